"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a server's URL."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.bench_options import (
    AnswerOptions,
    BaselineOptions,
    ComparedOptions,
    ConversationOptions,
    EnoughOptions,
    make_plan,
)
from outrider.cli.lab import OutputOptions, Resume, command_line, deliver, interrupted, journal_for, shown_progress
from outrider.cli.options import MachineOptions, ServerTarget
from outrider.cli.server_study import endpoints_for, is_server, refuse_for_server, refuse_without_server
from outrider.cli.verbs import changed, with_groups

if TYPE_CHECKING:
    from outrider.lab.bench.result import BenchResult
    from outrider.lab.journal import Journal

@with_groups
def bench(
    target: ServerTarget,
    compared: ComparedOptions,
    prompts: ConversationOptions,
    answers: AnswerOptions,
    enough: EnoughOptions,
    machine: MachineOptions,
    servers: BaselineOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Measure plain against speculative decoding on the same prompts."""
    output.check()
    if is_server(target):
        refuse_for_server(changed(compared, enough, machine))
    else:
        refuse_without_server(servers)
    path = journal_for(output, "bench", resume=resume)
    try:
        if is_server(target):
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
    target: str, compared: ComparedOptions, prompts: ConversationOptions, answers: AnswerOptions, enough: EnoughOptions,
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
    url: str, prompts: ConversationOptions, answers: AnswerOptions, servers: BaselineOptions, path: Path, resume: bool
) -> tuple[BenchResult, Journal, bool]:
    from outrider.lab.bench.servers import bench_servers

    endpoints = endpoints_for(url, servers, prompts)
    workload = prompts.load(url)
    with shown_progress() as progress:
        return bench_servers(
            endpoints, workload, servers.load_options(answers), path, prompts=prompts.limit, resume=resume, progress=progress
        )
