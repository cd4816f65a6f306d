"""Random streams: every number is a function of (row seed, purpose, position), never of the batch
or of call order.

There are two kinds of position, for two different guarantees:

* A **coin** (accept, resample, draft) is keyed by the step that tosses it: `start`, the text index
  of the
  step's first draft token, and `offset` within the step. Every step commits at least one token, so
  a start never repeats and each coin is tossed once. Keying coins by text position alone would be
  WRONG: block verification looks at all coins of a step, also at those beyond the cut, so a coin
  met again at the same position by the next step is no longer uniform given the text
  (tests/contract/test_mutations.py shows the bias).
* **Gumbel noise** is keyed by text position alone: the coupled verifier consumes each position's noise
  exactly once, and that is what makes its output independent of the drafter.

Generator: NumPy's Philox (counter-based), key = (seed, purpose), so any position is reached without
drawing what precedes it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# coins of 64 starts x 16 offsets are drawn at once (one Philox call, 1024 numbers)
STARTS = 64
OFFSETS = 16
# Noise that a row remembers, for the next step asks for a rejected position again: so much, but no
# fewer positions than that.
KEPT_BYTES = 1 << 24
MIN_KEPT = 16
MIN_UNIFORM = 2.0**-54  # after noise: finite, so that a token of zero mass never wins


class Purpose(IntEnum):
    """Which coin: different purposes are independent streams. Values are part of "same seed, same
    text"."""

    ACCEPT = 0
    RESAMPLE = 1
    DRAFT = 2
    GUMBEL = 3


class Randomness(Protocol):
    """The source of every random outcome of verifiers and drafters; the exact-law oracle puts an
    enumerator in its place."""

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        """n coins of the step that begins at `start` (B,): probs (B, n) -> (B, n) bool. Offsets 0
        .. n-1."""

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        """One token per row, probability proportional to weights (B, V) >= 0: (B,) int64, never of
        weight 0.

        `start` (B,) is the text index of the step's first draft token, `offset` the draw's place in
        the step (a drafter's node i: offset i; the verifier's correction or bonus: 0), one for all
        rows or one each.
        """

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        """Standard Gumbel noise of text positions (B, n): (B, n, V) fp64, the same for every
        caller."""


class NoiseMaker(Protocol):
    """A maker of Gumbel noise, faster than `PhiloxNoise` and equal up to rounding."""

    def noise(self, seed: int, positions: list[int], vocab_size: int) -> list[Tensor]:
        """Each position's own (V,) fp64, on the CPU."""


class PhiloxNoise:
    """The reference: -log(-log u), each position's u a stream of its own."""

    def noise(self, seed: int, positions: list[int], vocab_size: int) -> list[Tensor]:
        drawn = [
            _generator(seed, Purpose.GUMBEL, [0, position, 0, 0]).random(vocab_size)
            for position in positions
        ]
        return [
            torch.from_numpy(numbers).clamp_(min=MIN_UNIFORM).log_().neg_().log_().neg_()
            for numbers in drawn
        ]


class KeyedStreams:
    """The Randomness of real runs: one seed per row. `noise`: who makes it; None: `PhiloxNoise`."""

    def __init__(self, seeds: list[int], noise: NoiseMaker | None = None) -> None:
        self._noise_maker = noise or PhiloxNoise()
        self._rows = [RowStreams(seed, self._noise_maker) for seed in seeds]

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def seeds(self) -> list[int]:
        return [row.seed for row in self._rows]

    def add_row(self, seed: int) -> None:
        self._rows.append(RowStreams(seed, self._noise_maker))

    def swap_remove(self, row: int) -> None:
        """Drop `row`; the last row takes its place."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def select(self, rows: list[int]) -> KeyedStreams:
        """The streams of some rows."""
        chosen = KeyedStreams([], self._noise_maker)
        chosen._rows = [self._rows[row] for row in rows]
        return chosen

    def uniforms(self, purpose: Purpose, start: list[int], num: int) -> np.ndarray:
        """The numbers that make the first `num` coins or draws of a step: (B, num) fp64, not to be
        written to."""
        found = [
            row.uniforms(purpose, begin, num) for row, begin in zip(self._rows, start, strict=True)
        ]
        return found[0][None] if len(found) == 1 else np.stack(found)

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        uniforms = self.uniforms(purpose, start.tolist(), probs.shape[1])  # sync: starts
        return torch.from_numpy(uniforms).to(probs.device) < probs

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        offsets = [offset] * len(self._rows) if isinstance(offset, int) else offset
        places = zip(self._places(start), offsets, strict=True)
        uniforms = [row.uniform(purpose, begin, place) for (row, begin), place in places]
        return inverse_cdf(
            weights, torch.tensor(uniforms, dtype=torch.float64, device=weights.device)
        )

    def draft_uniforms(self, start: Tensor, num: int) -> Tensor:
        """The uniforms of `categorical` for a drafter's first `num` draws of a step, (B, num)
        fp64 on the host.
        """
        return torch.from_numpy(self.uniforms(Purpose.DRAFT, start.tolist(), num))

    def noise(self, positions: list[list[int]], vocab_size: int) -> list[Tensor]:
        """The noise of `gumbel`, each position's (V,) by itself, row by row."""
        lines = zip(self._rows, positions, strict=True)
        return [noise for row, line in lines for noise in row.noise(line, vocab_size)]

    def remembered(self, positions: list[list[int]], vocab_size: int) -> list[Tensor | None]:
        """The part of `noise` that needs no making; None where it does."""
        lines = zip(self._rows, positions, strict=True)
        return [noise for row, line in lines for noise in row.remembered(line, vocab_size)]

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        noise = self.noise(positions.tolist(), vocab_size)  # sync: positions
        stacked = torch.stack(noise) if noise else torch.empty(0, vocab_size, dtype=torch.float64)
        return stacked.view(*positions.shape, vocab_size).to(positions.device)

    def _places(self, start: Tensor) -> zip[tuple[RowStreams, int]]:
        return zip(self._rows, start.tolist(), strict=True)  # sync: starts


