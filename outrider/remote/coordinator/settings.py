"""What an operator decides about a coordinator: models, their replicas, and how much is tried.

On the command line a model is `--model MODEL --target-endpoint A,B`; several are `--model NAME=MODEL` and
`--target-endpoint NAME=A,B`, each given once a name. In a file:

    [server]                          # as in `outrider serve --config`
    port = 8000

    [[models]]
    name = "small"                    # what clients call it
    model = "/models/small"           # its tokenizer and chat template; no weights are read
    endpoints = ["grpc://a:50052", "grpc://b:50052"]

    [[routes]]                        # as in `outrider serve --config`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.errors import ConfigError
from outrider.remote.coordinator.journey import RetryLimits
from outrider.remote.coordinator.replica import Timeouts
from outrider.remote.endpoint import Endpoint
from outrider.remote.security import ClientSecurity
from outrider.serve.api.reasoning_formats import AUTO
from outrider.serve.config_file import check_keys, read_config
from outrider.serve.settings import ServedModel, ServerSettings

MODEL_KEYS = ("name", "model", "endpoints", "trust_remote_code", "revision", "reasoning_parser")


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Raises ConfigError for what cannot be. `endpoints`: by model, of `server.models`, which name tokenizers here."""

    server: ServerSettings
    endpoints: dict[str, tuple[Endpoint, ...]]
    security: ClientSecurity = field(default_factory=ClientSecurity)
    patience: Timeouts = field(default_factory=Timeouts)
    limits: RetryLimits = field(default_factory=RetryLimits)
    max_queue: int = 256  # requests that may wait while no replica answers

    def __post_init__(self) -> None:
        for model in self.server.models:
            if not self.endpoints.get(model.name):
                raise ConfigError(f"the model '{model.name}' has no replica: give it a --target-endpoint")
        if self.limits.max_retries < 0:
            raise ConfigError(f"max_retries must be at least 0, got {self.limits.max_retries}")
        for name, seconds in (("replica_wait", self.limits.wait_s), ("stall_timeout", self.patience.silence_s)):
            if not seconds > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {seconds:g}")
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}")


def from_options(
    models: Sequence[str], endpoints: Sequence[str], given: dict[str, Any], *, trust_remote_code: bool, revision: str | None,
    reasoning_parser: str = AUTO,
) -> tuple[ServerSettings, dict[str, tuple[Endpoint, ...]]]:
    """Read settings from [NAME=]MODEL and [NAME=]A,B as written; `given`: fields of `ServerSettings`. Raises ConfigError."""
    named = _by_name(models, "--model", "[NAME=]MODEL")
    addresses = _by_name(endpoints, "--target-endpoint", "[NAME=]HOST:PORT,HOST:PORT")
    if not named:
        raise ConfigError("name the model whose tokenizer is read: --model MODEL (or the environment variable MODEL)")
    if not addresses:
        raise ConfigError("name the target services: --target-endpoint A,B (or the environment variable TARGET_ENDPOINT)")
    if len(named) == len(addresses) == 1 and None in addresses:
        addresses = {next(iter(named)): addresses[None]}
    if set(named) != set(addresses):
        raise ConfigError(
            f"--model names {_words(named)}, --target-endpoint names {_words(addresses)}: each model needs both, under one name"
        )
    served = [
        ServedModel(
            name=name or model, options=Options(target=model, trust_remote_code=trust_remote_code, revision=revision),
            reasoning_parser=reasoning_parser,
        )
        for name, model in named.items()
    ]
    parsed = {
        name or model: Endpoint.parse_all(addresses[name], "--target-endpoint") for name, model in named.items()
    }
    return ServerSettings(models=tuple(served), self_test=False, **given), parsed


def from_file(path: Path, given: dict[str, Any]) -> tuple[ServerSettings, dict[str, tuple[Endpoint, ...]]]:
    """Read settings from a TOML file; `given` wins. Raises ConfigError naming file and key."""
    endpoints_of: dict[str, tuple[Endpoint, ...]] = {}

    def read(table: dict[str, Any], where: str) -> ServedModel:
        check_keys(table, MODEL_KEYS, where)
        model, endpoints = table.get("model"), table.get("endpoints")
        if not isinstance(model, str):
            raise ConfigError(f"{where}: 'model' is missing: a folder or a hub id with the tokenizer")
        if not isinstance(endpoints, list) or not all(isinstance(one, str) for one in endpoints):
            raise ConfigError(f"{where}: 'endpoints' must be a list of addresses like grpc://HOST:PORT")
        name = table.get("name", model)
        if not isinstance(name, str):
            raise ConfigError(f"{where}: 'name' must be a text")
        endpoints_of[name] = Endpoint.parse_all(",".join(endpoints), f"{where}: endpoints")
        return ServedModel(
            name=name,
            options=Options(
                target=model, trust_remote_code=bool(table.get("trust_remote_code", False)), revision=table.get("revision")
            ),
            reasoning_parser=str(table.get("reasoning_parser", AUTO)),
        )

    return read_config(path, {**given, "self_test": False}, read), endpoints_of


def _by_name(texts: Sequence[str], option: str, form: str) -> dict[str | None, str]:
    found: dict[str | None, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key, value = (name.strip(), value.strip()) if equals else (None, text.strip())
        if not value or key == "":
            raise ConfigError(f"{option} takes {form}, got '{text}'")
        if key in found:
            raise ConfigError(f"{option} is given twice for {key or 'the one model'}")
        found[key] = value
    return found


def _words(named: dict[str | None, str]) -> str:
    return ", ".join(f"'{name}'" if name else "one without a name" for name in named)
