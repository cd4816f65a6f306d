"""Kinds and sections of text: each rule, what wins where two fit, and tokens that are parts of
characters."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.explain.regions import (
    KINDS,
    SECTIONS,
    character_kinds,
    section_starts,
    token_kinds,
    token_sections,
)


def spans(text: str) -> list[tuple[str, str]]:
    """(kind, text) of every run, white space left out."""
    found = []
    start = 0
    for kind, group in groupby(character_kinds(text)):
        length = len(list(group))
        if kind != "whitespace":
            found.append((kind, text[start : start + length]))
        start += length
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "it costs $1,234.50 now",
            [("word", "it"), ("word", "costs"), ("number", "$1,234.50"), ("word", "now")],
        ),
        (
            "5*2=10.",
            [
                ("number", "5"),
                ("punctuation", "*"),
                ("number", "2"),
                ("punctuation", "="),
                ("number", "10"),
                ("punctuation", "."),
            ],
        ),
        (
            "up 20% at 12:30",
            [("word", "up"), ("number", "20%"), ("word", "at"), ("number", "12:30")],
        ),
        (
            "He met Mary. She ran",
            [
                ("word", "He"),
                ("word", "met"),
                ("name", "Mary"),
                ("punctuation", "."),
                ("word", "She"),
                ("word", "ran"),
            ],
        ),
        (
            "the iPhone and JSON",
            [("word", "the"), ("name", "iPhone"), ("word", "and"), ("name", "JSON")],
        ),
        ("then I don't", [("word", "then"), ("word", "I"), ("word", "don't")]),
        ("Größe über Köln", [("word", "Größe"), ("word", "über"), ("name", "Köln")]),
        ("call `x = 1` here", [("word", "call"), ("code", "`x = 1`"), ("word", "here")]),
        ("a\n```py\nx = 1\n```\nb", [("word", "a"), ("code", "```py\nx = 1\n```"), ("word", "b")]),
        (
            "def f(x):\n    return x + 1\nDone",
            [("code", "def f(x):"), ("code", "    return x + 1"), ("word", "Done")],
        ),
        ("total = 5", [("word", "total"), ("punctuation", "="), ("number", "5")]),
        (
            "return the book.",
            [("word", "return"), ("word", "the"), ("word", "book"), ("punctuation", ".")],
        ),
        (
            'go {"a": [1, "}"]} on',
            [("word", "go"), ("tool call", '{"a": [1, "}"]}'), ("word", "on")],
        ),
        (
            "x <tool_call>f(1)</tool_call> y",
            [("word", "x"), ("tool call", "<tool_call>f(1)</tool_call>"), ("word", "y")],
        ),
        (
            '```json\n{"a": 1}\n```',
            [("code", "```json\n"), ("tool call", '{"a": 1}'), ("code", "\n```")],
        ),
        (
            "let (see below):",
            [
                ("word", "let"),
                ("punctuation", "("),
                ("word", "see"),
                ("word", "below"),
                ("punctuation", "):"),
            ],
        ),
        (
            "so x{1}",
            [
                ("word", "so"),
                ("word", "x"),
                ("punctuation", "{"),
                ("number", "1"),
                ("punctuation", "}"),
            ],
        ),
        (
            "int f(int x) {\n}\nx(1);",
            [("code", "int f(int x) {"), ("code", "}"), ("code", "x(1);")],
        ),
    ],
)
def test_kinds(text: str, expected: list[tuple[str, str]]) -> None:
    assert spans(text) == expected


def test_the_prompt_decides_what_begins_a_sentence() -> None:
    assert token_kinds("I saw", [" Paris"]) == ["name"]
    assert token_kinds("I saw it.", [" Paris"]) == ["word"]


def test_a_token_has_the_kind_of_its_first_visible_character() -> None:
    assert token_kinds("", [" 12", " ", "\n", "a1", "."]) == [
        "number",
        "whitespace",
        "whitespace",
        "word",
        "punctuation",
    ]


def test_parts_of_a_character_have_the_kind_of_the_whole() -> None:
    """Bytes that add no text yet belong to what the next token completes."""
    assert token_kinds("", ["x ", "", "", "é", ""]) == [
        "word",
        "word",
        "word",
        "word",
        "punctuation",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text", [(0, "text")]),
        ("<think>a</think>b", [(0, "text"), (0, "thinking"), (8, "answer")]),
        ("a</think>b", [(0, "thinking"), (1, "answer")]),
        ("5+5=10\n#### 10", [(0, "thinking"), (7, "answer")]),
        ("We add. The answer is 10.", [(0, "thinking"), (8, "answer")]),
        ("Answer: 1\nso\nFinal answer 2", [(0, "thinking"), (13, "answer")]),
        ("he had no answer: none", [(0, "text")]),
    ],
)
def test_sections(text: str, expected: list[tuple[int, str]]) -> None:
    assert section_starts(text) == expected


def test_sections_of_tokens_follow_marks_in_the_prompt() -> None:
    assert token_sections("Q <think>\n", ["a", "</think>", "b"]) == ["thinking", "answer", "answer"]
    assert token_sections("Question: 1+1?\nAnswer:", [" 2", " so"]) == ["text", "text"]
    assert token_sections("Question: 1+1?\nAnswer:", [" a", "\n####", " 2"]) == [
        "thinking",
        "answer",
        "answer",
    ]
    assert token_sections("", ["x", "#", "###", " 4"]) == ["thinking", "answer", "answer", "answer"]


@pytest.mark.slow
@given(st.text(max_size=60), st.lists(st.text(max_size=6), max_size=12))
def test_every_token_has_one_kind_and_one_section(prompt: str, pieces: list[str]) -> None:
    kinds = token_kinds(prompt, pieces)
    sections = token_sections(prompt, pieces)
    assert len(kinds) == len(sections) == len(pieces)
    assert set(kinds) <= set(KINDS)
    assert set(sections) <= set(SECTIONS)


@given(st.text(alphabet="ab1 .{}\"':=(\n`#<think>/", max_size=200))
def test_no_text_takes_long(text: str) -> None:
    assert len(character_kinds(text)) == len(text)
