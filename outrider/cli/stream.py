"""Printing an answer while it is made, and ending it cleanly when the user presses Ctrl-C.

The first Ctrl-C is noted and acted upon between two steps, so that no state is ever half updated:
the stream is closed, and what was produced is kept, with its stats. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import sys
import threading
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from outrider.report.text import printable
from outrider.report.tokens import MARKS

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion, StreamChunk
    from outrider.sampling.params import SamplingParams

MARK = "dim green"


class Printer:
    """Shows nothing of an answer: the caller prints the completion when it is whole."""

    def show(self, chunk: StreamChunk) -> None:
        """Print one step's text."""

    def end(self) -> None:
        """Leave the cursor at the start of a line."""


class PlainStream(Printer):
    """The text as it is, on stdout; always ended by a newline."""

    def __init__(self) -> None:
        self._last = "\n"

    def show(self, chunk: StreamChunk) -> None:
        text = printable(chunk.text) if sys.stdout.isatty() else chunk.text
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text[-1]

    def end(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._last = "\n"


class MarkedText(Printer):
    """Text in which one sees what was drafted: every run of accepted draft tokens between marks,
    and green where colour works.

        ‹James picks 18›eggs‹ in the›morning

    One run is one step's accepted tokens: its length is what speculation saved there.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = "\n"

    def legend(self) -> Text:
        """The legend of the marks, in the marks themselves."""
        return _accepted("drafted and accepted").append(
            "  everything else: written by the target itself", "dim"
        )

    def show(self, chunk: StreamChunk) -> None:
        text = Text()
        for is_accepted, group in groupby(
            zip(chunk.pieces, chunk.origins, strict=True), lambda one: one[1] == "accepted"
        ):
            run = "".join(piece for piece, _ in group)
            text.append_text(_accepted(run) if is_accepted else Text(printable(run)))
        if text:
            self._console.print(text, end="", soft_wrap=True)
            self._console.file.flush()
            self._last = text.plain[-1]

    def end(self) -> None:
        if self._last != "\n":
            self._console.print()
            self._last = "\n"


def _accepted(run: str) -> Text:
    before, after = MARKS["accepted"]
    return (
        Text.assemble((before, MARK), (printable(run), "green"), (after, MARK)) if run else Text()
    )


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
