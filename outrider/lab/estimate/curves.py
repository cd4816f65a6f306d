"""Costs with a fixed part of drafting, which `tune` measures for a draft service."""

from __future__ import annotations

from pydantic import Field

from outrider.lab.predict import CostPoints as CostPoints
from outrider.lab.predict import StepCosts as WholeCosts
from outrider.lab.predict import break_even as break_even


class StepCosts(WholeCosts):
    """`draft_fixed_s`: of drafting, once a step."""

    draft_fixed_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def step_s(self, k: int) -> tuple[float, bool]:
        seconds, outside = super().step_s(k)
        return seconds + (self.draft_fixed_s if k else 0.0), outside

    def relative(self, k: int) -> float:
        return self.step_s(k)[0] / self.step_s(0)[0]
