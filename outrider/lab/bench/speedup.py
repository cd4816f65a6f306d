"""How much faster, how sure, and what would make it surer.

A prompt's runs in several rounds say how steady the clock is; different prompts say how much the text matters. The interval
holds both (bootstrap over prompts). More rounds narrow only the first part: with r rounds of n prompts and a spread w of single
log ratios around their prompt's mean, the clock's share of the variance is w^2 / (n r). When what is left alone is wider than the
precision asked for, rounds are wasted, and about n (width left / precision)^2 prompts would be needed.

Prompts that were decoded together share their clock: they are no independent witnesses. So with batches of several, groups are
resampled too, and the interval reaches as far as the wider of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from outrider.lab.bench.notes import RunNote
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.result import Interval

WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors


@dataclass(frozen=True)
class TimedPair:
    """One prompt in one round, both sides over the same tokens."""

    prompt: int
    plain_s: float
    own_s: float
    group: tuple[int, int] | None = None  # round and number, where several prompts were decoded together


def samples(notes: Sequence[RunNote], *, end_to_end: bool = False) -> list[TimedPair]:
    """Samples of one configuration; pairs without common tokens behind their first steps say nothing about decoding."""
    found = []
    for note in notes:
        if (pairing := note.pairing) is None:
            continue
        plain_s, own_s = (pairing.plain_all_s, pairing.own_all_s) if end_to_end else (pairing.plain_s, pairing.own_s)
        if (end_to_end or pairing.tokens) and plain_s > 0 and own_s > 0:
            found.append(TimedPair(note.prompt, plain_s, own_s, (note.round, note.group) if note.shared else None))
    return found


def speedup(found: Sequence[TimedPair]) -> Interval | None:
    """Plain / own seconds, each prompt with the mean of its rounds; None without a sample."""
    if not found:
        return None
    by_prompt = list(_by_prompt(found).values())
    plain = [fmean(one.plain_s for one in group) for group in by_prompt]
    own = [fmean(one.own_s for one in group) for group in by_prompt]
    groups = {one.group for one in found}
    if len(by_prompt) == 1 or (None not in groups and len(groups) == 1):
        return Interval.unknown(sum(plain) / sum(own))
    interval = ratio_of_sums(plain, own)
    if None in groups:
        return interval
    return _reaching(interval, [[one for one in found if one.group == group] for group in groups])


def _reaching(interval: Interval, groups: Sequence[Sequence[TimedPair]]) -> Interval:
    """The interval, widened as far as the groups' own interval."""
    other = ratio_of_sums([sum(s.plain_s for s in group) for group in groups], [sum(s.own_s for s in group) for group in groups])
    low, high = min(interval.low, other.low), max(interval.high, other.high)
    return interval.model_copy(update={"low": low, "high": high})


def is_tight(found: Interval | None, precision: float) -> bool:
    """Whether the interval is at most `precision` wide, relative to the speedup. Nothing to compare counts as tight."""
    return found is None or (found.high - found.low) / found.value <= precision


def prompts_needed(found: Sequence[TimedPair], precision: float) -> int | None:
    """The number of prompts that would reach the precision where more rounds cannot. None where they can, or where it
    is unknown (fewer than two rounds, or one prompt)."""
    by_prompt = _by_prompt(found)
    repeated = [group for group in by_prompt.values() if len(group) > 1]
    now = speedup(found)
    if now is None or not repeated or now.low <= 0:
        return None
    within = fmean(variance(math.log(one.plain_s / one.own_s) for one in group) for group in repeated)
    error = math.log(now.high / now.low) / WIDTH
    left = error**2 - within / len(found)
    width = WIDTH * math.sqrt(max(left, 0.0))
    return math.ceil(len(by_prompt) * (width / precision) ** 2) if width > precision else None


def _by_prompt(found: Sequence[TimedPair]) -> dict[int, list[TimedPair]]:
    by_prompt: dict[int, list[TimedPair]] = {}
    for one in found:
        by_prompt.setdefault(one.prompt, []).append(one)
    return by_prompt
