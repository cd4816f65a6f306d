"""Which prompts are asked, and a server as the target: options, and what its counters and clocks say."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from outrider.cli.lab import INTERRUPTED, OutputOptions, command_line, deliver, shown_progress
from outrider.cli.options import MIN_P, SAMPLING, TOP_K, TOP_P
from outrider.cli.typed import numbers
from outrider.cli.verbs import given, option, refuse_unused
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.lab.server.options import LoadOptions, ServerEndpoint
    from outrider.lab.server.server_result import ServerResult
    from outrider.lab.workload.types import Workload
    from outrider.sampling.params import SamplingParams

PROMPTS, SERVERS = "Prompts", "For a server's URL"
ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/\S*)?")  # a hub's file has a / before its colon


def source(otherwise: str) -> Any:
    """The option `--prompts`; `otherwise`: which prompts are taken without it, where the target is not the demo's."""
    return option(
        None, PROMPTS,
        "A prompts file, a built-in name (docs/workloads.md), several with + between.",
        metavar="FILE_OR_NAME", show_default=f"demo for the demo target, else {otherwise}",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts."""

    otherwise: ClassVar[str] = "embedded:reasoning"

    prompts: str | None = source(otherwise)
    limit: int = option(16, PROMPTS, "Most prompts of each task.", min=1)
    data: Path | None = option(None, PROMPTS, "Folder with the files of named workloads.")
    on_bad: Literal["refuse", "skip"] = option("refuse", PROMPTS, "Bad lines, and prompts that do not fit.")

    def load(self, target: str, limit: int | None = None) -> Workload:
        """All of them, or at most `limit`. Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        if self.prompts is not None and self.prompts.isdigit():
            raise ConfigError(f"--prompts takes a file or a name; a number of prompts is --limit {self.prompts}")
        name = self.prompts or ("demo" if target == "demo" else self.otherwise)
        return load_workload(name, limit=limit, on_bad=self.on_bad, data=self.data)


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(PromptOptions):
    """Which prompts, and how conversations are sent."""

    chat_template: bool = option(
        True, PROMPTS, "Wrap conversations in the model's chat template; false: send them as plain text."
    )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers of measured prompts are sampled."""

    max_tokens: int = option(128, SAMPLING, "Max tokens of an answer.")
    temperature: str = option("0", SAMPLING, "0 is greedy; several with commas.", metavar="T,...")
    top_k: int = option(0, SAMPLING, TOP_K)
    top_p: float = option(1.0, SAMPLING, TOP_P)
    min_p: float = option(0.0, SAMPLING, MIN_P)
    ignore_eos: bool = option(False, SAMPLING, "Generate past the end of the text, so that batches stay full.")
    seed: int = option(0, SAMPLING, "Of sampled texts and of the order of batches.", min=0)

    def one_temperature(self) -> SamplingParams:
        """For servers, which are measured at one temperature at a time. Raises ConfigError for several."""
        temperatures = numbers("--temperature", self.temperature, float)
        if len(temperatures) != 1:
            raise ConfigError("a server is measured at one temperature at a time; give one --temperature")
        return self.params(temperatures[0])

    def params(self, temperature: float = 0.0) -> SamplingParams:
        """The sampling options as parameters of a request. Raises ConfigError for a value out of range."""
        from outrider.sampling.params import SamplingParams

        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """For targets that are the URL of an OpenAI-compatible server."""

    server_model: str | None = option(None, SERVERS, "Which of the server's models.", show_default="the only one")
    concurrency: str = option("1,4,16", SERVERS, "Requests in flight; several with commas.", metavar="N,...")
    api: Literal["auto", "chat", "completions"] = option("auto", SERVERS, "Which endpoint.")
    api_key_env: str | None = option(None, SERVERS, "Environment variable with the API key.", metavar="NAME")
    stall_timeout: float = option(300.0, SERVERS, "Seconds without a sign of life.")

    def load_options(self, sampling: SamplingParams) -> LoadOptions:
        """How the options load a server. Raises ConfigError."""
        from outrider.lab.server.options import LoadOptions

        levels = tuple(numbers("--concurrency", self.concurrency, int))
        return LoadOptions(concurrency=levels, sampling=sampling, api=self.api, timeout_s=self.stall_timeout)


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(ServerOptions):
    """A server, and the one to compare it with."""

    baseline_url: str | None = option(None, SERVERS, "The same model without speculation, to compare with.")
    baseline_api_key_env: str | None = option(
        None, SERVERS, "api_key_env of --baseline-url; '' sends it no key.", metavar="NAME", show_default="api_key_env"
    )


def is_server(target: str) -> bool:
    """Whether a target is a URL. Raises ConfigError for HOST:PORT alone, which is neither that nor a model."""
    if ADDRESS.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"'{target}' looks like a server's address: write http://{target}")
    return target.startswith(("http://", "https://"))


def refuse_for_server(unused: Sequence[str], *, resume: bool) -> None:
    """Raises ConfigError for options that were given and mean nothing to a server."""
    refuse_unused([*unused, *(["--resume"] if resume else [])], "when a server is measured: what it runs is set there")


def refuse_without_server(servers: ServerOptions) -> None:
    """Raises ConfigError for options that are about servers only."""
    refuse_unused(given(servers), "without a server's URL as the target")


def endpoints_for(url: str, servers: ServerOptions, prompts: ConversationOptions) -> dict[str, ServerEndpoint]:
    """The server, after the one to compare it with where there is one. Raises ConfigError."""
    from outrider.lab.server.options import ServerEndpoint, key_from

    if not prompts.chat_template:
        refuse_unused(["--set chat_template"], "when a server is measured: conversations go to its chat endpoint")
    key = key_from(servers.api_key_env)
    if not isinstance(servers, BaselineOptions) or servers.baseline_url is None:
        if isinstance(servers, BaselineOptions) and servers.baseline_api_key_env is not None:
            raise ConfigError("--set baseline_api_key_env means nothing without --baseline-url")
        return {"server": ServerEndpoint.parse(url, api_key=key, model=servers.server_model)}
    named = servers.baseline_api_key_env
    its_key = key if named is None else key_from(named or None)
    return {
        "plain": ServerEndpoint.parse(servers.baseline_url, api_key=its_key, model=servers.server_model),
        "speculative": ServerEndpoint.parse(url, api_key=key, model=servers.server_model),
    }


def ask_server(
    question: Literal["bench", "explain", "tune"], url: str, servers: ServerOptions, sampling: SamplingParams,
    prompts: ConversationOptions, output: OutputOptions,
) -> int:  # fmt: skip
    """Measure, show, write. The exit code is 1 where a request has no answer that a later run could get. Raises what `study`
    raises."""
    from outrider.lab.server.study import bench_servers, study

    endpoints, options, workload = endpoints_for(url, servers, prompts), servers.load_options(sampling), prompts.load(url)
    ask: Callable[..., BenchResult | ServerResult] = bench_servers if question == "bench" else partial(study, question)
    try:
        with shown_progress() as progress:
            result = ask(endpoints, workload, options, prompts=prompts.limit, progress=progress)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return INTERRUPTED
    return 0 if all(server.complete for server in result.servers) else 1
