"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a server's URL."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.bench_options import (
    AnswerOptions,
    ComparedOptions,
    EnoughOptions,
    PromptOptions,
    ServerOptions,
    changed,
    make_plan,
)
from outrider.cli.lab import OutputOptions, Resume, command_line, deliver, interrupted, journal_for, shown_progress
from outrider.cli.options import MachineOptions, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.bench.result import BenchResult
    from outrider.lab.journal import Journal

Target = Annotated[
    str,
    typer.Argument(help="'demo', a local folder, a hub id, or the URL of an OpenAI-compatible server.", show_default=False),
]


@with_groups
def bench(
    target: Target,
    compared: ComparedOptions,
    prompts: PromptOptions,
    answers: AnswerOptions,
    enough: EnoughOptions,
    machine: MachineOptions,
    servers: ServerOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Measure plain against speculative decoding on the same prompts."""
    output.check()
    is_server = target.startswith(("http://", "https://"))
    unused = changed(compared, enough, machine) if is_server else changed(servers)
    if unused:
        where = "when a server is measured: what it runs is set there" if is_server else "without a server's URL as the target"
        raise ConfigError(f"{', '.join(unused)} {'mean' if len(unused) > 1 else 'means'} nothing {where}")
    path = journal_for(output.out, "bench", resume=resume)
    try:
        if is_server:
            result, journal, complete = _bench_server(target, prompts, answers, servers, path, resume)
        else:
            result, journal = _bench_model(target, compared, prompts, answers, enough, machine, path, resume)
            complete = True
    except KeyboardInterrupt:
        return interrupted(path)
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return interrupted(path)
    if not complete:
        sys.stderr.write(f"some requests have no answer; {path} has the others: the same command with --resume asks again\n")
        return 1
    journal.close()
    return 0


def _bench_model(
    target: str, compared: ComparedOptions, prompts: PromptOptions, answers: AnswerOptions, enough: EnoughOptions,
    machine: MachineOptions, path: Path, resume: bool,
) -> tuple[BenchResult, Journal]:  # fmt: skip
    from outrider.cli.session import quieten_libraries
    from outrider.lab.bench.run import run_bench

    plan = make_plan(target, machine, compared, prompts, answers, enough)
    options = replace(machine.options(target), lossy=compared.lossy)
    workload = prompts.load(target)
    quieten_libraries()
    with shown_progress() as progress:
        return run_bench(
            options, plan, workload, path, resume=resume, on_bad=prompts.on_bad, chat_template=prompts.chat_template,
            progress=progress, status=progress.say,
        )  # fmt: skip


def _bench_server(
    url: str, prompts: PromptOptions, answers: AnswerOptions, servers: ServerOptions, path: Path, resume: bool
) -> tuple[BenchResult, Journal, bool]:
    from outrider.lab.bench.servers import bench_servers
    from outrider.lab.server import Endpoint, key_from

    if not prompts.chat_template:
        raise ConfigError("--raw means nothing when a server is measured: conversations go to its chat endpoint, see --api")
    key = key_from(servers.api_key_env)
    if servers.baseline_url is None:
        if servers.baseline_api_key_env is not None:
            raise ConfigError("--baseline-api-key-env means nothing without --baseline-url")
        endpoints = {"server": Endpoint.parse(url, api_key=key, model=servers.model)}
    else:
        named = servers.baseline_api_key_env
        its_key = key if named is None else key_from(named or None)
        endpoints = {
            "plain": Endpoint.parse(servers.baseline_url, api_key=its_key, model=servers.model),
            "speculative": Endpoint.parse(url, api_key=key, model=servers.model),
        }
    workload = prompts.load(url)
    with shown_progress() as progress:
        return bench_servers(
            endpoints, workload, servers.load_options(answers), path, prompts=prompts.prompts, resume=resume, progress=progress
        )
