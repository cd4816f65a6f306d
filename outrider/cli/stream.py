"""Printing an answer while it is made, and ending it cleanly when the user presses Ctrl-C.

The first Ctrl-C is noted and acted upon between two steps, so that no state is ever half updated:
the stream is closed, and what was produced is kept, with its stats. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType, Segment, Segments
from rich.style import Style
from rich.text import Text

from outrider.report.text import printable
from outrider.report.tokens import MARKS

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion, StreamChunk
    from outrider.sampling.params import SamplingParams

MARK = "dim green"
TAB = 8  # columns
Run = tuple[str, str]  # a text and its style


class Printer:
    """Shows nothing of an answer: the caller prints the completion when it is whole."""

    def show(self, chunk: StreamChunk) -> None:
        """Print one step's text."""

    def end(self) -> None:
        """Leave the cursor at the start of a line."""


class WordWrap:
    """Text on a terminal, written as it comes, with lines broken between words: a word that reaches
    the edge is taken back and continues on the next line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._word: list[Segment] = []  # the signs of the latest word

    @classmethod
    def of(cls, console: Console) -> WordWrap | None:
        """None where lines are left as they are: in pipes, files, and terminals that cannot take
        anything back."""
        is_terminal = console.file.isatty() and not console.is_dumb_terminal
        return cls(console) if is_terminal else None

    def write(self, runs: Sequence[Run]) -> None:
        """Continue the text."""
        segments: list[Segment] = []
        for text, style_name in runs:
            style = self._console.get_style(style_name)
            for sign in text:
                self._add(sign, style, segments)
        self._console.print(Segments(Segment.simplify(segments)), end="", soft_wrap=True)
        self._console.file.flush()

    def _add(self, sign: str, style: Style, segments: list[Segment]) -> None:
        # the last column stays empty: after it terminals differ in where the cursor is
        room = max(2, self._console.width - 1) - self._column
        if sign == "\n":
            self._column = 0
            self._word = []
            segments.append(Segment("\n"))
            return
        if sign in " \t":
            self._word = []
            width = TAB - self._column % TAB if sign == "\t" else 1
            if width <= room:  # at the edge the line's end stands for it
                self._column += width
                segments.append(Segment(" " * width, style))
            return
        width = cell_len(sign)
        if width > 1:  # such scripts break lines anywhere
            self._word = []
        if width > room:
            self._break_line(segments)
        self._column += width
        self._word.append(Segment(sign, style))
        segments.append(self._word[-1])

    def _break_line(self, segments: list[Segment]) -> None:
        taken = sum(segment.cell_length for segment in self._word)
        if taken == self._column:  # one word as long as the line
            self._word = []
        elif taken:
            back = (ControlType.CURSOR_BACKWARD, taken)
            segments.append(Control(back, (ControlType.ERASE_IN_LINE, 0)).segment)
        self._column = taken if self._word else 0
        segments += [Segment("\n"), *self._word]


class PlainStream(Printer):
    """The text as it is, on stdout; always ended by a newline."""

    def __init__(self) -> None:
        self._wrap = WordWrap.of(Console(highlight=False))
        self._last = "\n"

    def show(self, chunk: StreamChunk) -> None:
        self._write(printable(chunk.text) if sys.stdout.isatty() else chunk.text)

    def end(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._wrap is not None:
            self._wrap.write([(text, "")])
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
        self._last = text[-1]


class MarkedText(Printer):
    """Text in which one sees what was drafted: every run of accepted draft tokens between marks,
    and green where colour works.

        ‹James picks 18›eggs‹ in the›morning

    One run is one step's accepted tokens: its length is what speculation saved there.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wrap = WordWrap.of(console)
        self._last = "\n"

    def legend(self) -> Text:
        """The legend of the marks, in the marks themselves."""
        return Text.assemble(
            *_accepted("drafted and accepted"),
            ("  everything else: written by the target itself", "dim"),
        )

    def show(self, chunk: StreamChunk) -> None:
        runs: list[Run] = []
        for is_accepted, group in groupby(
            zip(chunk.pieces, chunk.origins, strict=True), lambda one: one[1] == "accepted"
        ):
            run = "".join(piece for piece, _ in group)
            runs += _accepted(run) if is_accepted else [(printable(run), "")]
        self.write(runs)

    def write(self, runs: Sequence[Run]) -> None:
        """Print text that is marked already, such as a prompt."""
        text = Text.assemble(*runs)
        if not text:
            return
        if self._wrap is not None:
            self._wrap.write(runs)
        else:
            self._console.print(text, end="", soft_wrap=True)
            self._console.file.flush()
        self._last = text.plain[-1]

    def end(self) -> None:
        if self._last != "\n":
            self.write([("\n", "")])


def _accepted(run: str) -> list[Run]:
    before, after = MARKS["accepted"]
    return [(before, MARK), (printable(run), "green"), (after, MARK)] if run else []


def run_stream(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    printer: Printer,
    prediction: str | None = None,
) -> Completion:
    """Generate one answer, shown by `printer` as it comes. After Ctrl-C: what there is, reason
    'abort'."""
    completion: Completion | None = None
    with CtrlC() as ctrl_c:
        stream: Any = llm.stream(prompt, params, prediction=prediction)
        try:
            for chunk in stream:
                printer.show(chunk)
                completion = chunk.completion or completion
                if ctrl_c.pressed and completion is None:
                    stream.close()
                    completion = llm.last_completion
                    break
        finally:
            printer.end()
    assert completion is not None, "a stream ends with a chunk that carries the completion"
    return completion


class CtrlC:
    """While active, the first Ctrl-C only sets `pressed`; the second raises KeyboardInterrupt as
    usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._previous: Any = None

    def __enter__(self) -> CtrlC:
        # signal handlers exist only there
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
