"""`outrider service draft MODEL`: guesses tokens for targets in other processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import DRAFTING, MODEL, DrafterOption, MachineOptions
from outrider.cli.service_options import SERVICE, ListeningOptions
from outrider.cli.verbs import name_and_value, option, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.remote.draft.run import DraftServiceSettings
    from outrider.remote.draft.settings import DraftLimits
    from outrider.remote.serving import ServiceSettings

LIMITS = "Limits"
Drafting = Annotated[
    str | None,
    typer.Argument(
        help="The model that drafts: 'demo', a local folder, or a hub id. For a look-up drafter: the target, as --model.",
        envvar="MODEL", show_default=False, metavar="[MODEL]",
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostedOptions:
    """Which drafter is hosted."""

    drafter: Annotated[
        str, option(DRAFTING, "Who drafts: see 'outrider ls drafters'. auto: draft-model.")
    ] = "auto"
    drafter_option: DrafterOption = None
    model: Annotated[
        str | None,
        option(MODEL, "The target whose tokens are drafted; only its tokenizer is read.", show_default="the draft model's"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftListeningOptions(ListeningOptions):
    """Options of a draft service: its address, its access rules, and how it is monitored."""

    port: Annotated[int, option(SERVICE, "0 takes a free one.")] = 50051
    drain_timeout: Annotated[float, option(SERVICE, "Seconds for drafts that are waited for after SIGTERM.")] = 5.0

    def listen(self) -> ServiceSettings:
        """Raises ConfigError for what cannot be."""
        return self.settings(self.port, self.drain_timeout)


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """What askers may use."""

    max_draft_tokens: Annotated[
        int, option(LIMITS, "Most draft tokens of a chain.", envvar="MAX_DRAFT_TOKENS")
    ] = 8
    batch_size: Annotated[int, option(LIMITS, "Most rows of one drafting call.", envvar="BATCH_SIZE")] = 32
    outcome_nodes: Annotated[
        int, option(LIMITS, "Nodes drafted ahead while a target's pass runs, for tokens that it may emit; 0: none.")
    ] = 64
    law_tokens: Annotated[int, option(LIMITS, "A drawn token's distribution is cut to so many of its likeliest tokens.")] = 64
    max_rows: Annotated[int, option(LIMITS, "Texts of one asker that are kept.")] = 256
    max_instances: Annotated[int, option(LIMITS, "Askers at the same time.")] = 64
    max_requests_per_second: Annotated[float, option(LIMITS, "Messages about rows, of one asker.")] = 5000.0
    memory: Annotated[str, option(LIMITS, "Memory for the texts' keys and values, or look-up tables.")] = "2GiB"
    idle_timeout: Annotated[float, option(LIMITS, "Seconds after which a text that nobody asks about is forgotten.")] = 600.0

    def limits(self) -> DraftLimits:
        """Raises ConfigError for what cannot be."""
        from outrider.cli.quantities import memory
        from outrider.remote.draft.settings import DraftLimits

        return DraftLimits(
            max_draft_tokens=self.max_draft_tokens, batch_size=self.batch_size, max_rows=self.max_rows,
            max_instances=self.max_instances, memory_bytes=memory("--memory", self.memory), idle_timeout_s=self.idle_timeout,
            max_requests_per_s=self.max_requests_per_second, law_tokens=self.law_tokens, outcome_nodes=self.outcome_nodes,
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
    settings = _settings(model_or_target, machine, hosted, limits, listening)
    from outrider.cli.session import quieten_libraries
    from outrider.remote.draft.run import run_draft_service

    quieten_libraries()
    run_draft_service(settings, status=lambda line: print(line, file=sys.stderr))
    return 0


def _settings(
    named: str | None, machine: MachineOptions, hosted: HostedOptions, limits: LimitOptions, listening: DraftListeningOptions
) -> DraftServiceSettings:
    """Raises ConfigError, before anything heavy is loaded where that is possible."""
    from outrider.remote.draft.hosted import HostedDrafterOptions, wants_draft
    from outrider.remote.draft.run import DraftServiceSettings

    if machine.quantise is not None:
        raise ConfigError("--set quantise rounds a target, and a draft service has none: leave it out")
    options = dict(name_and_value("--drafter-option", text) for text in hosted.drafter_option or [])
    drafter = "draft-model" if hosted.drafter == "auto" else hosted.drafter
    target, draft_model = hosted.model, machine.draft
    if named is not None and wants_draft(drafter, options):
        draft_model = _one("--draft", draft_model, named)
    elif named is not None:
        target = _one("--model", target, named)
    return DraftServiceSettings(
        drafter=HostedDrafterOptions(
            model=target, draft=draft_model, drafter=drafter, drafter_options=options,
            max_draft_tokens=limits.max_draft_tokens, dtype=machine.dtype, device=machine.device, threads=machine.threads,
            runtime=machine.runtime, max_model_len=machine.max_model_len, revision=machine.revision,
            trust_remote_code=machine.trust_remote_code,
        ),
        limits=limits.limits(), listen=listening.listen(),
        log_format=listening.log_format, log_level=listening.log_level, otlp_endpoint=listening.otlp_endpoint,
    )  # fmt: skip


def _one(option_name: str, given: str | None, named: str) -> str:
    """Raises ConfigError where two models were named for one place."""
    if given not in (None, named):
        raise ConfigError(f"two models were named: {named} and {option_name} {given}; give one")
    return named
