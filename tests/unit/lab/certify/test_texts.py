"""Texts compared token by token, and the three causes of a difference told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kv import KVCache
from outrider.lab.certify.certify_result import SameTexts
from outrider.lab.certify.subject import Subject
from outrider.lab.certify.texts import greedy
from outrider.lab.certify.ties import spacing, teacher_forced
from outrider.lab.journal import Journal
from outrider.sampling.params import SamplingParams
from outrider.verifiers import batch
from tests.unit.lab.certify.conftest import PROMPTS, Open

PARAMS = SamplingParams(max_tokens=16)


def section(subject: Subject, params: SamplingParams = PARAMS) -> SameTexts:
    return greedy(subject, PROMPTS, params, Journal())


def plain_texts(subject: Subject, params: SamplingParams) -> list[list[int]]:
    return subject.texts(subject.plain, PROMPTS, [params] * len(PROMPTS))


@pytest.mark.parametrize(
    ("drafter", "verifier", "options"),
    [
        ("draft-model", "block", {}),
        ("draft-model", "traversal", {"drafter_options": {"tree": "2x2"}}),
        ("ngram", "token", {}),
    ],
)
def test_sound_decoding_passes(
    open_subject: Open, drafter: str, verifier: str, options: dict[str, Any]
) -> None:
    found = section(open_subject(drafter, verifier, **options))
    assert found.status == "passed"
    assert [run.num_identical for run in found.runs] == [4, 4, 4, 4]
    assert all(run.num_tokens > 40 for run in found.runs)
    assert found.differences == []


def test_penalties_and_stop_strings_take_part(open_subject: Open) -> None:
    """The user's own options, not bare greedy text."""
    subject = open_subject()
    plain = plain_texts(subject, PARAMS)
    params = SamplingParams(max_tokens=16, repetition_penalty=1.8, stop=[f"w{plain[0][5]}"])
    assert section(subject, params).status == "passed"
    assert plain_texts(subject, params) != plain


def test_bans_take_part(open_subject: Open) -> None:
    """Catches a word that is only forbidden outside of certificates."""
    subject = open_subject()
    plain = plain_texts(subject, PARAMS)
    params = SamplingParams(max_tokens=16, bad_words=[f"w{plain[0][5]}"], min_tokens=16)
    assert section(subject, params).status == "passed"
    texts = plain_texts(subject, params)
    assert all(plain[0][5] not in text and len(text) == 16 for text in texts)


def test_one_prompt_has_no_plain_batch(open_subject: Open) -> None:
    found = greedy(open_subject(), PROMPTS[:1], PARAMS, Journal())
    assert [run.name for run in found.runs] == [
        "speculative, alone",
        "speculative, alongside a sampled row",
    ]


# ------------------------------------------------ causes


def off_by_one_near_ties(margin: float) -> Callable[..., list[list[int]]]:
    """BUG: with a draft, the runner-up wins where it is close."""
    real = batch.greedy_choice

    def choice(
        logits: Tensor, sampling: Any, history: Any = None, draft: Any = None
    ) -> list[list[int]]:
        found = real(logits, sampling, history, draft)
        if draft is None or draft.num_nodes == 0:
            return found
        top = logits.topk(2, dim=-1)
        return torch.where(
            top.values[..., 0] - top.values[..., 1] < margin,
            top.indices[..., 1],
            torch.tensor(found),
        ).tolist()

    return choice


@pytest.mark.slow
def test_a_choice_against_its_own_scores_is_the_verifiers_fault(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by one near ties: the scores are the same to the bit, the token is not theirs."""
    subject = open_subject(runtime="eager")
    monkeypatch.setattr(batch, "greedy_choice", off_by_one_near_ties(0.1))
    found = section(subject)
    assert found.status == "failed"
    assert {one.cause for one in found.differences} == {"verifier"}
    assert {run.name: run.num_identical for run in found.runs}["plain, several at once"] == 4
    assert {difference.moved_in_spacings for difference in found.differences} == {0}
    first = found.differences[0]
    assert 0 < first.gap < 0.1
    assert (first.expected, first.found) != (first.found, first.expected)
    assert first.expected_text == f" w{first.expected}"


def test_a_damaged_cache_is_a_fault_of_state(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is what the run's scores favour; they are far from what the text gives."""
    keep = KVCache.keep

    def damaged(kv: KVCache, row: int, path: list[int]) -> None:
        keep(kv, row, path)
        if len(path) > 1:  # an accepted token
            for store in kv.keys:
                store[row, kv.lengths[row] - 1] *= 1.5

    subject = open_subject()
    monkeypatch.setattr(KVCache, "keep", damaged)
    found = section(subject)
    assert found.status == "failed"
    assert {one.cause for one in found.differences} == {"state"}
    assert min(one.moved_in_spacings for one in found.differences) > 1000


def test_a_near_tie_that_rounding_turns_is_neither_right_nor_wrong(open_subject: Open) -> None:
    """A bias makes two tokens equal at the first token; passes with a draft add noise of a few
    spacings."""
    subject = open_subject()
    lm = subject.target
    prompt = PROMPTS[0]
    top = teacher_forced(lm, prompt, len(prompt)).topk(2)
    bias = float(top.values[0] - top.values[1]) - 1e-6
    run = lm.run

    def noisy(ids: Tensor, positions: Tensor, plan: Any, columns: Tensor) -> Tensor:
        logits = run(ids, positions, plan, columns).clone()
        if ids.shape[1] > 2:
            logits[..., int(top.indices[1])] += 4e-6
        return logits

    lm.run = noisy
    params = SamplingParams(max_tokens=1 + 6, logit_bias={int(top.indices[1]): bias})
    found = greedy(subject, [prompt], params, Journal())
    assert found.status == "inconclusive"
    first = found.differences[0]
    assert (first.cause, first.position, first.expected, first.found) == (
        "rounding",
        0,
        *top.indices.tolist(),
    )
    assert first.gap == pytest.approx(1e-6, abs=5e-7)
    assert 1 < first.moved_in_spacings < 100
    assert "near-tie" in found.why


def test_a_text_that_stops_early_is_a_difference(
    open_subject: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a text is not the text."""
    subject = open_subject()
    real = Subject.texts

    def shortened(
        self: Subject, decoder: Any, prompts: Any, params: Any, *, together: int = 1
    ) -> list[list[int]]:
        texts = real(self, decoder, prompts, params, together=together)
        return [text[:-2] for text in texts] if decoder is self.speculative else texts

    monkeypatch.setattr(Subject, "texts", shortened)
    found = section(subject)
    assert found.status == "failed"
    first = found.differences[0]
    assert (first.position, first.found, first.cause) == (14, None, "state")
    assert first.found_text == "(end)"


# ------------------------------------------------ spacings and passes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.3, 1.0, 1.9, 17.5, -200.0])
def test_spacing_is_the_step_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    here = torch.tensor(abs(value), dtype=dtype)
    following = torch.nextafter(here, torch.tensor(torch.inf, dtype=dtype))
    assert spacing(float(here), dtype) == float(following.double() - here.double())


def test_a_teacher_forced_text_leaves_nothing_behind(open_subject: Open) -> None:
    """Its logits are those of one wide pass over the text, up to rounding; the cache is empty
    again."""
    subject = open_subject()
    tokens = [*PROMPTS[0], 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    logits = teacher_forced(subject.target, tokens, 5)
    assert torch.allclose(logits, teacher_forced(subject.target, tokens, len(tokens)), atol=1e-4)
    assert subject.target.kv.num_rows == 0
    assert not torch.allclose(logits, teacher_forced(subject.target, tokens[:-1], 5), atol=1e-2)
