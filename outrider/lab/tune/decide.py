"""From findings to advice. Measured numbers decide; forecasts only where nothing was measured, and then they say so.

Do not speculate: when no finalist's measured speedup reaches WORTH, or its interval does not lie above 1 while the value is below
SURE. A task gets advice of its own when another finalist is better for it by more than WORTH, measured on that task's prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.result import Interval
from outrider.lab.tune.confirm import Confirmed
from outrider.lab.tune.load import WORTH
from outrider.lab.tune.options import options_of
from outrider.lab.tune.result import Recommendation
from outrider.lab.tune.tune import Findings

SURE = 1.1  # a gain of this size is believed although the interval of few prompts reaches below 1
ALL = "all"


def recommendations(found: Findings, configurations: Sequence[Configuration], draft: str | None) -> list[Recommendation]:
    """First for all traffic, then for each task that wants something else. `configurations`: all that were confirmed."""
    known = {one.label: one for one in configurations}
    first = _recommend(ALL, {one.configuration: one.speedup for one in found.confirmed}, found, known, draft)
    others = []
    for task in found.shares if len(found.shares) > 1 else ():
        speedups = {one.configuration: one.by_task[task] for one in found.confirmed if task in one.by_task}
        mine = _recommend(task, speedups, found, known, draft)
        here = speedups.get(first.configuration)
        if mine.configuration != first.configuration and _gain(mine.speedup, here) > WORTH:
            others.append(mine)
    return [first, *others]


def _gain(ours: Interval | None, theirs: Interval | None) -> float:
    """Of one speedup over another; not speculating is 1."""
    return (ours.value if ours is not None else 1.0) / (theirs.value if theirs is not None else 1.0)


def _recommend(
    task: str, speedups: dict[str, Interval], found: Findings, known: dict[str, Configuration], draft: str | None
) -> Recommendation:
    forecasts = {**found.overall, **{one.configuration: one.speedup for one in found.forecasts if one.task == task}}
    if not speedups:
        best = max(forecasts, key=lambda label: forecasts[label], default=None)
        reason = "nothing could be confirmed by measurement"
        if best is not None:
            reason += f"; the best forecast is {best} with {forecasts[best]:.2f}x"
        return _plain(task, reason, None, forecasts.get(best or "", 1.0))
    best = max(speedups, key=lambda label: speedups[label].value)
    gain = speedups[best]
    if not pays(gain):
        return _plain(task, f"the best that was measured, {best}, reaches {_words(gain)}", gain, forecasts.get(best, 1.0))
    return Recommendation(
        task=task, speculate=True, configuration=best, options=options_of(known[best], draft), speedup=gain,
        forecast_speedup=forecasts.get(best, gain.value), reason=f"{best} reaches {_words(gain)}",
    )  # fmt: skip


def pays(speedup: Interval) -> bool:
    """Whether to speculate at a measured speedup."""
    return speedup.value >= WORTH and (speedup.low > 1 or speedup.value >= SURE)


def _plain(task: str, reason: str, speedup: Interval | None, forecast: float) -> Recommendation:
    return Recommendation(
        task=task, speculate=False, configuration=PLAIN, options={"drafter": PLAIN}, speedup=speedup,
        forecast_speedup=forecast, reason=reason,
    )  # fmt: skip


def _words(gain: Interval) -> str:
    return f"{gain.value:.2f}x plain decoding [{gain.low:.2f}, {gain.high:.2f}]"


def overtaken(confirmed: Sequence[Confirmed]) -> list[str]:
    """Finalists that retired before the end, for the report."""
    most = max((one.groups for one in confirmed), default=0)
    return [one.configuration for one in confirmed if one.groups < most]
