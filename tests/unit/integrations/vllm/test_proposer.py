"""`Proposer`: what vLLM's old model runner may rely on, whatever happens to the rows of its batch."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import CapabilityError, ConfigError
from outrider.integrations.vllm import Proposer
from outrider.integrations.vllm.proposer import ProposalLimits
from tests.unit.integrations.vllm.scheduler import (
    CONTEXT,
    VOCABULARY,
    Runner,
    configuration,
    drafting_with,
    rule,
)

FORGETFUL = {"ngram": {}, "suffix": {"max_tokens": 0}}  # whose drafts follow from the text alone
LEARNING = {"suffix": {}, "ngram-cache": {}, "composite": {"parts": "suffix,ngram"}}
KINDS = ["join", "step", "step", "step", "shuffle", "preempt", "resume", "reuse"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1 << 16)), max_size=40)


def proposer(drafter: str, num_speculative_tokens: int = 4, **options: Any) -> Proposer:
    return Proposer(configuration(num_speculative_tokens, drafting_with(drafter, **options)))


def prompt_of(number: int) -> list[int]:
    random = Random(number)
    return [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 20))]


def happen(
    runner: Runner, events: list[tuple[str, int]]
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Let all that happen; returns the texts and drafts of each step, by row."""
    seen = []
    texts = [prompt_of(0)]
    for event, number in events:
        if event == "join":
            runner.join(prompt_of(number), 10 + number % 40, unread=number % 3)
        elif event == "reuse":  # the next turn of a conversation, or the same question again
            runner.join(texts[number % len(texts)], 20)
        elif event == "shuffle":
            runner.shuffle(Random(number))
        elif event == "preempt" and runner.rows:
            runner.preempt(number % len(runner.rows))
        elif event == "resume" and runner.away:
            runner.resume()
        elif event == "step" and runner.rows:
            rows = list(runner.rows)
            drafts = runner.step()
            seen.append(([list(row.tokens) if row.emitted else [] for row in rows], drafts))
            texts += [row.tokens[: CONTEXT // 2] for row in rows]
    return seen


@pytest.mark.parametrize("drafter", FORGETFUL)
@settings(max_examples=40, deadline=None)
@given(events=EVENTS)
def test_drafts_follow_from_the_text_alone(drafter: str, events: list[tuple[str, int]]) -> None:
    """State that went to the wrong row, or stayed behind after a preemption, would draft otherwise
    than a fresh start."""
    runner = Runner([proposer(drafter, **FORGETFUL[drafter])])
    for texts, drafts in happen(runner, events):
        for text, draft in zip(texts, drafts, strict=True):
            assert draft == (fresh(drafter, text) if text else [])


def fresh(drafter: str, text: list[int]) -> list[int]:
    """The draft of a proposer that meets this text for the first time."""
    table = np.zeros((1, CONTEXT), dtype=np.int32)
    table[0, : len(text)] = text
    return proposer(drafter, **FORGETFUL.get(drafter, {})).propose(
        [[text[-1]]], np.array([len(text)]), table
    )[0]


@pytest.mark.parametrize("drafter", [*FORGETFUL, "ngram-cache", "composite"])
@settings(max_examples=25, deadline=None)
@given(events=EVENTS)
def test_ranks_agree_and_limits_hold(drafter: str, events: list[tuple[str, int]]) -> None:
    """Ranks of a tensor-parallel group get the same calls and must draft the same tokens (`Runner`
    compares); never too many, never beyond the context or the vocabulary, nothing for rows that are
    still reading."""
    options = {**FORGETFUL, **LEARNING}[drafter]
    runner = Runner([proposer(drafter, 5, **options), proposer(drafter, 5, **options)])
    for texts, drafts in happen(runner, events):
        assert len(drafts) == len(texts)
        for text, draft in zip(texts, drafts, strict=True):
            assert len(draft) <= (min(5, max(0, CONTEXT - len(text) - 1)) if text else 0)
            assert all(isinstance(token, int) and 0 <= token < VOCABULARY for token in draft)


@pytest.mark.slow
def test_drafts_are_the_same_in_every_process() -> None:
    """Salted hashes would make ranks disagree, which live in processes of their own."""
    script = (
        "from tests.unit.integrations.vllm.test_proposer import *\n"
        "events = [(Random(n).choice(['join', 'step', 'step', 'step', 'shuffle', 'preempt', 'resume']), n) for n in range(150)]\n"
        "print([happen(Runner([proposer(drafter, **options)]), events) for drafter, options in LEARNING.items()])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1]


def test_texts_are_what_they_are_without_drafts() -> None:
    """The stand-in verifies, so this guards the tests' own ground; that drafts are accepted is the
    point."""
    runner = Runner([proposer("ngram")])
    request = runner.join([1, 2, 3, 4, 5, 6], 60)
    expected = [1, 2, 3, 4, 5, 6]
    while runner.rows:
        runner.step()
    while len(expected) < len(request.tokens):
        expected.append(rule(expected))
    assert request.tokens == expected
    assert runner.accepted > 20


def test_what_was_emitted_helps_later_requests() -> None:
    """The suffix memory learns a text as soon as its row is gone, so the same question is answered
    in fewer steps."""
    runner = Runner([proposer("suffix", 8)])
    steps = []
    for _ in range(2):
        runner.join([9, 9, 1, 30, 22, 4, 17], 60)
        steps.append(0)
        while runner.rows:
            runner.step()
            steps[-1] += 1
    assert steps[1] < steps[0]


def test_the_next_turn_is_a_new_text() -> None:
    """A prompt that begins with an earlier text continues no row: what the user wrote must not be
    remembered as an answer."""
    made = proposer("suffix")
    runner = Runner([made])
    first = runner.join([1, 2, 3], 10)
    while runner.rows:
        runner.step()
    asked = [*first.tokens, 33, 34, 35, 36]
    second = runner.join(asked, 10)
    while runner.rows:
        runner.step()
    runner.join([5], 2)
    runner.step()
    remembered = made._drafting.drafter.memory.sequences
    assert remembered == [first.tokens[3:], second.tokens[len(asked) :]]


def test_a_rejected_draft_is_not_learned() -> None:
    """What is remembered is the text, not what was drafted for it."""
    made = proposer("suffix")
    runner = Runner([made])
    request = runner.join([3, 1, 4, 1, 5, 9, 2, 6], 80)
    while runner.rows:
        runner.step()
    assert runner.drafted > runner.accepted
    runner.join([5], 2)
    runner.step()
    (text,) = made._drafting.drafter.memory.sequences
    assert text == request.tokens[8:]


def test_a_text_that_went_on_without_us_begins_again() -> None:
    """Near the context's end vLLM drafts zeros by itself and asks nobody; the text must not be
    mistaken for another."""
    made = proposer("ngram")
    table = np.zeros((1, CONTEXT), dtype=np.int32)
    text = [1, 2, 3, 1, 2, 3, 1]
    for new in (1, 5, 2):  # tokens since the last call, of which vLLM tells the last one
        text = [*text, *[2, 3, 1, 2, 3][:new]]
        table[0, : len(text)] = text
        drafts = made.propose([[text[-1]]], np.array([len(text)]), table)
        assert drafts[0] == fresh("ngram", text)


@pytest.mark.parametrize("drafter", ["ngram", "composite"])
def test_a_token_outside_the_vocabulary_ends_a_draft(drafter: str) -> None:
    """Texts may hold the placeholders of images, which no model can emit."""
    assert fresh(drafter, [4, 5, 6, VOCABULARY + 3, 7, 4, 5]) == [6]


def test_no_room_no_draft() -> None:
    text = [1, 2] * (CONTEXT // 2)
    assert fresh("ngram", text[: CONTEXT - 1]) == []
    assert fresh("ngram", text[: CONTEXT - 3]) == [2, 1]


def test_the_table_by_batch_size_is_honoured() -> None:
    """vLLM hands its table to its own drafters only. Gaps, and what lies behind the last line,
    belong to the line before."""
    limits = ProposalLimits(
        configuration(5, num_speculative_tokens_per_batch_size=[(2, 3, 4), (6, 8, 0)])
    )
    assert [limits.max_nodes(rows) for rows in range(1, 10)] == [0, 4, 4, 4, 4, 0, 0, 0, 0]


def test_another_interface_is_named() -> None:
    made = proposer("ngram")
    with pytest.raises(
        ConfigError, match=r"otherwise than 0\.32 does.*got shapes \(1,\) and \(3,\)"
    ):
        made.propose([[1]], np.array([3]), np.array([1, 2, 3]))
    with pytest.raises(ConfigError, match=r"otherwise than 0\.32"):
        made.propose([[1]], np.array([CONTEXT + 1]), np.zeros((1, CONTEXT), dtype=np.int32))


@pytest.mark.parametrize(
    ("drafter", "needs"),
    [
        ("recycling", "the target's logits"),
        ("lookahead", "the target's logits"),
        ("draft-model", "a draft model"),
        ("quantised", "own weights"),
        ("eagle3", "trained head"),
        ("prediction", "a prediction"),
        ("universal", "a draft model"),
    ],
)
def test_drafters_that_need_more_are_refused(drafter: str, needs: str) -> None:
    with pytest.raises(
        CapabilityError,
        match=f"'{drafter}' needs .*{needs}.*ngram, suffix.*OUTRIDER_DRAFT_ENDPOINT",
    ):
        proposer(drafter)


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("none", {}, "leave --speculative-config out"),
        ("sufix", {}, "Did you mean 'suffix'"),
        ("suffix", {"tree": "true"}, "vLLM verifies chains"),
        ("suffix", {"depth": "3"}, "has no option 'depth'"),
        ("suffix", {"cache": "/tmp/x"}, "drop it"),
        ("composite", {"mode": "merge"}, "mode=best"),
        ("composite", {"parts": "suffix,recycling"}, "'recycling' needs the target's logits"),
        (
            "composite",
            {"parts": "ngram,ngram-cache", "options": "ngram.tree=true"},
            "vLLM verifies chains",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    drafter: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, CapabilityError), match=message):
        proposer(drafter, **options)


def test_a_composite_of_look_ups_asks_no_clock() -> None:
    """What a pass took on this rank must not decide who drafts."""
    drafter = proposer("composite")._drafting.drafter
    for seconds in (1e-9, 0.1, 3.0):
        drafter._pass_seconds = seconds
        for part in drafter.parts:
            assert drafter._rate(part, 0, 4) == 1 + part.survival.expected(4, 0)


def test_parts_of_a_composite_make_chains_by_default() -> None:
    made = proposer("composite", parts="ngram,ngram-cache", options="ngram-cache.max_ngram=3")
    cache = made._drafting.drafter.parts[1].drafter
    assert (cache._settings.branches, cache._settings.max_ngram) == (1, 3)
