"""Printing an answer while it is made, and ending it cleanly when the user presses Ctrl-C.

The first Ctrl-C is noted and acted upon between two steps, so that no state is ever half updated: the stream
is closed, and what was produced is kept, with its stats. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from outrider.report.marks import DraftMarks
from outrider.report.text import printable

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion, StreamChunk
    from outrider.sampling.params import SamplingParams


class Printer(Protocol):
    """Something that shows the chunks of one answer."""

    def show(self, chunk: StreamChunk) -> None: ...

    def end(self) -> None: ...


class SilentStream:
    """Shows nothing: the caller prints the completion when it is whole."""

    def show(self, chunk: StreamChunk) -> None:
        pass

    def end(self) -> None:
        pass


class PlainStream:
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


class MarkedText:
    """The text with accepted draft tokens marked, on stdout."""

    def __init__(self, marks: DraftMarks) -> None:
        self._marks = marks

    def show(self, chunk: StreamChunk) -> None:
        self._marks.show(chunk.pieces, chunk.origins)

    def end(self) -> None:
        self._marks.end()


def run_stream(
    llm: LLM, prompt: str | list[int], params: SamplingParams, printer: Printer, prediction: str | None = None
) -> Completion:
    """Generate one answer, shown by `printer` as it comes. After Ctrl-C: what there is, reason 'abort'."""
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
    """While active, the first Ctrl-C only sets `pressed`; the second raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._previous: Any = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():  # signal handlers exist only there
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
