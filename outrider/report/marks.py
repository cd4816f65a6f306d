"""Text in which one sees what was drafted: every run of accepted draft tokens between marks, and green where
colour works.

    ‹James picks 18›eggs‹ in the›morning

The marks are there with and without colour, so a pipe, a monochrome terminal or a colour-blind reader loses
nothing. One run is one step's accepted tokens: its length is what speculation saved there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.report.text import printable

MARKS = ("‹", "›")
ASCII_MARKS = ("[", "]")  # where the output cannot encode the others
ACCEPTED = "green"
MARK = "dim green"


class DraftMarks:
    """Writes marked text to a console, one step at a time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left, self._right = MARKS if _can_encode(console, "".join(MARKS)) else ASCII_MARKS
        self._last = "\n"

    def legend(self) -> Text:
        """What the marks mean, in the marks themselves."""
        text = self._accepted("drafted and accepted")
        return text.append("  everything else: written by the target itself", style="dim")

    def show(self, pieces: Sequence[str], origins: Sequence[str]) -> None:
        """Print one step's tokens."""
        text = Text()
        run = ""
        for piece, origin in zip(pieces, origins, strict=True):
            if origin == "accepted":
                run += piece
            else:
                text.append_text(self._accepted(run)).append(printable(piece))
                run = ""
        text.append_text(self._accepted(run))
        if text:
            self._console.print(text, end="", soft_wrap=True)
            self._console.file.flush()
            self._last = text.plain[-1]

    def end(self) -> None:
        """Leave the cursor at the start of a line."""
        if self._last != "\n":
            self._console.print()
            self._last = "\n"

    def _accepted(self, run: str) -> Text:
        if not run:
            return Text()
        return Text.assemble((self._left, MARK), (printable(run), ACCEPTED), (self._right, MARK))


def _can_encode(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
