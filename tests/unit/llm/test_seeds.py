"""A seed gives one text: alone, in a batch, with every drafter and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams

SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
TEXT = "abcabcabc"


@pytest.fixture(scope="module")
def plain(byte_model: Path) -> list[int]:
    """The text of the seed without drafts."""
    done = LLM(byte_model, drafter="none").generate(TEXT, SEEDED)[0]
    assert done.verifier == "gumbel"
    return done.token_ids


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_a_seed_gives_the_text_of_plain_decoding(
    byte_model: Path, plain: list[int], drafter: str
) -> None:
    """Catches a seeded answer that depends on its drafts, on a second call or on its neighbours."""
    llm = LLM(byte_model, drafter=drafter, num_draft_tokens=4)
    alone = [llm.generate(TEXT, SEEDED)[0] for _ in range(2)]
    beside = llm.generate(["xyz", TEXT, "abab"], [SamplingParams(temperature=1.0), SEEDED, SEEDED])[
        1
    ]
    *_, last = llm.stream(TEXT, SEEDED)
    assert last.completion is not None
    answers = [*alone, beside, last.completion]
    assert [done.token_ids for done in answers] == [plain] * 4
    assert alone[0].stats.drafted > 0
    assert {done.verifier for done in answers} == {"gumbel"}


def test_a_named_verifier_is_kept(byte_model: Path, plain: list[int]) -> None:
    llm = LLM(byte_model, drafter="none", verifier="token")
    done = llm.generate(TEXT, SEEDED)[0]
    assert done.verifier == "token"
    assert done.token_ids != plain


def test_answers_without_a_seed_keep_the_usual_verifier(byte_model: Path) -> None:
    llm = LLM(byte_model, drafter="none")
    assert llm.generate(TEXT, SamplingParams(temperature=1.0, max_tokens=2))[0].verifier == "block"
    assert llm.generate(TEXT, SamplingParams(seed=3, max_tokens=2))[0].verifier == "block"
