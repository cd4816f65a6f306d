"""Translation between tokenizers: what a token says, the committed text in draft tokens, and the
way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.models.tokens.alignment import MAX_CHUNK, DraftContext, TokenizerPair
from outrider.models.tokens.bytes_text import UNFINISHED
from outrider.models.tokens.token_text import TokenText
from tests.helpers import byte_tokenizer, word_tokenizer
from tests.subword import byte_level_bpe, sentencepiece_bpe

TEXT = (
    "the quick brown fox — naïve 😀 dogs\n    return number\n\nshe sells  sea shells, to be or not to be "
    * 4
)
MAKERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_tokenizer,
    "small bpe": lambda: byte_level_bpe(290, end="<eos>"),
    "large bpe": lambda: byte_level_bpe(400),
    "sentencepiece": lambda: sentencepiece_bpe(360),
}
PAIRS = [(target, draft) for target in MAKERS for draft in MAKERS]
every_pair = pytest.mark.parametrize(("target", "draft"), PAIRS)


def pair_of(target: str, draft: str) -> TokenizerPair:
    left = MAKERS[target]()
    right = MAKERS[draft]()
    return TokenizerPair(left, right, len(left), len(right))


def context_of(pair: TokenizerPair, tokens: list[int]) -> DraftContext:
    context = DraftContext(pair)
    context.update(tokens)
    return context


@every_pair
def test_the_draft_reads_the_committed_text(target: str, draft: str) -> None:
    """Catches lost or doubled spaces and characters where chunks meet, and tokens no tokenizer
    would make of the text."""
    pair = pair_of(target, draft)
    tokenizer = MAKERS[draft]()
    tokens = MAKERS[target]()(TEXT)["input_ids"]
    context = context_of(pair, tokens)
    expected = tokenizer(TEXT)["input_ids"]
    assert len(tokens) > 2 * MAX_CHUNK
    assert context.covered == len(tokens)
    assert pair.draft.text(context.tokens) == tokenizer.decode(expected)
    assert abs(len(context.tokens) - len(expected)) <= 0.05 * len(expected)


@every_pair
def test_translation_does_not_depend_on_the_steps(target: str, draft: str) -> None:
    """Catches a chunk that is closed early or late when its tokens come a few at a time: commit
    must be total.

    Broken bytes and special tokens included.
    """
    pair = pair_of(target, draft)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, len(MAKERS[target]()), 150).tolist()
    tokens = MAKERS[target]()(TEXT)["input_ids"][:150] + noise
    grown = DraftContext(pair)
    at = 0
    while at < len(tokens):
        at = min(len(tokens), at + int(rng.integers(1, 6)))
        grown.update(tokens[:at])
        fresh = context_of(pair, tokens[:at])
        assert (grown.tokens, grown.covered, grown.segment) == (
            fresh.tokens,
            fresh.covered,
            fresh.segment,
        )
        assert grown.is_complete or draft != "bytes"


@every_pair
def test_what_the_draft_says_comes_back_as_the_targets_tokens(target: str, draft: str) -> None:
    """Catches a continuation shifted by a token, a doubled space, or words the target would never
    split like that.

    The text is cut after each of its target tokens, in the middle of words and characters; the
    draft says the rest.
    """
    pair = pair_of(target, draft)
    tokenizer = MAKERS[draft]()
    text = "the brown naïve dogs — 😀 number\n    return if she sells"
    tokens = MAKERS[target]()(text)["input_ids"]
    offered = 0
    for cut in range(2, len(tokens)):
        context = context_of(pair, tokens[:cut])
        known = [token for token in context.tokens if token != tokenizer.bos_token_id]
        rest = tokenizer(text, add_special_tokens=False)["input_ids"]
        if rest[: len(known)] != known:  # the draft's tokens of the whole text do not split here
            continue
        found = pair.continuation(tokens[:cut], context, rest[len(known) :])
        assert found == tokens[cut:], cut
        offered += 1
    assert offered > 8


def test_a_split_word_is_continued_as_it_stands() -> None:
    """Catches no proposal at all (or a doubled word) where the committed tokens are not those the
    tokenizer would choose."""
    pair = pair_of("large bpe", "small bpe")
    target = MAKERS["large bpe"]()
    draft = MAKERS["small bpe"]()
    tokens = [*target("she ")["input_ids"], *target("s")["input_ids"]]
    context = context_of(pair, tokens)
    found = pair.continuation(tokens, context, draft("ells sea")["input_ids"])
    assert pair.target.text([*tokens, *found]) == "she sells sea"


def test_an_unfinished_character_waits_for_its_bytes() -> None:
    """Catches U+FFFD fed to the draft as if it were text, and drafts that repeat the bytes already
    there."""
    target = byte_tokenizer()
    draft = sentencepiece_bpe(360)
    smile = target("😀")["input_ids"]
    pair = TokenizerPair(target, draft, 257, len(draft))
    # a draft without bytes
    pair.to_draft = {token: own for token, own in pair.to_draft.items() if token not in smile}
    tokens = target("she ")["input_ids"] + smile[:2]
    context = context_of(pair, tokens)
    assert context.covered == len(tokens) - 2
    assert UNFINISHED not in pair.draft.text(context.tokens)
    guess = draft("😀 sells", add_special_tokens=False)["input_ids"][1:]  # behind "she "
    assert pair.continuation(tokens, context, guess) == smile[2:] + target(" sells")["input_ids"]
    other = draft("naïve", add_special_tokens=False)["input_ids"]
    assert pair.continuation(tokens, context, other) == []


def test_special_tokens_become_the_drafts_own() -> None:
    """Catches an end token read aloud as text, a doubled begin token, and chat marks glued to the
    words beside them."""
    target = sentencepiece_bpe(360)
    draft = byte_level_bpe(400, end="<eos>")
    target.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    pair = TokenizerPair(target, draft, len(target), len(draft))
    mark = target.convert_tokens_to_ids("<|user|>")
    end = target.eos_token_id
    words = target("she sells", add_special_tokens=False)["input_ids"]
    ids = draft("she sells")["input_ids"]
    assert context_of(pair, [target.bos_token_id, mark, *words, end, *words]).tokens == [
        *ids,
        0,
        *ids,
    ]
    assert (
        pair.continuation(words, context_of(pair, words), [*draft(" sea")["input_ids"], 0, *ids])[
            -1
        ]
        == end
    )
    back = TokenizerPair(draft, target, len(draft), len(target))
    assert context_of(back, ids).tokens == [target.bos_token_id, *words]
    same = TokenizerPair(target, target, len(target), len(target))
    assert context_of(same, [target.bos_token_id, *words]).tokens == [target.bos_token_id, *words]


def test_shared_tokens_say_the_same() -> None:
    """Catches a code for bytes read wrongly: the maps would then pair tokens of different text, one
    with several, or few."""
    for target, draft in PAIRS:
        pair = pair_of(target, draft)
        assert len(set(pair.to_target.values())) == len(pair.to_target)
        assert {theirs: ours for ours, theirs in pair.to_draft.items()} == pair.to_target
        roles = pair.draft.specials
        same = [
            (a, b)
            for a, b in pair.to_target.items()
            if a not in roles and target != "sentencepiece" != draft
        ]
        assert all(pair.draft.text([a]) == pair.target.text([b]) for a, b in same)
        assert len(pair.to_target) > 256  # every byte
    equal = pair_of("large bpe", "large bpe")
    assert equal.coverage == 1
    assert all(ours == theirs for ours, theirs in equal.to_target.items())
    line_end = byte_tokenizer()("\n")["input_ids"][0]
    assert (
        TokenText(sentencepiece_bpe(360)).keys[3 + 0x0A]
        == b"\n"
        == TokenText(byte_tokenizer()).keys[line_end]
    )


def test_ids_beyond_a_models_vocabulary_are_not_shared() -> None:
    """Catches a token that the model has no row for."""
    tokenizer = byte_tokenizer()
    assert max(TokenizerPair(tokenizer, tokenizer, 200, 257).to_target) == 199
    assert max(TokenizerPair(tokenizer, tokenizer, 257, 100).to_target) == 99


def test_words_without_spaces_of_their_own() -> None:
    """Catches words glued together: this tokenizer implies the space between its tokens."""
    words = word_tokenizer(9)
    letters = byte_tokenizer()
    pair = TokenizerPair(words, letters, 9, 257)
    tokens = [1, 2, 3] * 40
    text = " ".join(["w1 w2 w3"] * 40)
    assert context_of(pair, tokens).tokens == letters(text)["input_ids"]
    assert set(pair.to_target) == {0}  # the end token
