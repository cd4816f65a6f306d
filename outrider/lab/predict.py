"""Predicted speedup of a draft length: the one formula for everything that predicts one.

    speedup(k) = tau(k) / (v(k + 1) + k c)

    tau(k)   tokens per step, 1 + S(1) + ... + S(k); S(i) = P(at least i draft tokens are kept)
    v(n)     a target pass over n tokens per row / one over a single token
    c        a draft token / a target pass over a single token

Leviathan et al. 2211.17192, Theorem 3.8, where acceptance may differ by position and wide passes
may cost more:

    costs = StepCosts(target=CostPoints.of({1: 0.020, 4: 0.021, 8: 0.026}), draft_s_per_token=0.002)
    predict([0.9, 0.85, 0.8], costs, 5).speedup

Left out: rows that end in the middle of a batch, steps that draft less than they were asked for,
and that a step's time may depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Self

import numpy as np
from pydantic import Field, model_validator
from scipy.optimize import isotonic_regression

from outrider.errors import ConfigError
from outrider.lab.result import Record
from outrider.sampling.theory import tau


def survival_of(acceptance: Sequence[float], length: int) -> list[float]:
    """S(1) .. S(length), from P(token i kept | the ones before it kept); positions after the last
    accept like it.

    One alpha for all positions is a list of one. Raises ConfigError for what is no probability.
    """
    if not acceptance:
        raise ConfigError(
            "no acceptance given: one probability per position is needed, or one for all"
        )
    for probability in acceptance:
        if not 0 <= probability <= 1:
            raise ConfigError(f"an acceptance must be between 0 and 1, got {probability}")
    by_position = [*acceptance, *[acceptance[-1]] * (length - len(acceptance))]
    return list(accumulate(by_position[:length], mul))


class CostPoint(Record):
    """One measured time."""

    num_tokens: int = Field(ge=1)  # query tokens per row of the pass: pending token and draft
    seconds: float = Field(gt=0, allow_inf_nan=False)


class CostPoints(Record):
    """Seconds by number of query tokens per row; any order, one time per number."""

    points: list[CostPoint] = Field(min_length=1)

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> CostPoints:
        """{query tokens per row: seconds}."""
        return cls(
            points=[CostPoint(num_tokens=count, seconds=time) for count, time in seconds.items()]
        )

    @model_validator(mode="after")
    def _sorted(self) -> CostPoints:
        self.points.sort(key=lambda point: point.num_tokens)
        if len({point.num_tokens for point in self.points}) < len(self.points):
            raise ValueError("two times for the same num_tokens: give their mean or median")
        return self

    def seconds(self, num_tokens: int) -> tuple[float, bool]:
        """Time of a pass over `num_tokens` per row, and whether that is outside of what was
        measured.

        Between the points: straight lines, after the least-squares fit that never falls (isotonic
        regression), since more tokens do not cost less. Outside: the first or last line continues;
        below the first point a token never costs more than its share there, and a single point is a
        flat cost.
        """
        counts, times = self._fitted
        if num_tokens < counts[0]:
            line = times[0] - (counts[0] - num_tokens) * _slope(counts[:2], times[:2])
            return float(max(line, times[0] * num_tokens / counts[0])), True
        if num_tokens > counts[-1]:
            line = times[-1] + (num_tokens - counts[-1]) * _slope(counts[-2:], times[-2:])
            return float(line), True
        return float(np.interp(num_tokens, counts, times)), False

    @cached_property
    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([point.num_tokens for point in self.points], dtype=np.float64)
        return counts, isotonic_regression([point.seconds for point in self.points]).x


class StepCosts(Record):
    """The cost of a step, for one number of rows. Whole steps that were timed are the points, with
    drafting in them."""

    target: CostPoints
    # for all rows together
    draft_s_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    num_rows: int = Field(default=1, ge=1)

    @classmethod
    def of_steps(cls, seconds: Mapping[int, float], num_rows: int = 1) -> Self:
        """From whole steps: {draft tokens per row: seconds}."""
        points = CostPoints.of({drafted + 1: time for drafted, time in seconds.items()})
        return cls(target=points, num_rows=num_rows)

    def step_s(self, k: int) -> tuple[float, bool]:
        """Seconds of a step with `k` draft tokens per row, and whether its pass is outside of what
        was measured."""
        seconds, outside = self.target.seconds(k + 1)
        return seconds + k * self.draft_s_per_token, outside

    def relative(self, k: int) -> float:
        """v(k + 1) + k c, a step in plain steps: tau must be above this to gain."""
        return self.step_s(k)[0] / self.target.seconds(1)[0]


class SpeedPrediction(Record):
    """The predicted effect of steps of one draft length."""

    num_draft_tokens: int
    tau: float  # tokens per step
    step_cost: float  # v(k + 1) + k c, in plain steps
    speedup: float  # tau / step_cost
    extrapolated: bool  # this step's pass, or the plain one, is outside of what was measured


def predict(acceptance: Sequence[float], costs: StepCosts, k: int) -> SpeedPrediction:
    """The formula for steps of `k` draft tokens per row, acceptance as for `survival_of`; k = 0 is
    plain decoding."""
    tokens = 1 + sum(survival_of(acceptance, k))
    cost = costs.relative(k)
    return SpeedPrediction(
        num_draft_tokens=k,
        tau=tokens,
        step_cost=cost,
        speedup=tokens / cost,
        extrapolated=costs.step_s(k)[1] or costs.step_s(0)[1],
    )


def predict_best(acceptance: Sequence[float], costs: StepCosts, max_k: int) -> SpeedPrediction:
    """The length from 0 to `max_k` with the highest speedup; of equals the shortest."""
    lengths = (predict(acceptance, costs, k) for k in range(max_k + 1))
    return max(lengths, key=lambda prediction: prediction.speedup)


def break_even(costs: StepCosts, k: int) -> float | None:
    """The alpha, equal at all positions, from which drafting `k` tokens pays; None where none does,
    and for k = 0."""
    needed = costs.relative(k)
    if k == 0 or needed > k + 1:
        return None
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if tau(middle, k) >= needed:
            high = middle
        else:
            low = middle
    return high


def _slope(counts: np.ndarray, times: np.ndarray) -> float:
    """The slope of the line through two points; 0 for one point."""
    return float((times[-1] - times[0]) / (counts[-1] - counts[0])) if len(counts) > 1 else 0.0
