"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a server's URL."""

from __future__ import annotations

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
from outrider.cli.lab import OutputOptions, Resume, measure
from outrider.cli.options import MachineOptions, ServerTarget
from outrider.cli.server_study import endpoints_for, is_server, measure_server, refuse_for_server, refuse_without_server
from outrider.cli.verbs import changed, with_groups

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.lab.journal import Journal
    from outrider.lab.progress import Progress

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
        refuse_for_server(changed(compared, enough, machine), resume=resume)
        return _bench_server(target, prompts, answers, servers, output)
    refuse_without_server(servers)
    plan = make_plan(target, machine, compared, prompts, answers, enough)
    workload = prompts.load(target)
    options = replace(machine.options(target), lossy=compared.lossy)

    def run(path: Path, progress: Progress) -> tuple[BenchResult, Journal]:
        from outrider.cli.session import quieten_libraries
        from outrider.lab.bench.run import run_bench

        quieten_libraries()
        return run_bench(
            options, plan, workload, path, resume=resume, on_bad=prompts.on_bad, chat_template=prompts.chat_template,
            progress=progress, status=progress.say,
        )  # fmt: skip

    return measure("bench", output, run, resume=resume)


def _bench_server(
    url: str, prompts: ConversationOptions, answers: AnswerOptions, servers: BaselineOptions, output: OutputOptions
) -> int:
    from outrider.lab.bench.servers import bench_servers

    endpoints, workload = endpoints_for(url, servers, prompts), prompts.load(url)
    options = servers.load_options(answers.one_temperature())
    return measure_server(
        lambda progress: bench_servers(endpoints, workload, options, prompts=prompts.limit, progress=progress), output
    )
