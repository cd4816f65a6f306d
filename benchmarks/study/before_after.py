"""Study `before-after`: heads for the demo target before and after training, against what needs no
training, and each other.

All draft chains of one length, so that nothing but the guesses differs; the best ones also at
`LONG`, beyond Medusa's heads. Held-out demo problems by grade and GSM8K test questions, T = 0 and
1. `explain` then says what improved where, by kind of text, on fewer prompts. `before` is the head
as its recipe begins, without a step of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.lab.explain.explain import explain
from outrider.lab.journal import Journal
from outrider.lab.runner import Runner
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import WorkloadRequest
from outrider.machine import versions
from outrider.sampling.params import SamplingParams
from study.common import DEMO, WORK, Way, counted, demo_answers, read_curve, saved, untrained
from study.prompts import demo_tasks, held_out

TARGET = DEMO / "target"
# draft tokens; Medusa has 4 heads
SHORT = 4
LONG = 7
MEASURED_TOKENS = 40
TASKS = {**demo_tasks(2), "gsm8k": 6}
EXPLAINED = {**demo_tasks(1), "gsm8k": 3}
EXPLAINED_AT = (0.0,)  # temperatures
RECIPES: dict[str, dict[str, Any]] = {  # as the embedded heads were trained
    "eagle3": {"draft_vocab": 1024, "unrolls": 6},
    "block": {"num_layers": 2, "block_size": 8, "target_layers": "2,4,6", "num_anchors": 24},
    "medusa": {},
}


@dataclass(frozen=True)
class Contestant:
    """One line of the table."""

    label: str
    way: Way
    folder: Path  # of a head or draft model; the target's own for drafters that have none
    is_explained: bool = False


def contestants(heads: Path | None) -> list[Contestant]:
    """What needs no training, then each head before and after; `heads`: folder of their runs, else
    the embedded ones."""
    found = [
        Contestant("ngram", Way(f"ngram k={SHORT}"), TARGET, is_explained=True),
        Contestant(
            "early-exit 4 of 8 layers, untrained", Way(f"early-exit k={SHORT} exit_layer=4"), TARGET
        ),
        Contestant(
            "early-exit 6 of 8 layers, untrained", Way(f"early-exit k={SHORT} exit_layer=6"), TARGET
        ),
        Contestant(
            "draft-model (embedded)",
            Way(f"draft-model k={SHORT}", uses_draft=True),
            DEMO / "draft",
            is_explained=True,
        ),
        Contestant(
            f"draft-model (embedded), k={LONG}",
            Way(f"draft-model k={LONG}", uses_draft=True),
            DEMO / "draft",
        ),
    ]
    for kind, settings in RECIPES.items():
        after = DEMO / "heads" / kind if heads is None else heads / kind / "drafter"
        before = untrained(f"before-{kind}", kind, TARGET, settings, demo_answers())
        way = Way(f"{kind} k={SHORT} head={{folder}}")
        found.append(Contestant(f"{kind}, before", way, before, is_explained=True))
        found.append(Contestant(f"{kind}, after", way, after, is_explained=True))
        if kind != "medusa":
            found.append(
                Contestant(
                    f"{kind}, after, k={LONG}", Way(f"{kind} k={LONG} head={{folder}}"), after
                )
            )
    return found


def run_before_after(heads: Path | None) -> None:
    """Measure and write the result."""
    path = WORK / "before-after.jsonl"
    plan = {
        "tasks": TASKS,
        "explained": EXPLAINED,
        "tokens": MEASURED_TOKENS,
        "versions": versions(),
        "heads": str(heads),
    }
    journal = Journal.open(path, plan, resume=path.exists())
    texts = held_out(TASKS, TARGET)
    measured = []
    regions = []
    for one in contestants(heads):
        if one.label not in journal:
            rows = counted(
                TARGET,
                one.way,
                {one.label: one.folder},
                texts,
                max_new_tokens=MEASURED_TOKENS,
                batch_size=16,
            )
            journal.add(one.label, rows)
        measured += journal[one.label]
    for one in [one for one in contestants(heads) if one.is_explained]:
        for temperature in EXPLAINED_AT:
            key = f"explain {one.label} T={temperature:g}"
            if key not in journal:
                journal.add(key, _regions(one, temperature))
            regions.append({"label": one.label, "temperature": temperature, **journal[key]})
    curves = {
        kind: read_curve((heads or DEMO / "heads") / kind / "result.json") for kind in RECIPES
    }
    notes = [
        f"{kind}: trained by a run that is not finished, its best so far"
        for kind in curves
        if _is_unfinished(heads, kind)
    ]
    settings = {
        "k": SHORT,
        "long_k": LONG,
        "max_new_tokens": MEASURED_TOKENS,
        "tasks": TASKS,
        "explained": EXPLAINED,
    }
    saved(
        "before-after",
        {
            "settings": settings,
            "curves": curves,
            "measured": measured,
            "regions": regions,
            "notes": notes,
        },
    )


def _is_unfinished(heads: Path | None, kind: str) -> bool:
    """A run in progress has a checkpoint."""
    return heads is not None and (heads / kind / "checkpoint.pt").exists()


def _regions(one: Contestant, temperature: float) -> dict[str, Any]:
    """What `explain` says of each kind of text and part of the answer."""
    options = {
        name: str(one.folder) if value == "{folder}" else value
        for name, value in _parsed(one).drafter_options.items()
    }
    configuration = Configuration(_parsed(one).drafter, SHORT, options)
    draft = str(one.folder) if one.way.uses_draft else None
    params = SamplingParams(
        temperature=temperature, max_tokens=MEASURED_TOKENS, seed=None if temperature == 0 else 0
    )

    def prompts_of(runner: Runner) -> list[PreparedPrompt]:
        return [
            PreparedPrompt(
                WorkloadRequest(text.id, task=text.task), list(text.prompt), MEASURED_TOKENS
            )
            for text in held_out(EXPLAINED, TARGET)
        ]

    result = explain(
        Options(str(TARGET), draft=draft, threads=1, runtime="eager"),
        configuration,
        prompts_of,
        params,
        max_shown=0,
    )
    kinds = [row.model_dump(include={"name", "tokens", "tested", "kept"}) for row in result.by_kind]
    sections = [
        row.model_dump(include={"name", "tokens", "tested", "kept"}) for row in result.by_section
    ]
    counts = {"steps": result.steps, "emitted": result.emitted}
    return {"tau": result.tau.model_dump(), **counts, "kinds": kinds, "sections": sections}


def _parsed(one: Contestant) -> Configuration:
    return Configuration.parse(one.way.drafter)
