"""Whether a draft service would pay here: a probe's own numbers in the formulas of `outrider estimate --remote-rtt-ms`.

The probe of the draft model's chains times each step, and the drafter's part of it. So a step splits into the target's part and
drafting, and both ways compare with a plain step of the same minutes: drafting beside the target, and across a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from outrider.errors import ConfigError
from outrider.lab.estimate.curves import CostPoints, StepCosts
from outrider.lab.estimate.estimate_result import RemoteEstimate
from outrider.lab.estimate.remote import check_line, remote_estimate
from outrider.lab.result import Record
from outrider.lab.tune.probe import Probe, StepNote, survival
from outrider.lab.tune.space import Family

DRAFTER = "draft-model"  # whose time a service would take off the target's process; look-ups take next to none


@dataclass(frozen=True)
class Line:
    """The way to a draft service. Raises ConfigError for values out of range."""

    rtt_s: float  # there and back, drafting aside
    endpoint: str | None = None  # where the round trip was measured; None: it was given

    def __post_init__(self) -> None:
        check_line(self.rtt_s)


class RemoteAdvice(Record):
    """A draft service against the same draft beside the target, and against no drafts."""

    endpoint: str | None  # where the round trip was measured; None: it was given
    configuration: str  # the family whose probe this rests on
    plain_step_s: float
    draft_fixed_s: float
    draft_s_per_token: float
    estimate: RemoteEstimate
    remote_speedup: float  # as the drafter `remote` works: 1 where waiting would never pay
    reason: str  # one sentence


def check_family(families: Sequence[Family]) -> None:
    """Raises ConfigError where no family of the draft model's chains is tried."""
    if family_of(families) is None:
        raise ConfigError(
            "whether a draft service pays is worked out for the chains of a draft model, which are not tried here: add --draft "
            "MODEL (and draft-model to --drafters, where that is given). Look-ups draft for next to nothing beside the target"
        )


def family_of(families: Sequence[Family]) -> Family | None:
    """Chains of the draft model, with nothing beside."""
    return next((family for family in families if family.label == DRAFTER), None)


def remote_advice(family: Family, probe: Probe, line: Line, rows: int, plain_s: float) -> RemoteAdvice | None:
    """None where the probe timed no step that drafts. `plain_s`: a plain step elsewhere, for a probe that has none."""
    steps = [step for notes in probe.steps.values() for step in notes]
    costs = _costs(steps, rows, plain_s)
    if costs is None:
        return None
    length = family.sizes[-1]
    found = remote_estimate(line.rtt_s, survival(steps, length), costs, length)
    return RemoteAdvice(
        endpoint=line.endpoint, configuration=family.label, plain_step_s=costs.step_s(0)[0],
        draft_fixed_s=costs.draft_fixed_s, draft_s_per_token=costs.draft_s_per_token, estimate=found,
        remote_speedup=found.speedup if found.in_time else 1.0, reason=_reason(found, costs.step_s(0)[0]),
    )  # fmt: skip


def _costs(steps: Sequence[StepNote], rows: int, plain_s: float) -> StepCosts | None:
    """Medians by width: of the target's part as points, of drafting as a line."""
    target: dict[int, list[float]] = {}
    drafting: dict[int, list[float]] = {}
    for step in steps:
        if step.steady:
            target.setdefault(step.drafted + 1, []).append(step.seconds - (step.draft_s if step.drafted else 0.0))
            if step.drafted:
                drafting.setdefault(step.drafted, []).append(step.draft_s)
    if not drafting:
        return None
    fixed_s, per_token_s = _straight({width: median(seconds) for width, seconds in drafting.items()})
    points = {1: plain_s, **{width: median(seconds) for width, seconds in target.items()}}
    return StepCosts(target=CostPoints.of(points), draft_fixed_s=fixed_s, draft_s_per_token=per_token_s, num_rows=rows)


def _straight(seconds: dict[int, float]) -> tuple[float, float]:
    """(Fixed, per token) of the line through times by width; neither is below 0, whatever the clock says."""
    widths, times = np.array(list(seconds)), np.array(list(seconds.values()))
    if len(seconds) > 1:
        slope, start = np.polyfit(widths, times, 1)
        if slope >= 0 and start >= 0:
            return float(start), float(slope)
    return 0.0, float(times.sum() / widths.sum())


def _reason(found: RemoteEstimate, plain_s: float) -> str:
    line = f"with {_ms(found.rtt_s)} ms there and back"
    beside = f"beside the target the draft model reaches {found.co_located_speedup:.2f}x"
    if found.in_time:
        return f"{line} it reaches {found.speedup:.2f}x plain decoding; {beside}"
    return (
        f"{line}, the shortest reply takes {_ms(found.lengths[0].reply_s)} ms and a plain step {_ms(plain_s)} ms, so no "
        f"draft comes in time and speed is that of plain decoding; {beside}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
