"""From probes to tokens per second of every member of every family, by task: no run of its own
(docs/tune.md, "Forecast").

Seconds are interpolated between the sizes that were timed and averaged over the widths that the
drafter offered. What a plain step costs comes from the same sweep, whose steps at times draft
nothing: so a slow minute of the machine divides out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from outrider.configuration import PLAIN
from outrider.lab.intervals import WORTH
from outrider.lab.predict import StepCosts, break_even
from outrider.lab.result import Record
from outrider.lab.tune.probe import Probe, mean_kept, offered_widths
from outrider.lab.tune.space import Family


class Forecast(Record):
    """The expected result of one member of a family on one task."""

    family: str
    configuration: str  # its label
    size: int  # nodes asked for
    task: str
    tau: float  # 1 + kept per step
    step_s: float
    tokens_per_s: float  # decode phase, all rows together
    speedup: float  # over plain decoding's forecast
    # acceptance, equal at all positions, from which this size pays; None: none does
    break_even_alpha: float | None


def step_costs(probe: Probe, rows: int = 1) -> StepCosts | None:
    """Median seconds by nodes drafted, steady steps of all tasks; None where there were none."""
    seconds: dict[int, list[float]] = {}
    for steps in probe.steps.values():
        for step in steps:
            if step.steady:
                seconds.setdefault(step.drafted, []).append(step.seconds)
    return (
        StepCosts.of_steps({size: median(times) for size, times in seconds.items()}, rows)
        if seconds
        else None
    )


def plain_tokens_per_s(plain: Probe, rows: int = 1) -> float:
    """Tokens per second of the plain probe, a token a step; 0 where answers are so short that no
    step could be timed."""
    costs = step_costs(plain, rows)
    return rows / costs.step_s(0)[0] if costs is not None else 0.0


def forecast(
    family: Family, acceptance: Probe, costs: StepCosts, plain_tokens_per_s: float
) -> list[Forecast]:
    """Every size of the family on every task that `acceptance` has steps of.

    `costs` may come from another sweep, at another number of rows; `plain_tokens_per_s` is plain
    decoding's there.
    """
    has_plain_steps = any(point.num_tokens == 1 for point in costs.target.points)
    plain_s = costs.step_s(0)[0] if has_plain_steps else costs.num_rows / plain_tokens_per_s
    forecasts = []
    for task, steps in acceptance.steps.items():
        for size, configuration in family.members():
            kept = mean_kept(steps, size, nested=family.nested)
            widths = offered_widths(steps, size, nested=family.nested)
            if kept is None or not widths:
                continue
            times = {width: costs.target.seconds(width + 1)[0] for width in set(widths)}
            seconds = sum(times[width] for width in widths) / len(widths)
            speedup = (1 + kept) * plain_s / seconds
            forecasts.append(
                Forecast(
                    family=family.label,
                    configuration=configuration.label,
                    size=size,
                    task=task,
                    tau=1 + kept,
                    step_s=seconds,
                    tokens_per_s=speedup * plain_tokens_per_s,
                    speedup=speedup,
                    break_even_alpha=break_even(costs, size),
                )
            )
    return forecasts


def overall(forecasts: Sequence[Forecast], shares: Mapping[str, float]) -> dict[str, float]:
    """Configuration -> speedup over the whole workload: seconds of all tasks, each by its share of
    the tokens.

    A configuration that was not forecast for every task is left out.
    """
    by_label: dict[str, dict[str, float]] = {}
    for prediction in forecasts:
        by_label.setdefault(prediction.configuration, {})[prediction.task] = prediction.speedup
    return {
        label: 1 / sum(share / speedups[task] for task, share in shares.items())
        for label, speedups in by_label.items()
        if set(shares) <= set(speedups)
    }


class LoadStep(Record):
    """From `batch_size` rows on."""

    batch_size: int
    configuration: str  # its label; "none": do not speculate
    size: int  # nodes; 0: none
    tokens_per_s: float  # forecast, all rows together
    plain_tokens_per_s: float
    speedup: float


def best_at(
    batch_size: int,
    families: Sequence[tuple[Family, Probe, Mapping[int, float]]],
    shares: Mapping[str, float],
) -> LoadStep:
    """The best member of some families at one load.

    `families`: each with the probe that knows its acceptance, and seconds of its steps there by
    nodes, 0 among them. Where no plain step could be timed, nothing is known to pay.
    """
    forecasts: list[Forecast] = []
    plain = 0.0
    for family, acceptance, seconds in families:
        if 0 in seconds:
            plain = max(plain, batch_size / seconds[0])
            costs = StepCosts.of_steps(seconds, batch_size)
            forecasts += forecast(family, acceptance, costs, batch_size / seconds[0])
    speedups = overall(forecasts, shares)
    best = max(speedups, key=lambda label: speedups[label], default=PLAIN)
    if speedups.get(best, 0.0) < WORTH:
        best = PLAIN
    speedup = speedups.get(best, 1.0)
    return LoadStep(
        batch_size=batch_size,
        configuration=best,
        size=next(
            (prediction.size for prediction in forecasts if prediction.configuration == best), 0
        ),
        tokens_per_s=plain * speedup,
        plain_tokens_per_s=plain,
        speedup=speedup,
    )
