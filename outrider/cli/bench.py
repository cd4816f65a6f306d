"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a server's URL."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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
from outrider.cli.verbs import given, with_groups


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
        refuse_for_server(given(compared, enough, machine), resume=resume)
        return _bench_server(target, prompts, answers, servers, output)
    refuse_without_server(servers)
    plan = make_plan(target, machine, compared, prompts, answers, enough)
    workload = prompts.load(target)
    options = replace(machine.options(target), lossy=compared.lossy)
    from outrider.lab.bench.run import run_bench

    run = partial(run_bench, options, plan, workload, on_bad=prompts.on_bad, chat_template=prompts.chat_template)
    return measure("bench", output, run, resume=resume)


def _bench_server(
    url: str, prompts: ConversationOptions, answers: AnswerOptions, servers: BaselineOptions, output: OutputOptions
) -> int:
    from outrider.lab.server.study import bench_servers

    endpoints, workload = endpoints_for(url, servers, prompts), prompts.load(url)
    options = servers.load_options(answers.one_temperature())
    return measure_server(
        lambda progress: bench_servers(endpoints, workload, options, prompts=prompts.limit, progress=progress), output
    )
