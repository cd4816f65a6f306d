"""A server's URL as the target: which servers are meant, and `explain` and `tune` of one by its counters and clocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from outrider.cli.bench_options import BaselineOptions, ConversationOptions, ServerOptions
from outrider.cli.lab import INTERRUPTED, OutputOptions, command_line, deliver, shown_progress
from outrider.cli.verbs import given, refuse_unused
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.lab.progress import Progress
    from outrider.lab.server.endpoint import ServerEndpoint
    from outrider.lab.server.server_result import ServerResult
    from outrider.sampling.params import SamplingParams


def is_server(target: str) -> bool:
    """Whether a target is a URL."""
    return target.startswith(("http://", "https://"))


def refuse_for_server(unused: Sequence[str], *, resume: bool) -> None:
    """Raises ConfigError for options that were given and mean nothing to a server."""
    refuse_unused([*unused, *(["--resume"] if resume else [])], "when a server is measured: what it runs is set there")


def refuse_without_server(servers: ServerOptions) -> None:
    """Raises ConfigError for options that are about servers only."""
    refuse_unused(given(servers), "without a server's URL as the target")


def endpoints_for(url: str, servers: ServerOptions, prompts: ConversationOptions) -> dict[str, ServerEndpoint]:
    """The server, after the one to compare it with where there is one. Raises ConfigError."""
    from outrider.lab.server.endpoint import ServerEndpoint, key_from

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
    question: Literal["explain", "tune"], url: str, servers: ServerOptions, sampling: SamplingParams,
    prompts: ConversationOptions, output: OutputOptions,
) -> int:  # fmt: skip
    """Measure, show, write; the exit code. Raises what `study` raises."""
    from outrider.lab.server.study import study

    endpoints, options, workload = endpoints_for(url, servers, prompts), servers.load_options(sampling), prompts.load(url)
    return measure_server(
        lambda progress: study(question, endpoints, workload, options, prompts=prompts.limit, progress=progress), output
    )


def measure_server(run: Callable[[Progress], BenchResult | ServerResult], output: OutputOptions) -> int:
    """Show and write what `run` measures; exit code 1 where a request has no answer that a later run could get."""
    try:
        with shown_progress() as progress:
            result = run(progress)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return INTERRUPTED
    return 0 if all(server.complete for server in result.servers) else 1
