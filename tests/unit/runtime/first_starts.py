"""The record that a first start leaves, checked against the one that transformers' start leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.cache import cache_folder
from outrider.models.source import resolve
from outrider.runtime.first_start import first_start, nothing_ships

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ships(model: Path) -> bool:
    """Whether a first start of this file or folder is made of what ships."""
    return first_start(resolve(str(model)), "model") is not None


def kept() -> dict[str, Any]:
    """What the start has left in the cache folder, by kind."""
    contents = {}
    for kind in ("starts", "checked", "tokenizers"):
        (file,) = (cache_folder() / kind).glob("*.json")
        contents[kind] = json.loads(file.read_text(encoding="utf-8").splitlines()[1])
    return contents


def answer(model: Path) -> list[int]:
    """A greedy text."""
    llm = LLM(str(model), drafter="none", runtime="native")
    return llm.generate([[3, 4, 5, 6, 7]], PARAMS)[0].token_ids


def check_record(model: Path) -> None:
    """Program, tables, places of weights, card, notes, limits and tokenizer; then the same text."""
    assert ships(model)
    ours = answer(model)
    shipped = kept()
    shutil.rmtree(cache_folder())
    with nothing_ships():
        assert answer(model) == ours
    for kind, content in kept().items():
        for part, entry in content.items():
            assert shipped[kind][part] == entry, (kind, part)
    assert answer(model) == ours, "a later start, as it was kept"


def check_imports(model: str, *options: str) -> None:
    """A process that loads the model and answers imports neither transformers nor the hub's
    package."""
    script = (
        "import sys; from outrider import LLM, SamplingParams;"
        f"LLM({', '.join([repr(model), *options])}).generate('a', SamplingParams(max_tokens=4));"
        "print(*(name for name in ('transformers', 'huggingface_hub') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == ""
