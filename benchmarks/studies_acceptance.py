"""Study `acceptance`: a draft that stops by a rule against fixed draft lengths, in drafted tokens at equal tau.

    fixed      tau and drafted tokens per target pass at each fixed length; between lengths, a straight line
    rule       the same at each threshold, with at most `MOST` tokens a draft
    saved      1 - drafted by the rule / drafted by the fixed length that reaches the same tau (on the line, maybe between two)

Rules: `entropy` and `product`, which need no training, and `acceptance`, the trained head. Prompts, seeds and target are the same
for all, on models loaded once (the lab's runner). The head's own validation says what it should save, and what a perfect head
would (train/stopping.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from studies_common import DEMO, PAIR, TEMPERATURES, WORK, curve, demo_answers, saved, train
from studies_domain import domain_answers
from studies_prompts import demo_tasks, held_out

from outrider.build import Options
from outrider.lab.configuration import Configuration
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner
from outrider.machine import versions
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.train.texts import Text

MOST = 12  # draft tokens of a rule
MEASURED_TOKENS = 64
BATCH = 16
ROUNDS = 2  # at temperature 1, where each draws texts of its own
Counts = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """A pair of models, prompts, and what is tried on them."""

    name: str
    pair: Path
    tasks: dict[str, int]
    lengths: tuple[int, ...]
    thresholds: dict[str, tuple[float, ...]]  # by rule


PAIR_THRESHOLDS = {"entropy": (0.3,), "product": (0.5, 0.25), "acceptance": (0.5, 0.35, 0.2)}
DEMO_THRESHOLDS = {"entropy": (0.5,), "product": (0.6,), "acceptance": (0.85, 0.7)}
WORKLOADS = (
    Workload("pair", PAIR, {"gsm8k": 12, "python": 12}, (1, 2, 3, 5, 8), PAIR_THRESHOLDS),
    Workload("demo", DEMO, demo_tasks(3), (2, 4, 8, 12), DEMO_THRESHOLDS),
)


def run_acceptance(only: Sequence[str] = ()) -> None:
    """Train the heads, measure, write the result. `only`: names of workloads; none: all."""
    found = {}
    for one in WORKLOADS:
        if only and one.name not in only:
            continue
        head, result = trained_head(one)
        found[one.name] = {"curve": curve(result), "tasks": one.tasks, "rows": _rows(one, head)}
    settings = {
        "measured_tokens": MEASURED_TOKENS, "most_draft_tokens": MOST, "batch_size": BATCH, "rounds_at_temperature_1": ROUNDS,
    }  # fmt: skip
    saved("acceptance", {"settings": settings, "workloads": found})


def trained_head(one: Workload) -> tuple[Path, Any]:
    """The acceptance head for the workload's own draft model."""
    demo = one.pair == DEMO
    file = demo_answers() if demo else domain_answers()["both"]
    words = ("--responses", file, "--option", f"draft={one.pair / 'draft'}", "--epochs", 4, "--feature-cache", "3GB")
    limit = ("--limit", 300) if demo else ()
    return train(f"acceptance-{one.name}", "acceptance", "demo" if demo else PAIR / "target", *words, *limit)


def configurations(one: Workload, head: Path) -> list[Configuration]:
    """Fixed lengths, then every rule at every threshold."""
    found = [Configuration("draft-model", k) for k in one.lengths]
    for rule, thresholds in one.thresholds.items():
        extra = {"acceptance_head": str(head)} if rule == "acceptance" else {}
        found += [Configuration("draft-model", MOST, {"stop": rule, "stop_below": value, **extra}) for value in thresholds]
    return found


def _rows(one: Workload, head: Path) -> list[dict[str, Any]]:
    """Counters by configuration, temperature and task; what an interrupted run has is not measured again."""
    wanted = configurations(one, head)
    path = WORK / f"acceptance-{one.name}.jsonl"
    plan = {"tasks": one.tasks, "tokens": MEASURED_TOKENS, "most": MOST, "versions": versions()}
    journal = Journal.open(path, plan, resume=path.exists())
    runner = Runner(Options(str(one.pair / "target"), draft=str(one.pair / "draft"), threads=1, compile="off"), wanted)
    texts = held_out(one.tasks, one.pair / "target")
    found = []
    for configuration in wanted:
        for temperature in TEMPERATURES:
            totals: dict[str, Counter[str]] = {}
            for round_ in range(ROUNDS if temperature else 1):
                key = f"{_label(configuration)} T={temperature:g}" + (f" round {round_}" if round_ else "")
                if key not in journal:
                    journal.add(key, by_task(runner.open(configuration), texts, temperature, round_))
                for task, counts in journal[key].items():
                    totals.setdefault(task, Counter()).update(counts)
            for task, total in totals.items():
                found.append({"configuration": _label(configuration), "temperature": temperature, "task": task, **total})
    return found


def by_task(contender: Contender, texts: Sequence[Text], temperature: float, round_: int) -> dict[str, Counts]:
    """Counters of each task; the demo's grades are one. Each round has seeds of its own."""
    seeds = range(round_ * 1000, round_ * 1000 + len(texts))
    params = [SamplingParams(temperature=temperature, max_tokens=MEASURED_TOKENS, seed=seed) for seed in seeds]
    totals: dict[str, DecodeStats] = {}
    for text, trace in zip(texts, contender.run([text.prompt for text in texts], params, BATCH), strict=True):
        task = "demo" if text.task.startswith("demo") else text.task
        totals[task] = totals.get(task, DecodeStats()).merge(trace.stats)
    names = ("steps", "emitted", "drafted", "tested", "accepted")
    return {task: {name: getattr(total, name) for name in names} for task, total in totals.items()}


def _label(configuration: Configuration) -> str:
    options = configuration.drafter_options
    return f"{options['stop']} {options['stop_below']:g}" if options else f"k={configuration.num_draft_tokens}"


def line_of(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(tau, drafted tokens per step) of the fixed lengths among these rows, plain decoding first, by rising tau."""
    fixed = [row for row in rows if row["configuration"].startswith("k=")]
    return sorted([(1.0, 0.0), *((row["emitted"] / row["steps"], row["drafted"] / row["steps"]) for row in fixed)])


def drafted_at(line: Sequence[tuple[float, float]], tau: float) -> float | None:
    """Drafted tokens per step of the fixed length that reaches `tau`; None beyond the longest one measured."""
    for (low, few), (high, many) in pairwise(line):
        if low <= tau <= high and high > low:
            return few + (many - few) * (tau - low) / (high - low)
    return None


def savings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every rule and threshold among the rows of one task and temperature."""
    line = line_of(rows)
    found = []
    for row in rows:
        if row["configuration"].startswith("k="):
            continue
        tau, drafted = row["emitted"] / row["steps"], row["drafted"] / row["steps"]
        fixed = drafted_at(line, tau)
        saved_ = None if fixed is None or fixed == 0 else 1 - drafted / fixed
        found.append({"configuration": row["configuration"], "tau": tau, "drafted": drafted, "fixed": fixed, "saved": saved_})
    return found
