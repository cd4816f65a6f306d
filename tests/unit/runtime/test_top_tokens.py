"""The likeliest tokens by the native kernel, held to torch's."""

from __future__ import annotations

import ctypes

import pytest
import torch

from outrider.runtime.top_tokens import NONE, TopTokens

SIZES = (5, 16, 63, 64, 65, 131, 4099)


@pytest.fixture
def kernel(native_library: ctypes.CDLL) -> TopTokens:
    return TopTokens(native_library)


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_torch(size: int, kernel: TopTokens) -> None:
    """Catches a block of scores that is passed over: sorted ones would hide it, so the largest lie
    anywhere."""
    scores = torch.randn(2, 7, size)
    outputs = [13, 0, 4, 4, 9]
    for count in (1, 2, 5):
        assert (
            kernel.tokens(scores, outputs, count) == TopTokens().tokens(scores, outputs, count)
        ).all()


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_those_of_the_softmax(size: int, kernel: TopTokens) -> None:
    """Also of the first scores alone, as of a draft whose vocabulary is padded, and at a
    temperature of each output's own."""
    scores = 4 * torch.randn(1, 6, size)
    heat = [1.0, 0.3, 2.0]
    for width in (size, size - 1):
        ours, torchs = (
            one.shares(scores, [5, 0, 2], 4, width, heat) for one in (kernel, TopTokens())
        )
        assert (ours.tokens == torchs.tokens).all()
        assert abs(ours.shares - torchs.shares).max() < 1e-6


def test_of_equal_scores_the_lowest_id_comes_first(kernel: TopTokens) -> None:
    scores = torch.zeros(1, 200)
    scores[0, [150, 70, 71]] = 1.0
    assert kernel.tokens(scores, [0], 5).tolist() == [[70, 71, 150, 0, 1]]


def test_what_cannot_be_emitted_is_no_favourite(kernel: TopTokens) -> None:
    """Catches an id outside the vocabulary that looks like a token, and shares that do not tell
    broken scores."""
    scores = torch.full((3, 90), -torch.inf)
    scores[0, [3, 80]] = torch.tensor([1.0, 2.0])
    scores[2] = torch.nan
    found = kernel.shares(scores, [0, 1, 2], 3, 90, [1.0] * 3)
    assert found.tokens.tolist() == [[80, 3, NONE], [NONE] * 3, [NONE] * 3]
    assert found.shares[0].sum() == pytest.approx(1.0)
