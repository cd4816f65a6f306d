"""Targets that are URLs: which verbs take them, and what else they take then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.servers import ServerOptions, is_server
from outrider.errors import ConfigError

Cli = Callable[..., Any]


def test_what_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_server("http://host:8000")
    assert is_server("https://host/v1")
    assert not is_server("demo")
    assert not is_server("owner/name:file.gguf")
    with pytest.raises(ConfigError, match="write http://host:8000"):
        is_server("host:8000")


def test_one_endpoint_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    both = ServerOptions(baseline_url="http://b:1", api_key_env="KEY").endpoints("http://a:1")
    assert [(name, one.url, one.api_key) for name, one in both.items()] == [
        ("plain", "http://b:1", "secret"),
        ("speculative", "http://a:1", "secret"),
    ]
    assert list(ServerOptions().endpoints("http://a:1")) == ["server"]
    keyless = ServerOptions(
        baseline_url="http://b:1", api_key_env="KEY", baseline_api_key_env=""
    ).endpoints("http://a:1")
    assert keyless["plain"].api_key is None
    with pytest.raises(ConfigError, match="means nothing without --baseline-url"):
        ServerOptions(baseline_api_key_env="KEY").endpoints("http://a:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["http://localhost:1", "--draft", "x"],
            "--draft means nothing when a server is certified",
        ),
        (["http://localhost:1", "--resume"], "--resume means nothing when a server is certified"),
        (["http://localhost:1", "--sampling", "regex=a"], "regex means nothing when a server"),
        (["demo", "--baseline-url", "http://x:1"], "without a server's URL as the target"),
        (["demo", "--server", "concurrency=2"], "--server concurrency means nothing without"),
        (["localhost:1"], "write http://localhost:1"),
        (["http://localhost:1", "--out", "x.txt"], "--out writes"),
        (["http://localhost:1", "--server", "concurrency=0"], "concurrency=0"),
        (["http://u:p@localhost:1"], "no password"),
    ],
)
def test_certify_refuses_what_means_nothing(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("certify", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_certify_of_a_server_that_is_not_there(cli: Cli) -> None:
    result = cli("certify", "http://127.0.0.1:9")
    assert result.code == 1
    assert "is the server running there?" in result.err
