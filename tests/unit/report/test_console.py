"""A document on a terminal, in a pipe, without colour, without Unicode."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from outrider.report.console import MAX_TOKENS, print_document
from outrider.report.document import (
    Column,
    Document,
    MarkedTokens,
    Paragraph,
    Table,
    Token,
)
from outrider.report.text import PLAINER, one_line
from tests.unit.report.samples import HOSTILE, chart, every_block, everything, text

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def printed(
    document: Document, width: int = 80, *, colour: bool = False, encoding: str = "utf-8"
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors=PLAINER, write_through=True)
    print_document(
        document,
        Console(
            file=file,
            width=width,
            force_terminal=colour,
            color_system="standard" if colour else None,
        ),
    )
    return raw.getvalue().decode(encoding)


def test_everything_is_shown() -> None:
    out = printed(everything(), 200)
    for words in (
        "1.74 [1.68, 1.83]",
        "accepted / tested",
        "outrider generate demo",
        "• verify 4 %",
        "❌ One configuration",
    ):
        assert words in out


def test_marks_carry_the_text_without_colour() -> None:
    out = printed(Document("x", "", [text(1)]))
    assert "How many?\n▌‹ James picks 18›[- apples-] eggs‹ in the› morning⁺.\n" in out


def test_colour_adds_and_takes_nothing() -> None:
    """The same letters with and without."""
    assert ESCAPE.sub("", printed(everything(), colour=True)) == printed(everything())


def test_a_pipe_is_not_squeezed(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    print_document(
        Document(
            "x", "", [Paragraph(long), Table([Column(long, "left"), Column("b")], [[long, "1"]])]
        )
    )
    out = capsys.readouterr().out
    assert out.count(long.strip()) == 3
    assert max(map(len, out.splitlines())) < 400


def test_numbers_are_never_cut() -> None:
    """However narrow the terminal, whole words of a table are there."""
    out = printed(everything(), 40)
    for words in ("verifier=multi-round", "153.4", "1.83]", "identical"):
        assert words in out


def test_a_table_fits_where_its_words_allow_it() -> None:
    for width in (60, 70, 80, 100):
        table = (
            printed(everything(), width)
            .split("All configurations")[1]
            .split("speedup: tokens/s")[0]
        )
        longest = max(map(len, table.splitlines()))
        assert longest <= width or width == 60


def test_rows_that_stand_out_have_a_mark() -> None:
    lines = printed(everything(), 200).splitlines()
    marked = [line for line in lines if line.startswith("▸")]
    assert len(marked) == 2  # of the table, of the chart
    assert marked[:1] == [line for line in lines if "1.74 [1.68, 1.83]" in line and "MiB" in line]


def test_ascii() -> None:
    """Terminals that can print nothing else still tell fates and tones apart."""
    out = printed(everything(1), 200, encoding="ascii")
    assert "|< James picks 18>[- apples-] eggs< in the> morning+.\n" in out
    assert "x One configuration is slower" in out
    assert out.encode("ascii")


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_everywhere(words: str) -> None:
    out = printed(every_block(words), 400)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
    assert out.count(one_line(words)) >= 10


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec=None), max_size=30))
def test_any_words(words: str) -> None:
    out = printed(every_block(words), 400)
    assert one_line(words) in " ".join(out.split())
    assert "\x1b" not in out


def test_a_chart_is_bars_of_letters() -> None:
    lines = printed(Document("x", "", [chart()]), 100).splitlines()
    [best] = [line for line in lines if line.startswith("▸")]
    assert best.split()[1:5] == ["draft-model", "k=5", "1.74x", "[1.68,"]
    assert best.endswith("█" * 18)


def test_long_texts_end_with_a_word_about_the_rest() -> None:
    out = printed(
        Document("x", "", [MarkedTokens("t", [Token("ab ", "accepted")] * (MAX_TOKENS + 7))])
    )
    assert out.count("ab ") == MAX_TOKENS
    assert "(7 more tokens: the HTML page shows all)" in out
    assert f"drafted and accepted ({MAX_TOKENS + 7})" in out
    two = [MarkedTokens("first", tokens := [Token("ab ", "accepted")] * MAX_TOKENS)]
    out = printed(Document("x", "", [*two, MarkedTokens("second", tokens)]))
    assert "first" in out
    assert "second" not in out
    assert f"({MAX_TOKENS} more tokens: the HTML page shows all)" in out
