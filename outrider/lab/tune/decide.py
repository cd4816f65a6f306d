"""From findings to advice. Measured numbers decide; forecasts only where nothing was measured, and
then they say so.

A task gets advice of its own when another finalist is better for it by more than WORTH, measured on
that task's prompts.
"""

from __future__ import annotations

from outrider.configuration import PLAIN, Configuration
from outrider.lab.intervals import WORTH
from outrider.lab.result import Interval
from outrider.lab.tune.confirm import ALL
from outrider.lab.tune.tune import Tuner
from outrider.lab.tune.tune_result import Recommendation

SURE = 1.1  # a gain of this size is believed although the interval of few prompts reaches below 1
BY_FAR = 0.05


def recommendations(findings: Tuner, draft: str | None) -> list[Recommendation]:
    """First for all traffic, then for each task that wants something else."""
    known = {finalist.label: finalist for finalist in findings.finalists}
    first = _recommend(ALL, findings, known, draft)
    others = []
    for task in findings.shares if len(findings.shares) > 1 else ():
        if not (measured := _speedups(task, findings)):
            continue  # before its first prompt was run: the advice for all traffic stands
        recommended = _recommend(task, findings, known, draft)
        speedups = measured | {PLAIN: Interval(value=1.0, low=1.0, high=1.0)}
        gain = speedups[recommended.configuration].value
        before = speedups.get(first.configuration)
        if recommended.configuration != first.configuration and (
            before is None or gain > WORTH * before.value
        ):
            others.append(recommended)
    return [first, *others]


def _speedups(task: str, findings: Tuner) -> dict[str, Interval]:
    return {
        summary.configuration: speedup
        for summary in findings.confirmed
        if (speedup := summary.of_task(task)) is not None
    }


def _best(speedups: dict[str, Interval], known: dict[str, Configuration]) -> str:
    """A fixed length, unless `auto` is better by far."""
    ranking = sorted(speedups, key=lambda label: -speedups[label].value)
    fixed = next((label for label in ranking if not known[label].is_automatic), ranking[0])
    return (
        ranking[0] if speedups[ranking[0]].value > (1 + BY_FAR) * speedups[fixed].value else fixed
    )


def _recommend(
    task: str, findings: Tuner, known: dict[str, Configuration], draft: str | None
) -> Recommendation:
    speedups = _speedups(task, findings)
    if not speedups:
        forecasts = {
            **findings.overall,
            **{
                forecast.configuration: forecast.speedup
                for forecast in findings.forecasts
                if forecast.task == task
            },
        }
        best = max(forecasts, key=lambda label: forecasts[label], default=None)
        reason = "nothing could be confirmed by measurement"
        if best is not None:
            reason += f"; the best forecast is {best} with {forecasts[best]:.2f}x"
        return _plain(task, reason, None)
    best = _best(speedups, known)
    gain = speedups[best]
    if not pays(gain):
        return _plain(
            task,
            f"the best that was measured, {best}, reaches {gain.words('x plain decoding')}",
            gain,
        )
    return Recommendation(
        task=task,
        speculate=True,
        configuration=best,
        options=known[best].options(draft),
        speedup=gain,
        reason=f"{best} reaches {gain.words('x plain decoding')}",
        family=findings.family_of.get(best, ""),
    )


def pays(speedup: Interval) -> bool:
    """Whether to speculate at a measured speedup."""
    return speedup.value >= WORTH and (speedup.low > 1 or speedup.value >= SURE)


def _plain(task: str, reason: str, speedup: Interval | None) -> Recommendation:
    return Recommendation(
        task=task,
        speculate=False,
        configuration=PLAIN,
        options={"drafter": PLAIN},
        speedup=speedup,
        reason=reason,
    )
