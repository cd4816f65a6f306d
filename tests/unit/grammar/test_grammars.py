"""From what a client asks for to masks over real vocabularies; and errors that say where a grammar
is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.errors import CapabilityError, RequestError
from outrider.grammar import (
    Grammars,
    Spec,
    choice,
    ebnf,
    grammars,
    json_object,
    json_schema,
    lark,
    regex,
)
from outrider.grammar.compiled import Compiled
from outrider.grammar.vocabulary import index_vocabulary
from outrider.models.tokens.token_bytes import token_bytes
from tests.helpers import EOS, byte_tokenizer, word_tokenizer
from tests.published_tokenizers import OTHERS, WITH_BYTE_FALLBACK, gpt_2, t5
from tools.demo_models.tokenizer import as_transformers, train_tokenizer

BYTES = byte_tokenizer()
# 43 rows of logits stand for no token, as in padded vocabularies
GRAMMARS = Grammars(BYTES, 300, [EOS])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def accepts(grammars: Grammars, tokenizer: Any, spec: Spec, text: str) -> bool:
    """Whether the answer may be exactly this text: every token allowed in turn, then an end token."""
    constraint = grammars.constraint(spec)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    masks = constraint.allowed([tokens[:at] for at in range(len(tokens) + 1)])
    return all(masks[at, token] for at, token in enumerate(tokens)) and bool(
        masks[-1, tokenizer.eos_token_id]
    )


LINES = {"x-guidance": {"whitespace_pattern": "[\n]?"}}
CASES = [
    (
        json_schema(PERSON),
        ['{"name": "Ann", "age": 3}', '{"name":"A\\n"}'],
        ['{"age": 3}', '{"name": "A", "age": -1}', "[]"],
    ),
    (
        json_schema(PERSON),
        ['{"name":"A", "age":3}', '{ "name" : "A" }'],
        ['{  "name": "A"}', '{"name":  "A"}'],
    ),
    (
        json_schema(PERSON),
        [],
        ['{\n"name": "A"}', '{"name":\n"A"}', '{"name": "A",  "age": 3}', '{"name": "A"}\n'],
    ),
    (json_schema(PERSON, whitespace=""), ['{"name":"Ann"}'], ['{"name": "Ann"}']),
    (
        json_schema(PERSON, whitespace="[ \n]*"),
        ['{\n  "name" : "Ann"\n}', '{"name":"A"}'],
        ['{\t"name": "Ann"}'],
    ),
    (json_schema({**PERSON, **LINES}), ['{\n"name":"A"}'], ['{"name": "A"}']),
    (json_schema({**PERSON, **LINES}, whitespace=""), ['{"name":"A"}'], ['{\n"name":"A"}']),
    (
        json_schema({**PERSON, "x-guidance": {"lenient": True}}),
        ['{"name": "A"}'],
        ['{"name":  "A"}', '{\n"name": "A"}'],
    ),
    (
        json_object(),
        ['{"a": [1, {"b": null}]}', '{"a":[1,{}]}'],
        ['{"a": [  1]}', '{"a": [1,\n2]}', '{"a":  1}'],
    ),
    (json_schema(True), ["3", "null", '{"a": [1]}'], ["nul"]),
    (json_object(), ['{"a": [1, {}]}', "{}"], ["[1]", "3"]),
    (regex(r"[0-9]{2,3}(\.[0-9])?"), ["12", "123.4"], ["1", "1234"]),
    (choice(["yes", "no", "no way", 'a "b"']), ["yes", "no", "no way", 'a "b"'], ["maybe", "ye"]),
    (ebnf('root ::= item ("," item)*\nitem ::= [a-z]+'), ["a", "ab,c"], ["a,", ",a"]),
    (ebnf('start: "a" start "b" | ""'), ["", "ab", "aabb"], ["aab", "abb"]),
    (lark("start: /[ab]+/"), ["abba"], ["abc"]),
]


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema may be megabytes of descriptions, and the next one differ by a letter."""
    made: list[str] = []
    own = Compiled
    grammars = Grammars(BYTES, 257, [EOS])
    monkeypatch.setattr(
        "outrider.grammar.grammars.Compiled",
        lambda name, make, index: (made.append(name), own(name, make, index))[1],
    )
    monkeypatch.setattr("outrider.grammar.grammars.MAX_KEPT_CHARACTERS", 10)
    for pattern in ("aaaaa", "bbbbb", "aaaaa", "ccccc", "aaaaa", "c" * 11, "aaaaa"):
        grammars.constraint(regex(pattern, name=pattern))
    assert made == ["aaaaa", "bbbbb", "ccccc", "c" * 11, "aaaaa"]


