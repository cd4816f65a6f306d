"""`outrider service`: the processes of a deployment in parts, one sub-command each
(docs/services.md)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.options import DRAFTING, MODEL, SELDOM_MODEL, MachineOptions
from outrider.cli.serve import DoorOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.typed import memory
from outrider.cli.verbs import add_verb, gathered, listed, option, with_groups
from outrider.errors import ConfigError
from outrider.extras import check_installed

if TYPE_CHECKING:
    from outrider.remote.access import Access
    from outrider.remote.draft.texts import DraftLimits
    from outrider.remote.serving import ServiceSettings

SERVICE = "Service"
WATCHING = "Watching"
CALLING = "TLS of calls to services"
LIMITS = "Limits"
TARGETS = "Targets"
Drafting = Annotated[
    str | None,
    typer.Argument(
        help="The model that drafts: 'demo', a local folder, a .gguf file, or a hub id.",
        envvar="MODEL",
        show_default=False,
        metavar="MODEL",
    ),
]
TargetOfDrafts = Annotated[
    str | None,
    listed(
        MODEL,
        "The target whose tokens are drafted; only its tokenizer is read.",
        show_default="the draft model's",
        common=True,
    ),
]
Chains = Annotated[
    str, listed(DRAFTING, "How it drafts: 'draft-model stop=...', options as in drafting.")
]
Address = Annotated[
    str,
    typer.Argument(
        help="grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH; of a server http://HOST:PORT or "
        "https://HOST:PORT.",
        show_default=False,
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Options of a draft service: its address, its access rules, and how it is monitored."""

    host: str = option(
        "127.0.0.1", SERVICE, "Address to listen on; 0.0.0.0 is all of them.", common=True
    )
    port: int = option(50051, SERVICE, "0 takes a free one.", common=True)
    drain_timeout: float = option(
        5.0, SERVICE, "Seconds for drafts that are waited for after SIGTERM."
    )
    metrics_port: int | None = option(
        None, SERVICE, "Port for Prometheus, /metrics.", show_default="none", common=True
    )
    tls_cert: Path | None = option(
        None, SERVICE, "Certificate for TLS (PEM).", metavar="FILE", common=True
    )
    tls_key: Path | None = option(
        None, SERVICE, "Its private key (PEM).", metavar="FILE", common=True
    )
    tls_client_ca: Path | None = option(
        None,
        SERVICE,
        "Let in only callers with a certificate of this authority (PEM).",
        metavar="FILE",
    )
    log_format: Literal["human", "json"] = option("human", WATCHING, "human or json.")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", WATCHING, "Least severity of log lines."
    )

    def settings(self) -> ServiceSettings:
        """Settings of the gRPC server. Raises ConfigError for impossible values."""
        from outrider.remote.access import TOKEN_VARIABLE
        from outrider.remote.security import ServerSecurity
        from outrider.remote.serving import ServiceSettings

        return ServiceSettings(
            host=self.host,
            port=self.port,
            security=ServerSecurity(
                certificate=self.tls_cert,
                key=self.tls_key,
                client_ca=self.tls_client_ca,
                token=os.environ.get(TOKEN_VARIABLE),
            ),
            metrics_port=self.metrics_port,
            drain_timeout_s=self.drain_timeout,
        )


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How services are called."""

    tls_ca: Path | None = option(
        None,
        CALLING,
        "Who may have signed their certificates (PEM).",
        metavar="FILE",
        show_default="the system's",
        common=True,
    )
    tls_cert: Path | None = option(
        None,
        CALLING,
        "Certificate shown to them (PEM), for mutual TLS.",
        metavar="FILE",
        common=True,
    )
    tls_key: Path | None = option(
        None, CALLING, "Its private key (PEM).", metavar="FILE", common=True
    )
    tls_server_name: str | None = option(
        None, CALLING, "Name in their certificates, where it is not the address."
    )

    def access(self, token: str | None = None) -> Access:
        """How they are called. Raises ConfigError for half a certificate."""
        from outrider.remote.access import Access

        return Access(
            token=token,
            ca=self.tls_ca,
            certificate=self.tls_cert,
            key=self.tls_key,
            server_name=self.tls_server_name,
        )


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Permissions of callers."""

    max_draft_tokens: int = option(
        8, LIMITS, "Most draft tokens of a chain.", envvar="MAX_DRAFT_TOKENS", common=True
    )
    batch_size: int = option(
        32, LIMITS, "Most rows of one drafting call.", envvar="BATCH_SIZE", common=True
    )
    distribution_tokens: int = option(
        64, LIMITS, "A drawn token's distribution is cut to this many of its likeliest tokens."
    )
    max_rows: int = option(256, LIMITS, "Texts of one asker that are kept.")
    max_instances: int = option(64, LIMITS, "Askers at the same time.")
    memory: str = option("2GiB", LIMITS, "Memory for the texts' keys and values.", common=True)

    def limits(self) -> DraftLimits:
        """Permissions of a draft service's callers. Raises ConfigError for impossible values."""
        from outrider.remote.draft.texts import DraftLimits

        values = dict(vars(self))
        return DraftLimits(memory_bytes=memory("--memory", values.pop("memory")), **values)


