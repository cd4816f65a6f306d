"""Answers that may not end yet, and words that must not appear: in every distribution, with every
drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.grammar import Grammars, choice
from outrider.models.tokens.token_text import vocabulary_bytes
from outrider.sampling.bans import Bans
from outrider.sampling.params import SamplingParams
from outrider.sampling.words import BadWords, Spelling
from tests.helpers import EOS, bad_words, byte_tokenizer, disturbed, save_checkpoint, tiny_llama

TOKENIZER = byte_tokenizer()
VOCAB = 12
EAGER = {EOS: 60.0}  # every answer would end at once
DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("draft-model", {}), ("draft-model", {"tree": "2x2"}), ("ngram", {}), ("recycling", {}), ("early-exit", {"exit_layer": 1}),
    ("universal", {"method": "shared"}),
]  # fmt: skip


def banned(bans: Bans, path: list[int]) -> set[int]:
    [mask] = bans.allowed([path])
    return set((~mask).nonzero()[:, 0].tolist())


def test_ends_are_held_back_until_the_answer_is_long_enough() -> None:
    """Counted along draft paths, and asking changes nothing."""
    bans = Bans(VOCAB, min_tokens=3, ends=[0, 7])
    assert [banned(bans, path) for path in ([], [4, 5], [4, 5, 6])] == [{0, 7}, {0, 7}, set()]
    bans.commit([4, 5])
    assert [banned(bans, path) for path in ([], [9])] == [{0, 7}, set()]


def test_the_last_token_of_a_word_is_banned_behind_its_beginning_only() -> None:
    """A word may begin in the committed text and continue in the draft."""
    bans = Bans(VOCAB, words=bad_words([[3], [4, 5, 6], [5, 8]], VOCAB))
    assert banned(bans, []) == {3}
    assert banned(bans, [4, 5]) == {3, 6, 8}
    bans.commit([9, 9, 4])
    assert banned(bans, [5]) == {3, 6, 8}
    assert banned(bans, [5, 5]) == {3, 8}


def test_a_grammar_that_is_complete_ends_a_short_answer() -> None:
    """Without this rule no token at all would be allowed."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    bans = Bans(
        257, min_tokens=20, ends=[EOS], inner=grammars.constraint(choice(["yes", "yesterday"]))
    )
    for token in TOKENIZER("yes")["input_ids"]:
        assert EOS in banned(bans, [])
        bans.commit([token])
    assert EOS in banned(bans, []), "it may go on: yesterday"
    bans.commit(TOKENIZER("terday")["input_ids"])
    assert banned(bans, []) == set(range(257)) - {EOS}


@pytest.mark.slow
def test_bad_words_that_are_none_are_refused(llm_for: Callable[..., LLM]) -> None:
    """By name: what this vocabulary cannot write, and what is no text."""
    with pytest.raises(OutriderError, match=r"bad_words.* surrogate"):
        llm_for("none", {}).generate([[5, 6]], SamplingParams(bad_words=["\ud800"]))
    words = BadWords(Spelling([b"<s>", b"a", b"b"]), ["ab", "abc", "c"])
    assert words.unwritten == ["abc", "c"]
    with pytest.raises(ConfigError, match=r"bad_words\[0\] must not be empty"):
        SamplingParams(bad_words=[""])
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_words_that_leave_a_grammar_nothing_are_an_error() -> None:
    """One that names both, at once where the answer stands there."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    spelled = Spelling(vocabulary_bytes(TOKENIZER, 257))
    bans = Bans(
        257, words=BadWords(spelled, ["yes"]), inner=grammars.constraint(choice(["yes", "no"]))
    )
    y, e, n = TOKENIZER("yen")["input_ids"]
    assert banned(bans, []) == set(range(257)) - {y, n}
    bans.commit([y])
    bans.commit([e])
    with pytest.raises(RequestError, match=r"bad_words leave no token.*grammar"):
        bans.allowed([[]])


def test_a_draft_that_leads_nowhere_harms_nobody() -> None:
    """Until it is accepted: the token behind it completes no word, and then the answer is an error."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    spelled = Spelling(vocabulary_bytes(TOKENIZER, 257))
    y, e, s, n, o = TOKENIZER("yesno")["input_ids"]

    def made() -> Bans:
        words = BadWords(spelled, ["yes"])
        return Bans(257, ends=[EOS], words=words, inner=grammars.constraint(choice(["yes", "no"])))

    other = made()
    taken = made()
    masks = [bans.allowed([[], [y], [y, e], [n]])[2] for bans in (other, taken)]
    assert not any(mask[s] or mask[EOS] for mask in masks)
    for token in (n, o):
        other.commit([token])
    assert banned(other, []) == set(range(257)) - {EOS}
    taken.commit([y])
    taken.commit([e])
    with pytest.raises(RequestError, match="bad_words leave no token"):
        taken.commit([int(masks[1].nonzero()[0])])
    with pytest.raises(RequestError, match="bad_words leave no token"):
        taken.allowed([[]])


@pytest.fixture(scope="module")
def llm_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "target", target, TOKENIZER)
    save_checkpoint(folder / "draft", disturbed(target, 0.1), TOKENIZER)

    def make(drafter: str, options: dict[str, Any]) -> LLM:
        draft = folder / "draft" if drafter in ("draft-model", "universal") else None
        return LLM(
            folder / "target", drafter=drafter, draft=draft, drafter_options=options, threads=1
        )

    return make


