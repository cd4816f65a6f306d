"""Sampled texts of up to LATEST tokens, or to the end of the context: the distribution at late
positions.

Every token is one draw from its own conditional, which a teacher-forced pass along the text gives;
the ranks of all tokens in a band of positions make one test (`gtest.py`). An end token ends no such
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from outrider.lab.certify.certify_result import Sampler
from outrider.lab.certify.drafted import DraftedRanks
from outrider.lab.certify.gtest import PositionTable
from outrider.lab.certify.points import probs_along
from outrider.lab.certify.subject import Subject, row_seeds
from outrider.lab.journal import Units
from outrider.run import run_rows
from outrider.sampling.params import SamplingParams

LATEST = 1024  # tokens of a text
BANDS = 4  # of positions, with as many draws each
MAX_ROWS = 32  # at a time: each holds the keys and values of a whole text


@dataclass
class Band:
    """The draws at some positions of the texts."""

    first: int
    last: int
    table: PositionTable = field(default_factory=PositionTable)


def enough_prompts(prompts: Sequence[list[int]], context: int, num_draws: int) -> list[list[int]]:
    """The prompts in turn, again and again, until their texts have `num_draws` tokens for every
    band.

    A band ends between two positions, at which every text has a token: it may lack one draw of
    each.
    """
    rooms = [max(1, _room(prompt, context) - BANDS) for prompt in prompts]
    num_rounds = -(-BANDS * num_draws // sum(rooms))
    ends = np.cumsum(rooms * num_rounds)
    return (list(prompts) * num_rounds)[: int(np.searchsorted(ends, BANDS * num_draws)) + 1]


def long_texts(
    subject: Subject,
    sampler: Sampler,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    num_draws: int,
    seed: int,
    units: Units,
) -> tuple[list[Band], list[dict[str, Any]]]:
    """The draws of one sampler's texts, one for each prompt, and the ranks of what was drafted for
    them.

    Bands have at least `num_draws` draws: there are fewer of them where a grammar ends texts early.
    """
    texts: list[list[int]] = []
    drafted = []
    for start in range(0, len(prompts), MAX_ROWS):
        some = prompts[start : start + MAX_ROWS]
        seeds = row_seeds([seed, 2, start, sampler == "plain"], len(some))
        key = f"long/{sampler}/{start}"
        drawn = units.get(key, _draw, subject, sampler, some, params, seeds)
        texts += drawn["texts"]
        drafted.append(drawn["drafted"])
    pairs = list(zip(prompts, texts, strict=True))
    positions = [range(len(prompt), len(prompt) + len(text)) for prompt, text in pairs]
    bands = bands_of(positions, num_draws)
    if len(bands) > 1:  # and all of them together: a fault that is small everywhere
        bands.append(Band(bands[0].first, bands[-1].last))
    rng = np.random.default_rng([seed, 2])
    draft = subject.draft_model
    for prompt, text in pairs if bands else ():
        targets = probs_along(subject, subject.target, prompt, text, params)
        guesses: Iterable[np.ndarray | None] = repeat(None)
        if draft is not None:
            guesses = probs_along(subject, draft, prompt, text, params)
        triples = zip(text, targets, guesses, strict=False)
        for position, (token, probs, guess) in enumerate(triples, len(prompt)):
            for band in bands:
                if band.first <= position <= band.last:
                    band.table.add(probs, [token], rng, guess)
    return bands, drafted


def _room(prompt: list[int], context: int) -> int:
    return min(LATEST, context - len(prompt))


@torch.inference_mode()
def _draw(
    subject: Subject,
    sampler: Sampler,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """The tokens of every text, and the ranks of what was drafted."""
    decoder = subject.sampler(sampler)
    ranks = DraftedRanks(seeds[0])
    rows = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        room = _room(prompt, subject.built.context)
        row = subject.row(index, prompt, len(prompt), params, seed, room)
        rows.append(replace(row, stop_tokens=frozenset()))
    with decoder.observed(ranks):
        for _ in run_rows(decoder, rows):
            pass
    return {"texts": [row.output for row in rows], "drafted": ranks.as_json()}


def bands_of(texts: Sequence[range], num_draws: int) -> list[Band]:
    """Bands of the positions of all texts, each with at least `num_draws` draws."""
    positions = np.sort(np.concatenate(texts))
    num_bands = min(BANDS, len(positions) // (num_draws + len(texts)))
    num_bands = num_bands or int(len(positions) >= num_draws)
    if not num_bands:
        return []
    lasts = sorted({int(part[-1]) for part in np.array_split(positions, num_bands)})
    firsts = [int(positions[0]), *(last + 1 for last in lasts[:-1])]
    return [Band(first, last) for first, last in zip(firsts, lasts, strict=True)]
