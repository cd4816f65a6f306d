"""`outrider service draft MODEL`: guesses tokens for targets in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import DRAFTING, MODEL, DrafterOption, MachineOptions
from outrider.cli.service_options import SERVICE, ListeningOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.verbs import name_and_value, option, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.remote.draft.settings import DraftLimits

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
    outcome_nodes: int = option(
        64, LIMITS, "Nodes drafted ahead while a target's pass runs, for tokens that it may emit; 0: none."
    )
    distribution_tokens: int = option(64, LIMITS, "A drawn token's distribution is cut to so many of its likeliest tokens.")
    max_rows: int = option(256, LIMITS, "Texts of one asker that are kept.")
    max_instances: int = option(64, LIMITS, "Askers at the same time.")
    max_requests_per_second: float = option(5000.0, LIMITS, "Messages about rows, of one asker.")
    memory: str = option("2GiB", LIMITS, "Memory for the texts' keys and values, or look-up tables.")
    idle_timeout: float = option(600.0, LIMITS, "Seconds after which a text that nobody asks about is forgotten.")

    def limits(self) -> DraftLimits:
        """Raises ConfigError for what cannot be."""
        from outrider.cli.quantities import memory
        from outrider.remote.draft.settings import DraftLimits

        return DraftLimits(
            max_draft_tokens=self.max_draft_tokens, batch_size=self.batch_size, max_rows=self.max_rows,
            max_instances=self.max_instances, memory_bytes=memory("--memory", self.memory), idle_timeout_s=self.idle_timeout,
            max_requests_per_s=self.max_requests_per_second, distribution_tokens=self.distribution_tokens,
            outcome_nodes=self.outcome_nodes,
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
    """Raises ConfigError where two models were named for one place."""
    if given not in (None, named):
        raise ConfigError(f"two models were named: {named} and {option_name} {given}; give one")
    return named
