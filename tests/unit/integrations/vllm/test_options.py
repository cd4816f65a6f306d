"""Which drafter is asked for: vLLM's `additional_config`, the environment, and their mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.integrations.vllm.options import Chosen, read_options


def test_no_options() -> None:
    assert read_options({}, {}) == Chosen("suffix", {})
    assert read_options(None, {"HOME": "/root"}) == Chosen("suffix", {})


@pytest.mark.parametrize(
    "text", ["parts=ngram,suffix mode=best", '{"parts": "ngram,suffix", "mode": "best"}']
)
def test_environment(text: str) -> None:
    environment = {"OUTRIDER_DRAFTER": "composite", "OUTRIDER_DRAFTER_OPTIONS": text}
    assert read_options({}, environment) == Chosen(
        "composite", {"parts": "ngram,suffix", "mode": "best"}
    )


def test_configuration_wins() -> None:
    environment = {"OUTRIDER_DRAFTER": "ngram", "OUTRIDER_DRAFTER_OPTIONS": "max_ngram=3"}
    assert read_options(
        {"outrider": {"drafter": "suffix", "drafter_options": {}}}, environment
    ) == Chosen("suffix", {})


def test_a_draft_service_means_the_remote_drafter() -> None:
    environment = {"OUTRIDER_DRAFT_ENDPOINT": "host:5000"}
    assert read_options({}, environment) == Chosen("remote", {"endpoint": "host:5000"})
    with pytest.raises(ConfigError, match="'suffix', which asks none"):
        read_options({"outrider": {"drafter": "suffix"}}, environment)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outrider": {"draftr": "suffix"}}, "Did you mean 'drafter'"),
        ({"outrider": "suffix"}, "must be an object"),
        ({"outrider": {"drafter": 3}}, "must be a name, got 3"),
        ({"outrider": {"drafter_options": "max_depth"}}, "NAME=VALUE with spaces between"),
        ({"outrider": {"drafter_options": "{max_depth: 3}"}}, "no JSON object"),
        ({"outrider": {"drafter_options": "a='3"}}, "cannot be read"),
    ],
)
def test_mistakes(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given, {})
