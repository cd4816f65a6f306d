"""Predicted speedup of a draft length: the one formula for everything that predicts one.

    speedup(k) = tau(k) / (v(k + 1) + k c)

    tau(k)   tokens per step, 1 + S(1) + ... + S(k); S(i) = P(at least i draft tokens are kept)
    v(n)     a target pass over n tokens per row / one over a single token
    c        a draft token / a target pass over a single token

Leviathan et al. 2211.17192, Theorem 3.8, where acceptance may differ by position and wide passes
may cost more:

    costs = StepCosts(target=CostPoints.of({1: 0.020, 4: 0.021, 8: 0.026}), draft_s_per_token=0.002)
    predict(survival_of([0.9, 0.85, 0.8], 5), costs, 5).speedup

Left out: rows that end in the middle of a batch, steps that draft less than they were asked for,
and that a step's time may depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import numpy as np
from pydantic import Field, model_validator
from scipy.optimize import isotonic_regression

from outrider.errors import ConfigError
from outrider.lab.result import Record
from outrider.sampling.theory import speedup, tau

ROUNDING = 1e-9  # by which a survival curve may rise


def survival_of(acceptance: Sequence[float], length: int) -> list[float]:
    """S(1) .. S(length), from P(token i kept | the ones before it kept); positions after the last
    accept like it.

    One alpha for all positions is a list of one. Raises ConfigError for what is no probability.
    """
    if not acceptance:
        raise ConfigError(
            "no acceptance given: one probability per position is needed, or one for all"
        )
    survival = 1.0
    curve = []
    for position in range(max(length, len(acceptance))):
        probability = acceptance[min(position, len(acceptance) - 1)]
        if not 0 <= probability <= 1:
            raise ConfigError(f"an acceptance must be between 0 and 1, got {probability}")
        survival *= probability
        curve.append(survival)
    return curve[:length]


def tokens_per_step(survival: Sequence[float], k: int) -> float:
    """tau: 1 + S(1) + ... + S(k); positions after the curve's end accept like its last one. Raises
    ConfigError."""
    _check_curve(survival, k)
    kept = list(survival[:k])
    before_last = survival[-2] if len(survival) > 1 else 1.0
    acceptance = survival[-1] / before_last if k and before_last > 0 else 0.0
    while len(kept) < k:
        kept.append(kept[-1] * acceptance)
    return 1 + sum(kept)


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

    @property
    def c(self) -> float:
        """A draft token / a plain target pass; 0 where drafting is in the points."""
        return self.draft_s_per_token / self.target.seconds(1)[0]

    def wide_pass(self, k: int) -> float:
        """v(k + 1), in plain passes."""
        return self.target.seconds(k + 1)[0] / self.target.seconds(1)[0]

    def step_s(self, k: int) -> tuple[float, bool]:
        """Seconds of a step with `k` draft tokens per row, and whether its pass is outside of what
        was measured."""
        seconds, outside = self.target.seconds(k + 1)
        return seconds + k * self.draft_s_per_token, outside

    def relative(self, k: int) -> float:
        """v(k + 1) + k c, a step in plain steps: tau must be above this to gain."""
        return self.wide_pass(k) + k * self.c


class SpeedPrediction(Record):
    """The predicted effect of steps of one draft length."""

    num_draft_tokens: int
    tau: float  # tokens per step
    step_cost: float  # v(k + 1) + k c, in plain steps
    speedup: float  # tau / step_cost
    extrapolated: bool  # this step's pass, or the plain one, is outside of what was measured


def predict(survival: Sequence[float], costs: StepCosts, k: int) -> SpeedPrediction:
    """The formula for steps of `k` draft tokens per row; k = 0 is plain decoding. Raises
    ConfigError for no survival curve."""
    tokens = tokens_per_step(survival, k)
    return SpeedPrediction(
        num_draft_tokens=k,
        tau=tokens,
        step_cost=costs.relative(k),
        speedup=speedup(tokens, k, costs.c, costs.wide_pass(k)),
        extrapolated=costs.step_s(k)[1] or costs.step_s(0)[1],
    )


def predict_best(survival: Sequence[float], costs: StepCosts, max_k: int) -> SpeedPrediction:
    """The length from 0 to `max_k` with the highest speedup; of equals the shortest."""
    predictions = [predict(survival, costs, k) for k in range(max_k + 1)]
    return max(
        predictions, key=lambda prediction: (prediction.speedup, -prediction.num_draft_tokens)
    )


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


def _check_curve(survival: Sequence[float], k: int) -> None:
    if k < 0:
        raise ConfigError(f"k must be at least 0, got {k}")
    if k and not survival:
        raise ConfigError("the survival curve is empty: S(1) at least is needed to draft")
    above = 1.0
    for position, share in enumerate(survival, start=1):
        if not 0 <= share <= above + ROUNDING:
            raise ConfigError(
                f"a survival curve falls from 1 to 0; S({position}) is {share} after {above}"
            )
        above = share
