"""A new kind of head is at most five files (docs/add-a-head.md): one is added here, trained, found
and drafted with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider.build import Options, build
from outrider.drafters import DRAFTERS
from outrider.drafters.heads.medusa import MedusaDrafter
from outrider.lab.tune.drafts import read_drafts
from outrider.models.heads.kinds import head_kind
from outrider.models.source import resolve
from outrider.registry import Entry
from outrider.sampling.params import SamplingParams
from outrider.train.kinds import KINDS
from outrider.train.medusa import MedusaRecipe
from outrider.train.run import run_training
from tests.helpers import make_row, run_to_end
from tests.unit.train.material import spec_for

ROOT = Path(__file__).resolve().parents[4]


class EchoDrafter(MedusaDrafter):
    """Stands for the file of a drafter; the network is Medusa's."""


class EchoRecipe(MedusaRecipe):
    """Stands for the file of a recipe; what it saves names the new kind."""

    drafter: ClassVar[str] = "echo head={folder}"

    def save(self, folder: Path) -> None:
        super().save(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "outrider": {**config["outrider"], "head": "echo"}})
        )


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines."""
    lines: dict[Any, str] = {DRAFTERS: "EchoDrafter", KINDS: "EchoRecipe"}
    for registry, name in lines.items():
        monkeypatch.setitem(registry._builtin, "echo", Entry(f"{__name__}:{name}", "a new kind"))


@pytest.mark.slow
def test_a_new_kind_is_trained_found_and_drafts(tmp_path: Path) -> None:
    """Catches a list of kinds that would have to know it, too."""
    spec = spec_for(tmp_path, kind="echo", settings={"num_heads": "2"})
    run_training(spec)
    folder = spec.out / "drafter"
    target = str(spec.options.target)
    assert head_kind(resolve(str(folder))) == "echo"
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "runtime": "eager"}
    assert [head.kind for head in read_drafts(Options(target, draft=str(folder))).heads] == ["echo"]
    built = build(Options(target, draft=str(folder), **options))
    assert built.options.drafter == "echo"
    assert isinstance(built.decoder.drafter, EchoDrafter)
    plain = build(Options(target, drafter="none", **options))
    texts = []
    for made in (built, plain):
        made.decoder.add(make_row([10, 11, 12], SamplingParams(max_tokens=12, ignore_eos=True)))
        texts.append(run_to_end(made.decoder)[0].output)
    assert texts[0] == texts[1]


def test_the_page_lists_five_files_that_exist() -> None:
    page = (ROOT / "docs" / "add-a-head.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `(outrider/[\w/]+\.py)` \|", page, re.MULTILINE)
    assert 0 < len(files) <= 5
    assert all((ROOT / file).is_file() for file in files)
