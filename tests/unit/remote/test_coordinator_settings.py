"""What an operator writes for a coordinator: names, endpoints, files, variables, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli.app import run
from outrider.errors import ConfigError
from outrider.remote.coordinator.settings import CoordinatorSettings, from_file, from_options


def read(models: list[str], endpoints: list[str]) -> dict[str, list[str]]:
    server, parsed = from_options(models, endpoints, {}, trust_remote_code=False, revision=None)
    CoordinatorSettings(server=server, endpoints=parsed)
    return {model.name: [str(one) for one in parsed[model.name]] for model in server.models}


def test_one_model_needs_no_name() -> None:
    """A single model takes the name of its tokenizer."""
    assert read(["demo"], ["a:1,b:2"]) == {"demo": ["grpc://a:1", "grpc://b:2"]}
    assert read(["small=/models/x"], ["a:1"]) == {"small": ["grpc://a:1"]}


def test_several_models_have_names() -> None:
    """In any order."""
    found = read(["small=/s", "large=/l"], ["large=c:1", "small=a:1,grpcs://b:1"])
    assert found == {"small": ["grpc://a:1", "grpcs://b:1"], "large": ["grpc://c:1"]}


@pytest.mark.parametrize(
    ("models", "endpoints", "message"),
    [
        ([], ["a:1"], "--model MODEL"),
        (["demo"], [], "--target-endpoint A,B"),
        (["small=/s", "large=/l"], ["small=a:1"], "each model needs both"),
        (["small=/s", "small=/l"], ["small=a:1"], "given twice"),
        (["=x"], ["a:1"], "takes"),
        (["demo"], ["a:1,a:1"], "twice"),
        (["demo"], ["http://a:1"], "an HTTP address"),
    ],
)
def test_what_does_not_fit_is_explained(models: list[str], endpoints: list[str], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=message):
        read(models, endpoints)


FILE = """
[server]
port = 9000

[[models]]
name = "small"
model = "demo"
endpoints = ["a:1", "grpcs://b:2"]

[[routes]]
model = "auto"
to = "small"
"""


def test_a_file(tmp_path: Path) -> None:
    """Models, endpoints, routes; the command line wins."""
    path = tmp_path / "coordinator.toml"
    path.write_text(FILE, encoding="utf-8")
    server, parsed = from_file(path, {"host": "0.0.0.0"})
    assert (server.host, server.port, server.rules[0].to) == ("0.0.0.0", 9000, "small")
    assert [str(one) for one in parsed["small"]] == ["grpc://a:1", "grpcs://b:2"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "demo"', 'target = "demo"', "unknown key 'target'"),
        ('endpoints = ["a:1", "grpcs://b:2"]', "", "'endpoints' must be a list"),
        ('endpoints = ["a:1", "grpcs://b:2"]', "endpoints = []", "names no address"),
        ('to = "small"', 'to = "large"', "not served"),
        ('model = "demo"', 'model = "demo"\nreasoning_parser = "thonk"', "unknown reasoning parser 'thonk'"),
    ],
)
def test_a_wrong_file_names_the_path_in_it(tmp_path: Path, old: str, new: str, message: str) -> None:
    """File and key."""
    path = tmp_path / "coordinator.toml"
    path.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        from_file(path, {})


COMMAND = ["service", "coordinator", "--model", "demo", "--target-endpoint", "127.0.0.1:1"]
WRONG: list[tuple[list[str], str]] = [
    (["service", "coordinator"], "--model MODEL"),
    ([*COMMAND, "--draft-endpoint", "a:1"], "unknown option '--draft-endpoint'"),
    ([*COMMAND, "--set", "self_test=false"], "a coordinator tries nothing"),
    ([*COMMAND, "--set", "max_retries=-1"], "max_retries"),
    ([*COMMAND, "--set", "replica_wait=0"], "replica_wait"),
    ([*COMMAND, "--tls-cert", "x.pem"], "--tls-key"),
    ([*COMMAND, "--config", "x.toml"], "leave out --model"),
    ([*COMMAND, "--set", "reasoning_parser=qwen33"], "Did you mean 'qwen3'"),
    (["service", "coordinator", "--config", "x.toml", "--set", "reasoning_parser=qwen3"], "and --set reasoning_parser"),
    (["service", "target"], "name a model to run"),
    (["service", "target", "demo", "--batch-size", "0"], "max_num_seqs must be at least 1"),
    (["service", "target", "demo", "--tls-cert", "x.pem"], "--tls-key"),
    (["service", "target", "demo", "--port", "70000"], "port must be between"),
    (["service", "target", "demo", "--set", "drain_timeout=-1"], "--set drain_timeout"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[-40:])
def test_commands_refuse_what_cannot_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and one line with the remedy."""
    for name in ("MODEL", "TARGET_ENDPOINT", "DRAFT_ENDPOINT", "BATCH_SIZE", "MAX_DRAFT_TOKENS"):
        monkeypatch.delenv(name, raising=False)
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_variables_stand_for_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Deployments set options by variables; mistakes in them are refused, too."""
    monkeypatch.setenv("MODEL", "small=/s;large=/l")
    monkeypatch.setenv("TARGET_ENDPOINT", "small=a:1")
    assert run(["service", "coordinator"]) == 2
    assert "--target-endpoint names 'small'" in capsys.readouterr().err
    monkeypatch.setenv("MODEL", "demo")
    monkeypatch.setenv("BATCH_SIZE", "0")
    assert run(["service", "target"]) == 2
    assert "max_num_seqs" in capsys.readouterr().err
