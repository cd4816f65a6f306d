"""A model's tokenizer: the same answers as transformers' own, in a first start and in a later one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from outrider.messages import encode_conversation
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.models.tokens.token_bytes import token_bytes
from tests.helpers import byte_tokenizer, word_tokenizer


def pair(template: str | None = None) -> tuple[ModelTokenizer, Any]:
    """As a later start reads it, and transformers'."""
    real = byte_tokenizer()
    real.chat_template = template
    real.bos_token = real.eos_token
    own = ModelTokenizer.of(real)
    assert own is not None
    return ModelTokenizer(json.loads(json.dumps(own.record)), lambda: real), real


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{{ add_generation_prompt }}"
TURNS = [{"role": "user", "content": " Why? 🙂"}, {"role": "assistant", "content": "So."}]


def test_conversations_are_written_without_transformers() -> None:
    kept, real = pair(TEMPLATE)
    kept._load_whole = lambda: pytest.fail("the whole tokenizer was asked for")
    expected = real.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    assert encode_conversation(kept, TURNS, TEMPLATE, add_generation_prompt=True) == expected
    assert encode_conversation(real, TURNS, TEMPLATE, add_generation_prompt=True) == expected


def test_encoding_and_decoding() -> None:
    kept, real = pair()
    ids = real("Zwölf\n 🙂")["input_ids"]
    assert (
        kept("Zwölf\n 🙂")["input_ids"]
        == kept("Zwölf\n 🙂", add_special_tokens=False, verbose=False)["input_ids"]
        == ids
    )
    assert (
        kept.decode(ids, clean_up_tokenization_spaces=False) == real.decode(ids) == kept.decode(ids)
    )
    assert kept.whole is real
    with pytest.raises(ValueError, match="spaces are kept"):
        kept.decode(ids, clean_up_tokenization_spaces=True)
    added = {token: entry.content for token, entry in real.added_tokens_decoder.items()}
    assert {token: entry.content for token, entry in kept.added_tokens_decoder.items()} == added
    assert (kept.get_vocab(), len(kept), kept.eos_token_id) == (
        real.get_vocab(),
        len(real),
        real.eos_token_id,
    )
    assert copy.deepcopy(kept)("abc") == kept("abc")
    ours = token_bytes(kept)
    theirs = token_bytes(real)
    assert ours is not None
    assert theirs is not None
    assert (ours.shape, ours.special_ids, ours.is_joined) == (
        theirs.shape,
        theirs.special_ids,
        theirs.is_joined,
    )


def test_a_class_with_code_of_its_own_is_not_kept() -> None:
    class Own(type(word_tokenizer(5))):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **named: Any) -> str:
            return "own"

    assert ModelTokenizer.of(Own(tokenizer_object=word_tokenizer(5).backend_tokenizer)) is None
