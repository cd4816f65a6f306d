"""What a chain of another length would have given on the same text: a walk over its positions, without a model.

Given the text, a step that starts at position s keeps its next i draft tokens with a probability that the distributions there
tell:

    guessed (greedy rows; shared noise)     1 if the draft's guess is the text's token at all of them, else 0
    drawn, token-level                      product of min(1, q(y)/p(y)), y the text's token
    drawn, block                            product of min(1, q(y)/(a p(y))), a the path weight: a' = min(1, a p(y)/q(y))

(joint probability of keeping y, divided by P(y) = p(y); for block P(keep x_1..x_i) = rho_i, Sun et al. 2403.10444.) So the
expected number of steps over this text follows by adding up where steps can start. It is exact for guesses, the expectation over
all coins for draws; averaged over texts of the target's distribution it is the expectation of a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.lab.explain.annotate import NONE, Positions
from outrider.sampling.confidence import ConfidenceSettings

Mode = Literal["guessed", "token", "block"]


@dataclass(frozen=True)
class TextWalk:
    """What a walk over one text needs: columns over its output positions."""

    mode: Mode
    limit: int  # most tokens the output could have had
    agrees: np.ndarray  # (n,) guessed: P(the draft token is the text's); 0 where there is no distribution
    ratio: np.ndarray  # (n,) drawn: p(y)/q(y), inf where the draft cannot say y or there is no distribution
    bound: np.ndarray  # (n,) drafting stops before a position where this is below the stop rule's threshold
    prob: np.ndarray  # (n,) q(y), for the stop rule `product`

    def __len__(self) -> int:
        return len(self.agrees)

    def survival(self, start: int, levels: int, weight: float = 1.0, stop: ConfidenceSettings | None = None) -> list[float]:
        """P(at least 1, 2, ... draft tokens are kept) of a step that starts here; as long as the draft is."""
        found: list[float] = []
        alive, product = 1.0, 1.0
        for position in range(start, min(start + levels, len(self))):
            if stop is not None and self._stops(position, product, stop):
                break
            if self.mode == "guessed":
                alive *= float(self.agrees[position])
            else:
                ratio = float(self.ratio[position])
                alive *= min(1.0, 1 / (weight * ratio)) if ratio > 0 else 1.0
                weight = min(1.0, weight * ratio) if self.mode == "block" else 1.0
            product *= float(self.prob[position])
            found.append(alive)
            if alive == 0:
                break
        return found

    def steps(self, length: int, stop: ConfidenceSettings | None = None) -> float:
        """Expected number of steps with chains of `length` tokens, less only where the row is about to reach its limit."""
        total = len(self)
        starts = np.zeros(total + 1)  # P(a step starts here)
        starts[0] = 1
        for position in range(total):
            if starts[position] == 0:
                continue
            asked = max(0, min(length, self.limit - position - 1))
            kept = [1.0, *self.survival(position, asked, stop=stop)]
            for level, alive in enumerate(kept):
                gone = alive - (kept[level + 1] if level + 1 < len(kept) else 0.0)
                starts[min(position + level + 1, total)] += starts[position] * gone
        return float(starts[:total].sum())

    def _stops(self, position: int, product: float, stop: ConfidenceSettings) -> bool:
        if stop.stop == "entropy":
            return bool(self.bound[position] < stop.stop_below)
        return stop.stop == "product" and product < stop.stop_below


def walk_of(positions: Positions, mode: Mode, limit: int, stop: ConfidenceSettings | None = None) -> TextWalk:
    """The walk with the draft's own guesses or draws."""
    agrees = (positions.guess == positions.token) & (positions.guess != NONE)
    return _walk(positions, mode, limit, agrees.astype(float), stop)


def favourites_walk(positions: Positions, limit: int) -> TextWalk:
    """Temperature 0 at the same positions: each model says its favourite."""
    agrees = (positions.p_best == positions.q_best) & (positions.q_best != NONE)
    return _walk(positions, "guessed", limit, agrees.astype(float), None)


def placed_walk(positions: Positions, limit: int) -> TextWalk:
    """Sampled text, and a draft that says its favourite: kept where that is the text's token."""
    agrees = (positions.q_best == positions.token) & (positions.q_best != NONE)
    return _walk(positions, "guessed", limit, agrees.astype(float), None)


def overlap_walk(positions: Positions, limit: int) -> TextWalk:
    """Draws from the distributions that are shown, at the same positions: a draft token is kept with probability sum min(p,
    q)."""
    return _walk(positions, "guessed", limit, np.nan_to_num(1 - positions.tv, nan=0.0), None)


def _walk(positions: Positions, mode: Mode, limit: int, agrees: np.ndarray, stop: ConfidenceSettings | None) -> TextWalk:
    p, q = positions.p_token, np.nan_to_num(positions.q_token, nan=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / np.where(q > 0, q, 1), np.inf)
    entropy = np.nan_to_num(positions.q_entropy, nan=0.0)
    weight = stop.entropy_weight if stop is not None else 0.0
    bound = np.clip(1 - np.sqrt(weight * entropy), 0, None)
    return TextWalk(mode, limit, agrees, ratio, bound, q)


def total_steps(walks: Sequence[TextWalk], length: int, stop: ConfidenceSettings | None = None) -> float:
    """Over all texts."""
    return sum(walk.steps(length, stop) for walk in walks)
