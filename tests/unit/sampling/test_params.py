"""SamplingParams: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.sampling import SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or at least 0.0001, got -0.1"),
        ({"temperature": 1e-9}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"top_k": -2}, "top_k must be at least 1, or 0 or -1 for off, got -2"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"min_p": 1.01}, "min_p must be between 0 (off) and 1, got 1.01"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": 3}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2"),
        ({"seed": -1}, "seed must be between 0 and 2**64 - 1, or None, got -1"),
        ({"seed": 2**64}, "seed must be"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"stop": [""]}, "stop must be a string or a list of non-empty strings"),
        ({"stop": [3]}, "stop must be"),
        ({"stop_token_ids": [-5]}, "stop_token_ids must hold token ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias must hold token ids"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias[1] must be a finite number"),
        ({"logit_bias": [1, 2]}, "logit_bias must map token ids to numbers"),
    ],
)
def test_refused_with_name_value_and_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**options)
    assert message in str(error.value)


def test_defaults_are_greedy_without_history() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert not params.needs_history


def test_a_single_stop_string_becomes_a_list() -> None:
    assert SamplingParams(stop="\n\n").stop == ["\n\n"]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_needs_history(name: str) -> None:
    assert SamplingParams(**{name: 1.2}).needs_history
