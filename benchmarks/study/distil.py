"""Study `distil`: alpha of draft models before and after distillation on held-out prompts. Four
beginnings, each with its name:

    thinned     two of the demo target's own layers, copied: before = no training at all
    scratch     random weights of the embedded draft's shape: hard = the same answers learnt as text alone (cross entropy of their
                tokens), full = as many steps on the same answers with the target's full
                distributions
    embedded    the embedded draft, which the demo's recipe distilled already on other texts
    pair        the shared pair's own draft, trained on the same corpus as its target but never on the target's answers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from study import hard_labels
from study.common import (
    DEMO,
    PAIR,
    WORK,
    Way,
    counted,
    curve,
    demo_answers,
    saved,
    train,
    untrained,
)
from study.domain import domain_answers
from study.prompts import demo_tasks, held_out

WAY = Way("draft-model k=5", uses_draft=True)
DEMO_TASKS = {**demo_tasks(2), "gsm8k": 6}
MEASURED_TOKENS = 40
# the embedded draft's
SHAPE = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "intermediate_size": 384}
THINNED = {"init_layers": "2"}
LIMIT = 150
EPOCHS = 3
SCRATCH_LIMIT = 1000
SCRATCH_EPOCHS = 3
SCRATCH_LR = "3e-3"
PAIR_TASKS = {"gsm8k": 32, "python": 32}
PAIR_EPOCHS = 6


def run_distil(parts: list[str]) -> None:
    """Measure and write the result. `parts`: of the four beginnings."""
    found: dict[str, Any] = {}
    for name in parts:
        found[name] = BEGINNINGS[name]()
    settings = {"drafter": WAY.drafter, "max_new_tokens": MEASURED_TOKENS}
    saved("distil", {"settings": settings, "beginnings": found})


def _thinned() -> dict[str, Any]:
    file = demo_answers()
    before = untrained("distil-thinned-before", "draft-model", DEMO / "target", THINNED, file)
    kind = f"draft-model init_layers={THINNED['init_layers']}"
    words = ("--limit", LIMIT, "--epochs", EPOCHS, "--training", "feature_cache=3GB")
    after, result = train("distil-thinned", kind, "demo", "--responses", f"{file}", *words)
    return _measured(
        DEMO / "target", DEMO_TASKS, {"before": before, "after": after}, {"after": curve(result)}
    )


def _scratch() -> dict[str, Any]:
    file = demo_answers()
    shape = " ".join(f"{name}={value}" for name, value in SHAPE.items())
    words = (
        "--responses",
        f"{file}",
        "--limit",
        SCRATCH_LIMIT,
        "--epochs",
        SCRATCH_EPOCHS,
        "--training",
        f"lr={SCRATCH_LR}",
        "--training",
        "feature_cache=3GB",
    )
    plugin = hard_labels.installed(WORK / "plugin")
    hard, hard_result = train(
        "distil-scratch-hard", f"{hard_labels.KIND} {shape}", "demo", *words, plugin=plugin
    )
    full, full_result = train("distil-scratch-full", f"draft-model {shape}", "demo", *words)
    curves = {"hard": curve(hard_result), "full": curve(full_result)}
    return _measured(DEMO / "target", DEMO_TASKS, {"hard": hard, "full": full}, curves)


def _embedded() -> dict[str, Any]:
    file = demo_answers()
    words = (
        "--init",
        DEMO / "draft",
        "--limit",
        LIMIT,
        "--epochs",
        EPOCHS,
        "--training",
        "feature_cache=3GB",
    )
    after, result = train(
        "distil-embedded", "draft-model", "demo", "--responses", f"{file}", *words
    )
    return _measured(
        DEMO / "target",
        DEMO_TASKS,
        {"before": DEMO / "draft", "after": after},
        {"after": curve(result)},
    )


def _pair() -> dict[str, Any]:
    """On the answers of study `domain`, for longer."""
    words = (
        "--init",
        PAIR / "draft",
        "--epochs",
        PAIR_EPOCHS,
        "--training",
        "lr=5e-4",
        "--training",
        "feature_cache=3GB",
    )
    after, result = train(
        "distil-pair",
        "draft-model",
        PAIR / "target",
        "--responses",
        f"{domain_answers()['both']}",
        *words,
    )
    return _measured(
        PAIR / "target",
        PAIR_TASKS,
        {"before": PAIR / "draft", "after": after},
        {"after": curve(result)},
    )


def _measured(
    target: Path, tasks: dict[str, int], folders: dict[str, Path], curves: dict[str, Any]
) -> dict[str, Any]:
    found = counted(target, WAY, folders, held_out(tasks, target), max_new_tokens=MEASURED_TOKENS)
    return {"measured": found, "curves": curves, "tasks": tasks}


BEGINNINGS = {"thinned": _thinned, "scratch": _scratch, "embedded": _embedded, "pair": _pair}
