"""Keyed streams: a number depends on seed, purpose and position only; and the numbers are uniform."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.sampling.rng import (
    KEPT_BYTES,
    MIN_KEPT,
    KeyedStreams,
    PhiloxNoise,
    Purpose,
    RowStreams,
    inverse_cdf,
)

FALSE_ALARM = 1e-6  # of every statistical test here, were the seeds drawn afresh; they are fixed


def coins(streams: KeyedStreams, purpose: Purpose, start: list[int], num: int) -> torch.Tensor:
    """Which of 64 thresholds each uniform passes: (B, n, 64), a fingerprint of the numbers."""
    return torch.stack(
        [
            streams.bernoulli(torch.full((len(start), num), k / 64), purpose, torch.tensor(start))
            for k in range(64)
        ],
        -1,
    )


def test_independent_of_batch_and_of_call_order() -> None:
    """A row alone, among others, asked backwards, asked twice, with more coins: the same numbers."""
    alone = KeyedStreams([7])
    batch = KeyedStreams([3, 7, 9])
    expected = {start: coins(alone, Purpose.ACCEPT, [start], 4)[0] for start in (0, 5, 63, 64, 500)}
    for start in (500, 64, 5, 63, 0, 5):
        got = coins(batch, Purpose.ACCEPT, [start + 1, start, start + 2], 20)[1, :4]
        assert torch.equal(got, expected[start])


def test_rows_follow_their_seed_through_swap_remove() -> None:
    streams = KeyedStreams([1, 2, 3])
    streams.swap_remove(0)
    streams.add_row(4)
    got = coins(streams, Purpose.DRAFT, [10, 10, 10], 3)
    fresh = coins(KeyedStreams([3, 2, 4]), Purpose.DRAFT, [10, 10, 10], 3)
    assert torch.equal(got, fresh)
    streams.swap_remove(2)
    assert streams.num_rows == 2


def test_no_number_is_used_twice() -> None:
    """(start, offset), purpose and seed all matter; (1, 0) and (0, 1) are the same text position
    but different coins.
    """
    seen = set()
    for seed in (0, 1, 2**64 - 1):
        row = RowStreams(seed)
        for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE, Purpose.DRAFT):
            for start in (0, 1, 2, 63, 64, 65, 1000):
                seen.update(row.uniforms(purpose, start, 40).tolist())
    assert len(seen) == 3 * 3 * 7 * 40


def test_uniform_is_the_number_of_uniforms() -> None:
    row = RowStreams(5)
    many = row.uniforms(Purpose.DRAFT, 77, 40)
    assert [row.uniform(Purpose.DRAFT, 77, offset) for offset in range(40)] == many.tolist()


def test_uniforms_are_uniform_along_a_row_and_across_seeds() -> None:
    along = RowStreams(1)
    samples = {
        "starts": [along.uniform(Purpose.RESAMPLE, start, 0) for start in range(4000)],
        "seeds": [RowStreams(seed).uniform(Purpose.RESAMPLE, 12, 0) for seed in range(2000)],
    }
    for name, sample in samples.items():
        assert stats.kstest(sample, "uniform").pvalue > FALSE_ALARM, name
        lag = np.corrcoef(sample[:-1], sample[1:])[0, 1] * np.sqrt(len(sample))
        assert abs(lag) < stats.norm.isf(FALSE_ALARM / 2), name


def test_categorical_has_the_distribution_of_its_weights() -> None:
    """Seeded chi-square over 4000 starts, unnormalised weights with zeros; false alarm 1e-6."""
    weights = torch.tensor([[0.0, 3.0, 0.5, 0.0, 1.5, 2.0, 0.0]])
    streams = KeyedStreams([42])
    drawn = [
        int(streams.categorical(weights, Purpose.DRAFT, torch.tensor([s]), 1)) for s in range(4000)
    ]
    counts = np.bincount(drawn, minlength=7)
    support = weights[0].numpy() > 0
    assert counts[~support].sum() == 0
    expected = weights[0].double().numpy()[support] / 7.0 * 4000
    assert stats.chisquare(counts[support], expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_zero_mass_is_never_drawn_even_at_the_ends(uniform: float) -> None:
    """u = 0 with leading zeros and the largest u with trailing zeros are where an inverse CDF goes
    wrong."""
    weights = torch.zeros(1, 5000)
    weights[0, [10, 11, 4000]] = torch.tensor([1e-8, 0.3, 1e-7])
    token = int(inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[0, token] > 0


def test_certain_and_impossible_coins() -> None:
    streams = KeyedStreams([0])
    probs = torch.tensor([[0.0, 1.0]])
    for start in range(2000):
        assert streams.bernoulli(probs, Purpose.ACCEPT, torch.tensor([start])).tolist() == [
            [False, True]
        ]


def test_gumbel_noise_is_keyed_by_position_alone() -> None:
    """Same noise whichever positions are asked with it, in whichever batch, twice at once, and
    after the cache forgot it."""
    # of which no more than that are kept
    streams = KeyedStreams([8, 9])
    size = KEPT_BYTES // 8 // MIN_KEPT
    first = streams.gumbel(torch.tensor([[3, 4], [50, 51]]), size)
    streams.gumbel(torch.arange(MIN_KEPT + 2)[None].expand(2, -1) + 100, size)
    again = KeyedStreams([9]).gumbel(torch.tensor([[51, 51]]), size)
    assert torch.equal(first[1, 1], again[0, 0])
    assert torch.equal(first[1, 1], again[0, 1])
    assert torch.equal(first, streams.gumbel(torch.tensor([[3, 4], [50, 51]]), size))
    assert streams.gumbel(torch.zeros(2, 0, dtype=torch.int64), 30).shape == (2, 0, 30)
    assert torch.equal(
        streams.gumbel(torch.tensor([[3], [50]]), 30),
        KeyedStreams([8, 9]).gumbel(torch.tensor([[3], [50]]), 30),
    )


def test_of_noise_no_more_than_some_is_remembered() -> None:
    """Catches a row that keeps all the noise of a long text over a large vocabulary, or that makes
    the same noise twice."""

    class Watched(PhiloxNoise):
        made: ClassVar[list[int]] = []

        def noise(self, seed: int, positions: list[int], vocab_size: int) -> list[torch.Tensor]:
            self.made.extend(positions)
            return super().noise(seed, positions, vocab_size)

    row = RowStreams(5, Watched())
    size = KEPT_BYTES // 8 // MIN_KEPT
    for start in range(0, 3 * MIN_KEPT, 3):
        row.noise(list(range(start, start + 6)), size)
    assert Watched.made == list(range(3 * MIN_KEPT + 3))
    assert sum(one.nbytes for one in row._noise.values()) <= KEPT_BYTES
    Watched.made.clear()
    for _ in range(2):  # a drafter, and a verifier that wants one more
        row.noise(list(range(900, 900 + 2 * MIN_KEPT)), size)
    assert Watched.made == list(range(900, 900 + 2 * MIN_KEPT))


def test_gumbel_noise_has_its_distribution() -> None:
    noise = RowStreams(1).gumbel(0, 5000).numpy()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > FALSE_ALARM


def test_draft_uniforms_are_the_numbers_behind_categorical() -> None:
    """A compiled drafting loop draws for itself: it must get what `categorical` would have used."""
    streams = KeyedStreams([3, 4])
    start = torch.tensor([9, 70])
    weights = torch.rand(2, 50, generator=torch.Generator().manual_seed(0))
    uniforms = streams.draft_uniforms(start, 20)
    for offset in range(20):
        expected = inverse_cdf(weights, uniforms[:, offset])
        assert torch.equal(streams.categorical(weights, Purpose.DRAFT, start, offset), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_are_the_cpus() -> None:
    """The masked search on CUDA (parallel sums) against the CPU's binary search, zeros included."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 3000, generator=generator) * (
        torch.rand(200, 3000, generator=generator) < 0.1
    )
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    there = inverse_cdf(weights.cuda(), uniforms.cuda()).cpu()
    assert torch.equal(inverse_cdf(weights, uniforms), there)
