"""Texts whose tokens carry their fate: joined into runs, and the marks that tell fates apart
without colour.

    prompt▌‹ James picks 18› eggs⁺‹ in the›[-evening-] morning

Between ‹ › stands what was drafted and accepted, between [- -] what was drafted and rejected,
before the target's correction of it; ⁺ follows the target's bonus token after a draft that was kept
whole; ▌ ends the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.report.document import Token
from outrider.report.text import clean

MEANING = {
    "prompt": "prompt",
    "accepted": "drafted and accepted",
    "correction": "the target's correction of a rejected draft token",
    "bonus": "the target's bonus token after a draft kept whole",
    "plain": "written by the target without a draft",
}

MARKS = {  # what stands before and after what has a fate
    "prompt": ("", "▌"), "accepted": ("‹", "›"), "rejected": ("[-", "-]"), "correction": ("", ""), "bonus": ("", "⁺"),
    "plain": ("", ""),
}  # fmt: skip


def fates(tokens: Sequence[Token]) -> dict[str, int]:
    """How many tokens of each fate, in the order of `MEANING`, without those that do not occur."""
    count: Counter[str] = Counter(token.fate for token in tokens)
    return {fate: count[fate] for fate in MEANING if count[fate]}


def runs(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    """(kind, text) pieces in reading order: kind is a fate, "rejected", or "mark"."""
    for fate, group in groupby(tokens, key=lambda token: token.fate):
        if fate in ("correction", "bonus"):
            for token in group:
                if fate == "correction":
                    yield from _marked("rejected", token.rejected)
                yield from _marked(fate, token.text)
        else:
            yield from _marked(fate, "".join(token.text for token in group))


def _marked(kind: str, text: str) -> Iterator[tuple[str, str]]:
    before, after = MARKS[kind]
    yield from (("mark", before), (kind, clean(text)), ("mark", after))
