"""The report of a replay: the best setting in a sentence and a chart, then the numbers."""

from __future__ import annotations

from functools import partial

from outrider.configuration import PLAIN
from outrider.errors import counted
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration, ReplayResult
from outrider.lab.result import Interval
from outrider.report.document import NOTHING, Block, Cells, Chart, Document, Paragraph, Tone, table
from outrider.report.render import HARDLY, origin, plain_bar, speedup_bar, to_keep_in_mind
from outrider.report.text import interval, number

COLUMNS: Cells[ReplayedConfiguration] = {
    "setting": lambda row: "plain decoding" if row.drafter == PLAIN else row.configuration,
    "predicted speedup": lambda row: interval(row.overall.speedup, "x"),
    "tokens per pass": lambda row: interval(row.overall.tau),
    "accepted": lambda row: number(row.overall.alpha),
    "accepted of drafted": lambda row: number(row.overall.draft_utilisation),
    "drafted per step": lambda row: number(row.overall.drafted / row.overall.steps, 1),
    "kept by position": lambda row: _positions(row.overall),
    "drafter, µs per step": lambda row: number(row.draft_s_per_step * 1e6, 0),
}


def document(result: ReplayResult) -> Document:
    """Everything in it is in the result."""
    best = _best(result)
    tasks = {task: row for entry in result.configurations for task, row in entry.by_task.items()}
    cells = dict(COLUMNS)
    for task in sorted(tasks) if len(tasks) > 1 else ():
        name = f"{task} ({tasks[task].num_texts})"
        cells[name] = partial(_of_task, task)
    blocks: list[Block] = [
        Paragraph(*verdict(result)),
        _chart(result, best),
        table(result.configurations, cells, "All texts", lambda row: row is best),
        *to_keep_in_mind(result),
    ]
    texts = (
        f"{counted(result.num_texts, 'text')}, {result.num_tokens} tokens by the tokenizer of "
        f"{result.tokenizer}; no model was run"
    )
    return Document(f"Replay of {result.workload}", origin(result, texts), blocks)


def verdict(result: ReplayResult) -> tuple[str, Tone]:
    """One sentence, and how it is meant."""
    best = _best(result)
    if best is None:
        return "Only plain decoding was replayed: one token per target pass.", "caution"
    tau = f"{interval(best.overall.tau)} tokens per pass"
    name = f"'{best.configuration}'"
    if best.overall.speedup is None:
        text = (
            f"Most tokens per target pass: {name}, {interval(best.overall.tau)}. Its speedup is "
            f"below {best.overall.tau.value:.2f}x, what it would be if draft tokens were checked "
            "for nothing; 'outrider bench' measures it."
        )
        return text, "plain" if best.overall.tau.value >= HARDLY else "caution"
    speedup = interval(best.overall.speedup, "x")
    predicted = f"the best of these texts, {name}, is predicted at {speedup}, {tau}."
    if best.overall.speedup.value < 1:
        return f"Do not speculate: {predicted}", "bad"
    if best.overall.speedup.value < HARDLY:
        return f"Hardly a gain: {predicted}", "caution"
    return f"Use {name}: predicted speedup {speedup}, {tau}.", "good"


def _best(result: ReplayResult) -> ReplayedConfiguration | None:
    """By predicted speedup, otherwise by tau; of equals the one that drafts less. None where
    nothing drafts."""
    drafting = [row for row in result.configurations if row.drafter != PLAIN]
    return max(
        drafting,
        key=lambda row: (_objective(row.overall).value, -row.overall.drafted),
        default=None,
    )


def _objective(counts: AcceptanceCounts) -> Interval:
    return counts.speedup or counts.tau


def _of_task(task: str, row: ReplayedConfiguration) -> str:
    counts = row.by_task[task]
    return interval(_objective(counts), "x" if counts.speedup else "")


def _chart(result: ReplayResult, best: ReplayedConfiguration | None) -> Chart:
    unit = "" if result.costs is None else "x"
    bars = [
        plain_bar()
        if row.drafter == PLAIN
        else speedup_bar(row.configuration, _objective(row.overall), unit, is_best=row is best)
        for row in result.configurations
    ]
    bars.sort(key=lambda bar: -bar.value)
    what = "predicted speedup" if unit else "tokens per pass"
    return Chart(what.capitalize(), "setting", what, {"": bars}, baseline=1.0)


def _positions(counts: AcceptanceCounts) -> str:
    shares = [count / counts.steps for count in counts.accepted_per_position]
    return " ".join(map(number, shares)) or NOTHING
