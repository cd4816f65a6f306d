"""Sampling that a request leaves open: the model's generation config, else OpenAI's defaults."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.models.loading.generation_config import SamplingDefaults
from outrider.sampling.params import SamplingParams
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, serving

VALUES = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_tokens": 5,
}


def asked(values: dict[str, Any], path: str, body: dict[str, Any]) -> SamplingParams:
    """What the engine was asked for."""
    engine = FakeEngine(sampling_defaults=SamplingDefaults(values))
    with serving(engine) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return engine.seen[0].params


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_model_s_settings_hold_where_a_request_says_nothing(endpoint: str) -> None:
    path, body = (
        ("/v1/chat/completions", chat())
        if endpoint == "chat"
        else ("/v1/completions", {"prompt": "a"})
    )
    params = asked(VALUES, path, {**body, "temperature": None})
    assert {name: getattr(params, name) for name in VALUES} == VALUES
    openai = asked({}, path, body)
    assert (openai.temperature, openai.top_p, openai.top_k, openai.repetition_penalty) == (
        1.0,
        1.0,
        0,
        1.0,
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_a_request_says_wins(endpoint: str) -> None:
    """A request's value wins, also one that switches a setting off, and one longer than the model's
    own length."""
    path, body = (
        ("/v1/chat/completions", chat())
        if endpoint == "chat"
        else ("/v1/completions", {"prompt": "a"})
    )
    given = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "max_tokens": 50,
    }
    params = asked(VALUES, path, {**body, **given})
    assert {name: getattr(params, name) for name in given} == given


def test_lengths_without_any_setting() -> None:
    """Chats may fill the context, completions have OpenAI's 16 tokens."""
    room = asked({}, "/v1/chat/completions", chat()).max_tokens
    assert room is not None
    assert 16 < room < 200
    assert asked({}, "/v1/completions", {"prompt": "a"}).max_tokens == 16
    assert asked({"max_tokens": 1000}, "/v1/chat/completions", chat()).max_tokens == room
