"""`outrider service coordinator`: an OpenAI-compatible server whose models run in target services."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import MODEL
from outrider.cli.serve import REASONING_PARSER, ListenOptions, check_installed
from outrider.cli.service_options import CallOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.verbs import option, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.remote.coordinator.settings import CoordinatorSettings

REPLICAS = "Replicas"
DRAFT_VARIABLE = "DRAFT_ENDPOINT"
STEPS_ARE_THERE = (
    "a coordinator makes no steps, so it asks no draft service: give --draft-endpoint to the target services "
    "('outrider service target ... --draft-endpoint')"
)
Config = Annotated[
    Path | None,
    typer.Option(help="Models, their target services and routes from a TOML file.", metavar="FILE", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(CallOptions):
    """Which target services answer, how they are reached, and how much is tried."""

    model: list[str] | None = option(
        None, MODEL,
        "The model whose tokenizer and chat template are read (no weights); may be given again with names.",
        metavar="[NAME=]MODEL",
    )  # fmt: skip
    revision: str | None = option(None, MODEL, "Its branch, tag or commit on the hub.")
    trust_remote_code: bool = option(False, MODEL, "Run code that comes with the checkpoint.")
    reasoning_parser: str | None = option(None, MODEL, REASONING_PARSER, metavar="auto|none|NAME", show_default="auto")
    target_endpoint: list[str] | None = option(
        None, REPLICAS,
        "Target services of the model, grpc://HOST:PORT with commas between; may be given again with names.",
        metavar="[NAME=]A,B",
    )  # fmt: skip
    max_retries: int = option(3, REPLICAS, "Replicas that one request may lose before it ends with an error.")
    replica_wait: float = option(30.0, REPLICAS, "Seconds that a request waits for a replica when none answers.")
    stall_timeout: float = option(
        10.0, REPLICAS, "Seconds of silence after which a replica is given up, with the streams that bring nothing."
    )
    max_queue: int = option(256, REPLICAS, "Requests that may wait while no replica answers.")


@with_groups
def coordinator(
    replicas: ReplicaOptions,
    listen: ListenOptions,
    config: Config = None,
) -> int:
    """Answer OpenAI clients from target services, and carry their requests on when one of them dies.

    Environment: MODEL, TARGET_ENDPOINT, OUTRIDER_SERVICE_TOKEN, OUTRIDER_API_KEY.
    """
    check_installed()
    settings = _settings(replicas, listen, config)
    from outrider.remote.coordinator.run import run_coordinator

    quieten_libraries()
    notes = [f"{DRAFT_VARIABLE} is set: {STEPS_ARE_THERE}"] if os.environ.get(DRAFT_VARIABLE) else []
    run_coordinator(settings, status=say, notes=notes)
    return 0


def _settings(replicas: ReplicaOptions, listen: ListenOptions, config: Path | None) -> CoordinatorSettings:
    """Raises ConfigError, before anything is loaded."""
    from outrider.remote.coordinator.journey import RetryLimits
    from outrider.remote.coordinator.replica import Timeouts
    from outrider.remote.coordinator.settings import CoordinatorSettings, from_file, from_options
    from outrider.remote.security import TOKEN_VARIABLE

    given = listen.given()
    if given.pop("self_test", None) is not None:
        raise ConfigError("--set self_test: a coordinator tries nothing at its start; the target services have that option")
    hang_s = given.get("hang_timeout_s", 60.0)
    if config is not None:
        if replicas.model or replicas.target_endpoint or replicas.reasoning_parser:
            raise ConfigError(
                "--config says which models are served and where: leave out --model, --target-endpoint and --set reasoning_parser"
            )
        server, endpoints = from_file(config, given)
    else:
        models = replicas.model or _from_environment("MODEL")
        addresses = replicas.target_endpoint or _from_environment("TARGET_ENDPOINT")
        server, endpoints = from_options(
            models, addresses, given, trust_remote_code=replicas.trust_remote_code, revision=replicas.revision,
            reasoning_parser=replicas.reasoning_parser or "auto",
        )
    return CoordinatorSettings(
        server=server, endpoints=endpoints, security=replicas.security(os.environ.get(TOKEN_VARIABLE) or None),
        patience=Timeouts(
            silence_s=replicas.stall_timeout, hang_s=hang_s, watch_interval_s=min(1.0, replicas.stall_timeout / 4)
        ),
        limits=RetryLimits(max_retries=replicas.max_retries, wait_s=replicas.replica_wait), max_queue=replicas.max_queue,
    )  # fmt: skip


def _from_environment(name: str) -> list[str]:
    """Several with semicolons between."""
    return [part for part in os.environ.get(name, "").split(";") if part.strip()]
