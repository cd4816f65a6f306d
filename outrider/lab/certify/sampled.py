"""Sampled text against the target's own conditionals, and drafted tokens against what the drafter
reports of them.

Texts have up to LATEST tokens, or go to the end of the context; an end token ends none. Every token
is one draw from its own conditional, which a teacher-forced pass along the text gives, in which
neither drafter nor verifier takes part. The ranks of all tokens in a band of positions make one
test in each order (`ranks.py`). Where a test fails, the plain sampler goes through the same tests:
if it fails them, too, it is the test that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import counted
from outrider.lab.certify.certify_result import (
    FALSE_ALARMS,
    POWER,
    DistributionTest,
    Part,
    SampledDistribution,
    Sampler,
    Status,
)
from outrider.lab.certify.ranks import Ranks, detectable, holm
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import fit_width
from outrider.run import run_rows
from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.types import Draft

LATEST = 1024  # tokens of a text
BANDS = 4  # of positions, with as many draws each
MAX_ROWS = 32  # at a time: each holds the keys and values of a whole text
CHUNK = 32  # tokens of a teacher-forced pass
FILTER_EDGE = 0.01  # share of draws that rounding may move over the edge of top-k or top-p
WORST_DETECTABLE = 0.25  # a test that would miss even this total variation says nothing
ORIGINS = ("accepted", "correction", "bonus")


@dataclass
class Drawn:
    """The texts of one sampler."""

    prompts: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    origins: Counter[str] = field(default_factory=Counter)
    drafted: Ranks = field(default_factory=Ranks)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass
class Band:
    """The draws at some positions of the texts."""

    first: int
    last: int
    ranks: Ranks


@dataclass(frozen=True)
class Draws:
    """Texts after these prompts, with `num_draws` draws in every band of positions."""

    subject: Subject
    prompts: Sequence[list[int]]
    params: SamplingParams
    num_draws: int
    seed: int
    journal: Journal

    def section(self) -> SampledDistribution:
        """The section of the certificate."""
        room = min(LATEST, self.subject.built.context - max(map(len, self.prompts)))
        batches = -(-BANDS * self.num_draws // (MAX_ROWS * max(1, room)))
        self.journal.progress.stage("sampled distribution", batches)
        drawn = self.draw("speculative")
        tests = self._tests("speculative", drawn)
        if any(test.rejected for test in judged(tests)):  # is it the test that is wrong?
            tests += self._tests("plain", self.draw("plain"))
        result = SampledDistribution(
            status="passed",
            why="",
            temperature=self.params.temperature,
            num_texts=len(drawn.texts),
            num_tokens=drawn.num_tokens,
            origins=dict(drawn.origins),
            tests=judged(tests),
        )
        result.status, result.why = _judgement(result)
        return result

    def draw(self, sampler: Sampler) -> Drawn:
        """Texts after the prompts in turn, until every band has its draws, or there is a text for
        each draw: a grammar may end them early."""
        drawn = Drawn()
        turns = cycle(self.prompts)
        while (
            len(drawn.texts) < self.num_draws
            and (missing := BANDS * (self.num_draws + len(drawn.texts)) - drawn.num_tokens) > 0
        ):
            room = max(1, LATEST if not drawn.texts else drawn.num_tokens // len(drawn.texts))
            some = list(islice(turns, min(MAX_ROWS, -(-missing // room))))
            start = len(drawn.texts)
            seeds = np.random.SeedSequence([self.seed, start, sampler == "plain"]).generate_state(
                len(some), np.uint64
            )
            batch = self.journal.unit(
                f"texts/{sampler}/{start}", self._batch, sampler, some, (seeds >> 1).tolist()
            )
            drawn.prompts += some
            drawn.texts += batch["texts"]
            drawn.origins.update(batch["origins"])
            drawn.drafted.merge(batch["drafted"])
        return drawn

    @torch.inference_mode()
    def _batch(
        self, sampler: Sampler, prompts: Sequence[list[int]], seeds: Sequence[int]
    ) -> dict[str, Any]:
        """The tokens of every text, their origins, and the ranks of what was drafted."""
        decoder = self.subject.sampler(sampler)
        ranks = Ranks(seeds[0])
        rows = []
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            row = self.subject.row(index, prompt, self.params, seed)
            limit = min(LATEST + len(prompt), self.subject.built.context)
            rows.append(replace(row, stop_tokens=frozenset(), max_tokens=limit))
        with decoder.observed(ranks):
            for _ in run_rows(decoder, rows):
                pass
        origins = Counter(origin for row in rows for origin in row.origins)
        return {
            "texts": [row.output for row in rows],
            "origins": dict(origins),
            "drafted": ranks.as_json(),
        }

    def bands(self, drawn: Drawn) -> list[Band]:
        """The ranks of all tokens, by bands of positions."""
        pairs = list(zip(drawn.prompts, drawn.texts, strict=True))
        ranges = [range(len(prompt), len(prompt) + len(text)) for prompt, text in pairs]
        limits = bands_of(ranges, self.num_draws)
        bands = [
            Band(first, last, Ranks([self.seed, number]))
            for number, (first, last) in enumerate(limits)
        ]
        draft = self.subject.draft_model
        for prompt, text in pairs if bands else ():
            position = len(prompt)
            guesses: Iterator[Tensor | None] = (
                cycle([None])
                if draft is None
                else probs_along(self.subject, draft, prompt, text, self.params)
            )
            targets = probs_along(self.subject, self.subject.target, prompt, text, self.params)
            for probs, guess in zip(targets, guesses, strict=False):
                at = torch.arange(position, position + len(probs))
                start = position - len(prompt)
                tokens = torch.tensor(text[start : start + len(probs)])
                for band in bands:
                    inside = (at >= band.first) & (at <= band.last)
                    if bool(inside.any()):
                        band.ranks.add(
                            probs[inside], tokens[inside], None if guess is None else guess[inside]
                        )
                position += len(probs)
        return bands

    def _tests(self, sampler: Sampler, drawn: Drawn) -> list[DistributionTest]:
        tolerated = 0.0 if self.subject.built.config()["exact"] else FILTER_EDGE
        parts: list[tuple[Part, Band, float]] = [
            ("texts", band, tolerated) for band in self.bands(drawn)
        ]
        parts.append(("drafts", Band(1, self.subject.max_drafted, drawn.drafted), 0.0))
        return [
            DistributionTest(
                **statistic.model_dump(),
                part=part,
                sampler=sampler,
                view=view,
                first=band.first,
                last=band.last,
            )
            for part, band, allowed in parts
            for view, statistic in band.ranks.tests(allowed)
        ]


@torch.inference_mode()
def probs_along(
    subject: Subject, lm: LM, prompt: list[int], answer: list[int], params: SamplingParams
) -> Iterator[Tensor]:
    """The distributions (n, V) before the tokens of an answer, some at a time; penalties, bans and
    grammar as for committed text.

    Teacher-forced: the text is fed as it is. `lm`: the target, or a draft, whose logits are brought
    to the target's width as its drafter does.
    """
    vocab_size = subject.target.shape.vocab_size
    lm.kv.add_row()
    try:
        lm.catch_up([prompt])
        for start in range(0, len(answer), CHUNK):
            piece = answer[start : start + CHUNK]
            fed = torch.tensor(
                [[*prompt[-1:], *answer][start : start + len(piece)]], device=lm.device
            )
            columns = torch.arange(len(piece), device=lm.device)
            logits = fit_width(lm.forward(fed, columns=columns).logits, vocab_size)
            lm.kv.advance(0, len(piece))
            chain = Draft(torch.tensor([piece[:-1]]), torch.tensor([len(piece) - 1]))
            before = answer[:start]
            history = (
                History.start([prompt], [before], vocab_size) if params.needs_history else None
            )
            constraint = subject.constraint(before, params)
            sampling = BatchSampling.of([params], vocab_size, constraints=[constraint])
            yield distribution(logits.cpu(), sampling, history, chain)[0]
    finally:
        lm.kv.swap_remove(0)


def bands_of(texts: Sequence[range], num_draws: int) -> list[tuple[int, int]]:
    """First and last position of the bands of all texts, each with at least `num_draws` draws, and
    of all of them together: a fault that is small everywhere."""
    positions = np.sort(np.concatenate(texts))
    num_bands = min(BANDS, len(positions) // (num_draws + len(texts)))
    num_bands = num_bands or int(len(positions) >= num_draws)
    if not num_bands:
        return []
    lasts = sorted({int(part[-1]) for part in np.array_split(positions, num_bands)})
    firsts = [int(positions[0]), *(last + 1 for last in lasts[:-1])]
    bands = list(zip(firsts, lasts, strict=True))
    return [*bands, (firsts[0], lasts[-1])] if len(bands) > 1 else bands


def judged(tests: Sequence[DistributionTest]) -> list[DistributionTest]:
    """The tests of one certificate, corrected for their number."""
    rejected = holm([test.p_value for test in tests], FALSE_ALARMS)
    level = FALSE_ALARMS / max(1, len(tests))
    return [
        test.model_copy(
            update={
                "rejected": no,
                "detectable_total_variation": detectable(test, level, POWER),
            }
        )
        for test, no in zip(tests, rejected, strict=True)
    ]


def _judgement(section: SampledDistribution) -> tuple[Status, str]:
    what = f"{section.num_tokens} tokens in {counted(section.num_texts, 'text')}"
    rejected = [test for test in section.tests if test.rejected]
    if plain := [test for test in rejected if test.sampler == "plain"]:
        return "inconclusive", (
            f"the plain sampler itself deviates at {_where(plain[0])} (p = {plain[0].p_value:.1e})"
        )
    if rejected:
        first = min(rejected, key=lambda test: test.p_value)
        of_drafts = first.part == "drafts"
        beyond = f"(p = {first.p_value:.1e})"
        if first.impossible:
            whose = "drafter" if of_drafts else "target"
            beyond += f", {first.impossible} of them tokens that the {whose} never emits"
        if of_drafts:
            return "failed", (
                f"{first.num_draws} drafted tokens: the drafter draws from another distribution "
                f"than it reports {beyond}"
            )
        return "failed", f"{what}: {_where(first)} is off the target's distribution {beyond}"
    if not any(section.origins.get(name) for name in ORIGINS):
        return "inconclusive", (
            f"the drafter proposed nothing in {what}; choose prompts it has guesses for"
        )
    worst = section.finds("texts") or 1.0
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
    return f"text from token {test.first} to {test.last}"