@pytest.mark.parametrize(
    ("spec", "good", "bad"), CASES, ids=[f"{case[0].form}-{at}" for at, case in enumerate(CASES)]
)
def test_what_a_grammar_accepts(spec: Spec, good: list[str], bad: list[str]) -> None:
    assert [accepts(GRAMMARS, BYTES, spec, text) for text in good] == [True] * len(good)
    assert [accepts(GRAMMARS, BYTES, spec, text) for text in bad] == [False] * len(bad)


def test_rows_of_one_grammar_do_not_share_their_text() -> None:
    """Catches a compiled grammar handed out twice instead of copied."""
    one, other = (GRAMMARS.constraint(regex("ab")) for _ in range(2))
    one.commit(BYTES("a")["input_ids"])
    assert other.allowed([[]])[0].nonzero().tolist() != one.allowed([[]])[0].nonzero().tolist()


def test_tokens_that_no_tokenizer_names_are_never_allowed() -> None:
    mask = GRAMMARS.constraint(regex("(.|\n)+")).allowed([[]])[0]
    assert mask.shape == (300,)
    assert not mask[257:].any()


def test_any_of_several_end_tokens_ends() -> None:
    other = BYTES("!")["input_ids"][0]
    constraint = Grammars(BYTES, 257, [EOS, other]).constraint(regex("a?"))
    mask = constraint.allowed([[]])[0]
    assert mask[EOS]
    assert mask[other]
    constraint.commit([other])
    assert constraint.is_over


WRONG: list[tuple[Any, str]] = [
    ({"type": "objec"}, r"^schema: Invalid type: objec"),
    (
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "strin"}]}}},
        r"^schema\.properties\.a\.anyOf\.1: .*strin",
    ),
    (
        {"$defs": {"x": {"pattern": "(?=a)"}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        r"look-ahead",
    ),
    (
        {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        r"^schema\.properties\.a: .*not",
    ),
]


EXACT = 2**53 - 1
INT64 = 2**63 - 1
BOUNDED: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({"minimum": EXACT}, [EXACT, EXACT + 1, EXACT + 2], [EXACT - 1, -EXACT]),
    ({"maximum": -EXACT}, [-EXACT, -EXACT - 1, -EXACT - 2], [1 - EXACT, 0]),
    (
        {"exclusiveMinimum": -EXACT, "exclusiveMaximum": EXACT},
        [1 - EXACT, 0, EXACT - 1],
        [-EXACT, EXACT, EXACT + 1],
    ),
    (
        {"minimum": -EXACT, "maximum": INT64},
        [-EXACT, INT64, INT64 - 1],
        [-EXACT - 1, INT64 + 1, 10 * INT64],
    ),
]


@pytest.mark.parametrize(("bounds", "good", "bad"), BOUNDED)
def test_bounds_of_large_whole_numbers(
    bounds: dict[str, Any], good: list[int], bad: list[int]
) -> None:
    spec = json_schema({"type": "integer", **bounds})
    assert [accepts(GRAMMARS, BYTES, spec, str(number)) for number in good] == [True] * len(good)
    assert [accepts(GRAMMARS, BYTES, spec, str(number)) for number in bad] == [False] * len(bad)


ROUNDED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": EXACT + 1}, "minimum is 9007199254740992"),
    # which ended the process
    ({"type": "integer", "minimum": -(2**63), "maximum": INT64}, "minimum is -9223372036854775808"),
    ({"type": "number", "maximum": INT64}, "maximum is 9223372036854775807"),
    ({"maximum": INT64}, "maximum is 9223372036854775807"),
    ({"type": "integer", "exclusiveMaximum": INT64 + 1}, "exclusiveMaximum is 9223372036854775808"),
    ({"type": "integer", "maximum": 1e19}, r"maximum is 1e\+19"),
    ({"const": -(2**63)}, "const is -9223372036854775808"),
    (
        {"properties": {"id": {"enum": [1, [{"a": EXACT + 2}]]}}},
        r"properties\.id\.enum\.1\.0\.a is 9007199254740993",
    ),
]


