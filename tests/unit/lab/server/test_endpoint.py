"""URLs, keys and the bodies that are sent."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.lab.server.options import LoadOptions, ServerEndpoint, key_from
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams

PROMPT = WorkloadRequest(id="1", prompt="Hello")
CONVERSATION = WorkloadRequest(id="2", messages=({"role": "user", "content": "Hello"},))


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://host:8000", "http://host:8000"),
        (" http://host:8000/ ", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/api/v1/chat/completions", "https://host/api"),
        ("https://host/v1beta/v1", "https://host/v1beta"),
        ("https://host/v1beta", "https://host/v1beta"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_root_is_where_metrics_lie(url: str, root: str) -> None:
    """A path that is cut at the wrong character asks /v1/v1/models."""
    assert ServerEndpoint.parse(url).root == root


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://host:99999", "http://[::1", "", "http://-\x01:80"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerEndpoint.parse(url)


@pytest.mark.parametrize("url", ["http://me:secret@host", "http://host/?key=secret"])
def test_secrets_in_a_url_would_be_in_results(url: str) -> None:
    with pytest.raises(ConfigError, match="environment") as error:
        ServerEndpoint.parse(url)
    assert "secret" not in str(error.value)


def test_the_key_is_shown_nowhere() -> None:
    endpoint = ServerEndpoint.parse("http://host", api_key="sk-123456")
    assert "sk-123456" not in repr(endpoint)
    assert endpoint.clean("Incorrect API key provided: sk-123456") == "Incorrect API key provided: ***"


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", " sk-1\n")
    assert key_from("SERVER_KEY") == "sk-1"
    assert key_from(None) is None
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="SERVER_KEY"):
        key_from("SERVER_KEY")


def test_a_key_that_no_header_can_carry() -> None:
    with pytest.raises(ConfigError, match="header"):
        ServerEndpoint.parse("http://host", api_key="sk\n1")


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://127.0.0.1:1", True), ("http://localhost", True), ("http://[::1]", True), ("http://host", False)],
)
def test_loopback(url: str, local: bool) -> None:
    assert ServerEndpoint.parse(url).is_local is local


def test_only_what_was_asked_for_is_sent() -> None:
    """A parameter at its default must stay the server's."""
    path, body = LoadOptions(sampling=SamplingParams(max_tokens=7)).body(PROMPT, "m")
    assert path == "/v1/completions"
    assert body == {
        "model": "m", "prompt": "Hello", "temperature": 0.0, "max_tokens": 7, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_sampling_parameters_reach_the_server() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=3, stop=["\n"], top_k=5)
    _, body = LoadOptions(sampling=sampling).body(PROMPT, "m")
    assert {name: body[name] for name in ("temperature", "top_p", "seed", "stop", "top_k")} == {
        "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ["\n"], "top_k": 5,
    }  # fmt: skip
    assert "min_p" not in body


def test_conversations_and_prompts_find_their_way() -> None:
    assert LoadOptions().body(CONVERSATION, "m")[0] == "/v1/chat/completions"
    path, body = LoadOptions(api="chat").body(PROMPT, "m")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match="chat template"):
        LoadOptions(api="completions").body(CONVERSATION, "m")


def test_a_logged_length_is_a_limit_not_a_wish() -> None:
    request = WorkloadRequest(id="1", prompt="x", max_tokens=5)
    assert LoadOptions(sampling=SamplingParams(max_tokens=9)).body(request, "m")[1]["max_tokens"] == 5
    assert LoadOptions(sampling=SamplingParams(max_tokens=3)).body(request, "m")[1]["max_tokens"] == 3


def test_extra_fields_are_added_or_drop_ours() -> None:
    _, body = LoadOptions(extra={"return_meta_info": True, "stream_options": None, "max_tokens": None}).body(
        PROMPT, "m"
    )
    assert body["return_meta_info"] is True
    assert "stream_options" not in body
    assert "max_tokens" not in body


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": ()},
        {"concurrency": (0,)},
        {"timeout_s": 0},
        {"api": "responses"},
        {"extra": {"stream": False}},
        {"extra": {"n": 2}},
        {"sampling": SamplingParams(logprobs=1)},
        {"sampling": SamplingParams(n=2)},
        {"sampling": SamplingParams(max_tokens=None)},
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadOptions(**options)


def test_levels_come_once_and_in_order() -> None:
    levels = LoadOptions(concurrency=(4, 1, 4)).levels
    assert [level.label for level in levels] == ["4 at once", "1 at once"]
