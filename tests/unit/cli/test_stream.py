"""Text in which accepted draft tokens are marked."""

from __future__ import annotations

import io

from rich.console import Console

from outrider.cli.stream import MarkedText
from outrider.llm import StreamChunk
from outrider.report.text import PLAINER


def console(encoding: str = "utf-8", colour: bool = False) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors=PLAINER, write_through=True)
    return Console(
        file=file, force_terminal=colour, color_system="standard" if colour else None, width=80
    ), raw


def chunk(pieces: list[str], origins: list[str]) -> StreamChunk:
    return StreamChunk(
        text="".join(pieces), token_ids=[0] * len(pieces), pieces=pieces, origins=origins
    )


def test_marks_survive_line_breaks_and_long_lines() -> None:
    """The marked text with its marks removed is the text: nothing wrapped, nothing trimmed."""
    out, raw = console()
    marks = MarkedText(out)
    pieces = ["word " * 40, " \n", "[bold]x[/bold]", "end"]
    marks.show(chunk(pieces, ["accepted", "correction", "accepted", "accepted"]))
    marks.end()
    plain = raw.getvalue().decode().replace("‹", "").replace("›", "")
    assert plain == "".join(pieces) + "\n"


def test_marks_in_ascii() -> None:
    """A terminal that cannot print the marks gets brackets, not an exception."""
    out, raw = console("ascii")
    MarkedText(out).show(chunk(["a", "b"], ["accepted", "bonus"]))
    assert raw.getvalue() == b"<a>b"


def test_colour_is_added_to_the_marks() -> None:
    out, raw = console(colour=True)
    MarkedText(out).show(chunk(["a"], ["accepted"]))
    assert "\x1b[32ma" in raw.getvalue().decode()
    assert "‹" in raw.getvalue().decode()


def test_empty_pieces_leave_no_marks() -> None:
    """Bytes of an unfinished character come as an empty piece."""
    out, raw = console()
    marks = MarkedText(out)
    marks.show(chunk([""], ["accepted"]))
    marks.end()
    assert raw.getvalue() == b""
