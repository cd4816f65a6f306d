"""Study `acceptance`: a draft that stops by a rule against fixed draft lengths, in drafted tokens
at equal tau.

    fixed      tau and drafted tokens per target pass at each fixed length; between lengths, a straight line
    rule       the same at each threshold, with at most the workload's `most` tokens a draft
    saved      1 - drafted by the rule / drafted by the fixed length that reaches the same tau (on the line, maybe between two)
    alike      the same against fixed lengths without the tokens that they draft behind a drafted end of the text, where every
               rule stops: what the rule saves by its estimates alone

Rules: `entropy` and `product`, which need no training, and `acceptance`, the trained head. Prompts,
seeds and target are the same for all, on models loaded once (the lab's runner). The head's own
validation says what it should save, and what a perfect head would (train/stopping.py). A workload
that is not measured again keeps what the newest result says of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workload import RESULTS, read_result

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner, Trace
from outrider.machine import versions
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.train.texts import TrainingText
from study.common import DEMO, PAIR, TEMPERATURES, WORK, answers, curve, demo_answers, saved, train
from study.domain import domain_answers
from study.prompts import demo_tasks, held_out, training_prompts

MEASURED_TOKENS = 64
BATCH = 16
ROUNDS = 2  # at temperature 1, where each draws texts of its own
# that the demo's head is trained on: GSM8K's are of its training split
OWN_TEXTS = 800
GSM8K_TEXTS = 192
GSM8K_TOKENS = 96  # of those answers
COUNTERS = ("steps", "emitted", "drafted", "tested", "accepted")
Counts = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A pair of models, prompts, and what is tried on them."""

    name: str
    pair: Path
    tasks: dict[str, int]
    lengths: tuple[int, ...]
    max_nodes: int  # draft tokens of a rule
    thresholds: dict[str, tuple[float, ...]]  # by rule
    epochs: int
    settings: str  # of the kind


PAIR_THRESHOLDS = {"entropy": (0.3,), "product": (0.5, 0.25), "acceptance": (0.5, 0.35, 0.2)}
DEMO_THRESHOLDS = {"entropy": (0.5,), "product": (0.6, 0.3), "acceptance": (0.8, 0.6, 0.4, 0.2)}
DEMO_SETTINGS = "fixed=8 depth=20"  # nearly always right: make them long
WORKLOADS = (
    Workload(
        "pair", PAIR, {"gsm8k": 12, "python": 12}, (1, 2, 3, 5, 8, 12), 12, PAIR_THRESHOLDS, 4, ""
    ),
    Workload(
        "demo",
        DEMO,
        {**demo_tasks(5), "gsm8k": 24},
        (1, 2, 3, 5, 8, 12, 16),
        16,
        DEMO_THRESHOLDS,
        3,
        DEMO_SETTINGS,
    ),
)


def run_acceptance(only: Sequence[str] = ()) -> None:
    """Train the heads, measure, write the result. `only`: names of workloads; none: all."""
    found = _newest()
    for one in WORKLOADS:
        if only and one.name not in only:
            continue
        head, result = trained_head(one)
        _, plain = trained_head(one, "-without-table", "token_size=0")
        found[one.name] = {
            "curve": curve(result),
            "laws_alone": [point.model_dump() for point in plain.curve],
            "tasks": one.tasks,
            "most": one.max_nodes,
            "rows": _rows(one, head),
        }
    settings = {
        "measured_tokens": MEASURED_TOKENS,
        "batch_size": BATCH,
        "rounds_at_temperature_1": ROUNDS,
    }
    saved(
        "acceptance",
        {
            "settings": settings,
            "workloads": {w.name: found[w.name] for w in WORKLOADS if w.name in found},
        },
    )


def _newest() -> dict[str, Any]:
    """The workloads of the newest result."""
    files = sorted(RESULTS.glob("studies-acceptance-2*.json*"))
    found: dict[str, Any] = read_result(files[-1])["workloads"] if files else {}
    return found


def trained_head(one: Workload, suffix: str = "", more: str = "") -> tuple[Path, Any]:
    """The acceptance head for the workload's own draft model; `more`: settings of the kind."""
    demo = one.pair == DEMO
    file = _demo_texts() if demo else domain_answers()["both"]
    kind = f"acceptance draft={one.pair / 'draft'} {one.settings} {more}"
    words = ("--responses", f"{file}", "--epochs", one.epochs, "--training", "feature_cache=3GB")
    return train(
        f"acceptance-{one.name}{suffix}", kind, "demo" if demo else PAIR / "target", *words
    )


def _demo_texts() -> Path:
    """The demo target's answers to problems of its own training split and to questions of GSM8K's."""
    path = WORK / "demo-acceptance.jsonl"
    if not path.exists():
        prompts = training_prompts("gsm8k", GSM8K_TEXTS)
        other = answers(
            "demo-gsm8k",
            DEMO / "target",
            DEMO / "draft",
            prompts,
            max_new_tokens=GSM8K_TOKENS,
            task="gsm8k",
        )
        own, more = (
            file.read_text(encoding="utf-8").splitlines() for file in (demo_answers(), other)
        )
        path.write_text("\n".join([*own[: 1 + OWN_TEXTS], *more[1:]]) + "\n", encoding="utf-8")
    return path


