"""From the runs of a cell to its numbers: how much faster, and how sure.

Different prompts say how much the text matters, a prompt's runs in several rounds how steady the
clock is; the interval holds both (bootstrap over prompts). Prompts that were decoded together share
their clock: they are no independent witnesses. So with batches of several, groups are resampled
too, and the interval reaches as far as the wider of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from statistics import fmean, median
from typing import Any, TypeVar

from scipy.stats import binomtest

from outrider.lab.bench.bench_result import (
    AcceptanceLengths,
    Accuracy,
    DepthAcceptance,
    Divergence,
    Identity,
    Measured,
    OtherProcesses,
    Percentiles,
    RunRecord,
    TargetInfo,
    TurnMeasured,
)
from outrider.lab.bench.machine import roof_tokens_per_s
from outrider.lab.bench.notes import RunNote
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.result import Interval
from outrider.lab.workload.types import WorkloadRequest
from outrider.stats import sum_parts
from outrider.text import decode

MIN_STEPS = 5  # of one width; the median of fewer is no time to rely on


def measured(
    notes: Sequence[RunNote],
    plain: Sequence[RunNote] | None,
    *,
    target: TargetInfo,
    rows: int,
    max_other_cpu: float,
    same_text: bool,
    prompts: Sequence[WorkloadRequest],
    tokenizer: Any,
    keep_runs: bool = False,
) -> Measured:
    """One configuration's runs in one cell, at least one. `plain`: those of its baseline; None
    where it is its own. `same_text`: texts must be the plain ones. `prompts`: by their number.
    `keep_runs`: with the texts of the first round."""
    ids = [request.id for request in prompts]
    rate = _tokens_per_s(notes)
    roof = roof_tokens_per_s(
        target, rows, fmean(note.prompt_tokens + note.tokens / 2 for note in notes)
    )
    result = Measured(
        configuration=notes[0].configuration,
        num_runs=len(notes),
        num_tokens=sum(note.tokens for note in notes),
        num_steps=sum(note.steps for note in notes),
        drafted=sum(note.drafted for note in notes),
        tested=sum(note.tested for note in notes),
        accepted=sum(note.accepted for note in notes),
        parts=sum_parts(*(note.parts for note in notes)),
        num_disturbed=sum(note.other_cpu > max_other_cpu for note in notes),
        other_cpu=fmean(note.other_cpu for note in notes),
        tokens_per_s=rate,
        throughput_tokens_per_s=sum(note.tokens for note in notes)
        / sum(note.wall_s / rows for note in notes),
        ttft_s=Percentiles.of(note.ttft_s for note in notes),
        tpot_s=Percentiles.of(
            note.decode_s / note.decode_tokens for note in notes if note.decode_tokens
        ),
        chunk_s=Percentiles.of(gap for note in notes for gap in note.gaps_s),
        time_s={phase: sum(note.time_s[phase] for note in notes) for phase in notes[0].time_s},
        acceptance=acceptance(notes),
        acceptance_lengths=AcceptanceLengths.of([(note.tokens, note.steps) for note in notes]),
        tokens_per_step=tokens_per_step(notes),
        by_turn=by_turn(notes, [request.turn for request in prompts]),
        runs=[_run_of(note) for note in notes if note.round == 0] if keep_runs else [],
        roof=rate.value / roof if rate is not None and roof else None,
        accuracy=accuracy(notes, plain),
    )
    if plain is not None:
        result.speedup = speedup(samples(notes))
        result.end_to_end = speedup(samples(notes, end_to_end=True))
        result.step_s = {**step_seconds(notes), **step_seconds(plain)}
        result.identity = identity(notes, ids, tokenizer) if same_text else None
    return result


def tokens_per_step(notes: Sequence[RunNote]) -> dict[int, int]:
    """How many steps emitted how many tokens."""
    steps = Counter(count for note in notes for count in note.emitted)
    return dict(sorted(steps.items()))


def by_turn(notes: Sequence[RunNote], turns: Sequence[int]) -> list[TurnMeasured]:
    """The runs by turn of their conversation, `turns` by number of the prompt; nothing where all
    are first ones."""
    if max(turns) == 1:
        return []
    of_turn: dict[int, list[RunNote]] = {}
    for note in notes:
        of_turn.setdefault(turns[note.prompt], []).append(note)
    return [
        TurnMeasured(
            turn=turn,
            num_runs=len(runs),
            num_tokens=sum(note.tokens for note in runs),
            num_steps=sum(note.steps for note in runs),
            mean_prompt_tokens=fmean(note.prompt_tokens for note in runs),
            tokens_per_s=_tokens_per_s(runs),
            speedup=speedup(samples(runs)),
        )
        for turn, runs in sorted(of_turn.items())
    ]


def _run_of(note: RunNote) -> RunRecord:
    ends = accumulate(note.gaps_s, initial=note.ttft_s)
    return RunRecord(
        prompt=note.prompt,
        text=note.text,
        tokens=note.emitted,
        times_s=[round(end, 6) for end in ends],
    )


def identity(notes: Sequence[RunNote], ids: Sequence[str], tokenizer: Any) -> Identity:
    """Texts against the plain ones of the same round."""
    paired = [(note, note.pairing.parting) for note in notes if note.pairing is not None]
    parted = [(note.prompt, parting) for note, parting in paired if parting is not None]
    result = Identity(num_compared=len(paired), num_identical=len(paired) - len(parted))
    if parted:
        result.equal_tokens = fmean(
            note.tokens if parting is None else parting.position for note, parting in paired
        )
    for prompt, parting in parted[:1]:
        result.first = Divergence(
            **parting.model_dump(),
            prompt=ids[prompt],
            plain_text=decode(tokenizer, parting.plain, special=True),
            own_text=decode(tokenizer, parting.own, special=True),
        )
    return result


def accuracy(notes: Sequence[RunNote], plain: Sequence[RunNote] | None) -> Accuracy | None:
    """Accuracy in the first round, so that every prompt counts once; None where nothing can be
    graded. Without `plain`: its own."""
    theirs = {note.prompt: note for note in plain or notes if note.round == 0}
    graded = [
        (note, theirs[note.prompt])
        for note in notes
        if note.round == 0
        and note.prompt in theirs
        and None not in (note.right, theirs[note.prompt].right)
    ]
    if not graded:
        return None
    whole = [(bool(a.right), bool(b.right)) for a, b in graded if a.complete and b.complete]
    num_apart = sum(right != plain_right for right, plain_right in whole)
    num_only_here = sum(right > plain_right for right, plain_right in whole)
    return Accuracy(
        num_graded=len(whole),
        num_incomplete=len(graded) - len(whole),
        num_right=sum(right for right, _ in whole),
        num_plain_right=sum(plain_right for _, plain_right in whole),
        p_value=float(binomtest(num_only_here, num_apart).pvalue) if num_apart else None,
    )


def others_during(notes: Sequence[RunNote], max_other_cpu: float) -> OtherProcesses | None:
    """The share of the processors that other processes used during these runs; None where there was
    none."""
    shares = [note.other_cpu for note in notes]
    if not shares:
        return None
    return OtherProcesses(
        mean=fmean(shares),
        highest=max(shares),
        allowed=max_other_cpu,
        num_runs=len(shares),
        num_disturbed=sum(share > max_other_cpu for share in shares),
        num_repeated=sum(note.attempts > 1 for note in notes),
    )


def step_seconds(notes: Sequence[RunNote]) -> dict[int, float]:
    """Median seconds of a step by draft nodes of its widest row, where MIN_STEPS or more were that
    wide."""
    seconds: dict[int, list[float]] = {}
    for note in notes:
        for width, gap_s in zip(note.widths, note.gaps_s, strict=True):
            if width is not None:
                seconds.setdefault(width, []).append(gap_s)
    return {
        width: median(seconds[width])
        for width in sorted(seconds)
        if len(seconds[width]) >= MIN_STEPS
    }


def _tokens_per_s(notes: Sequence[RunNote]) -> Interval | None:
    """Tokens per second of a row's decode phase, prompts resampled; an open interval where there
    was one prompt."""
    by_prompt = _by_prompt([note for note in notes if note.decode_tokens])
    if not by_prompt:
        return None
    tokens = [fmean(note.decode_tokens for note in of_prompt) for of_prompt in by_prompt]
    seconds = [fmean(note.decode_s for note in of_prompt) for of_prompt in by_prompt]
    return ratio_of_sums(tokens, seconds)


def acceptance(notes: Sequence[RunNote]) -> DepthAcceptance | None:
    """Acceptance of all runs together; None where nothing was drafted."""
    num_steps = sum(note.num_drafts for note in notes)
    if not num_steps:
        return None
    return DepthAcceptance(
        num_steps=num_steps,
        reached=list(map(sum, zip_longest(*(note.reached for note in notes), fillvalue=0))),
        kept=list(map(sum, zip_longest(*(note.kept for note in notes), fillvalue=0))),
    )


@dataclass(frozen=True)
class TimedPair:
    """One prompt in one round, both sides over the same tokens."""

    prompt: int
    plain_s: float
    own_s: float
    # round and number, where several prompts were decoded together
    group: tuple[int, int] | None = None


Timed = TypeVar("Timed", RunNote, TimedPair)


def samples(notes: Sequence[RunNote], *, end_to_end: bool = False) -> list[TimedPair]:
    """Samples of one configuration; pairs without common tokens after their first steps say
    nothing about decoding."""
    pairs = []
    for note in notes:
        if (pairing := note.pairing) is None:
            continue
        plain_s, own_s = (
            (pairing.plain_all_s, pairing.own_all_s)
            if end_to_end
            else (pairing.plain_s, pairing.own_s)
        )
        if (end_to_end or pairing.tokens) and plain_s > 0 and own_s > 0:
            pairs.append(
                TimedPair(
                    note.prompt, plain_s, own_s, (note.round, note.group) if note.shared else None
                )
            )
    return pairs


def speedup(pairs: Sequence[TimedPair]) -> Interval | None:
    """Plain / own seconds, each prompt with the mean of its rounds; None without a sample."""
    if not pairs:
        return None
    by_prompt = _by_prompt(pairs)
    plain = [fmean(pair.plain_s for pair in of_prompt) for of_prompt in by_prompt]
    drafted = [fmean(pair.own_s for pair in of_prompt) for of_prompt in by_prompt]
    groups = {pair.group for pair in pairs}
    if len(by_prompt) == 1 or (None not in groups and len(groups) == 1):
        return Interval.unknown(sum(plain) / sum(drafted))
    interval = ratio_of_sums(plain, drafted)
    if None in groups:
        return interval
    together = [[pair for pair in pairs if pair.group == group] for group in groups]
    of_groups = ratio_of_sums(
        [sum(pair.plain_s for pair in group) for group in together],
        [sum(pair.own_s for pair in group) for group in together],
    )
    low = min(interval.low, of_groups.low)
    high = max(interval.high, of_groups.high)
    return interval.model_copy(update={"low": low, "high": high})


def _by_prompt(items: Sequence[Timed]) -> list[list[Timed]]:
    by_prompt: dict[int, list[Timed]] = {}
    for item in items:
        by_prompt.setdefault(item.prompt, []).append(item)
    return list(by_prompt.values())
