"""Lines, JSON and marks."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from outrider.report.marks import DraftMarks
from outrider.report.tables import demo_table
from outrider.report.text import amount, printable, stats_line, to_json
from outrider.stats import DecodeStats

ROW = {
    "drafter": "none", "tokens_per_s": 100.0, "speedup": 1.0, "tau": 1.0, "alpha": None, "num_identical": 3,
    "num_problems": 3, "num_correct": 2,
}  # fmt: skip


def console(encoding: str = "utf-8", colour: bool = False) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(
        file=file, force_terminal=colour, color_system="standard" if colour else None, width=80
    ), raw


def test_marks_survive_line_breaks_and_long_lines() -> None:
    """The marked text with its marks removed is the text: nothing wrapped, nothing trimmed."""
    out, raw = console()
    marks = DraftMarks(out)
    pieces = ["word " * 40, " \n", "[bold]x[/bold]", "end"]
    marks.show(pieces, ["accepted", "correction", "accepted", "accepted"])
    marks.end()
    plain = raw.getvalue().decode().replace("‹", "").replace("›", "")
    assert plain == "".join(pieces) + "\n"


def test_marks_in_ascii() -> None:
    """A terminal that cannot print the marks gets brackets, not an exception."""
    out, raw = console("ascii")
    DraftMarks(out).show(["a", "b"], ["accepted", "bonus"])
    assert raw.getvalue() == b"[a]b"


def test_colour_is_added_to_the_marks() -> None:
    out, raw = console(colour=True)
    DraftMarks(out).show(["a"], ["accepted"])
    assert "\x1b[32ma" in raw.getvalue().decode()
    assert "‹" in raw.getvalue().decode()


def test_empty_pieces_leave_no_marks() -> None:
    """Bytes of an unfinished character come as an empty piece."""
    out, raw = console()
    marks = DraftMarks(out)
    marks.show([""], ["accepted"])
    marks.end()
    assert raw.getvalue() == b""


def test_printable_disarms_the_terminal() -> None:
    """A model can write escape sequences; a terminal must not obey them."""
    assert printable("a\x1b[2Jb\tc\nd\x9b") == "a\ufffd[2Jb\tc\nd\ufffd"


def test_json_is_strict() -> None:
    assert json.loads(to_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": ("x",)})) == {
        "a": None, "b": [None, 1.5], "c": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "text"), [(10, "10 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 42, "4096.0 GiB")]
)
def test_amount(size: int, text: str) -> None:
    assert amount(size) == text


def test_stats_line_without_drafts_has_no_ratios() -> None:
    """Plain decoding has no acceptance to speak of."""
    stats = DecodeStats(ttft_s=1.0, decode_s=1.0)
    stats.count_step(0, 0, 4, rejected=False)
    assert "α" not in stats_line(stats)
    assert "2 tokens/s" in stats_line(stats)


def test_demo_table_shows_a_difference() -> None:
    """'identical: no' is the one cell nobody may overlook."""
    out, raw = console()
    other = {**ROW, "drafter": "ngram", "speedup": 1.5, "num_identical": 2}
    out.print(demo_table("title", [ROW, other], "caption"))
    text = raw.getvalue().decode()
    assert "no (2/3)" in text
    assert "1.50x" in text
    assert "none (plain)" in text
