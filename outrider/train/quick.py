"""A first head in minutes: what `outrider train eagle3 --quick` trains, and what to expect of it.

Few answers and few passes over them, to see every stage of a run before a long one. The figures are
those of docs/results/heads.md (a test compares).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.build import DEMO
from outrider.errors import ConfigError
from outrider.train.config import TrainConfig
from outrider.train.measure import MeasurePlan

KIND = "eagle3"
NUM_PROMPTS = 400
EPOCHS = 3
SETTINGS: dict[str, Any] = {"unrolls": 4, "draft_vocab": 1024}
MEASURED = MeasurePlan(prompts=8, temperatures=(0.0,), max_tokens=64)
MINUTES = "2 to 3 minutes on two cores"
TRY = "Question: Tom has 12 pens. He buys 5 more. How many pens does he have in the end?"


@dataclass(frozen=True)
class Expected:
    """The tau of a head on held-out problems of the demo's, greedy, after this many answers."""

    answers: int
    tau: float


QUICK = Expected(answers=NUM_PROMPTS, tau=2.93)  # studies-quick-2026-11-30.json
LONG = Expected(answers=6000, tau=4.07)  # studies-before-after-2026-11-22.json.gz


def check(kind: str, settings: dict[str, Any], target: str) -> None:
    """Raises ConfigError for a run whose time and outcome nobody has measured."""
    if kind != KIND or settings or target != DEMO:
        got = " ".join([kind, *(f"{name}={value}" for name, value in settings.items())])
        raise ConfigError(
            f"--quick trains {KIND} for {DEMO}, got {got} for {target}: leave --quick out, and give "
            "--prompts"
        )


def config(asked: TrainConfig) -> TrainConfig:
    """The training of a quick run, with the seed that was asked for."""
    return replace(asked, epochs=EPOCHS)


def announcement() -> str:
    """One line on the training to come: its size, its time, and the tau to expect."""
    return (
        f"--quick: {QUICK.answers} answers of the demo, {EPOCHS} passes over them, {MINUTES}. Expect "
        f"tau near {QUICK.tau:.1f} on its own problems (1.0 without drafts); {LONG.answers} answers "
        f"gave {LONG.tau:.2f} (docs/results/heads.md)"
    )


def command_to_try(drafter: Path) -> str:
    """The command that answers a question with the head."""
    return f'outrider generate {DEMO} "{TRY}" --drafter {KIND} --draft {drafter} --show-drafts'
