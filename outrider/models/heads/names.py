"""Names of tensors in published layouts, as tables of patterns that are read in both directions.

    "{head}.{layer}.linear.{rest}"  <->  "heads.{head}.layers.{layer}.{rest}"

`{rest}` stands for anything, any other place for a number; `{layer+1}` is one more than the number
that was read.
"""

from __future__ import annotations

import re
from functools import cache

PLACE = re.compile(r"\{(\w+)(\+1)?\}")
Pair = tuple[str, str]  # patterns of a name: in the files, and of the network's parameter


class Names:
    """A layout's names. `aliases` are applied first, one after another: they undo prefixes and
    other spellings."""

    def __init__(self, *pairs: Pair, aliases: tuple[Pair, ...] = ()) -> None:
        self._pairs = pairs
        self._aliases = aliases

    def ours(self, name: str) -> str:
        """The parameter that a tensor of this name belongs to; the name itself where no pattern
        matches."""
        for there, here in self._aliases:
            name = _renamed(name, there, here) or name
        return next(
            (match for there, here in self._pairs if (match := _renamed(name, there, here))), name
        )

    def theirs(self, name: str, **numbers: int) -> str:
        """The name of a parameter in the files. `numbers`: of places that its own name lacks."""
        return next(
            (
                match
                for there, here in self._pairs
                if (match := _renamed(name, here, there, numbers))
            ),
            name,
        )


@cache
def expression(pattern: str) -> re.Pattern[str]:
    """A regular expression with a group for each place of a pattern."""
    parts = PLACE.split(pattern)
    texts = parts[::3]
    places = parts[1::3]
    groups = [f"(?P<{place}>{'.+' if place == 'rest' else '[0-9]+'})" for place in places]
    return re.compile(
        "".join(
            part for pair in zip(map(re.escape, texts), [*groups, ""], strict=True) for part in pair
        )
    )


def _renamed(
    name: str, pattern: str, other: str, numbers: dict[str, int] | None = None
) -> str | None:
    """A name of one pattern as the other has it; None where it does not match."""
    match = expression(pattern).fullmatch(name)
    if match is None:
        return None
    values = {**(numbers or {}), **match.groupdict()}
    return PLACE.sub(
        lambda place: str(int(values[place[1]]) + 1) if place[2] else str(values[place[1]]), other
    )
