"""`outrider service`: the processes of a deployment in parts, one sub-command each (docs/services.md)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.options import DRAFTING, MODEL, DrafterOption, MachineOptions, ModelOptions
from outrider.cli.serve import ENGINE, REASONING_PARSER, EngineOptions, ListenOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.typed import memory
from outrider.cli.verbs import add_verb, name_and_value, option, with_groups
from outrider.errors import ConfigError
from outrider.extras import check_installed

if TYPE_CHECKING:
    from outrider.remote.coordinator.settings import CoordinatorSettings
    from outrider.remote.draft.settings import DraftLimits
    from outrider.remote.security import ClientSecurity
    from outrider.remote.serving import ServiceSettings

SERVICE = "Service"
WATCHING = "Watching"
CALLING = "TLS of calls to services"
LIMITS = "Limits"
Drafting = Annotated[
    str | None,
    typer.Argument(
        help="The model that drafts: 'demo', a local folder, a .gguf file, or a hub id. For a look-up drafter: the target, as "
        "--model.",
        envvar="MODEL", show_default=False, metavar="[MODEL]",
    ),
]  # fmt: skip
DRAFT_VARIABLE = "DRAFT_ENDPOINT"
SPARE_CALLS = 64  # beside requests: those that watch, shake hands, or are refused
Target = Annotated[
    str | None,
    typer.Argument(
        help="'demo', a local folder, a .gguf file, or a hub id.", envvar="MODEL", show_default=False, metavar="[MODEL]"
    ),
]
REPLICAS = "Replicas"
STEPS_ARE_THERE = (
    "a coordinator makes no steps, so it asks no draft service: give --draft-endpoint to the target services "
    "('outrider service target ... --draft-endpoint')"
)
Config = Annotated[
    Path | None,
    typer.Option(help="Models, their target services and routes from a TOML file.", metavar="FILE", show_default=False),
]
Address = Annotated[str, typer.Argument(help="grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH.", show_default=False)]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Options of a service: its address, its access rules, and how it is monitored.

    Each service adds its port and its time to drain.
    """

    host: str = option("127.0.0.1", SERVICE, "Address to listen on; 0.0.0.0 is all of them.")
    metrics_port: int | None = option(None, SERVICE, "Port for Prometheus, /metrics.", show_default="none")
    tls_cert: Path | None = option(None, SERVICE, "Certificate for TLS (PEM).", metavar="FILE")
    tls_key: Path | None = option(None, SERVICE, "Its private key (PEM).", metavar="FILE")
    tls_client_ca: Path | None = option(
        None, SERVICE, "Let in only callers with a certificate of this authority (PEM).", metavar="FILE"
    )
    log_format: Literal["human", "json"] = option("human", WATCHING, "human or json.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", WATCHING, "Least severity of log lines.")
    otlp_endpoint: str | None = option(None, WATCHING, "OpenTelemetry collector for traces.", metavar="URL")

    def settings(self, port: int, drain_timeout: float, **more: int) -> ServiceSettings:
        """What the gRPC server takes; `more`: further fields of `ServiceSettings`. Raises ConfigError for what cannot be."""
        from outrider.remote import security
        from outrider.remote.serving import ServiceSettings

        token = os.environ.get(security.TOKEN_VARIABLE)
        access = security.ServerSecurity(
            certificate=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca, tokens=() if token is None else (token,)
        )
        if not 0 <= drain_timeout < float("inf"):
            raise ConfigError(f"--set drain_timeout must be at least 0 seconds, and finite, got {drain_timeout}")
        return ServiceSettings(
            host=self.host, port=port, security=access, metrics_port=self.metrics_port, drain_timeout_s=drain_timeout, **more
        )

    def watching(self) -> dict[str, Any]:
        """Fields of a service's settings about how it is monitored."""
        return {"log_format": self.log_format, "log_level": self.log_level, "otlp_endpoint": self.otlp_endpoint}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How services are called."""

    tls_ca: Path | None = option(
        None, CALLING, "Who may have signed their certificates (PEM).", metavar="FILE", show_default="the system's"
    )
    tls_cert: Path | None = option(None, CALLING, "Certificate shown to them (PEM), for mutual TLS.", metavar="FILE")
    tls_key: Path | None = option(None, CALLING, "Its private key (PEM).", metavar="FILE")
    tls_server_name: str | None = option(None, CALLING, "Name in their certificates, where it is not the address.")

    def security(self, token: str | None = None) -> ClientSecurity:
        """How calls are secured. Raises ConfigError for files that do not fit."""
        from outrider.remote.security import ClientSecurity

        return ClientSecurity(
            ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, token=token, server_name=self.tls_server_name
        )


@dataclass(frozen=True, kw_only=True)
class HostedOptions:
    """Which drafter is hosted."""

    drafter: str = option("auto", DRAFTING, "Who drafts: see 'outrider ls drafters'. auto: draft-model.")
    drafter_option: DrafterOption = None
    model: str | None = option(
        None, MODEL,
        "The target whose tokens are drafted; only its tokenizer is read.",
        show_default="the draft model's",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DraftListeningOptions(ListeningOptions):
    """Options of a draft service: its address, its access rules, and how it is monitored."""

    port: int = option(50051, SERVICE, "0 takes a free one.")
    drain_timeout: float = option(5.0, SERVICE, "Seconds for drafts that are waited for after SIGTERM.")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """What askers may use."""

    max_draft_tokens: int = option(8, LIMITS, "Most draft tokens of a chain.", envvar="MAX_DRAFT_TOKENS")
    batch_size: int = option(32, LIMITS, "Most rows of one drafting call.", envvar="BATCH_SIZE")
    distribution_tokens: int = option(64, LIMITS, "A drawn token's distribution is cut to so many of its likeliest tokens.")
    max_rows: int = option(256, LIMITS, "Texts of one asker that are kept.")
    max_instances: int = option(64, LIMITS, "Askers at the same time.")
    max_requests_per_second: float = option(5000.0, LIMITS, "Messages about rows, of one asker.")
    memory: str = option("2GiB", LIMITS, "Memory for the texts' keys and values, or look-up tables.")
    idle_timeout: float = option(600.0, LIMITS, "Seconds after which a text that nobody asks about is forgotten.")

    def limits(self) -> DraftLimits:
        """What a draft service lets its callers do. Raises ConfigError for what cannot be."""
        from outrider.remote.draft.settings import DraftLimits

        return DraftLimits(
            max_draft_tokens=self.max_draft_tokens, batch_size=self.batch_size, max_rows=self.max_rows,
            max_instances=self.max_instances, memory_bytes=memory("--memory", self.memory), idle_timeout_s=self.idle_timeout,
            max_requests_per_s=self.max_requests_per_second, distribution_tokens=self.distribution_tokens,
        )  # fmt: skip


@with_groups
def draft(
    machine: MachineOptions,
    hosted: HostedOptions,
    limits: LimitOptions,
    listening: DraftListeningOptions,
    model_or_target: Drafting = None,
) -> int:
    """Guess tokens for targets in other processes: a draft model, or a look-up drafter."""
    check_installed("a draft service", "services")
    from outrider.remote.draft.hosted import HostedDrafterOptions, wants_draft
    from outrider.remote.draft.run import DraftServiceSettings, run_draft_service

    if machine.quantise is not None:
        raise ConfigError("--set quantise rounds a target, and a draft service has none: leave it out")
    options = dict(name_and_value("--drafter-option", text) for text in hosted.drafter_option or [])
    drafter = "draft-model" if hosted.drafter == "auto" else hosted.drafter
    target, draft_model = hosted.model, machine.draft
    if model_or_target is not None and wants_draft(drafter, options):
        draft_model = _one("--draft", draft_model, model_or_target)
    elif model_or_target is not None:
        target = _one("--model", target, model_or_target)
    settings = DraftServiceSettings(
        drafter=HostedDrafterOptions(
            model=target, draft=draft_model, drafter=drafter, drafter_options=options,
            max_draft_tokens=limits.max_draft_tokens, dtype=machine.dtype, device=machine.device, threads=machine.threads,
            runtime=machine.runtime, max_model_len=machine.max_model_len, revision=machine.revision,
            trust_remote_code=machine.trust_remote_code,
        ),
        limits=limits.limits(), listen=listening.settings(listening.port, listening.drain_timeout), **listening.watching(),
    )  # fmt: skip
    quieten_libraries()
    run_draft_service(settings, status=say)
    return 0


def _one(option_name: str, given: str | None, named: str) -> str:
    """The one name that was given. Raises ConfigError where two models were named for one place."""
    if given not in (None, named):
        raise ConfigError(f"two models were named: {named} and {option_name} {given}; give one")
    return named


@dataclass(frozen=True, kw_only=True)
class TargetListeningOptions(ListeningOptions):
    """Options of a target service: its address, its access rules, and how it is monitored."""

    port: int = option(50052, SERVICE, "0 takes a free one.")
    drain_timeout: float = option(30.0, SERVICE, "Seconds that running requests have to finish after SIGTERM.")
    self_test: bool = option(True, WATCHING, "Try at the start whether drafting pays.")


@dataclass(frozen=True, kw_only=True)
class TargetEngineOptions(EngineOptions):
    """How a target service runs its model."""

    batch_size: int = option(32, ENGINE, "Requests decoded at the same time.", envvar="BATCH_SIZE")


@with_groups
def target(
    model: ModelOptions,
    engine: TargetEngineOptions,
    listen: TargetListeningOptions,
    target: Target = None,
) -> int:
    """Run a model for coordinators: tokens in, tokens and text out, over gRPC.

    Environment: MODEL, BATCH_SIZE, MAX_DRAFT_TOKENS (--num-draft-tokens), DRAFT_ENDPOINT, OUTRIDER_SERVICE_TOKEN.
    """
    check_installed("a target service", "services")
    from outrider.remote.target.run import TargetSettings, run_target

    if target is None:
        raise ConfigError("name a model to run ('demo', a folder, a .gguf file or a hub id), or set the variable MODEL")
    if model.num_draft_tokens is None and (max_tokens := os.environ.get("MAX_DRAFT_TOKENS")):
        model = dataclasses.replace(model, num_draft_tokens=max_tokens)
    if model.draft_endpoint is None and (address := os.environ.get(DRAFT_VARIABLE)):
        if model.draft is None and model.drafter in ("auto", "remote"):
            model = dataclasses.replace(model, draft_endpoint=address)
        else:
            say(f"note: {DRAFT_VARIABLE} is set, but not used: --draft or --drafter chooses the drafter")
    served = engine.served(target, model, engine.batch_size)
    max_streams = served.engine.max_num_seqs + served.engine.max_queue + SPARE_CALLS
    service = listen.settings(listen.port, listen.drain_timeout, max_streams=max_streams)
    quieten_libraries()
    run_target(TargetSettings(model=served, service=service, self_test=listen.self_test, **listen.watching()), status=say)
    return 0


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
    max_retries: int = option(3, REPLICAS, "Replicas that a request may lose, no token between, before it ends with an error.")
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
    check_installed("a coordinator", "serve")
    check_installed("a coordinator", "services")
    from outrider.remote.coordinator.run import run_coordinator

    settings = _settings(replicas, listen, config)
    quieten_libraries()
    notes = [f"{DRAFT_VARIABLE} is set: {STEPS_ARE_THERE}"] if os.environ.get(DRAFT_VARIABLE) else []
    run_coordinator(settings, status=say, notes=notes)
    return 0


def _settings(replicas: ReplicaOptions, listen: ListenOptions, config: Path | None) -> CoordinatorSettings:
    """A coordinator's settings, from options and a file. Raises ConfigError, before anything is loaded."""
    from outrider.remote import security
    from outrider.remote.coordinator.journey import RetryLimits
    from outrider.remote.coordinator.replica import Timeouts
    from outrider.remote.coordinator.settings import CoordinatorSettings, from_file, from_options

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
        server=server, endpoints=endpoints, security=replicas.security(os.environ.get(security.TOKEN_VARIABLE) or None),
        patience=Timeouts(
            silence_s=replicas.stall_timeout, hang_s=hang_s, watch_interval_s=min(1.0, replicas.stall_timeout / 4)
        ),
        limits=RetryLimits(max_retries=replicas.max_retries, wait_s=replicas.replica_wait), max_queue=replicas.max_queue,
    )  # fmt: skip


def _from_environment(name: str) -> list[str]:
    """Several with semicolons between."""
    return [part for part in os.environ.get(name, "").split(";") if part.strip()]


@with_groups
def health(address: Address, call: CallOptions, timeout: Timeout = 5.0) -> int:
    """Ask a draft or target service whether it takes calls: exit status 0, or 1 with the reason. Needs no token."""
    check_installed("a call to a service", "services")
    from outrider.remote.endpoint import Endpoint
    from outrider.remote.probe import check_health

    round_trip_s = asyncio.run(check_health(Endpoint.parse(address, "address"), call.security(), timeout))
    typer.echo(f"{address} takes calls, {1e3 * round_trip_s:.3g} ms there and back")
    return 0


COMMANDS: tuple[Callable[..., int | None], ...] = (draft, target, coordinator, health)


def service_app() -> typer.Typer:
    """The group of sub-commands, for the table of verbs."""
    app = typer.Typer(
        name="service",
        help="Run one part of a deployment in parts: draft, target or coordinator.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_without_command)
    for command in COMMANDS:
        add_verb(app, command)
    return app


def _without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