def asked() -> list[SamplingParams]:
    """Greedy and seeded; too short, and full of words."""
    early: dict[str, Any] = {"logit_bias": EAGER, "min_tokens": 9, "max_tokens": 14}
    words: dict[str, Any] = {"bad_words": ["e", "th", "\n"], "max_tokens": 24, "ignore_eos": True}
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    return [SamplingParams(**kind, **more) for more in ({}, seeded) for kind in (early, words)]


@pytest.mark.parametrize(("drafter", "options"), DRAFTERS)
def test_drafts_do_not_show(
    llm_for: Callable[..., LLM], drafter: str, options: dict[str, Any]
) -> None:
    """Greedy rows emit the text of plain decoding; every row keeps its bans and still has some
    drafts accepted."""
    prompts = [TOKENIZER("the one with the theme")["input_ids"] * 2] * 4
    plain = llm_for("none", {}).generate(prompts, asked())
    done = llm_for(drafter, options).generate(prompts, asked())
    assert [one.token_ids for one in done[:2]] == [one.token_ids for one in plain[:2]]
    for one in (*plain, *done):
        if len(one.token_ids) < 20:
            assert len(one.token_ids) == 10
            assert one.token_ids.index(EOS) == 9
        else:
            assert not {"e", "\n"} & set(one.text)
            assert "th" not in one.text
    if drafter == "draft-model":
        assert sum(one.stats.accepted for one in done) > 10


def test_special_tokens_show_where_they_are_wanted(llm_for: Callable[..., LLM]) -> None:
    """The one that ends an answer is no part of its text; stop strings count once the answer is
    long enough."""
    llm = llm_for("none", {})
    prompt = [5, 6, 7]
    fixed = {"logit_bias": EAGER, "max_tokens": 3}
    shown = SamplingParams(**fixed, skip_special_tokens=False, ignore_eos=True)
    ended = SamplingParams(**fixed, skip_special_tokens=False)
    hidden = SamplingParams(**fixed, ignore_eos=True)
    texts = [one.text for one in llm.generate([prompt] * 3, [shown, ended, hidden])]
    assert texts == ["<|end|>" * 3, "", ""]
    chunks = list(llm.stream(prompt, shown))
    assert "".join(chunk.text for chunk in chunks) == "<|end|>" * 3
    biased = SamplingParams(
        logit_bias={70: 90.0}, stop=[TOKENIZER.decode([70])], min_tokens=4, max_tokens=9
    )
    [one] = llm.generate([prompt], biased)
    assert one.token_ids == [70] * 5
    assert one.text == TOKENIZER.decode([70] * 4)


def test_what_ends_an_answer_is_part_of_it_where_it_is_wanted(llm_for: Callable[..., LLM]) -> None:
    """vLLM's include_stop_str_in_output: the stop string, and an end token where special tokens
    show."""
    llm = llm_for("none", {})
    prompt = [5, 6, 7]
    letter = TOKENIZER.decode([70])
    stopped = {"logit_bias": {70: 90.0}, "stop": [letter * 2], "max_tokens": 9}
    ended = {"logit_bias": EAGER, "max_tokens": 3, "skip_special_tokens": False}
    wanted = [
        SamplingParams(**stopped, include_stop_str_in_output=True),
        SamplingParams(**stopped),
        SamplingParams(**ended, include_stop_str_in_output=True),
        SamplingParams(**ended),
    ]
    found = llm.generate([prompt] * 4, wanted)
    assert [one.text for one in found] == [letter * 2, "", "<|end|>", ""]
    assert [one.finish_reason for one in found] == ["stop"] * 4
    assert ["".join(chunk.text for chunk in llm.stream(prompt, params)) for params in wanted] == [
        one.text for one in found
    ]


def test_words_that_leave_none_of_the_allowed_tokens_are_refused(
    llm_for: Callable[..., LLM],
) -> None:
    """Before the request runs, and by both names."""
    x, y = TOKENIZER("xy")["input_ids"]
    llm = llm_for("none", {})
    with pytest.raises(ConfigError, match=r"bad_words .* allowed_token_ids"):
        llm.generate([[5, 6]], SamplingParams(bad_words=["x"], allowed_token_ids=[x]))
    [one] = llm.generate(
        [[5, 6]], SamplingParams(bad_words=["x"], allowed_token_ids=[x, y], max_tokens=2)
    )
    assert one.text == "yy"


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_drafts_that_leave_none_of_the_allowed_tokens(
    llm_for: Callable[..., LLM], drafter: str
) -> None:
    """They cost nothing where the answer goes elsewhere; where it goes there it is an error, not a
    bad word at its end."""
    x, y = TOKENIZER("xy")["input_ids"]
    llm = llm_for(drafter, {})
    prompt = [y, x, y, y] * 3
    options: dict[str, Any] = {
        "bad_words": ["xx", "xy"],
        "allowed_token_ids": [x, y],
        "max_tokens": 4,
    }
    [done] = llm.generate([prompt], SamplingParams(**options, logit_bias={y: 90.0}))
    assert done.text == "yyyy"
    with pytest.raises(RequestError, match=r"bad_words leave no token"):
        llm.generate([prompt], SamplingParams(**{**options, "max_tokens": 2}, logit_bias={x: 90.0}))


def test_end_tokens_alone_cannot_make_a_long_answer(llm_for: Callable[..., LLM]) -> None:
    """Refused before it runs, by both names."""
    with pytest.raises(ConfigError, match=r"min_tokens forbid .* allowed_token_ids"):
        llm_for("none", {}).generate(
            [[5, 6]], SamplingParams(min_tokens=2, allowed_token_ids=[EOS])
        )
