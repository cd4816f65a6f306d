"""What an operator decides about the server: where it listens, what it admits, which models it
serves, who goes where."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from outrider.build import Options
from outrider.engine.request import EngineSettings
from outrider.errors import ConfigError, did_you_mean
from outrider.models.loading.generation_config import checked_choice
from outrider.serve.api.reasoning_formats import AUTO, check_name
from outrider.serve.rules import Rule

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One engine."""

    name: str  # what clients call it
    options: Options
    engine: EngineSettings = field(default_factory=EngineSettings)
    extra_drafters: tuple[str, ...] = ()  # others that a request may ask for
    allow_lossy: tuple[str, ...] = ()  # lossy verifiers that a request may ask for
    # where sampling defaults come from: the model's own file, "none", or a folder
    generation_config: str = "auto"
    # how it writes down what it thinks; "none": thoughts are part of the text
    reasoning_parser: str = AUTO


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Address and access of an HTTP process. Raises ConfigError for impossible values."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    # PEM: clients must show a certificate that it signed (mutual TLS)
    ssl_ca_certs: Path | None = None
    max_body_bytes: int = 8 * MIB
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    log_format: str = "human"
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 (any free one) and 65535, got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        # NaN, which TOML can write, is neither: it would be no limit, without a word
        if not self.request_timeout_s > 0:
            raise ConfigError(
                f"request_timeout must be above 0 seconds, got {self.request_timeout_s:g}"
            )
        if not self.drain_timeout_s >= 0:
            raise ConfigError(
                f"drain_timeout must be at least 0 seconds, got {self.drain_timeout_s:g}"
            )
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError(
                "an API key must be ASCII text without spaces around it, and not empty"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both: --ssl-certfile FILE and --ssl-keyfile FILE")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError(
                "--ssl-ca-certs needs TLS: add --ssl-certfile FILE and --ssl-keyfile FILE"
            )
        for file in (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs):
            if file is not None and not file.is_file():
                raise ConfigError(f"TLS file {file} does not exist")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ListenSettings):
    """Raises ConfigError for what cannot be."""

    models: tuple[ServedModel, ...]
    rules: tuple[Rule, ...] = ()
    strict: bool = False  # refuse fields that have no effect, instead of naming them
    # in texts of clients, as text; else they act as what they are
    spell_special_tokens: bool = False
    max_stored_responses: int = 1000  # that /v1/responses may go on from; 0: none
    # longest a busy engine may not come round and be called healthy; 0: for ever
    hang_timeout_s: float = 60.0
    self_test: bool = True
    log_requests: Path | None = None  # texts of requests and answers
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        super().__post_init__()
        if self.max_stored_responses < 0:
            raise ConfigError(
                "max_stored_responses must be at least 0 (0: none are kept), got "
                f"{self.max_stored_responses}"
            )
        if not 0 <= self.hang_timeout_s < math.inf:
            raise ConfigError(
                "hang_timeout must be at least 0 seconds (0: never), and finite, got "
                f"{self.hang_timeout_s:g}"
            )
        for model in self.models:
            checked_choice(model.generation_config)
            check_name(model.reasoning_parser)

    def _check_names(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ConfigError("no model to serve: name a target, or a --config with [[models]]")
        for name in names:
            if not name.strip() or names.count(name) > 1:
                raise ConfigError(
                    f"models need names of their own: '{name}' is empty or used twice"
                )
        for rule in self.rules:
            if rule.to is not None and rule.to not in names:
                raise ConfigError(
                    f"a route leads to the model '{rule.to}', which is not "
                    f"served.{did_you_mean(rule.to, names)}"
                )
            if rule.to is None and rule.model is not None and rule.model not in names:
                raise ConfigError(
                    f"a route for '{rule.model}', which is no model here, must say which one "
                    "answers: to = ..."
                )
