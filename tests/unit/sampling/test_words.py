"""Bad words in every vocabulary: no tokens write one, in whatever pieces, and other words that hold
it stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.demo import DEMO_PROMPTS
from outrider.models.tokens.token_bytes import special_ids
from outrider.models.tokens.token_text import vocabulary_bytes
from outrider.sampling.words import BadWords, Spelling, Tail
from tests.helpers import byte_tokenizer, word_tokenizer
from tests.subword import byte_level_bpe, sentencepiece_bpe

PIECES = [
    "", "a", "b", " a", "ab", " ab", "ba", "aba", "1", "12", "a1", "é", "éa", "aé", "(ab", "ab)", "苹", "果", "苹果汁", ".", "AB",
]  # fmt: skip
LETTER = [
    letter.encode()[index : index + 1] for letter in "é苹" for index in range(len(letter.encode()))
]
VOCABULARY = [*(piece.encode() for piece in PIECES), *LETTER]
WORDS = ["a", "ab", "aba", "1", "12", "é", "苹果", "果", "a b", "ab.", "b1a", "(", "éaé", "AB"]


def banned(vocabulary: list[bytes], words: list[str], tokens: list[int]) -> set[int]:
    made = BadWords(Spelling(vocabulary), words)
    return made.anywhere | made.completing(made.after(Tail(), tokens))


def together(one: str, other: str) -> bool:
    """Two letters of one word: both have case, or both are digits."""

    def kind(letter: str) -> int:
        return 1 if letter.lower() != letter.upper() else 2 if letter.isdigit() else 0

    return bool(one and other) and kind(one) == kind(other) > 0


def completes(vocabulary: list[bytes], word: str, tokens: list[int], token: int) -> bool:
    """Looked up letter by letter in the whole text."""
    before = b"".join(vocabulary[t] for t in tokens)
    starts = {len(b"".join(vocabulary[t] for t in tokens[:n])) for n in range(len(tokens) + 1)}
    text = before + vocabulary[token]
    wanted = word.encode()
    for at in range(len(text) - len(wanted) + 1):
        end = at + len(wanted)
        if text[at:end] != wanted or end <= len(before):
            continue
        left = text[max(0, at - 4) : at].decode(errors="ignore")[-1:]
        right = text[end : end + 4].decode(errors="ignore")[:1]
        if (at in starts or not together(left, word[0])) and not together(word[-1], right):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=7),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
)
def test_whatever_would_complete_a_word_is_banned_and_nothing_else(
    tokens: list[int], words: list[str]
) -> None:
    """Against a look at every position of the text. Catches pieces across tokens, halves of
    letters, and edges of words."""
    expected = {
        token
        for token in range(len(VOCABULARY))
        if any(completes(VOCABULARY, word, tokens, token) for word in words)
    }
    assert banned(VOCABULARY, words, tokens) == expected


def segmentations(
    vocabulary: dict[bytes, int], text: bytes, count: int, seed: int
) -> Iterator[list[int]]:
    """Random ways to write a text."""
    draw = random.Random(seed)
    for _ in range(count):
        at = 0
        tokens = []
        while at < len(text):
            ends = [end for end in range(at + 1, len(text) + 1) if text[at:end] in vocabulary]
            end = draw.choice(ends)
            tokens.append(vocabulary[text[at:end]])
            at = end
        yield tokens


@pytest.mark.parametrize(
    "make", [lambda: byte_level_bpe(400), lambda: sentencepiece_bpe(400), byte_tokenizer]
)
@pytest.mark.parametrize("word", ["question", "shells", "fibonacci(", "be or", "naïve", "dog,"])
@pytest.mark.parametrize("before", ["", " ", "\n", "the ", "("])
def test_no_way_to_write_a_word_is_left(make: Callable[[], Any], word: str, before: str) -> None:
    """Bare, behind a space, a line end or a bracket, in the tokenizer's own tokens and in any
    others."""
    tokenizer = make()
    spelled = vocabulary_bytes(tokenizer, len(tokenizer))
    vocabulary = {
        text: token
        for token, text in enumerate(spelled)
        if token not in special_ids(tokenizer) and text
    }
    made = BadWords(Spelling(spelled), [word])
    own = tokenizer(before + word, add_special_tokens=False)["input_ids"]
    for tokens in [own, *segmentations(vocabulary, (before + word).encode(), 40, 0)]:
        stopped = [
            token in made.anywhere | made.completing(made.after(Tail(), tokens[:index]))
            for index, token in enumerate(tokens)
        ]
        assert any(stopped), tokens


@pytest.mark.parametrize(
    ("word", "token", "is_banned"),
    [
        ("apples", " apples", True),
        ("apples", "apples", True),
        ("apples", "(apples", True),
        ("apples", "_apples", True),
        ("apples", "37apples", True),
        ("apples", "apples.", True),
        ("apples", "\n\napples", True),
        ("apples", "apples's", True),
        ("apples", " applesauce", False),
        ("apples", " pineapples", False),
        ("apples", " Apples", False),
        ("apple", " apples", False),
        ("ass", " class", False),
        ("37", "137", False),
        ("37", "x37", True),
        ("苹果", "红苹果汁", True),
        ("\n", ".\n", True),
        ("é", "café", False),
        ("caf", "café", False),
    ],
)
def test_a_longer_word_of_one_token_is_another_word(word: str, token: str, is_banned: bool) -> None:
    assert banned([b"<s>", token.encode()], [word], []) == ({1} if is_banned else set())


def test_tokens_that_the_text_does_not_show_are_no_way_around() -> None:
    """A special token between two pieces is there for nobody, unless special tokens show; it may be
    a bad word itself."""
    spelling = Spelling([b"<s>", b" app", b"les"])
    hidden = BadWords(spelling, ["apples"], silent=[0])
    shown = BadWords(spelling, ["apples"])
    assert hidden.completing(hidden.after(Tail(), [1, 0])) == {2}
    assert shown.completing(shown.after(Tail(), [1, 0])) == set()
    assert BadWords(spelling, ["<s>"], silent=[0]).anywhere == {0}


def test_words_of_vocabularies_that_imply_spaces() -> None:
    """WordLevel puts the space before, the first BPE behind."""
    words = word_tokenizer(5)
    assert vocabulary_bytes(words, 6) == [b"<|end|>", b" w1", b" w2", b" w3", b" w4", b""]
    assert banned(vocabulary_bytes(words, 6), ["w1 w2"], [1]) == {2}


@pytest.fixture(scope="module")
def pair() -> tuple[LLM, LLM]:
    return LLM("demo", threads=1), LLM("demo", drafter="none", threads=1)


@pytest.mark.parametrize("words", [["apples"], ["more"], ["lemons", "has"], ["19"], ["="]])
def test_the_demo_does_not_say_them(pair: tuple[LLM, LLM], words: list[str]) -> None:
    """Greedy texts are plain decoding's, seeded ones keep their bans; a draft is accepted all the
    same."""
    prompts = list(DEMO_PROMPTS[:3])
    greedy, warm = (
        SamplingParams(max_tokens=40, bad_words=words, temperature=t, seed=3) for t in (0, 1)
    )
    drafted, plain = (llm.generate(prompts, greedy) for llm in pair)
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert sum(one.stats.accepted for one in drafted) > 10
    for one in (*drafted, *pair[0].generate(prompts, warm), *pair[1].generate(prompts, warm)):
        assert not any(word in one.text for word in words), one.text
