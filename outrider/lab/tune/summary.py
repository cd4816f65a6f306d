"""From findings to the result that is written."""

from __future__ import annotations

from outrider.lab.tune.decide import recommendations
from outrider.lab.tune.forecast import step_costs
from outrider.lab.tune.probe import survival
from outrider.lab.tune.remote import Line, RemoteAdvice, family_of, remote_advice
from outrider.lab.tune.space import Family, Space
from outrider.lab.tune.tune import Findings, TunePlan, exhaustive_seconds
from outrider.lab.tune.tune_result import FamilySummary, Tried, TuneResult


def summarise_tuning(
    found: Findings, space: Space, plan: TunePlan, tried: Tried, line: Line | None, notes: list[str]
) -> TuneResult:
    """Everything a report or another program may want. `line`: to a draft service that is asked about."""
    costs = step_costs(found.plain, plan.batch_size)
    plain_step_s = costs.step_s(0)[0] if costs is not None else 0.0
    advice, missing = _about_service(found, space, plan, line, plain_step_s)
    failed = [f"{label} could not be confirmed: {why}" for label, why in found.failures.items() if label in found.family_of]
    return TuneResult(
        notes=[*notes, *missing, *failed], interrupted=found.interrupted, tried=tried,
        families=[_family(family, found) for family in space.families],
        plain_step_s=plain_step_s, forecasts=found.forecasts, overall_speedup=found.overall,
        confirmed=found.confirmed, others=found.others, recommendations=recommendations(found, found.finalists, tried.draft),
        schedule=found.schedule, by_load=found.by_load, stages=found.stages,
        exhaustive_s=exhaustive_seconds(found, plan), num_members=space.num_members,
        search=None if found.search is None else found.search.outcome, remote=advice,
    )  # fmt: skip


def _about_service(
    found: Findings, space: Space, plan: TunePlan, line: Line | None, plain_step_s: float
) -> tuple[RemoteAdvice | None, list[str]]:
    """Advice about a draft service, or a note that says why there is none."""
    family = family_of(space)
    if line is None or family is None:
        return None, []
    probe = found.probes.get(family.label)
    advice = None
    if probe is not None and plain_step_s:
        advice = remote_advice(family, probe, line, plan.batch_size, plain_step_s)
    if advice is None:
        return None, [f"a draft service cannot be judged: no step of {family.label} could be timed"]
    return advice, []


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
