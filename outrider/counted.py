"""Numbers of things in words: 1 prompt, 2 prompts."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """The number and the thing, in the plural where it is not one."""
    ending = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number} {thing}{ending}"
