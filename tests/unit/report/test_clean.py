"""What writers do to every text before they escape it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.report.document import Token
from outrider.report.text import clean, one_line
from outrider.report.tokens import MEANING, fates, runs


@given(st.text(st.characters(codec=None)))
def test_nothing_harmful_is_left(text: str) -> None:
    found = clean(text)
    found.encode("utf-8")
    assert not [c for c in found if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    turns = {"RLO", "LRO", "RLE", "LRE", "RLI", "LRI", "FSI", "PDF", "PDI"}
    assert not turns & {unicodedata.bidirectional(c) for c in found}
    assert not [c for c in found if ord(c) & 0xFFFE == 0xFFFE]


@pytest.mark.parametrize("text", ["שלום", "👩‍👩‍👧", "e\u0301", "a\tb\nc", "漢字", "a\u00a0b"])
def test_what_is_harmless_stays(text: str) -> None:
    """Joiners of emoji, accents and right-to-left letters are text."""
    assert clean(text) == text


def test_lines() -> None:
    assert clean("a\r\nb\rc") == "a\nb\ufffdc"
    assert one_line("  a \n\t b\x00 ") == "a b\ufffd"


def test_runs_and_marks() -> None:
    tokens = [
        Token("Q", "prompt"),
        Token("a", "accepted"),
        Token("b", "accepted"),
        Token("c", "correction", "x\x1b"),
        Token("d", "bonus"),
        Token("e", "plain"),
        Token("f", "plain"),
    ]
    assert "".join(text for _, text in runs(tokens)) == "Q▌‹ab›[-x\ufffd-]cd⁺ef"
    assert [kind for kind, _ in runs(tokens) if kind != "mark"] == [
        "prompt",
        "accepted",
        "rejected",
        "correction",
        "bonus",
        "plain",
    ]


def test_corrections_in_a_row_stay_apart() -> None:
    """Each has a draft token of its own, or none."""
    tokens = [Token("a", "correction", "x"), Token("b", "correction")]
    assert "".join(text for _, text in runs(tokens)) == "[-x-]a[--]b"


def test_fates_are_counted_in_order() -> None:
    tokens = [Token("", "plain"), Token("", "accepted"), Token("", "plain")]
    assert list(fates(tokens).items()) == [("accepted", 1), ("plain", 2)]
    assert list(MEANING) == ["prompt", "accepted", "correction", "bonus", "plain"]
