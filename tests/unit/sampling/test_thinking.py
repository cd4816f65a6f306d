"""Thoughts in an answer: separated by tokens or by text, stop strings and grammars that wait, and a
budget, with every drafter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError
from outrider.grammar import Grammars, choice
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import BehindThoughts, ThinkingMarks
from outrider.thoughts import Part, StopsBehindThoughts, Thoughts
from tests.helpers import EOS, byte_tokenizer, disturbed, save_checkpoint, tiny_llama

TOKENIZER = byte_tokenizer()
OPEN, CLOSE = TOKENIZER("<>")["input_ids"]
BY_TEXT = ThinkingMarks(opening=("<think>", "<t:"), closing=("</think>", "</t>"))
BY_TOKEN = ThinkingMarks(opening=("<",), closing=(">",), opening_id=OPEN, closing_ids=(CLOSE,))


def parts_of(thinking: ThinkingMarks, text: str, size: int = 1) -> list[Part]:
    """The parts of a text that comes in pieces of `size` letters, neighbours of one kind joined."""
    thoughts = Thoughts(thinking)
    found = list[Part]()
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        found += thoughts.push(TOKENIZER(piece)["input_ids"][-1], piece)
    found += thoughts.end()
    assert "".join(part for _, part in found) == text, "nothing of a text is lost"
    joined: list[Part] = []
    for kind, part in found:
        joined[-1:] = (
            [(kind, joined[-1][1] + part)]
            if joined and joined[-1][0] == kind
            else [*joined[-1:], (kind, part)]
        )
    return joined


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_marks_in_the_text(size: int) -> None:
    """However it is cut: a half mark is no mark, a second thought is text, and so is a mark behind
    other text."""
    assert parts_of(BY_TEXT, "\n<think>a <b </thin</think>c</think><think>", size) == [
        ("mark", "\n<think>"),
        ("thought", "a <b </thin"),
        ("mark", "</think>"),
        ("answer", "c</think><think>"),
    ]
    assert parts_of(BY_TEXT, "<thanks> <think>", size) == [("answer", "<thanks> <think>")]
    assert parts_of(BY_TEXT, "<t:x</thi", size) == [("mark", "<t:"), ("thought", "x</thi")], (
        "cut off"
    )
    opened = ThinkingMarks(opening=("<think>",), closing=("</think>",), is_open=True)
    assert parts_of(opened, "x</think>y", size) == [
        ("thought", "x"),
        ("mark", "</think>"),
        ("answer", "y"),
    ]


def test_marks_that_are_tokens() -> None:
    """The token counts, not the text it adds: a mark that is not shown is one, too."""
    assert parts_of(BY_TOKEN, " <a>b<c>") == [
        ("mark", " <"),
        ("thought", "a"),
        ("mark", ">"),
        ("answer", "b<c>"),
    ]
    hidden = Thoughts(BY_TOKEN)
    parts = [
        hidden.push(token, text)
        for token, text in ((OPEN, ""), (5, "a<"), (6, "b"), (CLOSE, "?"), (OPEN, "<"))
    ]
    assert parts == [
        [("mark", "")],
        [("thought", "a<")],
        [("thought", "b")],
        [("mark", "?")],
        [("answer", "<")],
    ]
    assert hidden.num_tokens == 2, "marks are no thoughts"


def test_a_mark_of_several_tokens() -> None:
    """The beginning of a mark, repeated, is no mark."""
    thoughts = Thoughts(
        ThinkingMarks(opening=("?",), closing=("abc",), closing_ids=(1, 2, 3), is_open=True)
    )
    parts = [
        part
        for token in (1, 1, 2, 9, 1, 2, 3, 1)
        for part in thoughts.push(token, "?abcdefghi"[token])
    ]
    assert parts == [("thought", "aabi"), ("mark", "abc"), ("answer", "a")]
    assert thoughts.num_tokens == 4


def test_stop_strings_do_not_count_in_thoughts() -> None:
    """Before, inside and behind; one that a mark belongs to counts only where it is text."""
    for text, shown, match in (
        ("<a.b>c.d", "<a.b>c", "."),
        ("<a.b", "<a.b", None),
        ("a.b", "a", "."),
        ("<.>.", "<.>", "."),
        ("<a>b>.", "<a>b>", "."),
    ):
        stops = StopsBehindThoughts(["."], BY_TOKEN)
        output = "".join(
            stops.push(letter, token)
            for letter, token in zip(text, TOKENIZER(text)["input_ids"], strict=True)
        )
        assert (output + stops.flush(), stops.match) == (shown, match)


def test_thoughts_amid_an_answer_end_what_may_become_a_stop_string() -> None:
    """Catches text that comes behind the thoughts it stands before, and a stop string of two
    pieces."""
    repeats = ThinkingMarks(
        opening=("<",), closing=(">",), opening_id=OPEN, closing_ids=(CLOSE,), repeats=True
    )
    for text, shown, match in (
        ("xab<t>c", "xab<t>c", None),
        ("xab<t>abc", "xab<t>", "abc"),
        ("xab<t", "xab<t", None),
    ):
        stops = StopsBehindThoughts(["abc"], repeats)
        output = "".join(
            stops.push(letter, token)
            for letter, token in zip(text, TOKENIZER(text)["input_ids"], strict=True)
        )
        assert (output + stops.flush(), stops.match) == (shown, match)


def test_a_grammar_waits_for_the_thoughts_to_end() -> None:
    """Along draft paths: any token in thoughts, the form behind them, either at the beginning."""
    held = BehindThoughts(
        257, BY_TOKEN, Grammars(TOKENIZER, 257, [EOS]).constraint(choice(["yes", "no"]))
    )
    y, n, e = TOKENIZER("yne")["input_ids"]

    def may(*path: int) -> set[int]:
        return set(held.allowed([path])[0].nonzero()[:, 0].tolist())

    assert [may(), may(y)] == [{y, n, OPEN}, {e}]
    assert [len(may(OPEN)), may(OPEN, y, CLOSE), may(OPEN, CLOSE, y)] == [257, {y, n}, {e}]
    held.commit([OPEN, y, CLOSE])
    assert may() == {y, n}
    held.commit(TOKENIZER("no")["input_ids"])
    assert may() == {EOS}
    held.commit([EOS])
    assert held.is_over


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opening": "<think>"}, "opening must be a list"),
        ({"closing": ()}, "closing must have at least 1"),
        ({"opening_id": 3}, "opening_id needs closing_ids"),
        ({"closing_ids": (-1,)}, r"closing_ids\[0\] must be at least 0"),
        ({"budget": 8}, "one token"),
        ({"repeats": True}, "repeats needs opening_id"),
        ({"budget": -1, "closing_ids": (5,)}, "budget must be"),
        ({"is_open": 1}, "is_open must be"),
    ],
)
def test_marks_that_cannot_be_followed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ThinkingMarks(**{"opening": ("a",), "closing": ("b",), **fields})
    with pytest.raises(ConfigError, match="thinking must be"):
        SamplingParams(thinking="<think>")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=f"allowed_token_ids must hold {CLOSE}, with which thinking.budget ends thoughts",
    ):
        SamplingParams(thinking=replace(BY_TOKEN, budget=3), allowed_token_ids=[OPEN])


@pytest.fixture(scope="module", params=["none", "draft-model", "ngram"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("thinking")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "target", target, TOKENIZER)
    save_checkpoint(folder / "draft", disturbed(target, 0.1), TOKENIZER)
    draft = folder / "draft" if request.param == "draft-model" else None
    return LLM(folder / "target", drafter=request.param, draft=draft, threads=1)


@pytest.mark.slow
def test_a_budget_ends_thoughts_whoever_drafts(llm: LLM) -> None:
    """The model would think for ever. Behind the budget it answers, and there a stop string counts."""
    [dash] = TOKENIZER("-")["input_ids"]
    thinking = ThinkingMarks(
        opening=("<",),
        closing=(">",),
        opening_id=OPEN,
        closing_ids=(CLOSE,),
        is_open=True,
        budget=5,
    )
    [done] = llm.generate(
        [[5, 6, 7]], SamplingParams(max_tokens=12, logit_bias={dash: 90.0}, thinking=thinking)
    )
    assert done.text == "----->------"
    params = SamplingParams(max_tokens=12, logit_bias={dash: 90.0}, thinking=thinking, stop=["--"])
    assert llm.generate([[5, 6, 7]], params)[0].text == "----->"
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        llm.generate(
            [[5]],
            SamplingParams(
                thinking=ThinkingMarks(opening=("<",), closing=(">",), closing_ids=(999,), budget=1)
            ),
        )
