"""Texts whose tokens carry their fate: joined into runs, and the marks that tell fates apart without colour.

    prompt▌‹ James picks 18› eggs⁺‹ in the›[-evening-] morning

Between ‹ › stands what was drafted and accepted, between [- -] what was drafted and rejected, before the target's correction
of it; ⁺ follows the target's bonus token after a draft that was kept whole; ▌ ends the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.report.clean import clean
from outrider.report.document import Token

MEANING = {
    "prompt": "prompt",
    "accepted": "drafted and accepted",
    "correction": "the target's correction of a rejected draft token",
    "bonus": "the target's bonus token after a draft kept whole",
    "plain": "written by the target without a draft",
}

ACCEPTED, REJECTED, BONUS, PROMPT = ("‹", "›"), ("[-", "-]"), "⁺", "▌"


def fates(tokens: Sequence[Token]) -> dict[str, int]:
    """How many tokens of each fate, in the order of `MEANING`, without those that do not occur."""
    count: Counter[str] = Counter(token.fate for token in tokens)
    return {fate: count[fate] for fate in MEANING if count[fate]}


def runs(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    """(kind, text) pieces in reading order: kind is a fate, "rejected", or "mark"."""
    for fate, group in groupby(tokens, key=lambda token: token.fate):
        joined = list(group)
        if fate == "accepted":
            yield "mark", ACCEPTED[0]
        if fate in ("correction", "bonus"):
            yield from _target_tokens(joined)
        else:
            yield fate, clean("".join(token.text for token in joined))
        if fate == "accepted":
            yield "mark", ACCEPTED[1]
        if fate == "prompt":
            yield "mark", PROMPT


def _target_tokens(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    for token in tokens:
        if token.fate == "correction":
            yield "mark", REJECTED[0]
            yield "rejected", clean(token.rejected)
            yield "mark", REJECTED[1]
        yield token.fate, clean(token.text)
        if token.fate == "bonus":
            yield "mark", BONUS