class RowStreams:
    """The numbers of one seed. Caches are only for speed: any place can be asked for at any time."""

    def __init__(self, seed: int, noise: NoiseMaker | None = None) -> None:
        self.seed = seed
        self._noise_maker = noise or PhiloxNoise()
        self._windows: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        # by position, in the order in which they were asked for first
        self._noise: dict[int, Tensor] = {}
        self._vocab_size = 0  # of these

    def uniforms(self, purpose: Purpose, start: int, num: int) -> np.ndarray:
        """fp64 uniforms in [0, 1) of offsets 0 .. num-1: (num,)."""
        if num <= OFFSETS:
            return self._window(purpose, start, 0)[start % STARTS, :num]
        pages = [
            self._window(purpose, start, page)[start % STARTS] for page in range(-(-num // OFFSETS))
        ]
        return np.concatenate(pages)[:num]

    def uniform(self, purpose: Purpose, start: int, offset: int) -> float:
        page, column = divmod(offset, OFFSETS)
        return self._window(purpose, start, page)[start % STARTS, column]

    def gumbel(self, position: int, vocab_size: int) -> Tensor:
        """(V,) fp64 standard Gumbel noise of a text position, not to be written to."""
        return self.noise([position], vocab_size)[0]

    def noise(self, positions: list[int], vocab_size: int) -> list[Tensor]:
        """`gumbel` of several positions, perhaps the same one twice."""
        if vocab_size != self._vocab_size:
            self._noise = {}
            self._vocab_size = vocab_size
        known = self._noise
        missing = [position for position in dict.fromkeys(positions) if position not in known]
        if missing:
            known.update(
                zip(missing, self._noise_maker.noise(self.seed, missing, vocab_size), strict=True)
            )
        numbers = [known[position] for position in positions]
        # a verifier asks for its drafter's again
        most = max(MIN_KEPT, 2 * len(positions), KEPT_BYTES // (8 * vocab_size))
        while len(known) > most:
            known.pop(next(iter(known)))  # the oldest
        return numbers

    def remembered(self, positions: list[int], vocab_size: int) -> list[Tensor | None]:
        known = self._noise if vocab_size == self._vocab_size else {}
        return [known.get(position) for position in positions]

    def _window(self, purpose: Purpose, start: int, page: int) -> np.ndarray:
        # (STARTS, OFFSETS) fp64; page p holds offsets 16p .. 16p+15
        window = start // STARTS
        cached = self._windows.get((purpose, page))
        if cached is None or cached[0] != window:
            drawn = _generator(self.seed, purpose, [0, window, page, 0]).random((STARTS, OFFSETS))
            self._windows[purpose, page] = cached = (window, drawn)
        return cached[1]


def _generator(seed: int, purpose: Purpose, counter: list[int]) -> np.random.Generator:
    # explicit uint64: NumPy turns a list with a seed above 2**63 into floats, and nearby seeds into
    # one
    key = np.array([seed, int(purpose)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform * total: weights (..., V), uniforms
    (...) -> (...) int64.

    A token of zero weight is never returned: it does not raise the cumulative sum, and u < 1 keeps
    the threshold below the total. Sums run in fp64. A parallel (CUDA) sum need not be monotone, so
    there zero weights are masked as well.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    if weights.device.type == "cpu":
        return torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    return ((cumulative > threshold) & (weights > 0)).to(torch.uint8).argmax(dim=-1)


def gumbel_choice(probs: Tensor, noise: Tensor) -> Tensor:
    """The winner of the race per law: probs and noise (..., V) -> (...) int64; lowest id among
    equals."""
    scores = probs.log() + noise
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    # torch looks at one score after the other there
    return torch.from_numpy(np.asarray(scores.numpy().argmax(axis=-1)))
