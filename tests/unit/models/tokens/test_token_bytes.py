"""The bytes of single tokens, read from the decoders that published tokenizers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from outrider.models.tokens.bytes_text import UNFINISHED
from outrider.models.tokens.token_bytes import decoder_shape, show_bytes, token_bytes, token_name
from tests.helpers import byte_tokenizer, word_tokenizer
from tests.published_tokenizers import (
    ALL,
    JOINED,
    PythonBytes,
    bert,
    gemma,
    gpt_2,
    llama_2,
    phi_3,
    t5,
    words,
)

CASES = [
    (llama_2, "▁there", b" there"), (llama_2, "<0xF0>", b"\xf0"), (llama_2, "x<0x41>", b"x<0x41>"), (llama_2, "</s>", b"</s>"),
    (phi_3, "▁there", b" there"), (gemma, "▁▁", b"  "), (t5, "▁there", b" there"), (t5, "a▁b", b"a b"),
    (gpt_2, "Ġthe", b" the"), (gpt_2, "aâ", b"a\xe2"), (gpt_2, "<｜tool▁sep｜>", "<｜tool▁sep｜>".encode()),
    (gpt_2, "two words", b"two words"), (bert, "the", b" the"), (bert, "##re", b"re"), (bert, ".", b"."), (bert, "##", b""),
    (words, "cat", b" cat"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "token", "expected"), CASES)
def test_bytes_inside_a_text(make: Any, token: str, expected: bytes) -> None:
    tokenizer = make()
    known = token_bytes(tokenizer)
    assert known is not None
    assert known.is_joined
    assert known.bytes_of(tokenizer.convert_tokens_to_ids(token)) == expected


@pytest.mark.parametrize("name", JOINED)
def test_every_token_adds_its_bytes(name: str) -> None:
    """Catches a token of some rare kind: the tokenizer's own decoder, behind a token that is no
    byte, must say the same."""
    tokenizer = JOINED[name]()
    known = token_bytes(tokenizer)
    anchor = tokenizer.eos_token_id
    assert known is not None
    for token in range(len(tokenizer)):
        whole = tokenizer.decode([anchor, token], skip_special_tokens=False)
        assert whole.removeprefix("</s>") == known.bytes_of(token).decode(errors="replace")
        if UNFINISHED not in whole:
            start = tokenizer.decode([token], skip_special_tokens=False)
            stripped = known.bytes_at_start(token).decode()
            assert start == (stripped.removeprefix(" ") if known.shape.max_strips else stripped)


def test_names_are_for_people() -> None:
    tokenizer = llama_2()
    names = [
        token_name(tokenizer, token)
        for token in tokenizer.convert_tokens_to_ids(["▁there", "<0xF0>", "</s>"])
    ]
    assert names == [" there", "bytes:\\xf0", "</s>"]
    assert token_name(tokenizer, 9999) == "#9999"
    assert token_name(bert(), bert().eos_token_id) == "</s>"
    assert [token_name(PythonBytes(), token) for token in (97, 255)] == ["a", "b255"]
    assert token_name(word_tokenizer(5), 3) == " w3"
    assert show_bytes("é".encode()) == "é"


def test_bytes_of_a_character_in_halves() -> None:
    tokenizer = byte_tokenizer()
    known = token_bytes(tokenizer)
    assert known is not None
    assert b"".join(known.bytes_of(token) for token in tokenizer("é")["input_ids"]) == "é".encode()
    assert known.name(0) == "<|end|>"
    assert known.bytes_of(100_000) == b""


def test_a_tokenizers_bytes_are_read_once() -> None:
    tokenizer = llama_2()
    assert token_bytes(tokenizer) is token_bytes(tokenizer)
    assert token_bytes(PythonBytes()) is None


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("x", "Ġ"), decoders.ByteLevel()]),
    ],
)
def test_decoders_that_look_at_neighbours_are_not_read_token_by_token(decoder: Any) -> None:
    """Catches a decoder that is read half: its text would differ from the tokenizer's own."""
    tokenizer = ALL["gemma"]()
    tokenizer.backend_tokenizer.decoder = decoder
    known = token_bytes(tokenizer)
    assert known is not None
    assert not known.is_joined


def test_nested_sequences_are_read() -> None:
    nested = {
        "type": "Sequence",
        "decoders": [
            {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            {"type": "Fuse"},
        ],
    }
    shape = decoder_shape(nested)
    assert shape is not None
    assert shape.has_byte_fallback
    assert shape.is_fused


def test_a_class_that_decodes_in_its_own_way_is_not_read_token_by_token() -> None:
    class Own(type(gemma())):
        def _decode(self, *ids: Any, **options: Any) -> str:
            return super()._decode(*ids, **options).upper()

    known = token_bytes(Own(tokenizer_object=gemma().backend_tokenizer))
    assert known is not None
    assert not known.is_joined


def test_the_shared_models(shared: Path) -> None:
    """Catches what the miniatures do not model."""
    for folder in ("stories260K", "pair-14M/target"):
        if not (shared / "models" / folder).exists():
            pytest.skip(f"no model at {folder}")
        tokenizer = AutoTokenizer.from_pretrained(shared / "models" / folder)
        known = token_bytes(tokenizer)
        assert known is not None
        text = " there: naïve 日本語 😀"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(known.bytes_of(token) for token in ids).decode().strip() == text.strip()
