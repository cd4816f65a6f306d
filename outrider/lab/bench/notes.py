"""The record of a run: from a trace, and from the plain trace that it is compared with.

*The same tokens*: the two sides of a pair are compared from the token that both had after their first step to the last token that
both have. Steps that reach over an end count by the share of their tokens inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pydantic import Field

from outrider.lab.bench.bench_result import Parting
from outrider.lab.result import Record
from outrider.lab.runner import Trace
from outrider.stats import PHASES, PartStats

SHOWN = 8  # tokens of a text that parts


class Pairing(Record):
    """Seconds of both sides over the same tokens."""

    tokens: int  # decoded after both first steps
    plain_s: float
    own_s: float
    plain_all_s: float  # prompt and queue included, to the last common token
    own_all_s: float
    parting: Parting | None = None  # None: the same text


class RunNote(Record):
    """One prompt through one configuration, with all that a cell's numbers are made of."""

    configuration: int
    prompt: int
    round: int
    tokens: int
    steps: int
    ttft_s: float
    decode_s: float  # after the first step, to the last token
    other_cpu: float  # share of the processors that others used meanwhile, 0..1
    attempts: int  # runs that this is the calmest of
    group: int  # of the prompts decoded together, within the round
    prompt_tokens: int
    drafted: int
    tested: int
    accepted: int
    decode_tokens: int
    wall_s: float  # of the whole group, prompts included
    gaps_s: list[float]  # from step to step
    emitted: list[int]  # tokens of each step
    text: str
    # draft nodes of the step's widest row, for each gap; None: a row of the group was missing
    widths: list[int | None]
    time_s: dict[str, float]  # this row's share of wall_s: prompt, draft, target, verify, other
    num_drafts: int  # steps that had a draft
    reached: list[int]
    kept: list[int]
    shared: bool  # its steps were those of other prompts, too
    complete: bool  # the answer came to its own end
    parts: dict[str, PartStats] = Field(default_factory=dict)  # as of `Measured`
    right: bool | None = None
    pairing: Pairing | None = None


def notes_of(
    traces: Sequence[Trace],
    configuration: int,
    prompts: Sequence[int],
    turn: int,
    attempts: int,
    group: int = 0,
    plain: Sequence[Trace] | None = None,
) -> list[RunNote]:
    """Notes of a group that was decoded together, in order. `plain`: the traces that it is compared
    with."""
    widths = _widths(traces)
    wall_s = max(trace.steps[-1].at_s for trace in traces) - traces[0].began_s
    times = _times(traces, wall_s)
    notes = []
    for row, trace in enumerate(traces):
        stats = trace.stats
        ends = [step.at_s for step in trace.steps]
        reached, kept, num_drafts = depth_counts(trace)
        notes.append(
            RunNote(
                configuration=configuration,
                prompt=prompts[row],
                round=turn,
                group=group,
                prompt_tokens=len(trace.completion.prompt_token_ids),
                tokens=stats.emitted,
                steps=stats.steps,
                drafted=stats.drafted,
                tested=stats.tested,
                accepted=stats.accepted,
                parts=stats.parts,
                ttft_s=trace.ttft_s,
                decode_s=ends[-1] - ends[0],
                decode_tokens=trace.decode_tokens(),
                wall_s=wall_s,
                gaps_s=[round(after - before, 7) for before, after in pairwise(ends)],
                emitted=[step.taken for step in trace.steps],
                text=trace.completion.text,
                widths=[widths.get(at_s) for at_s in ends[1:]],
                time_s=times,
                num_drafts=num_drafts,
                reached=reached,
                kept=kept,
                shared=any(step.rows > 1 for step in trace.steps[1:]),
                other_cpu=trace.other_cpu,
                attempts=attempts,
                complete=trace.completion.finish_reason == "stop",
                pairing=None if plain is None else pair(plain[row], trace),
            )
        )
    return notes


def pair(plain: Trace, own: Trace) -> Pairing:
    texts = plain.completion.token_ids, own.completion.token_ids
    first = max(plain.steps[0].taken, own.steps[0].taken)
    last = max(min(map(len, texts)), first)
    seconds = [trace.seconds_to(last) - trace.seconds_to(first) for trace in (plain, own)]
    wholes = [trace.ttft_s + trace.seconds_to(min(map(len, texts))) for trace in (plain, own)]
    return Pairing(
        tokens=last - first,
        plain_s=seconds[0],
        own_s=seconds[1],
        plain_all_s=wholes[0],
        own_all_s=wholes[1],
        parting=_parting(*texts),
    )


def depth_counts(trace: Trace) -> tuple[list[int], list[int], int]:
    """(reached, kept) by depth, and the number of steps that had a draft."""
    drafts = [step for step in trace.steps if step.tokens]
    deepest = max((len(step.path) + (not step.complete) for step in drafts), default=0)
    reached = [0] * deepest
    kept = [0] * deepest
    for step in drafts:
        for depth in range(len(step.path)):
            reached[depth] += 1
            kept[depth] += 1
        if not step.complete:
            reached[len(step.path)] += 1
    return reached, kept, len(drafts)


def _widths(traces: Sequence[Trace]) -> dict[float, int]:
    """Draft nodes of the widest row, by the end of the step; steps in which a row of the group is
    missing are left out."""
    widths: dict[float, int] = {}
    for trace in traces:
        for step in trace.steps:
            if step.rows == len(traces):
                widths[step.at_s] = max(widths.get(step.at_s, 0), len(step.tokens))
    return widths


def _times(traces: Sequence[Trace], wall_s: float) -> dict[str, float]:
    """A row's share of the group's wall time by phase. Feeding the prompts is the target's work of
    the first step; what lies between steps counts as other."""
    total = {phase: sum(trace.stats.time_s[phase] for trace in traces) for phase in PHASES}
    prompt = traces[0].ttft_s - traces[0].steps[0].seconds
    total |= {"prompt": prompt, "target": total["target"] - prompt}
    total["other"] += wall_s - sum(total.values())
    return {phase: max(total[phase], 0.0) / len(traces) for phase in ("prompt", *PHASES)}


def _parting(plain: Sequence[int], text: Sequence[int]) -> Parting | None:
    if list(plain) == list(text):
        return None
    both = enumerate(zip(plain, text, strict=False))
    index = next((at for at, (a, b) in both if a != b), min(len(plain), len(text)))
    return Parting(
        position=index,
        plain=list(plain[index : index + SHOWN]),
        own=list(text[index : index + SHOWN]),
    )
