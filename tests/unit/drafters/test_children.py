"""Children of a tree's nodes that scores alone rank, against those that distributions rank."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters.children import (
    likeliest,
    likeliest_scores,
    raced,
    raced_scores,
    ranked_by_scores,
)
from outrider.rows import Rows
from outrider.runtime.top_tokens import TopTokens
from outrider.sampling.params import SamplingParams
from outrider.verifiers.coupled import CoupledVerifier
from tests.helpers import make_row

VOCAB = 30
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=0.7),
)
RACING = 3


def batch() -> Rows:
    rows = Rows(VOCAB, torch.device("cpu"))
    for number, params in enumerate(PARAMS):
        row = make_row([5, 6], params)
        row.verifier = CoupledVerifier() if number == RACING else None
        rows.add(row)
    return rows


def test_rows_whose_distributions_are_more_than_a_softmax_are_left_out() -> None:
    assert ranked_by_scores(batch()) == [True, True, False, True]


def test_scores_rank_as_their_distributions_do() -> None:
    """Of a draft with a wider vocabulary; greedy rows at temperature 1, sampled ones at their own."""
    scores = 3 * torch.randn(4, 5, VOCAB + 3)
    columns = [[0, 4], [2], [], []]
    counts = [[3, 1], [2], [], []]
    found = likeliest_scores(TopTokens(), batch(), scores, columns, counts)
    assert found is not None
    for row, heat in enumerate((1.0, 0.4)):
        expected = likeliest(
            torch.softmax(scores[row, columns[row], :VOCAB] / heat, dim=-1), counts[row]
        )
        for ours, theirs in zip(found[row], expected, strict=True):
            assert [child.token for child in ours] == [child.token for child in theirs]
            assert [child.prob for child in ours] == pytest.approx([child.prob for child in theirs])
    assert found[2:] == [[], []]


def test_the_targets_noise_on_scores_ranks_as_on_their_distributions() -> None:
    rows = batch()
    scores = 3 * torch.randn(4, 3, VOCAB + 3)
    depths = torch.tensor([[0, 1, 1]]).expand(4, -1)
    columns = [[0, 1], [2], [], [0, 2]]
    before = scores.clone()
    ranking = raced_scores(rows, scores, columns, depths)
    assert torch.equal(scores, before)
    assert torch.equal(ranking[:RACING], scores[:RACING])
    assert torch.equal(ranking[RACING, 1], scores[RACING, 1])  # a column that nobody asks for

    heat = PARAMS[RACING].temperature
    probs = torch.softmax(scores[:, :, :VOCAB] / heat, dim=-1)
    expected = raced(rows, probs, depths)[RACING, columns[RACING]]
    found = torch.softmax(ranking[RACING, columns[RACING], :VOCAB] / heat, dim=-1)
    torch.testing.assert_close(found, expected.float())
    assert not torch.allclose(found, probs[RACING, columns[RACING]])


def test_scores_are_raced_only_for_rows_that_share_noise() -> None:
    rows = batch()
    scores = torch.randn(4, 1, VOCAB)
    assert (
        raced_scores(rows, scores, [[0], [0], [0], []], torch.zeros(4, 1, dtype=torch.int64))
        is scores
    )


def test_broken_scores_rank_nothing() -> None:
    """Catches children of a node whose scores are no numbers: the distribution says what is wrong
    with them."""
    scores = torch.full((4, 1, VOCAB), torch.nan)
    assert (
        likeliest_scores(TopTokens(), batch(), scores, [[0], [], [], []], [[2], [], [], []]) is None
    )
