"""`--generation-config`: what the verbs take from a model's file, and what they say about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.models.loading.generation_config import SamplingDefaults
from outrider.sampling.params import SamplingParams

OWN = SamplingDefaults({"temperature": 0.6, "top_p": 0.95, "max_tokens": 99})


def test_generate_is_greedy_and_says_what_it_leaves(cli: Callable[..., Any], fake: Any) -> None:
    """The model's settings are not used without a word about them; asked for, neither one is
    printed."""
    fake.sampling_defaults = SamplingDefaults(
        unused="generation_config.json asks for temperature 0.6"
    )
    note = "note: generation_config.json asks for temperature 0.6, which is left aside (--generation-config auto takes"
    assert note in cli("generate", "demo", "x").err
    assert "left aside" not in cli("generate", "demo", "x", "--generation-config", "none").err
    fake.sampling_defaults = OWN
    assert "left aside" not in cli("generate", "demo", "x", "--generation-config", "auto").err
    assert fake.generation_configs == ["none", "none", "auto"]
    assert [params.temperature for params in fake.params] == [0, 0, 0.6]


def test_chat_takes_them(cli: Callable[..., Any], fake: Any) -> None:
    fake.sampling_defaults = OWN
    cli("chat", "demo", stdin="Hi\n")
    cli(
        "chat",
        "demo",
        "--temperature",
        "0",
        "--top-p",
        "1",
        "--generation-config",
        "folder",
        stdin="Hi\n",
    )
    assert fake.generation_configs == ["auto", "folder"]
    assert fake.params == [SamplingParams(**OWN.values), SamplingParams(max_tokens=99)]


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_no_limit(cli: Callable[..., Any], fake: Any, verb: str) -> None:
    cli(verb, "demo", "--max-tokens", "none", stdin="Hi\n")
    assert fake.params[0].max_tokens is None
    result = cli(verb, "demo", "--max-tokens", "many", stdin="Hi\n")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert (
        "--max-tokens takes a number, or none for the end of the context, got 'many'" in result.err
    )
