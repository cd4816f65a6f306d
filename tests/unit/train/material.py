"""What the tests of training share: a tiny target on disk, texts, a kind that is one matrix, and a
progress that interrupts."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.train.config import TrainConfig
from outrider.train.material import TrainingData
from outrider.train.measure import MeasurePlan
from outrider.train.responses import ResponsePlan, vocabulary_print
from outrider.train.run import TrainSpec
from outrider.train.texts import TrainingText
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama


def save_target(folder: Path, **changes: Any) -> Path:
    return save_checkpoint(
        folder,
        tiny_llama(257, sharpness=3.0, **{"num_hidden_layers": 3, **changes}),
        byte_tokenizer(),
    )


def texts(count: int = 12) -> list[TrainingText]:
    """Different prompts; responses of different lengths."""
    return [
        TrainingText(
            f"t{n}", [10 + n, 11, 12], [20 + (n + k) % 30 for k in range(6 + n % 5)], "chat"
        )
        for n in range(count)
    ]


def save_responses(path: Path, chosen: Sequence[TrainingText], tokenizer: Any = None) -> Path:
    head = {
        "outrider_responses": 1,
        "target": "tiny",
        "vocabulary": vocabulary_print(tokenizer or byte_tokenizer()),
    }
    path.write_text("\n".join(map(json.dumps, [head, *(vars(text) for text in chosen)])) + "\n")
    return path


def spec_for(folder: Path, out: str = "out", kind: str = "early-exit", **changes: Any) -> TrainSpec:
    """A short run on responses that are there: no generation, nothing measured."""
    target = folder / "target"
    if not target.exists():
        save_target(target)
        save_responses(folder / "responses.jsonl", texts())
    values: dict[str, Any] = {
        "kind": kind,
        "options": Options(str(target), drafter="ngram", runtime="eager", device="cpu"),
        "name": "tiny",
        "out": folder / out,
        "material": TrainingData(responses=folder / "responses.jsonl"),
        "responses": ResponsePlan(max_tokens=8),
        "settings": {"rank": 4} if kind == "early-exit" else {},
        "config": TrainConfig(
            epochs=2,
            batch_size=4,
            micro_batch=2,
            lr=1e-2,
            save_every_s=0.0,
            held_out=0.2,
            log_every=1,
        ),
        "measure": MeasurePlan(prompts=0),
    }
    return TrainSpec(**{**values, **changes})


@dataclass
class Interrupting:
    """Ctrl-C during the training step `at`, counted over the run."""

    at: int
    stage_name: str = "training"
    count: int = 0
    name: str = ""
    lines: tuple[str, ...] = ()

    def stage(self, name: str, total: int, max_s: float = math.inf) -> None:
        self.name = name

    def advance(self, units: int = 1) -> None:
        if self.name == self.stage_name and units:
            self.count += units
            if self.count >= self.at:
                os.kill(os.getpid(), signal.SIGINT)

    skip = advance

    def say(self, line: str) -> None:
        self.lines = (*self.lines, line)
