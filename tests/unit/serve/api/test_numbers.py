"""Numbers as clients write them: nearly zero, 16.0 for 16, values that ask for nothing. Texts and
truth values are no numbers."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.headers import IGNORED_HEADER
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = [(CHAT, chat()), (COMPLETIONS, {"prompt": "Say"})]


def params_of(path: str, body: dict[str, Any]) -> Any:
    engine = FakeEngine()
    with serving(engine, strict=True) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert IGNORED_HEADER not in response.headers
    return engine.seen[0].params


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-8}, {"temperature": 9e-5, "top_p": 0.5}, {"top_p": 0}, {"top_p": 0.0}],
)
def test_nearly_zero_is_greedy(path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    """1e-8 is an evaluation client's default: a 400 would stop its whole run, dividing by it would
    overflow."""
    params = params_of(path, {**body, **fields})
    assert params.is_greedy
    assert params.temperature == 0


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_values_that_switch_a_filter_off(path: str, body: dict[str, Any]) -> None:
    off = {
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_p": 1,
    }
    params = params_of(path, {**body, **off})
    assert not params.needs_history
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1, -1, 1, 0)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_16_0_is_16(path: str, body: dict[str, Any]) -> None:
    """JSON has one kind of number, and some languages write all of them with a point."""
    fields = {
        "max_tokens": 16.0,
        "n": 1.0,
        "top_k": 40.0,
        "seed": 7.0,
        "min_tokens": 2.0,
        "stop_token_ids": [3.0],
    }
    params = params_of(path, {**body, **fields})
    found = [
        params.max_tokens,
        params.top_k,
        params.seed,
        params.min_tokens,
        *params.stop_token_ids,
    ]
    assert found == [16, 40, 7, 2, 3]
    assert all(type(number) is int for number in found)


def test_token_ids_may_be_written_so_too() -> None:
    engine = FakeEngine()
    with serving(engine) as client:
        assert client.post(COMPLETIONS, json={"prompt": [[51.0, 65.0]]}).status_code == 200
        assert client.post("/detokenize", json={"tokens": [97.0]}).status_code == 200
    assert engine.seen[0].prompt == [51, 65]


@pytest.mark.parametrize(
    ("given", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_seeds_are_taken_modulo_2_to_the_64(given: int, used: int) -> None:
    assert params_of(CHAT, chat(seed=given)).seed == used


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n", "presence_penalty"],
)
@pytest.mark.parametrize("value", ["1", True, [1]])
def test_texts_and_truth_values_are_no_numbers(
    path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    with serving(FakeEngine()) as client:
        error = error_of(client.post(path, json={**body, name: value}), 400)
    assert error["param"] == name


NOTHING: list[dict[str, Any]] = [{"logit_bias": {}}, {"stop": []}, {"bad_words": []}]
NOTHING_IN_CHAT: list[dict[str, Any]] = [
    {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"parallel_tool_calls": True}, {"tool_choice": "auto"},
    {"tools": []}, {"include_reasoning": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", NOTHING, ids=str)
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_values_that_ask_for_nothing(
    path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Clients that fill in every field send them."""
    params_of(path, {**body, **fields})


@pytest.mark.parametrize("fields", NOTHING_IN_CHAT, ids=str)
def test_values_that_ask_for_nothing_in_a_chat(fields: dict[str, Any]) -> None:
    params_of(CHAT, chat(**fields))
