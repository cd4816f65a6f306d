"""From what a replay did to what its result says: sums, ratios, intervals, and what steps of those widths would cost.

Texts differ, steps within a text are alike: so whole texts are drawn for intervals, not steps. Where a drafter learns, one text's
result depends on the texts before it; then blocks of consecutive texts are drawn instead (Carlstein 1986; n^(1/3) texts each),
which keeps the dependence of neighbours. What no interval knows: that another order of the log would have taught more or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from outrider.lab.estimate.curves import StepCosts
from outrider.lab.intervals import ratio_of_rates, ratio_of_sums
from outrider.lab.replay.replay import Replay, ReplayedText, sum_stats
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration
from outrider.lab.replay.texts import Text
from outrider.lab.result import Interval

MIN_BLOCKS = 5  # texts or blocks; an interval from fewer would be a guess

Sums = tuple[Sequence[float], Sequence[float]]  # numerators and denominators, one of each per text, in the order of the replay


def summarise(
    found: Replay, texts: Sequence[Text], costs: StepCosts | None = None, draft_s: float | None = None
) -> ReplayedConfiguration:
    """`texts`: those that were replayed. `costs`: of steps with as many rows as were served together. `draft_s`: seconds of
    drafting per step that the costs do not have; default: `unpaid_drafting`.
    """
    charged = unpaid_drafting(found, costs) if draft_s is None else draft_s
    parts = found.configuration.parts()
    in_order = [(texts[number].task, found.texts[number]) for number in found.order]
    total, tasks = found.total, sorted({task for task, _ in in_order})
    return ReplayedConfiguration(
        configuration=found.configuration.label,
        family=replace(found.configuration, num_draft_tokens=None).label,
        drafter=found.configuration.drafter,
        num_draft_tokens=parts.length.max_nodes,
        settings=asdict(parts.drafter_settings),
        trees=parts.requirements.trees,
        learns=found.learns,
        overall=acceptance([text for _, text in in_order], costs, charged, blocks=found.learns),
        by_task={
            task: acceptance([text for other, text in in_order if other == task], costs, charged, blocks=found.learns)
            for task in tasks
        },
        draft_s_per_step=total.time_s["draft"] / total.steps,
        charged_draft_s=charged,
        tokens_per_s=total.emitted / found.seconds,
        outside_costs=0 if costs is None else _outside(found.texts, costs),
    )


def acceptance(texts: Sequence[ReplayedText], costs: StepCosts | None, draft_s: float, *, blocks: bool) -> AcceptanceCounts:
    """Acceptance of some texts, in the order they were replayed. `blocks`: they depend on one another."""
    total = sum_stats([text.stats for text in texts])
    widths = sum((text.widths for text in texts), Counter[int]())
    emitted = [text.stats.emitted for text in texts]
    paid = None if costs is None else [plain_steps(text, costs, draft_s) for text in texts]
    return AcceptanceCounts(
        num_texts=len(texts),
        steps=total.steps,
        emitted=total.emitted,
        drafted=total.drafted,
        tested=total.tested,
        accepted=total.accepted,
        accepted_per_position=total.accepted_per_position,
        widths=[widths[width] for width in range(max(widths) + 1)],
        tau=ratio_interval((emitted, [text.stats.steps for text in texts]), blocks=blocks),
        alpha=total.alpha,
        draft_utilisation=total.draft_utilisation,
        speedup=None if paid is None else ratio_interval((emitted, paid), blocks=blocks),
    )


def plain_steps(text: ReplayedText, costs: StepCosts, draft_s: float) -> float:
    """What its steps cost, in plain steps: the sum over steps of (seconds(width) + draft_s) / seconds(0). Plain decoding pays one
    a token."""
    passes = sum(count * costs.relative(width) for width, count in text.widths.items())
    return passes + text.stats.steps * draft_s / costs.step_s(0)[0]


def unpaid_drafting(found: Replay, costs: StepCosts | None) -> float:
    """Seconds of drafting per step that the costs do not have: where they have none at all, what the replay's own clock says. A
    look-up takes its time in every step, also where it finds nothing. Plain decoding drafts nothing."""
    if costs is None or found.configuration.is_plain:
        return 0.0
    if costs.whole_steps or costs.draft_fixed_s or costs.draft_s_per_token:
        return 0.0
    return found.total.time_s["draft"] / found.total.steps


def _outside(texts: Sequence[ReplayedText], costs: StepCosts) -> int:
    widths = sum((text.widths for text in texts), Counter[int]())
    return sum(count for width, count in widths.items() if costs.step_s(width)[1])


def ratio_interval(sums: Sums, *, blocks: bool) -> Interval:
    """sum(numerators) / sum(denominators). Unknown for too few texts."""
    above, below = (column.tolist() for column in _units(sums, blocks=blocks))
    return ratio_of_sums(above, below) if len(above) >= MIN_BLOCKS else Interval.unknown(sum(above) / sum(below))


def gain_interval(new: Sums, old: Sums, *, blocks: bool) -> Interval | None:
    """Ratio of `new` over the ratio of `old`, less 1; both over the same texts. None for too few of them."""
    a, b = _units(new, blocks=blocks)
    c, d = _units(old, blocks=blocks)
    if len(a) < MIN_BLOCKS:
        return None
    found = ratio_of_rates(a.tolist(), b.tolist(), c.tolist(), d.tolist())
    return found.model_copy(update={"value": found.value - 1, "low": found.low - 1, "high": found.high - 1})


def block_length(num_texts: int) -> int:
    """Consecutive texts per block: n^(1/3), rounded."""
    return max(1, round(num_texts ** (1 / 3)))


def _units(sums: Sums, *, blocks: bool) -> list[np.ndarray]:
    """What is drawn: texts, or blocks of them."""
    num_texts = len(sums[0])
    starts = np.arange(0, num_texts, block_length(num_texts) if blocks else 1)
    return [np.add.reduceat(np.asarray(column, dtype=np.float64), starts) for column in sums]
