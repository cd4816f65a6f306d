"""A form is about text: every spelling in ordinary tokens is allowed, and none in a token that is
no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor

from outrider.errors import RequestError
from outrider.grammar import Grammars, Spec, choice, ebnf, json_schema, lark, regex
from outrider.grammar.matcher import Matcher
from outrider.sampling.distribution import BatchSampling, distribution
from outrider.sampling.params import SamplingParams
from tests.helpers import EOS, byte_tokenizer
from tests.published_tokenizers import t5
from tests.unit.grammar.vocabularies import END, grammars_over

Path = tuple[int, ...]

# ---------------------------------------------------------------- the law

TEXTS = ["a", "b", "c", "ab", "bc", "abc", "cc", '"', '"a', 'c"']
ALLOWED: list[tuple[Spec, set[str]]] = [
    (regex("abc|abcc"), {"abc", "abcc"}),
    (choice(["abc", "bcc"]), {"abc", "bcc"}),
    (json_schema({"enum": ["abc", "acc"]}), {'"abc"', '"acc"'}),
    (json_schema({"const": "abccc"}), {'"abccc"'}),
    (ebnf('root ::= "a" "bcc"'), {"abcc"}),
    (lark('start: "ab" C\nC: /c{2,3}/'), {"abcc", "abccc"}),
]


def spelled(path: Path) -> str:
    return "".join(TEXTS[token - 1] for token in path)


def expected(texts: set[str], path: Path) -> set[int]:
    """The definition: tokens after which the text may still become one of `texts`, and the end
    where it is one."""
    begun = [
        token
        for token in range(1, 1 + len(TEXTS))
        if any(text.startswith(spelled((*path, token))) for text in texts)
    ]
    return {*begun, *([END] if spelled(path) in texts else [])}


def law(constraint: Matcher | None, texts: set[str], seed: int) -> dict[Path, float]:
    """The probability of every answer of a random target, by `constraint` or by the definition."""
    params = SamplingParams(temperature=1.0)

    def next_law(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, path)))
        logits = torch.randn(1 + len(TEXTS), generator=generator, dtype=torch.float64) * 2
        if constraint is None:
            barred = [
                token for token in range(1 + len(TEXTS)) if token not in expected(texts, path)
            ]
            return logits.index_fill(0, torch.tensor(barred), -torch.inf).softmax(-1)
        logits[~constraint.allowed([path])[0]] = -torch.inf
        sampling = BatchSampling.of([params], 1 + len(TEXTS))
        return distribution(logits[None, None], sampling, None, dtype=torch.float64)[0, 0]

    def answers(path: Path, mass: float) -> Iterator[tuple[Path, float]]:
        for token, share in enumerate(next_law(path).tolist()):
            if share and token == END:
                yield path, mass * share
            elif share:
                yield from answers((*path, token), mass * share)

    return dict(answers((), 1.0))


@pytest.mark.parametrize(
    ("spec", "texts"), ALLOWED, ids=[f"{spec.form}-{spec.text[:20]}" for spec, _ in ALLOWED]
)
def test_the_law_is_the_targets_over_all_spellings(spec: Spec, texts: set[str]) -> None:
    """Catches one spelling taken for the only one where a text is forced: step by step, the
    target's own law must be cut down to the tokens after which the text can still have the form,
    and to nothing less."""
    wanted = law(None, texts, 7)
    answers = law(grammars_over(*TEXTS).constraint(spec), texts, 7)
    assert {spelled(path) for path in wanted} == texts
    assert len(wanted) > 3 * len(texts), "every text has many spellings"
    assert answers.keys() == wanted.keys()
    assert 0.5 * sum(abs(answers[path] - wanted[path]) for path in wanted) < 1e-12


# ---------------------------------------------------------------- tokens that are no text

SPECIAL = "<s>"
ADDED = "<think>"
BRACKETS = "[X]"


def tokenizer_with_marks() -> Any:
    """Bytes, a special token, one that is added and not special, and one such that is not written
    <...>."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [
            AddedToken(SPECIAL, special=True, normalized=False),
            AddedToken(ADDED, special=False, normalized=False),
            AddedToken(BRACKETS, special=True, normalized=False),
        ]
    )
    return tokenizer


