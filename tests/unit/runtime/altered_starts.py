"""A process that starts a model from kept files that were altered, their sums right: it must live
to report on every one.

    python -m tests.unit.runtime.altered_starts MODEL FIRST LAST      seeds; prints "SEED what it changed: outcome" for each
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider import loader as loading
from outrider.cache import cache_folder, keep_json, kept_json
from outrider.errors import CapabilityError, OutriderError
from tests.fuzz import altered

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
REST = "loaded as the first time"


def as_the_first_time(*unused: object, **also_unused: object) -> None:
    """Stands for loading, which takes long and is not what is tried."""
    raise CapabilityError(REST)


def outcome(model: Path) -> str:
    """What comes of a start and a text."""
    try:
        llm = LLM(model, drafter="none", threads=1)
        return "text " + json.dumps(llm.generate("abc", PARAMS)[0].text)
    except OutriderError as error:
        return REST if REST in str(error) else f"refused: {error}"
    except Exception as error:  # noqa: BLE001  to be reported
        return f"TRACEBACK {type(error).__name__}: {error}"


def main(model: Path, first: int, last: int) -> None:
    """Alter one of the files for each seed, start, and put the file back."""
    torch.set_num_threads(1)
    files = [
        *(cache_folder() / "starts").glob("*.json"),
        *(cache_folder() / "checked").glob("*.json"),
    ]
    contents: dict[Path, Any] = {file: kept_json(file, lambda content: content) for file in files}
    loading.load_module = as_the_first_time  # type: ignore[assignment]
    for seed in range(first, last):
        chance = random.Random(seed)
        file = files[0] if chance.random() < 0.85 else files[1]
        content, what = altered(contents[file], chance)
        keep_json(file, content, max_files=1)
        print(seed, what, flush=True)
        print(seed, outcome(model), flush=True)
        keep_json(file, contents[file], max_files=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
