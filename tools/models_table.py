"""The table of families in docs/models.md, measured: `python -m tools.models_table` loads a tiny model of each and writes it.

    cache    ours, or transformers' own (`models/stateful/`)
    runs on  the native runtime, else torch
    text     whether greedy text with drafts is that without to the bit, as `config.exact` says, or up to rounding
    drafts   whether drafters of trees may be used, or of chains alone
    MTP head the layout of the head that its checkpoints have, where it is read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.cache import cache_folder
from outrider.errors import CapabilityError
from outrider.models.loading.load import build_lm, finish
from outrider.models.stateful.lm import StateLM
from outrider.runtime.limits import find_native_limits
from outrider.runtime.own_states import native_states
from outrider.runtime.run import use_native_run
from tests.contract import multimodal_families, own_cache_families
from tests.mtp_heads import SHIPPED
from tests.unit.runtime import families

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: written by python -m tools.models_table -->", "<!-- end of families -->"
HEADER = "| `model_type` | cache | runs on | greedy text | drafts | MTP head |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Served:
    """How a family is served."""

    family: str
    cache: str
    runs_on: str
    text: str
    drafts: str

    def line(self) -> str:
        head = SHIPPED.get(self.family, "")
        return f"| `{self.family}` | {self.cache} | {self.runs_on} | {self.text} | {self.drafts} | {head} |"


def makers() -> dict[str, Callable[[], Any]]:
    """By family, what makes a random model of it."""
    ours = {name: families.make for name in (*families.FAMILIES, *families.NOT_LOWERED)}
    every = ours | {name: own_cache_families.make for name in own_cache_families.FAMILIES}
    every |= {name: multimodal_families.make_text for name in multimodal_families.FAMILIES}
    return {name: partial(make, name) for name, make in sorted(every.items())}


def measured(family: str, module: Any) -> Served:
    """How this model is served, in float32 on the CPU."""
    lm = build_lm(module, family, torch.float32, torch.device("cpu"))
    if isinstance(lm, StateLM):
        try:
            made = native_states(lm, module, cache_folder())
            return Served(family, "ours", "native", _text(find_native_limits(made).exact_rows), "chains, trees")
        except CapabilityError:
            finish(lm, module)
        return Served(family, "transformers'", "torch", _text(lm.limits.exact_rows), "chains")
    try:
        use_native_run(lm, module, cache_folder())
        lm.limits = find_native_limits(lm)
        runs = "native"
    except CapabilityError:
        finish(lm, module)
        runs = "torch"
    return Served(family, "ours", runs, _text(lm.limits.exact_rows), "chains, trees")


def _text(is_exact: bool) -> str:
    return "exact" if is_exact else "up to rounding"


def written() -> dict[str, str]:
    """The lines that the page has, by family."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `") and "model_type" not in line}


def _lines() -> Iterator[str]:
    for family, make in makers().items():
        line = measured(family, make()).line()
        print(line, flush=True)
        yield line


def main() -> None:
    """Measures all families and writes the table."""
    torch.set_num_threads(1)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table = "\n".join([HEADER, *_lines()])
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
