"""From probes to tokens per second of every member of every family, by task: no run of its own (docs/tune.md, "Forecast" and
"Load").

Seconds are interpolated between the sizes that were timed (`estimate/curves.py`) and averaged over the widths that the drafter
offered. What a plain step costs is taken from the same probe, whose sweep has steps that draft nothing: so a slow minute of
the machine divides out. Only where a probe has none, plain decoding's own probe stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from outrider.lab.intervals import WORTH
from outrider.lab.predict import StepCosts, break_even
from outrider.lab.result import Record
from outrider.lab.tune.probe import Probe, mean_kept, offered_widths
from outrider.lab.tune.space import Family


class Forecast(Record):
    """What one member of a family is expected to do on one task."""

    family: str
    configuration: str  # its label
    size: int  # nodes asked for
    task: str
    tau: float  # 1 + kept per step
    step_s: float
    tokens_per_s: float  # decode phase, all rows together
    speedup: float  # over plain decoding's forecast
    break_even_alpha: float | None  # acceptance, equal at all positions, from which this size pays; None: none does


def step_costs(probe: Probe, rows: int = 1) -> StepCosts | None:
    """Median seconds by nodes drafted, steady steps of all tasks; None where there were none."""
    seconds: dict[int, list[float]] = {}
    for steps in probe.steps.values():
        for step in steps:
            if step.steady:
                seconds.setdefault(step.drafted, []).append(step.seconds)
    return StepCosts.of_steps({size: median(found) for size, found in seconds.items()}, rows) if seconds else None


def plain_tokens_per_s(plain: Probe, rows: int = 1) -> float:
    """Tokens per second of the plain probe: a token a step."""
    costs = step_costs(plain, rows)
    return rows / costs.step_s(0)[0] if costs is not None else 0.0


def forecast(family: Family, acceptance: Probe, costs: StepCosts, plain_tokens_per_s: float) -> list[Forecast]:
    """Every size of the family on every task that `acceptance` has steps of. `costs` may come from another probe, at another
    number of rows; `plain_tokens_per_s` is plain decoding's there."""
    has_plain_steps = any(point.num_tokens == 1 for point in costs.target.points)
    plain_s = costs.step_s(0)[0] if has_plain_steps else costs.num_rows / plain_tokens_per_s
    found = []
    for task, steps in acceptance.steps.items():
        for size, configuration in family.members():
            kept = mean_kept(steps, size, nested=family.nested)
            widths = offered_widths(steps, size, nested=family.nested)
            if kept is None or not widths:
                continue
            seconds = _expected_seconds(costs, widths)
            speedup = (1 + kept) * plain_s / seconds
            found.append(
                Forecast(
                    family=family.label, configuration=configuration.label, size=size, task=task, tau=1 + kept, step_s=seconds,
                    tokens_per_s=speedup * plain_tokens_per_s, speedup=speedup, break_even_alpha=break_even(costs, size),
                )
            )  # fmt: skip
    return found


def overall(forecasts: Sequence[Forecast], shares: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, float]:
    """Configuration -> speedup over the whole workload: seconds of all tasks, each by its share of the tokens.

    `plain`: tokens/s of plain decoding by task. A configuration that was not forecast for every task is left out.
    """
    speeds: dict[str, dict[str, float]] = {}
    for one in forecasts:
        speeds.setdefault(one.configuration, {})[one.task] = one.tokens_per_s
    base = sum(share / plain[task] for task, share in shares.items())
    return {
        label: base / sum(share / by_task[task] for task, share in shares.items())
        for label, by_task in speeds.items()
        if set(shares) <= set(by_task)
    }


def _expected_seconds(costs: StepCosts, widths: Sequence[int]) -> float:
    known = {width: costs.target.seconds(width + 1)[0] for width in set(widths)}
    return sum(known[width] for width in widths) / len(widths)


class LoadStep(Record):
    """From `batch_size` rows on."""

    batch_size: int
    configuration: str  # its label; "none": do not speculate
    size: int  # nodes; 0: none
    tokens_per_s: float  # forecast, all rows together
    plain_tokens_per_s: float
    speedup: float


def best_at(
    batch_size: int, families: Sequence[tuple[Family, Probe, Probe]], plain: Probe, shares: dict[str, float]
) -> LoadStep:
    """`families`: each with the probe that knows its acceptance and the one that was timed at this batch size. Where answers are
    so short that no plain step could be timed, nothing is known to pay."""
    base = plain_tokens_per_s(plain, batch_size)
    found: list[Forecast] = []
    for family, acceptance, timed in families if base else ():
        if (costs := step_costs(timed, batch_size)) is not None:
            found += forecast(family, acceptance, costs, base)
    speedups = overall(found, shares, dict.fromkeys(shares, base)) if base else {}
    best = max(speedups, key=lambda label: speedups[label], default=None)
    label, size, speedup = "none", 0, 1.0
    if best is not None and speedups[best] >= WORTH:
        label, speedup = best, speedups[best]
        size = next(one.size for one in found if one.configuration == best)
    return LoadStep(
        batch_size=batch_size, configuration=label, size=size, tokens_per_s=base * speedup, plain_tokens_per_s=base,
        speedup=speedup,
    )  # fmt: skip
