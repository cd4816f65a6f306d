"""Every draft that real drafting code can make, with its probability: an enumerator of outcomes in
the place of its coins.

`drafted(rows)` is run on a batch of equal rows, again and again, each time with one more draw
prescribed for every row; where a draw is not prescribed yet, every row is split over its outcomes
(the idea of tests/enumeration/enumerate.py, for drafters).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.enumeration.enumerate import Enumeration, NeedsOutcomesError
from tests.enumeration.tables import Proposals
from tests.helpers import make_row

Drafting = Callable[[Rows], Draft]


def batch(prompt: list[int], params: SamplingParams, num_rows: int, vocab_size: int) -> Rows:
    rows = Rows(vocab_size, torch.device("cpu"))
    for number in range(num_rows):
        rows.add(make_row(prompt, params, seed=0, number=number))
    return rows


def all_drafts(
    drafted: Drafting, prompt: list[int], params: SamplingParams, vocab_size: int
) -> Proposals:
    """Probabilities are as exact as the drafter's distributions (fp32)."""
    num_rows = 1
    plan = []
    while True:
        rows = batch(prompt, params, num_rows, vocab_size)
        randomness = Enumeration(torch.ones(num_rows, dtype=torch.float64), plan, torch.empty(0))
        rows.rng = randomness
        try:
            draft = drafted(rows)
            break
        except NeedsOutcomesError as need:
            plan = [outcome.repeat_interleave(len(need.outcomes), dim=0) for outcome in plan]
            plan.append(need.outcomes.repeat(num_rows, 1))
            num_rows *= len(need.outcomes)
    likely = randomness.weights > 0
    kept = Draft(
        draft.tokens[likely],
        draft.lengths[likely],
        None if draft.parents is None else draft.parents[likely],
        None if draft.probs is None else draft.probs[likely].double(),
        None if draft.sampled is None else draft.sampled[likely],
        draft.replacement,
    )
    paths = [
        tuple(line[:n]) if draft.parents is None else ()
        for line, n in zip(*kept.lists, strict=True)
    ]
    return Proposals(paths, randomness.weights[likely].tolist(), kept)
