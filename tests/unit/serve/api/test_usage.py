"""`stream_options.continuous_usage_stats`: every chunk of a stream carries the token counts of its
answer so far, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.engine.request import Finish
from outrider.serve.api.usage import Cost, metrics, usage
from outrider.serve.schema.answers import ChatChunk
from outrider.stats import DecodeStats
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, events, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def streamed(path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(chunks with text, the last one)."""
    with serving(FakeEngine()) as client:
        *chunks, last = events(client.post(path, json={**body, **CONTINUOUS}))
    assert last["choices"] == []
    return chunks, last


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(n=2)), (COMPLETIONS, {"prompt": "Say", "n": 2})]
)
def test_every_chunk_counts_its_own_answer(path: str, body: dict[str, Any]) -> None:
    """A count of all answers together, or of text chunks instead of tokens, would be another
    number."""
    chunks, last = streamed(path, body)
    for index in (0, 1):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        # a chat opens with the role; the engine emits two tokens a step
        assert counts[0] == (0 if path == CHAT else 2)
        assert counts[-1] == 13
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in usages
        )
    assert last["usage"]["completion_tokens"] == 26


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(n=2)), (COMPLETIONS, {"prompt": "Say", "n": 2})]
)
def test_the_last_chunk_has_the_timings_of_all_answers(path: str, body: dict[str, Any]) -> None:
    """With `include_usage` that is the chunk with the usage, else the last one with text."""
    chunks, last = streamed(path, body)
    assert not any("timings" in chunk for chunk in chunks)
    assert last["timings"]["predicted_n"] == 26
    with serving(FakeEngine()) as client:
        *chunks, last = events(client.post(path, json={**body, "stream": True}))
    assert not any("timings" in chunk for chunk in chunks)
    assert last["timings"]["predicted_n"] == 26
    assert last["choices"][0]["finish_reason"]


def test_chunks_have_the_documented_shape() -> None:
    chunks, last = streamed(CHAT, chat())
    for chunk in [*chunks, last]:
        ChatChunk.model_validate(chunk)


def test_each_prompt_has_its_own_length() -> None:
    chunks, _ = streamed(COMPLETIONS, {"prompt": ["a", "bcd"]})
    lengths = {chunk["choices"][0]["index"]: chunk["usage"]["prompt_tokens"] for chunk in chunks}
    assert lengths == {0: 1, 1: 3}


def test_a_prompt_that_is_only_scored_has_no_completion_tokens() -> None:
    chunks, last = streamed(
        COMPLETIONS, {"prompt": "Say", "echo": True, "max_tokens": 0, "logprobs": 0}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in [*chunks, last]] == [0] * (
        len(chunks) + 1
    )


def test_without_it_only_the_last_chunk_has_usage() -> None:
    for options in (
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": False},
    ):
        with serving(FakeEngine()) as client:
            *chunks, last = events(
                client.post(CHAT, json=chat(stream=True, stream_options=options))
            )
        assert not any("usage" in chunk for chunk in chunks)
        assert last["usage"]


def test_what_another_answer_left_in_the_cache_was_not_cached() -> None:
    """The second of two answers to one prompt finds all of it in the cache, and may finish first."""

    def cost(prompt: int, cached: int) -> Cost:
        finish = Finish(
            reason="stop",
            stats=DecodeStats(),
            seed=1,
            lossless=True,
            drafter="none",
            prompt_tokens=9,
            cached_tokens=cached,
        )
        return Cost(finish, 1, 0, prompt)

    found = usage([cost(0, 8), cost(0, 2), cost(1, 4), cost(1, 8)])
    assert (found["prompt_tokens"], found["prompt_tokens_details"]) == (18, {"cached_tokens": 6})


def test_metrics_name_the_least_share_of_a_prompt_that_was_read() -> None:
    costs = [
        Cost(
            Finish(
                reason="stop",
                stats=DecodeStats(),
                seed=1,
                lossless=False,
                drafter="none",
                prompt_share=share,
            ),
            1,
            0,
            0,
        )
        for share in (0.2, 1.0)
    ]
    numbers = metrics(costs, None)
    assert (numbers["lossless"], numbers["prompt_share"]) == (False, 0.2)


def test_alone_it_is_refused() -> None:
    with serving(FakeEngine()) as client:
        response = client.post(
            CHAT, json=chat(stream=True, stream_options={"continuous_usage_stats": True})
        )
    assert "include_usage: true" in error_of(response, 400)["message"]
