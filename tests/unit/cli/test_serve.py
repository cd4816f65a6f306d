"""`outrider serve`: what the command line and the file decide, without starting a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.serve import run
from outrider.serve.settings import ServerSettings


def test_help_imports_nothing_heavy() -> None:
    """Help that loads torch or a web framework takes seconds."""
    heavy = ("torch", "transformers", "fastapi", "uvicorn", "outrider.serve")
    code = (
        "import sys; from outrider.cli.app import run; code = run(['serve', '--help']); "
        f"print('HEAVY', [m for m in {heavy!r} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0"
    assert "--kv-memory" in done.stdout


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """What servers would have been started with."""
    found: list[ServerSettings] = []
    monkeypatch.setattr(run, "run_server", lambda settings, status: found.append(settings))
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    return found


def test_options_reach_model_engine_and_server(
    cli: Callable[..., Any], started: list[ServerSettings]
) -> None:
    done = cli(
        "serve",
        "demo",
        "--drafter",
        "ngram",
        "--num-draft-tokens",
        "4",
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        "3",
        "--kv-memory",
        "2MiB",
        "--prefix-share",
        "0",
        "--extra-drafter",
        "suffix",
        "--allow-lossy",
        "typical",
        "--port",
        "0",
        "--reasoning-parser",
        "qwen3",
        "--api-key",
        "a",
        "--strict",
        "--api-key",
        "b",
        "--request-timeout",
        "7",
        "--hang-timeout",
        "90",
        "--no-self-test",
        "--cors-origin",
        "*",
    )
    assert done.code == 0, done.err
    (settings,) = started
    (model,) = settings.models
    assert (model.name, model.options.target) == ("tiny", "demo")
    assert (model.options.drafter, model.options.num_draft_tokens) == ("ngram", "4")
    assert (model.engine.max_num_seqs, model.engine.kv_memory, model.engine.max_queue) == (
        3,
        2 << 20,
        256,
    )
    assert model.engine.prefix_share == 0
    assert (model.extra_drafters, model.allow_lossy) == (("suffix",), ("typical",))
    assert model.reasoning_parser == "qwen3"
    assert (settings.port, settings.api_keys, settings.request_timeout_s, settings.self_test) == (
        0,
        ("a", "b"),
        7.0,
        False,
    )
    assert (settings.cors_origins, settings.hang_timeout_s, settings.strict) == (("*",), 90.0, True)


def test_defaults_are_safe(cli: Callable[..., Any], started: list[ServerSettings]) -> None:
    """Nobody outside this machine is let in unasked."""
    assert cli("serve", "demo").code == 0
    assert (started[0].host, started[0].port, started[0].api_keys, started[0].cors_origins) == (
        "127.0.0.1",
        8000,
        (),
        (),
    )
    assert started[0].models[0].name == "demo"
    assert not started[0].strict


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ([], "auto"),
        (["--num-draft-tokens", "3"], "3"),
        (["--drafter", "suffix k=3"], "3"),
        (["--drafter", "none"], None),
        (["--verifier", "token"], None),
        (["--draft-endpoint", "grpc://there:1"], None),
    ],
)
def test_lengths_follow_the_load_unless_told(
    cli: Callable[..., Any],
    started: list[ServerSettings],
    tmp_path: Path,
    arguments: list[str],
    length: str | None,
) -> None:
    assert cli("serve", "demo", *arguments).code == 0
    names = {"--num-draft-tokens": "num_draft_tokens", "--drafter": "drafter"}
    names |= {"--verifier": "verifier", "--draft-endpoint": "draft_endpoint"}
    entries = zip(arguments[::2], arguments[1::2], strict=True)
    keys = "".join(f'{names[option]} = "{value}"\n' for option, value in entries)
    path = tmp_path / "server.toml"
    path.write_text(f'[[models]]\ntarget = "demo"\n{keys}')
    assert cli("serve", "--config", str(path)).code == 0
    for settings in started:
        chosen = settings.models[0].options.num_draft_tokens
        assert (None if chosen is None else str(chosen)) == length


def test_key_from_the_environment(
    cli: Callable[..., Any], started: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "hidden")
    assert cli("serve", "demo").code == 0
    assert started[0].api_keys == ("hidden",)


def test_file_and_command_line(
    cli: Callable[..., Any], started: list[ServerSettings], tmp_path: Path
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        '[server]\nport = 1\nhost = "::1"\n[[models]]\ntarget = "demo"\n[[models]]\ntarget = '
        '"other"\n'
    )
    assert cli("serve", "--config", str(path), "--port", "2").code == 0
    assert (started[0].port, started[0].host) == (2, "::1")
    assert [model.name for model in started[0].models] == ["demo", "other"]
    refused = cli("serve", "demo", "--config", str(path), "--drafter", "ngram", "--max-queue", "3")
    assert refused.code == 2
    assert "leave out the target, --drafter, --max-queue" in refused.err
    # the default, which the file need not have
    refused = cli("serve", "--config", str(path), "--max-num-seqs", "32")
    assert refused.code == 2
    assert "leave out --max-num-seqs" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model"),
        (["demo", "--port", "70000"], "port must be at least 0 and at most 65535"),
        (["demo", "--kv-memory", "lots"], "--kv-memory takes bytes like 4GiB"),
        (["demo", "--kv-memory", "1"], "kv_memory must be at least 1048576"),
        (["demo", "--prefix-share", "1"], "prefix_share must be at least 0 and below 1"),
        (["demo", "--prefix-share", "nan"], "prefix_share must be a finite number, got nan"),
        (["demo", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["demo", "--ssl-keyfile", "key.pem"], "TLS needs both"),
        (["demo", "--ssl-keyfile", "no.pem", "--ssl-certfile", "no.pem"], "does not exist"),
        (["demo", "--api-key", " "], "API key"),
        (["demo", "--request-timeout", "0"], "above 0"),
        (["demo", "--hang-timeout", "-1"], "hang_timeout must be at least 0 (seconds after which"),
        (["demo", "--config", "no.toml"], "leave out the target"),
        (["--config", "no.toml"], "cannot be read"),
        (["demo", "--prot", "1"], "Did you mean '--port'?"),
    ],
)
def test_mistakes_are_lines(
    cli: Callable[..., Any], started: list[ServerSettings], arguments: list[str], message: str
) -> None:
    done = cli("serve", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not started
