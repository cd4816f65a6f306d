"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a
server's URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from outrider.cli import session
from outrider.cli.lab import OutputOptions, Resume, answer, measure
from outrider.cli.options import (
    PREFILL,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    MachineOptions,
    ServerTarget,
)
from outrider.cli.prompting import SELDOM_READING, AnswerOptions, ConversationOptions, PromptOptions
from outrider.cli.servers import SELDOM_SERVER, ServerOptions, is_server
from outrider.cli.typed import numbers
from outrider.cli.verbs import gathered, given, option, refuse_unused
from outrider.errors import ConfigError
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.configuration import Configuration
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.lab.bench.plan import Plan

COMPARED = "What is compared"
ENOUGH = "When it is enough"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Configurations and cells, and when they are measured well enough."""

    drafters: list[str] | None = option(
        None,
        COMPARED,
        "Configurations, with commas between: 'draft-model k=5, ngram k=auto, suffix'; may be "
        "given again.",
        metavar="LIST",
        show_default="draft-model where there is a draft, ngram, suffix",
        common=True,
    )
    lossy: bool = option(False, COMPARED, "Allow verifiers that change the text.")
    prefill: str | None = option(None, COMPARED, f"{PREFILL} Plain decoding reads whole prompts.")
    batch_size: str = option(
        "1",
        COMPARED,
        "Rows at once; several with commas give a curve.",
        metavar="N,...",
        common=True,
    )
    context_lengths: str | None = option(
        None,
        COMPARED,
        "Fill prompts up, or cut them, to this many tokens: a curve at the first batch size.",
        metavar="N,...",
        show_default="prompts as they are",
        common=True,
    )
    budget: float = option(20.0, ENOUGH, "Minutes of measuring, loading aside.", common=True)
    max_rounds: int = option(2, ENOUGH, "Rounds over the prompts, budget permitting.")
    max_other_cpu: float = option(
        0.1, ENOUGH, "Repeat a run while others used more than this share of the processors."
    )

    def plan(
        self, compared: Sequence[Configuration], prompts: PromptOptions, answers: AnswerOptions
    ) -> Plan:
        """The bench plan that the options ask for. Raises ConfigError."""
        from outrider.lab.bench.plan import Plan

        return Plan(
            configurations=tuple(compared),
            temperatures=tuple(numbers("--temperature", answers.temperature, float)),
            batch_sizes=tuple(numbers("--batch-size", self.batch_size, int)),
            context_lengths=tuple(numbers("--context-lengths", self.context_lengths or "", int)),
            prompts=prompts.limit,
            sampling=answers.params(),
            seed=answers.seed,
            rounds=self.max_rounds,
            budget_s=60 * self.budget,
            max_other_cpu=self.max_other_cpu,
            lossy=self.lossy,
        )


@gathered(
    sampling=SELDOM_SAMPLING,
    model_options=SELDOM_MODEL,
    reading=SELDOM_READING,
    enough=("max_rounds", "max_other_cpu"),
    server=SELDOM_SERVER,
)
def bench(
    target: ServerTarget,
    options: BenchOptions,
    prompts: ConversationOptions,
    answers: AnswerOptions,
    machine: MachineOptions,
    servers: ServerOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Measure plain against speculative decoding on the same prompts."""
    check_lab("bench")
    from outrider.lab.bench.run import run_bench

    of_server = is_server(target)
    output.check(folder=not of_server)
    if of_server:
        unused = [*given(options, machine), *(["--resume"] if resume else [])]
        unused += [] if prompts.chat_template else ["--reading chat_template"]
        refuse_unused(unused, "when a server is measured: what it runs is set there")
        return _bench_server(target, servers, answers, prompts, output)
    refuse_unused(given(servers), "without a server's URL as the target")
    machine, compared = _compared(target, options.drafters, machine)
    plan = options.plan(compared, prompts, answers)
    workload = prompts.load(target)
    asked = replace(machine.options(target), lossy=options.lossy, prefill=options.prefill)
    run = partial(
        run_bench,
        asked,
        plan,
        workload,
        on_bad=prompts.on_bad,
        chat_template=prompts.chat_template,
        keep_runs=bool(output.folders),
    )
    return measure("bench", output, run, resume=resume)


def _compared(
    target: str, drafters: Sequence[str] | None, machine: MachineOptions
) -> tuple[MachineOptions, list[Configuration]]:
    """The configurations to compare; the options with the draft model that --draft auto stands for.
    A head that it stands for becomes an option of the configurations that draft with it."""
    from outrider.build import found_companion
    from outrider.configuration import Configuration, parse_configurations
    from outrider.drafters.companions import AUTO, KINDS, MODEL
    from outrider.lab.bench.plan import default_configurations

    named = parse_configurations(drafters) if drafters else None
    if machine.draft != AUTO:
        has_draft = machine.draft is not None or target == "demo"
        return machine, named or default_configurations(has_draft)
    without = [one.drafter for one in named or () if "head" not in one.drafter_options]
    kinds = KINDS if named is None else [kind for kind in KINDS if kind in without]
    choice = found_companion(machine.options(target), kinds)
    for note in choice.notes:
        session.say(f"note: {note}")
    is_head = choice.kind not in (None, MODEL)
    if named is None:
        own = [Configuration(str(choice.kind)), Configuration(str(choice.kind), "auto")]
        named = [*(own if is_head else []), *default_configurations(choice.kind == MODEL)]
    if not is_head:
        return replace(machine, draft=choice.draft), named
    head = {"head": choice.draft or target}
    return replace(machine, draft=None), [
        replace(one, drafter_options={**head, **one.drafter_options})
        if one.drafter == choice.kind
        else one
        for one in named
    ]


def _bench_server(
    url: str,
    servers: ServerOptions,
    answers: AnswerOptions,
    prompts: ConversationOptions,
    output: OutputOptions,
) -> int:
    """Measure, show, write. The exit code is 1 where a request has no answer."""
    from outrider.lab.server.client import RequestOptions
    from outrider.lab.server.measure import bench_servers

    temperatures = numbers("--temperature", answers.temperature, float)
    if len(temperatures) != 1:
        raise ConfigError(
            "a server is measured at one temperature at a time; give one --temperature"
        )
    endpoints = servers.endpoints(url)
    options = RequestOptions(
        concurrency=servers.concurrency,
        sampling=answers.params(temperatures[0]),
        api=servers.api,
        timeout_s=servers.stall_timeout,
    )
    workload = prompts.load(url)

    def finish(result: BenchResult) -> int:
        return 0 if all(server.is_complete for server in result.servers) else 1

    run = partial(bench_servers, endpoints, workload, options, prompts=prompts.limit)
    return answer(output, lambda progress: run(progress=progress), finish)
