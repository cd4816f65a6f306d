"""From findings to the result that is written."""

from __future__ import annotations

from outrider.lab.tune.decide import recommendations
from outrider.lab.tune.forecast import step_costs
from outrider.lab.tune.probe import survival
from outrider.lab.tune.result import FamilySummary, Tried, TuneResult
from outrider.lab.tune.space import Family, Space
from outrider.lab.tune.tune import Findings, TunePlan, exhaustive_seconds


def summarise_tuning(
    found: Findings, space: Space, plan: TunePlan, tried: Tried, notes: list[str]
) -> TuneResult:
    """Everything a report or another program may want."""
    costs = step_costs(found.plain, plan.batch_size)
    plain_step_s = costs.step_s(0)[0] if costs is not None else 0.0
    return TuneResult(
        notes=notes, interrupted=found.interrupted, tried=tried, families=[_family(family, found) for family in space.families],
        plain_step_s=plain_step_s, forecasts=found.forecasts, overall_speedup=found.overall, laps=found.laps,
        confirmed=found.confirmed, recommendations=recommendations(found, found.finalists, tried.draft),
        schedule=found.schedule, by_load=found.by_load, stages=found.stages,
        exhaustive_s=exhaustive_seconds(found, plan), num_members=space.num_members,
        search=None if found.search is None else found.search.outcome,
    )  # fmt: skip


def _family(family: Family, found: Findings) -> FamilySummary:
    probe = found.probes.get(family.label)
    if probe is None:
        return FamilySummary(
            family=family.label, survival={}, step_s={}, seconds=0.0, failure=found.failures.get(family.label, "not run")
        )
    costs = step_costs(probe)
    times = {} if costs is None else {point.num_tokens - 1: point.seconds for point in costs.target.points}
    curves = {
        task: survival(steps, family.sizes[-1]) if family.nested else [] for task, steps in probe.steps.items()
    }
    return FamilySummary(family=family.label, survival=curves, step_s=times, seconds=probe.seconds)
