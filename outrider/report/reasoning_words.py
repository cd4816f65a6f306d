"""Small words that the parts of the page about worked solutions share."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.bench.result import Speedup
from outrider.lab.reasoning.result import Contestant
from outrider.lab.result import Interval

SAID = {"conclusion": "conclusions", "restating": "restatements"}  # kinds in a sentence, where their names would not do


def said(kind: str) -> str:
    """A kind in a sentence."""
    return SAID.get(kind, kind)


def share(value: float) -> str:
    """0.714 -> '71 %'."""
    return f"{100 * value:.0f} %"


def listed(words: Sequence[str]) -> str:
    """'a, b and c'."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "none"


def interval(found: Interval | None) -> str:
    """'0.71 [0.65, 0.77]'."""
    return "-" if found is None else f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def verdict(found: Speedup | None) -> str:
    """The verdict on an idea, over the best chain."""
    if found is None or found.interval is None:
        return "not known"
    return "pays" if found.is_gain else "does not pay" if found.is_loss else "no difference seen"


def tried(ideas: Sequence[Contestant]) -> list[tuple[Contestant, Speedup]]:
    """Ideas that were compared with the best chain, the largest gain first."""
    found = [(one, one.over_best) for one in ideas if one.role == "idea" and one.over_best is not None]
    return sorted(found, key=lambda pair: -pair[1].value)
