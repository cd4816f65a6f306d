"""From what a replay did to what its result says: sums, ratios, intervals, and what steps of those widths would cost.

Texts differ, steps within a text are alike: so whole texts are drawn for intervals, not steps. Where a drafter learns,
one text's result depends on the texts before it; then blocks of consecutive texts are drawn instead (Carlstein 1986;
n^(1/3) texts each). What no interval knows: that another order of the log would have taught more or less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.lab.intervals import ratio_of_sums
from outrider.lab.predict import StepCosts
from outrider.lab.replay.replay import Replay, ReplayedText, sum_stats
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration
from outrider.lab.replay.texts import Text
from outrider.lab.result import Interval

MIN_BLOCKS = 5  # texts or blocks; an interval from fewer would be a guess


def summarise(replayed: Replay, texts: Sequence[Text], costs: StepCosts | None = None) -> ReplayedConfiguration:
    """`texts`: those that were replayed."""
    by_task: dict[str, list[ReplayedText]] = {}
    for text, outcome in zip(texts, replayed.texts, strict=True):
        by_task.setdefault(text.task, []).append(outcome)
    return ReplayedConfiguration(
        configuration=replayed.configuration.label,
        drafter=replayed.configuration.drafter,
        overall=acceptance(replayed.texts, costs, blocks=replayed.learns),
        by_task={task: acceptance(by_task[task], costs, blocks=replayed.learns) for task in sorted(by_task)},
        draft_s_per_step=replayed.total.time_s["draft"] / replayed.total.steps,
        learns=replayed.learns,
        outside_costs=0 if costs is None else sum(_outside(text, costs) for text in replayed.texts),
    )


def acceptance(texts: Sequence[ReplayedText], costs: StepCosts | None, *, blocks: bool) -> AcceptanceCounts:
    """Acceptance of some texts, in the order they were replayed. `blocks`: they depend on one another."""
    total = sum_stats([text.stats for text in texts])
    emitted = [text.stats.emitted for text in texts]
    speedup = None
    if costs is not None:
        speedup = ratio_interval(emitted, [plain_steps(text, costs) for text in texts], blocks=blocks)
    return AcceptanceCounts(
        num_texts=len(texts),
        steps=total.steps,
        emitted=total.emitted,
        drafted=total.drafted,
        tested=total.tested,
        accepted=total.accepted,
        accepted_per_position=total.accepted_per_position,
        tau=ratio_interval(emitted, [text.stats.steps for text in texts], blocks=blocks),
        alpha=total.alpha,
        draft_utilisation=total.draft_utilisation,
        speedup=speedup,
    )


def plain_steps(text: ReplayedText, costs: StepCosts) -> float:
    """What its steps cost, in plain steps, each by its own draft. Plain decoding pays one a token."""
    return sum(count * costs.relative(width) for width, count in text.widths.items())


def _outside(text: ReplayedText, costs: StepCosts) -> int:
    return sum(count for width, count in text.widths.items() if costs.step_s(width)[1])


def ratio_interval(above: Sequence[float], below: Sequence[float], *, blocks: bool) -> Interval:
    """sum(above) / sum(below), a number of each per text. Unknown for too few texts."""
    starts = np.arange(0, len(above), block_length(len(above)) if blocks else 1)
    if len(starts) < MIN_BLOCKS:
        return Interval.unknown(sum(above) / sum(below))
    sums = [np.add.reduceat(np.asarray(column, dtype=np.float64), starts).tolist() for column in (above, below)]
    return ratio_of_sums(*sums)


def block_length(num_texts: int) -> int:
    """Consecutive texts per block: n^(1/3), rounded."""
    return max(1, round(num_texts ** (1 / 3)))
