"""`outrider service target MODEL`: an engine behind gRPC, for coordinators."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.cli.options import ModelOptions
from outrider.cli.serve import ENGINE, EngineOptions
from outrider.cli.service_options import SERVICE, WATCHING, ListeningOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.verbs import option, with_groups
from outrider.errors import ConfigError

DRAFT_VARIABLE = "DRAFT_ENDPOINT"
SPARE_CALLS = 64  # beside requests: those that watch, shake hands, or are refused
Target = Annotated[
    str | None,
    typer.Argument(help="'demo', a local folder, or a hub id.", envvar="MODEL", show_default=False, metavar="[MODEL]"),
]


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
    if target is None:
        raise ConfigError("name a model to run ('demo', a folder or a hub id), or set the environment variable MODEL")
    if model.num_draft_tokens is None and (max_tokens := os.environ.get("MAX_DRAFT_TOKENS")):
        model = dataclasses.replace(model, num_draft_tokens=max_tokens)
    if model.draft_endpoint is None and (address := os.environ.get(DRAFT_VARIABLE)):
        if model.draft is None and model.drafter in ("auto", "remote"):
            model = dataclasses.replace(model, draft_endpoint=address)
        else:
            say(f"note: {DRAFT_VARIABLE} is set, but not used: --draft or --drafter chooses the drafter")
    from outrider.remote.target.run import TargetSettings, run_target

    served = engine.served(target, model, engine.batch_size)
    max_streams = served.engine.max_num_seqs + served.engine.max_queue + SPARE_CALLS
    service = listen.settings(listen.port, listen.drain_timeout, max_streams=max_streams)
    quieten_libraries()
    run_target(TargetSettings(model=served, service=service, self_test=listen.self_test, **listen.watching()), status=say)
    return 0
