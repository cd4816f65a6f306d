"""`outrider serve TARGET`: an OpenAI-compatible server; several models and routes with --config."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.options import GENERATION_CONFIG, ModelOptions
from outrider.cli.session import quieten_libraries, say
from outrider.cli.typed import memory
from outrider.cli.verbs import given, option, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.serve.settings import ServedModel

SERVER = "Server"
ENGINE = "Engine"
WATCHING = "Watching"
KEY_VARIABLE = "OUTRIDER_API_KEY"
DRAFT_VARIABLE = "DRAFT_ENDPOINT"
REASONING_PARSER = "How it writes down what it thinks, by vLLM's names; auto: as its chat template shows; none: as text."
Target = Annotated[
    str | None,
    typer.Argument(
        help="'demo', a local folder, a .gguf file, or a hub id; none with --config.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="Models and routes from a TOML file.",
        metavar="FILE",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]


@dataclass(frozen=True, kw_only=True)
class DoorOptions:
    """Options that say where an HTTP process listens and which clients it admits. None: as the
    configuration file says, else the default shown."""

    host: str | None = option(
        None,
        SERVER,
        "Address to listen on; 0.0.0.0 is all of them.",
        show_default="127.0.0.1",
        common=True,
    )
    port: int | None = option(None, SERVER, "0 takes a free one.", show_default="8000", common=True)
    api_key: list[str] | None = option(
        None,
        SERVER,
        f"A key clients must send; may be given again. Also {KEY_VARIABLE}.",
        metavar="KEY",
        common=True,
    )
    cors_origin: list[str] | None = option(
        None,
        SERVER,
        "A web page's origin that may ask; may be given again; * is all.",
        metavar="URL",
    )
    ssl_certfile: Path | None = option(None, SERVER, "Certificate for TLS.", metavar="FILE")
    ssl_keyfile: Path | None = option(None, SERVER, "Its private key.", metavar="FILE")
    ssl_ca_certs: Path | None = option(
        None,
        SERVER,
        "Let in only clients with a certificate of this authority (PEM).",
        metavar="FILE",
    )
    max_body_bytes: int | None = option(
        None, SERVER, "Larger bodies are refused.", show_default="8 MiB"
    )
    request_timeout: float | None = option(
        None, SERVER, "Seconds after which an answer is cut off.", show_default="600"
    )
    drain_timeout: float | None = option(
        None,
        SERVER,
        "Seconds that running requests have to finish after SIGTERM.",
        show_default="30",
    )
    log_format: Literal["human", "json"] | None = option(
        None, WATCHING, "human or json.", show_default="human"
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = option(
        None, WATCHING, "Least severity of log lines.", show_default="info"
    )

    def given(self) -> dict[str, Any]:
        """Fields of the process's settings that the command line or the environment sets."""
        values = dict(vars(self))
        keys = list(values.pop("api_key") or [])
        if KEY_VARIABLE in os.environ:
            keys.append(os.environ[KEY_VARIABLE])
        values |= {
            "api_keys": tuple(keys) or None,
            "cors_origins": tuple(values.pop("cors_origin") or ()) or None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ListenOptions(DoorOptions):
    """Options for what the server admits besides requests, and how it is watched."""

    strict: bool | None = option(
        None,
        SERVER,
        "Refuse unknown fields, which are else named in log and header.",
        show_default="false",
    )
    spell_special_tokens: bool | None = option(
        None,
        SERVER,
        "Spell special tokens in texts of clients as text; else they act as such.",
        show_default="false",
    )
    max_stored_responses: int | None = option(
        None, SERVER, "Responses that later ones may continue from; 0: none.", show_default="1000"
    )
    hang_timeout: float | None = option(
        None,
        SERVER,
        "Seconds after which /health fails while an engine is stuck in a step; 0: never.",
        show_default="60",
    )
    log_requests: Path | None = option(
        None, WATCHING, "Write requests and answers, with their texts.", metavar="FILE", common=True
    )
    otlp_endpoint: str | None = option(
        None, WATCHING, "OpenTelemetry collector for traces.", metavar="URL"
    )
    self_test: bool | None = option(
        None, WATCHING, "Try at the start whether drafting pays.", show_default="true"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How one model is run for many requests."""

    served_model_name: str | None = option(
        None, ENGINE, "What clients call the model.", show_default="the target", common=True
    )
    max_queue: int = option(
        256, ENGINE, "Requests that may wait; more are refused (HTTP: 429 with Retry-After)."
    )
    kv_memory: str | None = option(
        None,
        ENGINE,
        "Memory for keys and values, like 4GiB.",
        show_default="half of what is free, 8 GiB at most",
        common=True,
    )
    prefix_share: float = option(
        0.25, ENGINE, "Share of it that keeps texts which may come again; 0: none are kept."
    )
    generation_config: str = option("auto", ENGINE, GENERATION_CONFIG, metavar="auto|none|FOLDER")
    extra_drafter: list[str] | None = option(
        None,
        ENGINE,
        "Another drafter that requests may ask for; may be given again.",
        metavar="NAME",
    )
    allow_lossy: list[str] | None = option(
        None,
        ENGINE,
        "A lossy verifier that requests may ask for; may be given again.",
        metavar="NAME",
    )

    def served(
        self, target: str, model: ModelOptions, max_num_seqs: int, reasoning_parser: str = "auto"
    ) -> ServedModel:
        """How the options let a model be served. Raises ConfigError for values out of range."""
        from outrider.build import Options
        from outrider.engine.request import EngineSettings
        from outrider.serve.settings import ServedModel

        engine = EngineSettings(
            max_num_seqs=max_num_seqs,
            max_queue=self.max_queue,
            prefix_share=self.prefix_share,
            kv_memory=None if self.kv_memory is None else memory("--kv-memory", self.kv_memory),
        )
        return ServedModel(
            name=self.served_model_name or target,
            options=Options(target=target, **model.llm_arguments()).with_free_length(),
            engine=engine,
            extra_drafters=tuple(self.extra_drafter or ()),
            allow_lossy=tuple(self.allow_lossy or ()),
            generation_config=self.generation_config,
            reasoning_parser=reasoning_parser,
        )


@dataclass(frozen=True, kw_only=True)
class ServerEngineOptions(EngineOptions):
    """How the one model of a server without --config is run."""

    max_num_seqs: int = option(
        32, ENGINE, "Requests decoded at the same time.", envvar="BATCH_SIZE", common=True
    )
    reasoning_parser: str = option("auto", ENGINE, REASONING_PARSER, metavar="auto|none|NAME")


@with_groups
def serve(
    model: ModelOptions,
    engine: ServerEngineOptions,
    listen: ListenOptions,
    target: Target = None,
    config: Config = None,
) -> int:
    """Answer clients of OpenAI and Anthropic: chat, responses, messages, completions; streams,
    thoughts, tools, forms.

    Environment: MODEL, BATCH_SIZE (--max-num-seqs), MAX_DRAFT_TOKENS (--num-draft-tokens),
    DRAFT_ENDPOINT, OUTRIDER_API_KEY, OUTRIDER_SERVICE_TOKEN (of the draft service). An option wins.
    """
    from outrider.serve.config_file import read_config
    from outrider.serve.run import run_server
    from outrider.serve.settings import ServerSettings

    if config is not None:
        unused = [*(["the target"] if target is not None else []), *given(model, engine)]
        if unused:
            raise ConfigError(
                f"--config says which models are served: leave out {', '.join(unused)}"
            )
        settings = read_config(config, listen.given())
    elif (target := target or os.environ.get("MODEL")) is None:
        raise ConfigError(
            "name a model to serve ('demo', a folder, a .gguf file or a hub id), or a --config FILE"
        )
    else:
        model = with_variables(model)
        served = engine.served(target, model, engine.max_num_seqs, engine.reasoning_parser)
        settings = ServerSettings(models=(served,), **listen.given())
    quieten_libraries()
    run_server(settings, status=say)
    return 0


def with_variables(model: ModelOptions) -> ModelOptions:
    """The options with MAX_DRAFT_TOKENS and DRAFT_ENDPOINT of the environment where they are not
    given."""
    if model.num_draft_tokens is None and (max_tokens := os.environ.get("MAX_DRAFT_TOKENS")):
        model = dataclasses.replace(model, num_draft_tokens=max_tokens)
    if model.draft_endpoint is None and (address := os.environ.get(DRAFT_VARIABLE)):
        if model.draft is None and model.drafter in ("auto", "remote"):
            model = dataclasses.replace(model, draft_endpoint=address)
        else:
            say(
                f"note: {DRAFT_VARIABLE} is set, but not used: --draft or --drafter chooses the "
                "drafter"
            )
    return model
