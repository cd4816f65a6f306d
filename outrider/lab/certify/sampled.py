"""Sampled text against the target's own conditionals: seeded continuations, counted, one G-test for each position; long texts,
for late positions; and what was drafted on the way, against the distributions that the drafter reports.

Half of the continuations begin with drafts of full length, half with drafts that end inside the tested tokens: so accepted
tokens, corrections and bonus tokens are all among those. The conditionals come from teacher-forced passes, in which neither
drafter nor verifier takes part. The plain sampler goes through the same test: where it fails, it is the test that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from outrider.counted import counted
from outrider.kv.view import KVView
from outrider.lab.certify.certify_result import (
    DRAFTS,
    FALSE_ALARMS,
    POWER,
    DistributionTest,
    Part,
    SampledDistribution,
    Sampler,
    Status,
    View,
)
from outrider.lab.certify.drafted import DraftedRanks, DraftedTable
from outrider.lab.certify.gtest import GStatistic, PositionTable, detectable, holm
from outrider.lab.certify.long_texts import MAX_ROWS as MAX_LONG_ROWS
from outrider.lab.certify.long_texts import enough_prompts, long_texts
from outrider.lab.certify.points import Beginning, Spot, conditionals
from outrider.lab.certify.subject import Subject, WatchedDecoder, clear, row_seeds
from outrider.lab.journal import Units
from outrider.models.lm import LM
from outrider.run import has_ended, run_rows
from outrider.sampling.params import SamplingParams

DEPTH = 3  # tokens tested per continuation, at most
MAX_ROWS = 64  # at a time
MAX_BYTES = 1 << 28  # of distributions of one batch
FILTER_EDGE = 0.01  # share of draws that rounding may move over the edge of top-k or top-p, where passes are not exact
WORST_DETECTABLE = 0.25  # a test that would miss even this total variation says nothing
SAMPLERS: tuple[Sampler, ...] = ("speculative", "plain")
Counts = Counter[Beginning]
Tables = Mapping[tuple[Sampler, int], PositionTable]  # by position, from 0


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
    subject: Subject, spots: Sequence[Spot], params: SamplingParams, num_samples: int, seed: int, units: Units
) -> SampledDistribution:
    """`num_samples` continuations of each sampler, the same number at every test point; and as many draws in every band of long
    texts."""
    depth = min(DEPTH, subject.max_drafted + 1)
    each = -(-num_samples // len(spots))
    size = _rows_at_once(subject)
    chunks = [min(size, each - start) for start in range(0, each, size)]
    prompts = {spot.prompt_number: spot.prompt for spot in spots}
    many = enough_prompts(list(prompts.values()), subject.built.context, num_samples)
    units.progress.stage("sampled distribution", len(spots) * (2 * len(chunks) + 1) - (-len(many) // MAX_LONG_ROWS))
    tables: Tables = {(name, position): PositionTable() for name in SAMPLERS for position in range(depth)}
    origins: Counter[str] = Counter()
    drafted = DraftedTable()
    rng = np.random.default_rng(seed)
    draft = _own_model(subject)
    for point, spot in enumerate(spots):
        counts = {name: Counter[Beginning]() for name in SAMPLERS}
        for number, count in enumerate(chunks):
            for which, name in enumerate(SAMPLERS):
                seeds = row_seeds([seed, point, number, which], count)
                decoder = subject.plain if name == "plain" else subject.drafting
                found = units.get(f"law/{name}/{point}/{number}", draw, subject, decoder, spot, params, seeds, depth)
                counts[name] += _read(found["texts"])
                origins += Counter(found["origins"])
                drafted.add(found["drafted"])
        _add(subject, tables, draft, spot, params, counts, rng)
        units.progress.advance()
    tolerated = 0.0 if subject.built.config()["exact"] else FILTER_EDGE
    statistics = {**_of_continuations(tables, tolerated), **_of_drafts("drafts", drafted, subject.max_drafted)}

    def of_long_texts(sampler: Sampler) -> Statistics:
        bands, drafted = long_texts(subject, sampler, draft, many, params, num_samples, seed, units)
        found = {
            Tested("long texts", sampler, view, band.first, band.last): one
            for band in bands for view, one in _views(band.table, tolerated)
        }  # fmt: skip
        return {**found, **_of_drafts("drafts of long texts", drafted, subject.max_drafted)}

    statistics |= of_long_texts("speculative")
    tests = _tests(statistics)
    if any(one.rejected for one in tests if one.part == "long texts"):  # is it the test that is wrong?
        tests = _tests(statistics | of_long_texts("plain"))
    result = SampledDistribution(
        status="passed", why="", temperature=params.temperature, num_samples=each * len(spots), num_tokens=depth,
        num_long_texts=len(many), origins=dict(origins), places=[spot.as_record() for spot in spots], tests=tests,
    )  # fmt: skip
    status, why = _judgement(result)
    worst = result.finds("continuations", "long texts")
    return result.model_copy(update={"status": status, "why": why, "detectable_total_variation": worst})


# ------------------------------------------------ drawing


@torch.inference_mode()
def draw(
    subject: Subject, decoder: WatchedDecoder, spot: Spot, params: SamplingParams, seeds: Sequence[int], depth: int
) -> dict[str, Any]:
    """One continuation per seed: how often each text of `depth` tokens was drawn, where the speculative tokens came from, and the
    ranks of what was drafted."""
    is_plain = decoder is subject.plain
    rooms = [depth, max(depth, subject.max_drafted + 1)]  # the first cuts drafts short
    rows = [
        subject.row(number, spot.tokens, len(spot.prompt), params, seed, rooms[number % 2])
        for number, seed in enumerate(seeds)
    ]
    ranks = DraftedRanks(seeds[0])
    try:
        subject.join(decoder, rows)
        with decoder.observed(ranks):
            for _ in run_rows(decoder, [], is_over=lambda row: has_ended(row) or len(row.origins) >= depth):
                pass
    finally:
        clear(decoder)
    start = len(spot.tokens)
    texts = Counter(" ".join(map(str, row.tokens[start : start + depth])) for row in rows)
    origins = Counter(origin for row in rows for origin in row.origins[:depth])
    return {"texts": dict(texts), "origins": {} if is_plain else dict(origins), "drafted": ranks.as_json()}


def _read(texts: Mapping[str, int]) -> Counts:
    return Counter({tuple(map(int, text.split())): count for text, count in texts.items()})


def _rows_at_once(subject: Subject) -> int:
    num_bytes = 4 * subject.target.shape.vocab_size * (subject.max_drafted + 1) * 2  # bytes of p and q of one row
    return max(2, min(MAX_ROWS, MAX_BYTES // num_bytes))


# ------------------------------------------------ testing


def _own_model(subject: Subject) -> LM | None:
    """The model whose distribution the drafter draws from, where it has a cache of its own to be fed on."""
    model = subject.speculative.drafter.model
    return None if model is None or isinstance(model.kv, KVView) else model


def _add(
    subject: Subject, tables: Tables, draft: LM | None, spot: Spot, params: SamplingParams,
    counts: Mapping[Sampler, Counts], rng: np.random.Generator,
) -> None:  # fmt: skip
    """Everything drawn at one test point goes into the tables."""
    after = {name: followers(found) for name, found in counts.items()}
    beginnings = sorted({beginning for found in after.values() for beginning in found}, key=lambda b: (len(b), b))
    fed = longest(beginnings)
    guesses = repeat(None) if draft is None else (probs for _, probs in conditionals(subject, draft, spot, fed, params))
    for (beginning, probs), guess in zip(conditionals(subject, subject.target, spot, fed, params), guesses, strict=False):
        for name, found in after.items():
            if beginning in found:
                tables[name, len(beginning)].add(probs, found[beginning], rng, guess)


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


def _of_continuations(tables: Tables, tolerated: float) -> Statistics:
    return {
        Tested("continuations", name, view, position + 1, position + 1): one
        for (name, position), table in tables.items() for view, one in _views(table, tolerated)
    }  # fmt: skip


def _of_drafts(part: Part, drafted: DraftedTable, max_drafted: int) -> Statistics:
    return {Tested(part, "speculative", view, 1, max_drafted): one for view, one in drafted.tests()}


def _tests(found: Statistics) -> list[DistributionTest]:
    rejected = holm([one.p_value for one in found.values()], FALSE_ALARMS)
    return [
        DistributionTest(
            **asdict(tested), **asdict(one), rejected=no,
            detectable_total_variation=detectable(one, FALSE_ALARMS / len(found), POWER),
        )
        for (tested, one), no in zip(found.items(), rejected, strict=True)
    ]  # fmt: skip


def _judgement(found: SampledDistribution) -> tuple[Status, str]:
    where = f"{counted(len(found.places), 'position')} and {counted(found.num_long_texts, 'long text')}"
    what = f"{found.num_samples} continuations at {where}"
    rejected = [one for one in found.tests if one.rejected]
    if bad := [one for one in rejected if one.sampler == "plain"]:
        return "inconclusive", f"the plain sampler itself deviates at {_where(bad[0])} (p = {bad[0].p_value:.1e})"
    if rejected:
        first = min(rejected, key=lambda one: one.p_value)
        beyond = f", {first.impossible} of them tokens that the {_whose(first)} never emits" if first.impossible else ""
        if first.part in DRAFTS:
            return "failed", (
                f"{first.num_draws} drafted tokens: the drafter draws from another distribution than it reports "
                f"(p = {first.p_value:.1e}){beyond}"
            )
        return "failed", f"{what}: {_where(first)} is off the target's distribution (p = {first.p_value:.1e}){beyond}"
    if not any(found.origins.get(name) for name in ("accepted", "correction", "bonus")):
        return "inconclusive", f"the drafter proposed nothing in {what}; choose prompts it has guesses for"
    worst = found.finds("continuations", "long texts") or 1.0
    if worst > WORST_DETECTABLE:
        return "inconclusive", f"{what} are too few: only a total variation of {worst:.2f} would be found; raise --samples"
    power = f"a total variation of {worst:.3f} would be found in {POWER:.0%} of cases"
    return "passed", f"{what} follow the target's distribution; {power}"


def _where(test: DistributionTest) -> str:
    return f"token {test.first}" if test.part == "continuations" else f"text from token {test.first} to {test.last}"


def _whose(test: DistributionTest) -> str:
    return "drafter" if test.part in DRAFTS else "target"