@gathered(
    model_options=SELDOM_MODEL,
    limits=("distribution_tokens", "max_rows", "max_instances", "drain_timeout"),
)
def draft(
    machine: MachineOptions,
    limits: LimitOptions,
    listening: ListeningOptions,
    draft_model: Drafting = None,
    model: TargetOfDrafts = None,
    drafter: Chains = "draft-model",
) -> int:
    """Guess tokens for targets in other processes, with a draft model."""
    check_installed("a draft service", "services")
    from outrider.configuration import Configuration
    from outrider.remote.draft.hosted import HostedDrafterOptions
    from outrider.remote.draft.run import DraftServiceSettings, run_draft_service

    if machine.quantise is not None:
        raise ConfigError("--quantise rounds a target, and a draft service has none: leave it out")
    asked = Configuration.parse(drafter)
    if asked != Configuration("draft-model", drafter_options=asked.drafter_options):
        raise ConfigError(
            f"a draft service drafts chains with a model (--drafter draft-model), got '{drafter}': "
            "k and verifier are the targets', and other drafters draft in their processes"
        )
    if draft_model is not None and machine.draft not in (None, draft_model):
        raise ConfigError(
            f"two models were named: {draft_model} and --draft {machine.draft}; give one"
        )
    if "auto" in (draft_model, machine.draft):
        raise ConfigError(
            "a draft service serves targets that it does not read, so auto has nothing to look "
            "for: name its model ('outrider ls drafters-for MODEL' lists them)"
        )
    settings = DraftServiceSettings(
        drafter=HostedDrafterOptions(
            model=model,
            draft=draft_model or machine.draft,
            drafter_options=asked.drafter_options,
            max_draft_tokens=limits.max_draft_tokens,
            dtype=machine.dtype,
            device=machine.device,
            threads=machine.threads,
            runtime=machine.runtime,
            max_model_len=machine.max_model_len,
            revision=machine.revision,
            trust_remote_code=machine.trust_remote_code,
        ),
        limits=limits.limits(),
        listen=listening.settings(),
        log_format=listening.log_format,
        log_level=listening.log_level,
    )
    quieten_libraries()
    run_draft_service(settings, status=say)
    return 0


@dataclass(frozen=True, kw_only=True)
class TargetOptions(CallOptions):
    """Which targets answer, how they are reached, and how much is tried."""

    target_endpoint: list[str] | None = option(
        None,
        TARGETS,
        "Servers ('outrider serve'), http://HOST:PORT with commas between; may be given again.",
        metavar="A,B",
        envvar="TARGET_ENDPOINT",
        common=True,
    )
    max_retries: int = option(
        3,
        TARGETS,
        "Targets that a request may lose, no token between, before it ends with an error.",
    )
    replica_wait: float = option(
        30.0, TARGETS, "Seconds that a request waits for a target when none answers."
    )
    stall_timeout: float = option(
        10.0,
        TARGETS,
        "Seconds of silence after which a target is given up, with the requests that it brings "
        "nothing for.",
    )
    max_queue: int = option(256, TARGETS, "Requests that may wait while no target answers.")


@gathered(limits=("max_retries", "replica_wait", "stall_timeout", "max_queue"))
def coordinator(targets: TargetOptions, listen: DoorOptions) -> int:
    """Route clients to several 'outrider serve', and continue their answers when one of them dies.

    Environment: TARGET_ENDPOINT, OUTRIDER_SERVICE_TOKEN (a key of the targets), OUTRIDER_API_KEY.
    """
    from outrider.remote.access import TOKEN_VARIABLE
    from outrider.remote.coordinator.app import run_coordinator
    from outrider.remote.coordinator.settings import CoordinatorSettings, parsed_targets

    settings = CoordinatorSettings(
        targets=parsed_targets(targets.target_endpoint or []),
        access=targets.access(os.environ.get(TOKEN_VARIABLE) or None),
        max_retries=targets.max_retries,
        wait_s=targets.replica_wait,
        stall_s=targets.stall_timeout,
        max_queue=targets.max_queue,
        **listen.given(),
    )
    quieten_libraries()
    run_coordinator(settings, status=say)
    return 0


@with_groups
def health(address: Address, call: CallOptions, timeout: Timeout = 5.0) -> int:
    """Ask a draft service, or a server, whether it takes requests: exit status 0, or 1 with the
    reason. Needs no key."""
    if address.startswith(("http://", "https://")):
        from outrider.remote.coordinator.target import ready_s

        typer.echo(
            f"{address} takes requests, {1e3 * ready_s(address, call.access(), timeout):.3g} ms "
            "there and back"
        )
        return 0
    check_installed("a call to a service", "services")
    from outrider.remote.endpoint import Endpoint
    from outrider.remote.probe import check_health

    round_trip_s = asyncio.run(
        check_health(Endpoint.parse(address, "address"), call.access(), timeout)
    )
    typer.echo(f"{address} takes calls, {1e3 * round_trip_s:.3g} ms there and back")
    return 0


COMMANDS: tuple[Callable[..., int | None], ...] = (draft, coordinator, health)


def service_app() -> typer.Typer:
    """The group of sub-commands, for the table of verbs."""
    app = typer.Typer(
        name="service",
        help="Run one part of a deployment in parts: a draft service, or a coordinator before "
        "several servers.",
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