def configurations(one: Workload, head: Path) -> list[Configuration]:
    """Fixed lengths, then every rule at every threshold."""
    found = [Configuration("draft-model", k) for k in one.lengths]
    for rule, thresholds in one.thresholds.items():
        extra = {"acceptance_head": str(head)} if rule == "acceptance" else {}
        rules = [{"stop": rule, "stop_below": value, **extra} for value in thresholds]
        found += [Configuration("draft-model", one.max_nodes, options) for options in rules]
    return found


def _rows(one: Workload, head: Path) -> list[dict[str, Any]]:
    """Counters by configuration, temperature and task; what an interrupted run has is not measured
    again."""
    wanted = configurations(one, head)
    path = WORK / f"acceptance-{one.name}.jsonl"
    plan = {
        "tasks": one.tasks,
        "tokens": MEASURED_TOKENS,
        "most": one.max_nodes,
        "versions": versions(),
    }
    journal = Journal.open(path, plan, resume=path.exists())
    runner = Runner(
        Options(
            str(one.pair / "target"), draft=str(one.pair / "draft"), threads=1, runtime="eager"
        ),
        wanted,
    )
    texts = held_out(one.tasks, one.pair / "target")
    found = []
    for temperature in TEMPERATURES:
        for configuration in wanted:
            totals: dict[str, Counter[str]] = {}
            for round_ in range(ROUNDS if temperature else 1):
                key = f"{_label(configuration)} T={temperature:g}" + (
                    f" round {round_}" if round_ else ""
                )
                if key not in journal:
                    journal.add(
                        key, by_task(runner.open(configuration), texts, temperature, round_)
                    )
                for task, counts in journal[key].items():
                    totals.setdefault(task, Counter()).update(counts)
            for task, total in totals.items():
                found.append(
                    {
                        "configuration": _label(configuration),
                        "temperature": temperature,
                        "task": task,
                        **total,
                    }
                )
    return found


def by_task(
    contender: Contender, texts: Sequence[TrainingText], temperature: float, round_: int
) -> dict[str, Counts]:
    """Counters of each task; the demo's grades are one. Each round has seeds of its own."""
    seeds = range(round_ * 1000, round_ * 1000 + len(texts))
    params = [
        SamplingParams(temperature=temperature, max_tokens=MEASURED_TOKENS, seed=seed)
        for seed in seeds
    ]
    totals: dict[str, DecodeStats] = {}
    behind: Counter[str] = Counter()
    for text, trace in zip(
        texts, contender.run([text.prompt for text in texts], params, BATCH), strict=True
    ):
        task = "demo" if text.task.startswith("demo") else text.task
        totals[task] = totals.get(task, DecodeStats()).merge(trace.stats)
        behind[task] += drafted_behind(trace, contender.built.target.eos_token_ids)
    return {
        task: {**{name: getattr(total, name) for name in COUNTERS}, "behind_end": behind[task]}
        for task, total in totals.items()
    }


def drafted_behind(trace: Trace, ends: frozenset[int]) -> int:
    """Draft tokens behind one that ends the text, which no rule drafts."""
    count = 0
    for step in trace.steps:
        first = next(
            (index for index, token in enumerate(step.tokens) if token in ends),
            len(step.tokens) - 1,
        )
        count += len(step.tokens) - 1 - first
    return count


def _label(configuration: Configuration) -> str:
    options = configuration.drafter_options
    return (
        f"{options['stop']} {options['stop_below']:g}"
        if options
        else f"k={configuration.num_draft_tokens}"
    )


def line_of(rows: Sequence[dict[str, Any]], *, alike: bool = False) -> list[tuple[float, float]]:
    """(tau, drafted tokens per step) of the fixed lengths among these rows, plain decoding first,
    by rising tau. `alike`: without what they drafted behind an end."""
    fixed = [row for row in rows if row["configuration"].startswith("k=")]
    found = [(1.0, 0.0)]
    for row in fixed:
        drafted = row["drafted"] - (row["behind_end"] if alike else 0)
        found.append((row["emitted"] / row["steps"], drafted / row["steps"]))
    return sorted(found)


def drafted_at(line: Sequence[tuple[float, float]], tau: float) -> float | None:
    """Drafted tokens per step of the fixed length that reaches `tau`; None beyond the longest one
    measured."""
    for (low, few), (high, many) in pairwise(line):
        if low <= tau <= high and high > low:
            return few + (many - few) * (tau - low) / (high - low)
    return None


def savings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every rule and threshold among the rows of one task and temperature. `most`: of a rule
    that wasted no draft token. `alike` is None for rows from before what lies behind an end was
    counted."""
    is_counted = all("behind_end" in row for row in rows)
    lines = {"saved": line_of(rows), "alike": line_of(rows, alike=True) if is_counted else []}
    found = []
    for row in rows:
        if row["configuration"].startswith("k="):
            continue
        tau = row["emitted"] / row["steps"]
        drafted = row["drafted"] / row["steps"]
        one = {
            "configuration": row["configuration"],
            "tau": tau,
            "drafted": drafted,
            "fixed": drafted_at(lines["saved"], tau),
        }
        for name, line in lines.items():
            one[name] = _share(drafted, drafted_at(line, tau))
        one["most"] = _share(row["accepted"] / row["steps"], one["fixed"])
        found.append(one)
    return found


def _share(drafted: float, fixed: float | None) -> float | None:
    """Of the fixed length's tokens that are not drafted; None where there is no such length."""
    return None if not fixed else 1 - drafted / fixed
