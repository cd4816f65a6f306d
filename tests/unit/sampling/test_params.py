"""SamplingParams: what is refused, and with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.sampling.params import MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": -0.1},
            "temperature must be at least 0 and at most 1e+30 (0, or below 0.0001, is greedy), "
            "got -0.1",
        ),
        ({"temperature": -1e-9}, "temperature must be at least 0"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": 10**400}, "temperature must be "),
        (
            {"top_k": -2},
            "top_k must be at least -1 (keep the k likeliest tokens; 0 and -1 are off), got -2",
        ),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"top_k": float("inf")}, "top_k must be a whole number, got inf"),
        ({"top_p": -1e-9}, "top_p must be at least 0 and at most 1 ("),
        ({"top_p": 1.5}, "1 is off, 0 greedy), got 1.5"),
        ({"min_p": 1.01}, "0 is off), got 1.01"),
        ({"temperature": 1e39}, "at most 1e+30 (0, or below 0.0001, is greedy), got 1e+39"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.0001"),
        ({"repetition_penalty": 1e-40}, "1 is off), got 1e-40"),
        ({"logit_bias": {1: -1e39}}, "logit_bias[1] must be at least -1e+30, got -1e+39"),
        ({"presence_penalty": 3}, "presence_penalty must be at least -2 and at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be at least -2 and at most 2"),
        ({"seed": -(2**63) - 1}, f"seed must be at least {-(2**63)} and below {2**64}"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"seed": 2**64}, f"got {2**64}"),
        ({"seed": 1e20}, "seed must be a whole number, got 1e+20"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 ("),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"max_tokens": "16"}, "max_tokens must be a whole number, got '16'"),
        ({"max_tokens": 16.5}, "max_tokens must be a whole number, got 16.5"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be at most max_tokens (3), got 4"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"stop": [""]}, "stop[0] must not be empty, got ''"),
        ({"stop": ""}, "stop must not be empty"),
        ({"stop": [3]}, "stop[0] must be a text, got 3"),
        ({"stop": 3}, "stop must be a text or a list, got 3"),
        ({"bad_words": "word"}, "bad_words must be a list, got 'word'"),
        ({"bad_words": ["a", ""]}, "bad_words[1] must not be empty"),
        ({"stop_token_ids": [-5]}, "stop_token_ids[0] must be at least 0, got -5"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0] must be a whole number, got True"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias[-1] must be at least 0, got -1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias[1] must be a finite number, got inf"),
        ({"logit_bias": [1, 2]}, "logit_bias must be a dictionary, got [1, 2]"),
        ({"structured_outputs": {"regex": "a"}}, "must be StructuredOutputsParams, got {'regex'"),
        ({"thinking": "yes"}, "thinking must be ThinkingMarks, got 'yes'"),
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


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-8}, {"temperature": 9.9e-5}, {"temperature": 0.7, "top_p": 0}]
)
def test_numbers_that_are_nearly_zero_are_greedy(options: dict[str, Any]) -> None:
    """1e-8 is an evaluation client's default; dividing logits by it would overflow."""
    params = SamplingParams(**options)
    assert params.is_greedy
    assert params.temperature == 0


def test_the_least_temperature_still_samples() -> None:
    assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE


def test_top_p_0_stays_greedy_when_only_the_temperature_is_replaced() -> None:
    """Benchmarks set each cell's temperature on options that were given once."""
    assert replace(SamplingParams(top_p=0), temperature=1.0).is_greedy
    assert not SamplingParams(top_p=0).drawn().is_greedy


def test_whole_numbers_may_be_written_as_floats() -> None:
    params = SamplingParams(max_tokens=16.0, top_k=-1.0, seed=7.0, min_tokens=2.0, logprobs=3.0)  # type: ignore[arg-type]
    found = (params.max_tokens, params.top_k, params.seed, params.min_tokens, params.logprobs)
    assert found == (16, -1, 7, 2, 3)
    assert all(type(value) is int for value in found)


def test_a_million_mistakes_are_one() -> None:
    """Each of them would be an object of pydantic's."""
    with pytest.raises(ConfigError) as error:
        SamplingParams(stop_token_ids=[-1] * 1000)
    assert isinstance(error.value.__cause__, ValidationError)
    assert error.value.__cause__.error_count() == 1


def test_numbers_may_be_numpys() -> None:
    """A seed that NumPy drew overflowed: its integers know no 2**64."""
    params = SamplingParams(seed=np.int64(-1), n=np.int64(2), max_tokens=np.int32(4))  # type: ignore[arg-type]
    assert type(SamplingParams(temperature=np.float32(0.5)).temperature) is float  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[np.int64(3)]).stop_token_ids == [3]  # type: ignore[list-item]
    assert [params.answer(number).seed for number in range(params.n)] == [2**64 - 1, 0]


@pytest.mark.parametrize(
    ("given", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)]
)
def test_negative_seeds_count_down_from_2_to_the_64(given: int, used: int) -> None:
    assert SamplingParams(seed=given).seed == used


def test_what_changes_the_distribution_makes_it_no_softmax() -> None:
    """Catches an option that drafters which rank tokens by their scores alone would not honour."""
    changes: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
    ]
    assert SamplingParams().is_softmax
    assert SamplingParams(temperature=0.4, seed=1).is_softmax
    assert not any(SamplingParams(**change).is_softmax for change in changes)
