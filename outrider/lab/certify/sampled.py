"""Sampled text against the target's own conditionals: continuations, long texts, and drafted
tokens.

Half of the continuations begin with drafts of full length, half with drafts that end inside the
tested tokens: so accepted tokens, corrections and bonus tokens are all among those. The
conditionals come from teacher-forced passes, in which neither drafter nor verifier takes part.
Where a test fails, the plain sampler goes through the same tests: if it fails them, too, it is the
test that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from outrider.errors import counted
from outrider.lab.certify.certify_result import (
    FALSE_ALARMS,
    POWER,
    DistributionTest,
    Part,
    SampledDistribution,
    Sampler,
    Status,
    View,
)
from outrider.lab.certify.drafted import DraftedRanks
from outrider.lab.certify.gtest import GStatistic, PositionTable, detectable, holm
from outrider.lab.certify.long_texts import MAX_ROWS as MAX_LONG_ROWS
from outrider.lab.certify.long_texts import enough_prompts, long_texts
from outrider.lab.certify.points import Beginning, Spot, conditionals
from outrider.lab.certify.subject import Subject, clear, row_seeds
from outrider.lab.journal import Units
from outrider.run import has_ended, run_rows
from outrider.sampling.params import SamplingParams

DEPTH = 3  # tokens tested per continuation, at most
MAX_ROWS = 64  # at a time
MAX_BYTES = 1 << 28  # of distributions of one batch
FILTER_EDGE = 0.01  # share of draws that rounding may move over the edge of top-k or top-p
WORST_DETECTABLE = 0.25  # a test that would miss even this total variation says nothing
SAMPLERS: tuple[Sampler, ...] = ("speculative", "plain")


@dataclass(frozen=True)
class Tested:
    """What a test is of: see `DistributionTest`."""

    part: Part
    sampler: Sampler
    view: View
    first: int
    last: int


Statistics = dict[Tested, GStatistic]


def sampled_distribution(
    subject: Subject,
    spots: Sequence[Spot],
    params: SamplingParams,
    num_samples: int,
    seed: int,
    units: Units,
) -> SampledDistribution:
    """The section: `num_samples` continuations, and as many draws in every band of long texts."""
    depth = min(DEPTH, subject.max_drafted + 1)
    each = -(-num_samples // len(spots))
    size = _rows_at_once(subject)
    chunks = [min(size, each - start) for start in range(0, each, size)]
    prompts = {spot.prompt_number: spot.prompt for spot in spots}
    many = enough_prompts(list(prompts.values()), subject.built.context, num_samples)
    num_units = len(spots) * (len(chunks) + 1) - (-len(many) // MAX_LONG_ROWS)
    units.progress.stage("sampled distribution", num_units)
    origins = Counter[str]()
    tolerated = 0.0 if subject.built.config()["exact"] else FILTER_EDGE

    def statistics_of(sampler: Sampler) -> Statistics:
        tables = [PositionTable() for _ in range(depth)]
        drafted = DraftedRanks()
        rng = np.random.default_rng(seed)
        for point, spot in enumerate(spots):
            texts = Counter[Beginning]()
            for number, count in enumerate(chunks):
                seeds = row_seeds([seed, point, number, SAMPLERS.index(sampler)], count)
                key = f"law/{sampler}/{point}/{number}"
                drawn = units.get(key, draw, subject, sampler, spot, params, seeds, depth)
                for text, times in drawn["texts"].items():
                    texts[tuple(map(int, text.split()))] += times
                if sampler == "speculative":
                    origins.update(drawn["origins"])
                drafted.add(drawn["drafted"])
            _add(subject, tables, spot, params, texts, rng)
            units.progress.advance()
        statistics: Statistics = {}
        for position, table in enumerate(tables, 1):
            for view, one in _views(table, tolerated):
                statistics[Tested("continuations", sampler, view, position, position)] = one
        bands, ranks = long_texts(subject, sampler, many, params, num_samples, seed, units)
        for band in bands:
            for view, one in _views(band.table, tolerated):
                statistics[Tested("long texts", sampler, view, band.first, band.last)] = one
        for counts in ranks:
            drafted.add(counts)
        for view, one in drafted.tests():
            statistics[Tested("drafts", sampler, view, 1, subject.max_drafted)] = one
        return statistics

    statistics = statistics_of("speculative")
    tests = _tests(statistics)
    if any(test.rejected for test in tests):  # is it the test that is wrong?
        tests = _tests(statistics | statistics_of("plain"))
    result = SampledDistribution(
        status="passed",
        why="",
        temperature=params.temperature,
        num_samples=each * len(spots),
        num_tokens=depth,
        num_long_texts=len(many),
        origins=dict(origins),
        places=[spot.as_record() for spot in spots],
        tests=tests,
    )
    status, why = _judgement(result)
    worst = result.finds("continuations", "long texts")
    return result.model_copy(
        update={"status": status, "why": why, "detectable_total_variation": worst}
    )


# ------------------------------------------------ drawing


@torch.inference_mode()
def draw(
    subject: Subject,
    sampler: Sampler,
    spot: Spot,
    params: SamplingParams,
    seeds: Sequence[int],
    depth: int,
) -> dict[str, Any]:
    """One continuation per seed: the texts, the origins of their tokens, the ranks of what was
    drafted."""
    decoder = subject.sampler(sampler)
    rooms = [depth, max(depth, subject.max_drafted + 1)]  # the first cuts drafts short
    rows = [
        subject.row(number, spot.tokens, len(spot.prompt), params, seed, rooms[number % 2])
        for number, seed in enumerate(seeds)
    ]
    ranks = DraftedRanks(seeds[0])
    try:
        subject.join(decoder, rows)
        with decoder.observed(ranks):
            for _ in run_rows(
                decoder, [], is_over=lambda row: has_ended(row) or len(row.origins) >= depth
            ):
                pass
    finally:
        clear(decoder)
    start = len(spot.tokens)
    texts = Counter(" ".join(map(str, row.tokens[start : start + depth])) for row in rows)
    origins = Counter(origin for row in rows for origin in row.origins[:depth])
    return {
        "texts": dict(texts),
        "origins": dict(origins),
        "drafted": ranks.as_json(),
    }


def _rows_at_once(subject: Subject) -> int:
    # p and q of one row
    num_bytes = 8 * subject.target.shape.vocab_size * (subject.max_drafted + 1)
    return max(2, min(MAX_ROWS, MAX_BYTES // num_bytes))


# ------------------------------------------------ testing


def _add(
    subject: Subject,
    tables: Sequence[PositionTable],
    spot: Spot,
    params: SamplingParams,
    texts: Mapping[Beginning, int],
    rng: np.random.Generator,
) -> None:
    """Everything drawn at one test point goes into the tables of the positions."""
    after = followers(texts)
    fed = longest(after)
    guesses: Iterable[np.ndarray | None] = repeat(None)
    if subject.draft_model is not None:
        drafted = conditionals(subject, subject.draft_model, spot, fed, params)
        guesses = (probs for _, probs in drafted)
    targets = conditionals(subject, subject.target, spot, fed, params)
    for (beginning, probs), guess in zip(targets, guesses, strict=False):
        if beginning in after:
            tables[len(beginning)].add(probs, after[beginning], rng, guess)


def followers(texts: Mapping[Beginning, int]) -> dict[Beginning, list[int]]:
    """Beginning -> the tokens that were drawn after it."""
    after: dict[Beginning, list[int]] = {}
    for text, count in texts.items():
        for length in range(len(text)):
            after.setdefault(text[:length], []).extend([text[length]] * count)
    return after


def longest(beginnings: Iterable[Beginning]) -> list[Beginning]:
    """The beginnings that no other one begins with: feeding them feeds all."""
    known = set(beginnings)
    inner = {one[:length] for one in known for length in range(len(one))}
    return sorted(known - inner)


def _views(table: PositionTable, tolerated: float) -> Iterator[tuple[View, GStatistic]]:
    yield "tokens", table.tokens(tolerated)
    if (preference := table.preference()) is not None:
        yield "preference", preference


def _tests(statistics: Statistics) -> list[DistributionTest]:
    rejected = holm([one.p_value for one in statistics.values()], FALSE_ALARMS)
    level = FALSE_ALARMS / len(statistics)
    return [
        DistributionTest(
            **asdict(tested),
            **asdict(one),
            rejected=no,
            detectable_total_variation=detectable(one, level, POWER),
        )
        for (tested, one), no in zip(statistics.items(), rejected, strict=True)
    ]


def _judgement(found: SampledDistribution) -> tuple[Status, str]:
    points = counted(len(found.places), "position")
    what = (
        f"{found.num_samples} continuations at {points} and "
        f"{counted(found.num_long_texts, 'long text')}"
    )
    rejected = [one for one in found.tests if one.rejected]
    if plain := [one for one in rejected if one.sampler == "plain"]:
        return "inconclusive", (
            f"the plain sampler itself deviates at {_where(plain[0])} (p = {plain[0].p_value:.1e})"
        )
    if rejected:
        first = min(rejected, key=lambda one: one.p_value)
        of_drafts = first.part == "drafts"
        whose = "drafter" if of_drafts else "target"
        beyond = f"(p = {first.p_value:.1e})"
        if first.impossible:
            beyond += f", {first.impossible} of them tokens that the {whose} never emits"
        if of_drafts:
            return "failed", (
                f"{first.num_draws} drafted tokens: the drafter draws from another distribution "
                f"than it reports {beyond}"
            )
        return "failed", f"{what}: {_where(first)} is off the target's distribution {beyond}"
    if not any(found.origins.get(name) for name in ("accepted", "correction", "bonus")):
        return "inconclusive", (
            f"the drafter proposed nothing in {what}; choose prompts it has guesses for"
        )
    worst = found.finds("continuations", "long texts") or 1.0
    if worst > WORST_DETECTABLE:
        return "inconclusive", (
            f"{what} are too few: only a total variation of {worst:.2f} would be found; "
            "raise --samples"
        )
    return "passed", (
        f"{what} follow the target's distribution; a total variation of {worst:.3f} would be "
        f"found in {POWER:.0%} of cases"
    )


def _where(test: DistributionTest) -> str:
    if test.part == "continuations":
        return f"token {test.first}"
    return f"text from token {test.first} to {test.last}"
