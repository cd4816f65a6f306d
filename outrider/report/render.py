"""From a result to a document, one function per kind of result; and what most of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from outrider.errors import counted
from outrider.lab.result import Interval, Result
from outrider.report.document import Bar, Block, Bullets, Document, Heading, Paragraph, Tone
from outrider.report.text import interval

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import OtherProcesses

INTERRUPTED = (
    "Interrupted: this is what was known when the run was stopped; it rests on less than was asked "
    "for."
)
HARDLY = 1.05  # a predicted speedup below this is within what a prediction can be off
SPEEDUP = "Speedup over plain decoding"  # title of a chart
RENDERERS = {
    "bench": "outrider.report.bench",
    "tune": "outrider.report.tune",
    "explain": "outrider.report.explain",
    "certify": "outrider.report.certify",
    "certify-server": "outrider.report.certify_server",
    "estimate": "outrider.report.estimate",
    "replay": "outrider.report.replay",
    "train": "outrider.report.train",
    "export": "outrider.report.export",
}


def render(result: Result) -> Document:
    """The report of a result, by its kind. Its first block is the answer."""
    make: Callable[[Result], Document] = import_module(RENDERERS[result.kind]).document
    document = make(result)
    if not result.interrupted:
        return document
    first, *others = document.blocks
    return replace(document, blocks=(first, Paragraph(INTERRUPTED, "caution"), *others))


def origin(result: Result, *facts: str) -> str:
    """One line under a title: date, version, processor, and what else there is to say. Empty facts
    are left out."""
    words = [
        f"{result.created:%Y-%m-%d %H:%M} UTC",
        f"outrider {result.versions.get('outrider', '?')}",
    ]
    return " · ".join(filter(None, [*words, str(result.machine.get("cpu", "")), *facts]))


def to_keep_in_mind(result: Result) -> list[Block]:
    """The result's notes, where it has any."""
    return [Heading("To keep in mind"), Bullets(result.notes)] if result.notes else []


def disturbed(runs: Iterable[OtherProcesses | None]) -> list[Block]:
    """A warning where other processes used the processors during runs, and how much of them."""
    busy = [others for others in runs if others is not None and others.num_disturbed]
    if not busy:
        return []
    num_runs = sum(others.num_runs for others in busy)
    mean = sum(others.mean * others.num_runs for others in busy) / num_runs
    text = (
        f"The machine was busy: other processes used {mean:.0%} of the processors on average, at "
        f"most {max(others.highest for others in busy):.0%}; "
        f"{sum(others.num_disturbed for others in busy)} of {num_runs} runs were disturbed. "
        "Tokens/s are too low, and speedups are less certain than their intervals say: measure "
        "again on an idle machine."
    )
    return [Paragraph(text, "caution")]


def how_fast(speedup: Interval, num_prompts: int | None = None) -> str:
    """3.38 times as fast as plain decoding (95 % interval 3.14 to 3.65, 16 prompts)."""
    text = f"{speedup.value:.2f} times as fast as plain decoding"
    sure = [f"95 % interval {speedup.low:.2f} to {speedup.high:.2f}"] if speedup.is_known else []
    sure += [] if num_prompts is None else [counted(num_prompts, "prompt")]
    return f"{text} ({', '.join(sure)})" if sure else text


def plain_bar(label: str = "plain decoding") -> Bar:
    """The bar that speedups are compared with."""
    return Bar(label, "1.00x", 1.0)


def speedup_bar(label: str, speedup: Interval, unit: str = "x", *, is_best: bool = False) -> Bar:
    """Its tone says on which side of 1 the interval is."""
    tone: Tone = "good" if speedup.low > 1 else "bad" if speedup.high < 1 else "caution"
    low = speedup.low if speedup.is_known else None
    high = speedup.high if speedup.is_known else None
    return Bar(label, interval(speedup, unit), speedup.value, low, high, tone, is_best)
