"""What a draft length will bring, from what was measured: how long a target pass over n tokens takes, how long drafting takes,
how far drafts survive. No assumption of flat costs, none of equal acceptance at all positions.

    step seconds(gamma) = t_target(gamma + 1) + draft_fixed_s + gamma draft_s_per_token + overhead_s        gamma > 0
                          t_target(1) + plain_overhead_s                                                    gamma = 0
    tau(gamma)          = 1 + S(1) + ... + S(gamma)
    tokens per second   = num_rows tau(gamma) / step seconds(gamma)
    speedup(gamma)      = tokens per second(gamma) / tokens per second(0)

The expected goodput of SmartSpec (Liu et al. 2406.14066) for one fixed length; used by `estimate`, `bench` and `tune` alike:

    costs = StepCosts(target=CostPoints.of({1: .020, 4: .021, 8: .026}), draft_s_per_token=.002)
    predict([.8, .64, .51], costs, gamma=3)      # -> SpeedPrediction(tau, step_s, tokens_per_s, speedup, ...)

What a prediction leaves out: rows end and prompts arrive in the middle of a batch; survival is taken to be the same in every
step; the time of a step does not depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError, model_validator
from scipy.optimize import isotonic_regression

from outrider.errors import ConfigError
from outrider.lab.result import Record
from outrider.sampling.theory import alpha_of_tau, tau_of
from outrider.wellformed import read_json

ROUNDING = 1e-9
EXAMPLE = (
    '{"target": {"points": [{"num_tokens": 1, "seconds": 0.020}, {"num_tokens": 6, "seconds": 0.024}]}, '
    '"draft_s_per_token": 0.002}'
)


class CostPoint(Record):
    """One measured time."""

    num_tokens: int = Field(ge=1)  # query tokens per row of the pass: pending token + draft
    seconds: float = Field(gt=0, allow_inf_nan=False)


class CostPoints(Record):
    """Seconds by number of query tokens per row; any order, one time per number."""

    points: list[CostPoint] = Field(min_length=1)
    context: int | None = Field(default=None, ge=0)  # cached tokens per row while they were measured

    @classmethod
    def of(cls, seconds: Mapping[int, float], context: int | None = None) -> CostPoints:
        """{query tokens per row: seconds}."""
        return cls(
            points=[CostPoint(num_tokens=count, seconds=time) for count, time in seconds.items()], context=context
        )

    @model_validator(mode="after")
    def _sorted(self) -> CostPoints:
        self.points.sort(key=lambda point: point.num_tokens)
        counts = [point.num_tokens for point in self.points]
        if len(set(counts)) < len(counts):
            raise ValueError("two times for the same num_tokens: give their mean or median")
        return self

    def seconds(self, num_tokens: int) -> tuple[float, bool]:
        """Time of a pass over `num_tokens` per row, and whether that is outside of what was measured.

        Inside: straight lines between the points, after the least-squares fit that never falls (isotonic regression): more tokens
        do not cost less, the clock says so now and then. Outside: the first or last line goes on. Below the first point a
        token never costs more than its share there; beyond a single point the cost is taken to be flat.
        """
        counts, times = self._fitted
        if num_tokens < counts[0]:
            line = times[0] - (counts[0] - num_tokens) * _slope(counts[:2], times[:2])
            return float(max(line, times[0] * num_tokens / counts[0])), True
        if num_tokens > counts[-1]:
            return float(times[-1] + (num_tokens - counts[-1]) * _slope(counts[-2:], times[-2:])), True
        return float(np.interp(num_tokens, counts, times)), False

    @property
    def correction(self) -> float:
        """Largest relative change that the fit made to a point: 0 where times never fall, a few percent for noise."""
        measured = np.array([point.seconds for point in self.points])
        return float(np.max(np.abs(self._fitted[1] / measured - 1)))

    @cached_property
    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([point.num_tokens for point in self.points], dtype=np.float64)
        return counts, isotonic_regression([point.seconds for point in self.points]).x


class StepCosts(Record):
    """What a step costs, for one number of rows; the file of `--costs` is one of these as JSON.

    Drafting is `draft_fixed_s` once a step plus `draft_s_per_token` for each draft token of a row (for all rows together): a
    draft model has mostly the latter, a look-up or a parallel head mostly the former. Where whole steps were timed, they are
    the points (`of_steps`): drafting and overhead are in them.
    """

    target: CostPoints
    draft_s_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    draft_fixed_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    overhead_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of a step that drafts, outside of model passes
    plain_overhead_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of a step that does not
    num_rows: int = Field(default=1, ge=1)
    whole_steps: bool = False  # the points are whole steps, not target passes

    @classmethod
    def of_steps(cls, seconds: Mapping[int, float], num_rows: int = 1) -> StepCosts:
        """From whole steps: {draft tokens per row: seconds}."""
        points = CostPoints.of({drafted + 1: time for drafted, time in seconds.items()})
        return cls(target=points, num_rows=num_rows, whole_steps=True)

    @model_validator(mode="after")
    def _counted_once(self) -> StepCosts:
        if self.whole_steps and (
            self.draft_s_per_token or self.draft_fixed_s or self.overhead_s or self.plain_overhead_s
        ):
            raise ValueError("whole_steps: drafting and overhead are in the points already, they must be 0")
        return self

    def step_s(self, gamma: int) -> tuple[float, bool]:
        """Seconds of a step that drafts `gamma` tokens per row, and whether its pass is outside of what was measured."""
        seconds, outside = self.target.seconds(gamma + 1)
        if gamma == 0:
            return seconds + self.plain_overhead_s, outside
        return seconds + self.draft_fixed_s + gamma * self.draft_s_per_token + self.overhead_s, outside

    def relative(self, gamma: int) -> float:
        """A step's time in plain steps: tau must be above this to gain."""
        return self.step_s(gamma)[0] / self.step_s(0)[0]