BYTES = byte_tokenizer()
MARKED = tokenizer_with_marks()
LITERAL: list[tuple[Spec, str]] = [
    (regex(f"{SPECIAL}x"), f"{SPECIAL}x"),
    (regex(f"{ADDED}x"), f"{ADDED}x"),
    (regex(r"\[X\]"), BRACKETS),
    (regex(f"a{SPECIAL}b"), f"a{SPECIAL}b"),
    (regex("<.end.>"), "<|end|>"),
    (choice([f"{SPECIAL}no", "yes"]), f"{SPECIAL}no"),
    (choice([ADDED]), ADDED),
    (
        json_schema({"const": {"a": ADDED}}, whitespace=""),
        json.dumps({"a": ADDED}, separators=(",", ":")),
    ),
    (json_schema({"enum": [f"x{SPECIAL}", f"x{BRACKETS}"]}), json.dumps(f"x{SPECIAL}")),
    (
        json_schema(
            {"type": "object", "properties": {ADDED: {"type": "null"}}, "required": [ADDED]},
            whitespace="",
        ),
        json.dumps({ADDED: None}, separators=(",", ":")),
    ),
    (lark(f'start: "{ADDED}" "y" | "{SPECIAL}"'), f"{ADDED}y"),
    (ebnf(f'root ::= "{SPECIAL}" [a-z]'), f"{SPECIAL}z"),
]


@pytest.mark.parametrize(
    ("spec", "text"), LITERAL, ids=[f"{spec.form}-{text}" for spec, text in LITERAL]
)
def test_the_text_of_a_token_that_is_no_text_is_written_in_others(spec: Spec, text: str) -> None:
    """Catches a special token forced, which then breaks the form or ends the answer in the middle
    of it."""
    constraint = Grammars(MARKED, len(MARKED), [EOS]).constraint(spec)
    marks = [token for token in MARKED.added_tokens_decoder if token != EOS]
    for letter in text:
        mask = constraint.allowed([[]])[0]
        assert not mask[marks].any()
        constraint.commit(BYTES(letter)["input_ids"])
    assert constraint.is_over or constraint.allowed([[]])[0, EOS]


def test_a_grammar_may_ask_for_such_a_token_by_name() -> None:
    number = MARKED.convert_tokens_to_ids(ADDED)
    for text in (f"start: {ADDED}", f"start: <[{number}]>"):
        mask = Grammars(MARKED, len(MARKED), [EOS]).constraint(lark(text)).allowed([[]])[0]
        assert mask.nonzero().flatten().tolist() == [number]


def test_a_tokenizer_that_llguidance_cannot_read_has_the_same_rule() -> None:
    tokenizer = t5()
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<sep>", "a<", "sep>")]
    )
    grammars = Grammars(tokenizer, len(tokenizer), [])
    number, *letters = tokenizer.convert_tokens_to_ids(["<sep>", "a<", "sep>"])
    masks = grammars.constraint(regex("a?(a<sep>)*")).allowed([[], letters[:1], letters])
    assert masks[0, letters[0]]
    assert masks[1, letters[1]]
    assert not masks[:, number].any()
    assert grammars.constraint(lark("start: <sep>")).allowed([[]])[0, number]


# ---------------------------------------------------------------- what no token can say


@pytest.mark.parametrize("spec", [regex("xyz|Q"), choice(["x", "{"]), json_schema({"const": 1})])
def test_a_text_that_no_token_can_begin_is_refused_at_once(spec: Spec) -> None:
    with pytest.raises(
        RequestError,
        match=f"^{spec.name} asks for a text that the tokens of this model cannot spell: use other",
    ):
        grammars_over("a", "b").constraint(spec)


def test_a_text_that_no_token_can_continue_is_refused_by_name() -> None:
    constraint = grammars_over("a", "b").constraint(regex("ax"))
    constraint.commit([1])
    with pytest.raises(RequestError, match="cannot spell"):
        constraint.allowed([[]])


@pytest.mark.parametrize("make", [lark, ebnf])
def test_llguidances_own_json_is_no_grammar(make: Any) -> None:
    with pytest.raises(
        RequestError, match=r"grammar must be a grammar .* got JSON: use the field for schemas"
    ):
        grammars_over("a").constraint(make('{"grammars": [{"json_schema": {}}]}'))