@pytest.mark.parametrize(("schema", "match"), ROUNDED)
def test_numbers_that_would_be_rounded_are_refused(schema: Any, match: str) -> None:
    """Catches an answer held to another bound or constant than the schema's, by one to a thousand."""
    text = json.dumps(schema)
    for spec in (
        json_schema(schema),
        lark(f"start: %json {text}"),
        ebnf(f'start: "a" %json\n {text}'),
    ):
        with pytest.raises(
            RequestError,
            match=rf"^{spec.name}\.{match}, and an answer can be held to whole numbers up to",
        ):
            GRAMMARS.constraint(spec)


@pytest.mark.parametrize(("schema", "match"), WRONG)
def test_a_wrong_schema_is_refused_with_the_path(schema: Any, match: str) -> None:
    """Catches a keyword that is ignored, and an error that leaves a client to search a schema of
    pages."""
    with pytest.raises(RequestError, match=match):
        GRAMMARS.constraint(json_schema(schema))


@pytest.mark.parametrize(
    "make", [lambda: regex("a(b"), lambda: ebnf("root ::= item"), lambda: lark("start: item")]
)
def test_a_wrong_grammar_is_refused(make: Any) -> None:
    with pytest.raises(RequestError, match=r"regex|grammar"):
        GRAMMARS.constraint(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema([1]),
        lambda: regex(""),
        lambda: choice([]),
        lambda: choice("ab"),
        lambda: ebnf(3),
    ],  # type: ignore[arg-type,list-item]
)
def test_what_is_no_grammar_at_all_is_refused_at_once(make: Any) -> None:
    with pytest.raises(RequestError):
        make()


# ---------------------------------------------------------------- tokenizers


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram-like BPE with bytes and `▁`, as Llama 2 has it."""
    letters = ["▁", *'{}":,[]abcdefghijklmnopqrstuvwxyz0123456789', "▁a", "ab"]
    vocab = {"</s>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {letter: 257 + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def demo_tokenizer() -> PreTrainedTokenizerFast:
    return as_transformers(train_tokenizer(['{"a": 1} is it'] * 9, 300))


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, demo_tokenizer])
def test_other_tokenizers(make: Any) -> None:
    """SentencePiece, and the demo pair's kind (byte-level, every digit alone)."""
    tokenizer = make()
    grammars = Grammars(tokenizer, len(tokenizer), [])
    spec = json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    assert accepts(grammars, tokenizer, spec, '{"a": 12}')
    assert accepts(grammars, tokenizer, choice(["ab", "é"]), "é")
    assert not accepts(grammars, tokenizer, spec, json.dumps({"a": "x"}))


def test_a_tokenizer_that_implies_spaces_is_refused() -> None:
    with pytest.raises(CapabilityError, match="implies the spaces between its words"):
        Grammars(word_tokenizer(10), 10, [EOS]).constraint(json_object())


@pytest.mark.parametrize("make", OTHERS.values())
def test_a_tokenizer_without_bytes_of_tokens_is_refused(make: Any) -> None:
    with pytest.raises(CapabilityError, match="does not say which bytes its tokens add to a text"):
        Grammars(make(), 10, [EOS]).constraint(json_object())


@pytest.mark.parametrize("make", [*WITH_BYTE_FALLBACK.values(), t5, gpt_2])
def test_a_grammar_sees_the_bytes_that_the_text_gets(make: Any) -> None:
    """Catches a grammar that reads a token as other bytes than the answer will have."""
    tokenizer = make()
    known = token_bytes(tokenizer)
    index = index_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    assert known is not None
    for token in set(range(len(tokenizer))) - known.special_ids:
        # which begins the names of special tokens in llguidance
        if known.bytes_of(token) != b"\xff":
            assert index.decode_bytes([token]) == known.bytes_of(token)


def test_a_model_without_tokenizer_or_end_is_refused() -> None:
    with pytest.raises(CapabilityError, match="no tokenizer"):
        Grammars(None, 10, []).constraint(json_object())
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(CapabilityError, match="no end token"):
        Grammars(endless, 257, []).constraint(json_object())


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's environment has one that ignores the rule for white space."""
    monkeypatch.setattr("outrider.grammar.grammars.version", lambda _: "1.7.6")
    grammars._library.cache_clear()
    with pytest.raises(CapabilityError, match=r"llguidance 1.9 or later, got 1.7.6"):
        Grammars(BYTES, 257, [EOS]).constraint(regex("a+"))