class SpeedPrediction(Record):
    """The prediction for steps that draft `num_draft_tokens` per row."""

    num_draft_tokens: int
    tau: float  # 1 + S(1) + ... + S(gamma)
    step_s: float
    tokens_per_s: float  # num_rows tau / step_s, prompts not included
    speedup: float  # tokens_per_s / tokens_per_s without drafting
    cost_extrapolated: bool  # this step's pass, or the plain one, is outside of what was measured
    survival_extrapolated: bool  # positions beyond the curve survive like its last one


def predict(survival: Sequence[float], costs: StepCosts, gamma: int) -> SpeedPrediction:
    """What steps of `gamma` draft tokens bring. `survival`: S(1), S(2), ..., S(i) = P(at least i draft tokens kept); gamma = 0 is
    plain decoding. Raises ConfigError on a curve that is none.
    """
    _check(survival, gamma)
    tau = tau_of(extended(survival, gamma))
    step_s, outside = costs.step_s(gamma)
    plain_s, plain_outside = costs.step_s(0)
    return SpeedPrediction(
        num_draft_tokens=gamma,
        tau=tau,
        step_s=step_s,
        tokens_per_s=costs.num_rows * tau / step_s,
        speedup=tau * plain_s / step_s,
        cost_extrapolated=outside or plain_outside,
        survival_extrapolated=gamma > len(survival),
    )


def predict_best(survival: Sequence[float], costs: StepCosts, max_gamma: int, min_gamma: int = 0) -> SpeedPrediction:
    """The length from `min_gamma` to `max_gamma` with the most tokens per second; ties: fewer tokens."""
    found = [predict(survival, costs, gamma) for gamma in range(min_gamma, max_gamma + 1)]
    return max(found, key=lambda one: (one.tokens_per_s, -one.num_draft_tokens))


def break_even(costs: StepCosts, gamma: int) -> float | None:
    """The alpha, equal at all positions, from which drafting `gamma` tokens pays; None where none does, and for gamma = 0."""
    return alpha_of_tau(costs.relative(gamma), gamma)


def extended(survival: Sequence[float], length: int) -> list[float]:
    """S(1) .. S(length): positions beyond the curve accept like its last one, S(n) / S(n - 1)."""
    curve = list(survival[:length])
    last, before = survival[-1] if survival else 0.0, survival[-2] if len(survival) > 1 else 1.0
    acceptance = last / before if before > 0 else 0.0
    while len(curve) < length:
        last *= acceptance
        curve.append(last)
    return curve


def read_costs(path: Path) -> StepCosts:
    """Costs from a JSON file. Raises ConfigError that says what is wrong and shows the form."""
    content = read_json(path, f"--costs {path}", f". Its form: {EXAMPLE}")
    if isinstance(content, dict) and "kind" in content:
        raise ConfigError(
            f"--costs {path} is a result of kind '{content['kind']}', and reads cost points: {EXAMPLE}; 'outrider estimate "
            "--result' reads results of bench and tune"
        )
    try:
        return StepCosts.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(f"--costs {path}: {where}: {first['msg']}. Its form: {EXAMPLE}") from error


def _slope(counts: np.ndarray, times: np.ndarray) -> float:
    """The slope of the line through two points; 0 for one point."""
    return float((times[-1] - times[0]) / (counts[-1] - counts[0])) if len(counts) > 1 else 0.0


def _check(survival: Sequence[float], gamma: int) -> None:
    if gamma < 0:
        raise ConfigError(f"gamma must be at least 0, got {gamma}")
    if gamma and not survival:
        raise ConfigError("the survival curve is empty: S(1) at least is needed to draft")
    above = 1.0
    for position, value in enumerate(survival, start=1):
        if not 0 <= value <= above + ROUNDING:
            raise ConfigError(f"a survival curve falls from 1 to 0; S({position}) is {value} after {above}")
        above = value
