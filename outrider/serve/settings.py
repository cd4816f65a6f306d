"""An operator's settings of the server: where it listens, what it admits, which models it serves,
who goes where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.build import Options
from outrider.engine.request import EngineSettings
from outrider.errors import ConfigError, did_you_mean
from outrider.models.loading.generation_config import checked_choice
from outrider.serve.api.reasoning_formats import AUTO, check_name
from outrider.serve.rules import Rule
from outrider.settings import checked, setting

MIB = 1 << 20
LogFormat = Literal["human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@checked()
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

    def __post_init__(self) -> None:
        """Raises ConfigError for names that mean nothing."""
        checked_choice(self.generation_config)
        check_name(self.reasoning_parser)


@checked()
@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Address and access of an HTTP process. Raises ConfigError for impossible values."""

    host: str = "127.0.0.1"
    port: int = setting(8000, "0 takes a free one", at_least=0, at_most=65535)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    # PEM: clients must show a certificate that it signed (mutual TLS)
    ssl_ca_certs: Path | None = None
    max_body_bytes: int = setting(8 * MIB, "larger bodies are refused", at_least=1)
    request_timeout_s: float = setting(
        600.0,
        "seconds after which an answer is cut off",
        alias="request_timeout",
        above=0,
        allow_inf_nan=True,
    )
    drain_timeout_s: float = setting(
        30.0,
        "seconds that running requests have to finish after SIGTERM",
        alias="drain_timeout",
        at_least=0,
        allow_inf_nan=True,
    )
    log_format: LogFormat = "human"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
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


@checked()
@dataclass(frozen=True, kw_only=True)
class ServerSettings(ListenSettings):
    """Raises ConfigError for what cannot be."""

    models: tuple[ServedModel, ...]
    rules: tuple[Rule, ...] = ()
    strict: bool = False  # refuse fields that have no effect, instead of naming them
    # in texts of clients, as text; else they act as what they are
    spell_special_tokens: bool = False
    max_stored_responses: int = setting(
        1000, "that later responses may continue; 0: none are kept", at_least=0
    )
    hang_timeout_s: float = setting(
        60.0,
        "seconds after which an engine that is stuck in a step is no longer healthy; 0: never",
        alias="hang_timeout",
        at_least=0,
    )
    self_test: bool = True
    log_requests: Path | None = None  # texts of requests and answers
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        super().__post_init__()

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
