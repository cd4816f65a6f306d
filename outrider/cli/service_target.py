"""`outrider service target MODEL`: an engine behind gRPC, for coordinators."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import GENERATION_CONFIG, ModelOptions
from outrider.cli.serve import ENGINE, AllowLossy, ExtraDrafter, KVMemory
from outrider.cli.service_options import SERVICE, WATCHING, ListeningOptions
from outrider.cli.verbs import option, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.request import EngineSettings
    from outrider.remote.serving import ServiceSettings

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

    def listen(self, max_streams: int) -> ServiceSettings:
        """Raises ConfigError for what cannot be."""
        return self.settings(self.port, self.drain_timeout, max_streams=max_streams)


@dataclass(frozen=True, kw_only=True)
class TargetEngineOptions:
    """How a target service runs its model."""

    batch_size: int = option(32, ENGINE, "Requests decoded at the same time.", envvar="BATCH_SIZE")
    max_queue: int = option(256, ENGINE, "Requests that may wait; more are refused.")
    kv_memory: KVMemory = None
    prefix_share: float = option(0.25, ENGINE, "Share of it that keeps texts which may come again; 0: none are kept.")
    served_model_name: str | None = option(
        None, ENGINE, "What the model is called in logs and metrics.", show_default="MODEL"
    )
    generation_config: str = option("auto", ENGINE, GENERATION_CONFIG, metavar="auto|none|FOLDER")
    extra_drafter: ExtraDrafter = None
    allow_lossy: AllowLossy = None

    def engine(self) -> EngineSettings:
        """Raises ConfigError for values out of range."""
        from outrider.cli.quantities import memory
        from outrider.engine.request import EngineSettings

        return EngineSettings(
            max_num_seqs=self.batch_size, max_queue=self.max_queue, prefix_share=self.prefix_share,
            kv_memory=None if self.kv_memory is None else memory("--kv-memory", self.kv_memory),
        )  # fmt: skip


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
            _say(f"note: {DRAFT_VARIABLE} is set, but not used: --draft or --drafter chooses the drafter")
    from outrider.build import Options
    from outrider.cli.session import quieten_libraries
    from outrider.remote.target.run import TargetSettings, run_target
    from outrider.serve.settings import ServedModel

    settings = engine.engine()
    served = ServedModel(
        name=engine.served_model_name or target, options=Options(target=target, **model.llm_arguments()), engine=settings,
        extra_drafters=tuple(engine.extra_drafter or ()), allow_lossy=tuple(engine.allow_lossy or ()),
        generation_config=engine.generation_config,
    )  # fmt: skip
    service = listen.listen(settings.max_num_seqs + settings.max_queue + SPARE_CALLS)
    quieten_libraries()
    run_target(
        TargetSettings(
            model=served, service=service, self_test=listen.self_test, log_format=listen.log_format,
            log_level=listen.log_level, otlp_endpoint=listen.otlp_endpoint,
        ),
        status=_say,
    )  # fmt: skip
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
