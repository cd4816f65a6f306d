"""How far drafts survive on a server, by its counters: the same in every engine that counts accepted tokens by position."""

from __future__ import annotations

from outrider.lab.intervals import proportion
from outrider.lab.result import Interval, Record
from outrider.lab.server.types import SpeculationCounts

RARELY, OFTEN = 0.1, 0.5  # of the steps
MIN_STEPS = 100


class PositionRow(Record):
    """One draft position, from 1."""

    position: int
    accepted: int  # steps in which it was
    share: float  # of all steps with a draft
    given: Interval | None  # of the steps that kept the position before; Wilson's interval, as if steps were independent


def positions(counts: SpeculationCounts) -> list[PositionRow]:
    """A row for every position that was counted; none where the server does not count them."""
    if not counts.num_steps:
        return []
    rows, before = [], counts.num_steps
    for index, accepted in enumerate(counts.accepted_per_position):
        given = proportion(accepted, before) if 0 <= accepted <= before and before else None
        rows.append(PositionRow(position=index + 1, accepted=accepted, share=accepted / counts.num_steps, given=given))
        before = accepted
    return rows


def findings(counts: SpeculationCounts) -> list[str]:
    """What the counts say about the drafts, a sentence each."""
    if counts.num_steps is None:
        return ["The server counts no passes with a draft, so its drafts cannot be judged."]
    if not counts.num_steps:
        return ["No pass had a draft: the server does not speculate, or drafted nothing for these prompts."]
    lines = []
    if counts.tau is not None:
        lines.append(f"A pass with a draft emits {counts.tau:.2f} tokens ({counts.tau_formula}).")
    if counts.draft_utilisation is not None and counts.num_draft_tokens:
        length = counts.num_draft_tokens / counts.num_steps
        lines.append(f"{counts.draft_utilisation:.0%} of the draft tokens are accepted, of {length:.1f} a pass.")
    lines += _by_position(counts)
    if counts.num_steps < MIN_STEPS:
        lines.append(f"That rests on {counts.num_steps} passes; more prompts, or longer answers, tell more.")
    return lines


def _by_position(counts: SpeculationCounts) -> list[str]:
    rows = positions(counts)
    if not rows:
        return ["The server does not count accepted tokens by position, so where drafts break off is unknown."]
    lines, last = [], rows[-1]
    rare = [row for row in rows if row.share < RARELY]
    if rows[0].share < OFTEN:
        lines.append(
            f"The first draft token is rejected in {1 - rows[0].share:.0%} of the passes: the drafter does not suit these "
            "prompts; another length cannot change that."
        )
    if rare and rare[0].position > 1 and (total := sum(row.accepted for row in rows)):
        kept = sum(row.accepted for row in rows[: rare[0].position - 1]) / total
        lines.append(
            f"From position {rare[0].position} on, fewer than one pass in ten keeps the token: drafts of {rare[0].position - 1} "
            f"would keep {kept:.0%} of what is kept now."
        )
    if last.share > OFTEN:
        lines.append(f"{last.share:.0%} of the passes keep the last token, at position {last.position}: longer drafts may pay.")
    return lines
