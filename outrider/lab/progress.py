"""How long work tells where it is. The lab only calls this; the command line shows it as a bar with the time left."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One stage at a time."""

    def stage(self, name: str, total: int) -> None:
        """A new stage of `total` units begins (what was left of the last one is not coming)."""

    def advance(self, units: int = 1) -> None: ...

    def say(self, line: str) -> None:
        """One line that stays on the screen."""


class Quiet:
    """Tells nobody."""

    def stage(self, name: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...

    def say(self, line: str) -> None: ...
