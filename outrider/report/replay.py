"""The report of a replay."""

from __future__ import annotations

from outrider.configuration import PLAIN
from outrider.errors import counted
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration, ReplayResult
from outrider.lab.result import Interval
from outrider.report.document import (
    Block,
    Column,
    Document,
    Fact,
    Paragraph,
    Table,
    Tone,
    curves,
    table,
)
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import interval, number

HARDLY = 1.05  # a predicted speedup below this is no reason to speculate
COLUMNS: tuple[Fact[ReplayedConfiguration], ...] = (
    Fact("configuration", lambda one: one.configuration, align="left"),
    Fact(
        "τ",
        lambda one: interval(one.overall.tau),
        "emitted / steps: tokens per target pass, the target's own included. The upper bound of "
        "the speedup: what it would be "
        "if a pass over k + 1 tokens cost the same as one over one token, and drafting nothing",
    ),
    Fact("α", lambda one: number(one.overall.alpha), "accepted / tested draft tokens"),
    Fact(
        "draft utilisation",
        lambda one: number(one.overall.draft_utilisation),
        "accepted / drafted tokens",
    ),
    Fact(
        "drafted per step",
        lambda one: number(one.overall.drafted / one.overall.steps, 1),
        "drafted / steps: each of these tokens makes a target pass wider",
    ),
    Fact(
        "drafter, µs per step",
        lambda one: number(one.draft_s_per_step * 1e6, 0),
        "time spent in the drafter / steps, on the machine of the replay",
    ),
)
SPEEDUP: Fact[ReplayedConfiguration] = Fact(
    "predicted speedup",
    lambda one: _cell(one.overall),
    "emitted × seconds of a plain step / seconds of all steps, each by its own draft, as bench "
    "measured them",
)


def document(result: ReplayResult) -> Document:
    """Everything in it is in the result."""
    best = _best(result)
    marked = frozenset(
        index for index, configuration in enumerate(result.configurations) if configuration is best
    )
    facts = COLUMNS if result.costs is None else (*COLUMNS, SPEEDUP)
    blocks: list[Block] = [
        Paragraph(*verdict(result)),
        table(result.configurations, facts, "All texts (95 % intervals in brackets)", marked),
        *_tasks(result),
        *_positions(result),
        *to_keep_in_mind(result),
    ]
    count = counted(result.num_texts, "text")
    facts_of_log = f"{count}, {result.num_tokens} tokens by the tokenizer of {result.tokenizer}; no model was run"
    return Document(f"Replay of {result.workload}", origin(result, facts_of_log), blocks)


def verdict(result: ReplayResult) -> tuple[str, Tone]:
    """One sentence, and how it is meant."""
    best = _best(result)
    if best is None:
        return "Only plain decoding was replayed: one token per target pass.", "caution"
    tau = f"τ {interval(best.overall.tau)}"
    name = f"'{best.configuration}'"
    if best.overall.speedup is None:
        bound = f"Its speedup is below {best.overall.tau.value:.2f}x, what it would be if draft tokens were checked for nothing"
        text = f"Most tokens per target pass: {name}, {tau}. {bound}; 'outrider bench' measures it."
        return text, "plain" if best.overall.tau.value >= HARDLY else "caution"
    speedup = interval(best.overall.speedup, "x")
    if best.overall.speedup.value < 1:
        return (
            f"Do not speculate on these texts: the best, {name}, is predicted at {speedup}, {tau}.",
            "bad",
        )
    if best.overall.speedup.value < HARDLY:
        return (
            f"Hardly a gain: the best of these texts, {name}, is predicted at {speedup}, {tau}.",
            "caution",
        )
    return f"Best of these texts: {name}, predicted speedup {speedup}, {tau}.", "good"


def _best(result: ReplayResult) -> ReplayedConfiguration | None:
    """By predicted speedup, otherwise by tau; of equals the one that drafts less. None where
    nothing drafts."""
    drafting = [
        configuration for configuration in result.configurations if configuration.drafter != PLAIN
    ]
    return max(
        drafting,
        key=lambda one: (_objective(one.overall).value, -one.overall.drafted),
        default=None,
    )


def _objective(counts: AcceptanceCounts) -> Interval:
    return counts.speedup or counts.tau


def _tasks(result: ReplayResult) -> list[Block]:
    counts = {
        task: cell.num_texts
        for configuration in result.configurations
        for task, cell in configuration.by_task.items()
    }
    if len(counts) < 2:
        return []
    columns = [
        Column("configuration", align="left"),
        *(Column(f"{task} ({counts[task]})") for task in sorted(counts)),
    ]
    rows = [
        [
            configuration.configuration,
            *(_cell(configuration.by_task[task]) for task in sorted(counts)),
        ]
        for configuration in result.configurations
    ]
    return [
        Table(
            columns,
            rows,
            f"{'τ' if result.costs is None else 'predicted speedup'} by task (number of texts)",
        )
    ]


def _cell(counts: AcceptanceCounts) -> str:
    return interval(counts.tau) if counts.speedup is None else interval(counts.speedup, "x")


def _positions(result: ReplayResult) -> list[Block]:
    lines = {
        configuration.configuration: {
            position: count / configuration.overall.steps
            for position, count in enumerate(configuration.overall.accepted_per_position, 1)
        }
        for configuration in result.configurations
        if configuration.overall.accepted
    }
    if not lines:
        return []
    return [
        curves("How far drafts are kept", "draft token", "share of all steps that keep it", lines)
    ]
