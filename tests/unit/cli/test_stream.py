"""Text in which accepted draft tokens are marked."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from outrider.cli.stream import MarkedText, WordWrap
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


CODE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")


def seen(written: str, width: int) -> list[str]:
    """The lines that a terminal shows, which breaks them at its own edge."""
    lines = [""]
    column = 0
    position = 0
    while position < len(written):
        code = CODE.match(written, position)
        position = code.end() if code else position + 1
        if code and code[2] == "D":
            column -= int(code[1])
        elif code and code[2] == "K":
            lines[-1] = lines[-1][:column]
        elif code is None and written[position - 1] == "\n":
            lines.append("")
            column = 0
        elif code is None:
            assert column < width, "the terminal breaks the line itself"
            lines[-1] = lines[-1][:column] + written[position - 1]
            column += 1
    return [line.rstrip() for line in lines]


def wrapped(pieces: list[str], width: int, styles: tuple[str, ...] = ("",)) -> list[str]:
    out, raw = console(colour=True)
    out.width = width
    wrap = WordWrap(out)
    for number, piece in enumerate(pieces):
        wrap.write([(piece, styles[number % len(styles)])])
    return seen(raw.getvalue().decode(), width)


TEXT = "One of the colours is red, the colour of love.\n\n  def add(a, b):\n\treturn a + b\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("width", [12, 20, 41])
def test_lines_are_broken_between_words(size: int, width: int) -> None:
    """However the text comes in, in whatever colours: no word is cut, and none is lost."""
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    lines = wrapped(pieces, width, ("", "green", "dim green"))
    assert lines == wrapped([TEXT], width)
    assert " ".join(lines).split() == TEXT.split()
    assert all(len(line) < width for line in lines)
    paragraph = lines[: lines.index("")]
    for line, following in pairwise(paragraph):
        assert len(line) + 1 + len(following.split()[0]) >= width, "the next word had room"


def test_a_word_longer_than_a_line_is_cut() -> None:
    assert wrapped(["see ", "x" * 25], 11) == ["see", "x" * 10, "x" * 10, "x" * 5]


def test_scripts_without_spaces_are_broken_anywhere() -> None:
    out, raw = console(colour=True)
    out.width = 11
    WordWrap(out).write([("ab 日本語日本語日本語", "")])
    assert raw.getvalue().decode().splitlines() == ["ab 日本語", "日本語日本", "語"]


def test_pipes_and_files_get_lines_as_they_are() -> None:
    out, _ = console(colour=True)
    assert WordWrap.of(out) is None
