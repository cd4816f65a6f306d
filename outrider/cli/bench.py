"""`outrider bench TARGET`: plain against speculative decoding on the same prompts; TARGET may be a server's URL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from outrider.cli.lab import OutputOptions, Resume, measure
from outrider.cli.options import MachineOptions, ServerTarget
from outrider.cli.prompting import (
    AnswerOptions,
    BaselineOptions,
    ConversationOptions,
    PromptOptions,
    ask_server,
    is_server,
    refuse_for_server,
    refuse_without_server,
)
from outrider.cli.typed import numbers
from outrider.cli.verbs import given, option, with_groups
from outrider.errors import ConfigError
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.lab.bench.plan import Plan
    from outrider.lab.configuration import Configuration

COMPARED, ENOUGH = "What is compared", "When it is enough"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Configurations and cells, and when they are measured well enough."""

    drafters: list[str] | None = option(
        None, COMPARED,
        "Configurations, with commas between: 'draft-model k=5, ngram k=auto, suffix'; may be given again.",
        metavar="LIST", show_default="draft-model where there is a draft, ngram, suffix",
    )  # fmt: skip
    draft_endpoint: str | None = option(
        None, COMPARED, "Draft service of configurations with drafter 'remote'.", metavar="ADDRESS|local"
    )
    lossy: bool = option(False, COMPARED, "Allow verifiers that change the text.")
    batch_size: str = option("1", COMPARED, "Rows at once; several with commas give a curve.", metavar="N,...")
    context_lengths: str | None = option(
        None, COMPARED,
        "Fill prompts up, or cut them, to so many tokens: a curve at the first batch size.",
        metavar="N,...", show_default="prompts as they are",
    )  # fmt: skip
    grid: bool = option(False, COMPARED, "Each context length at each batch size, not at the first one only.")
    interval: float = option(0.05, ENOUGH, "Stop when each speedup's 95 % interval is as narrow, relative to it.")
    budget: float = option(20.0, ENOUGH, "Minutes of measuring, loading aside.")
    min_rounds: int = option(2, ENOUGH, "At least as many rounds over the prompts, budget permitting.")
    max_rounds: int = option(10, ENOUGH, "Maximum number of rounds.")
    max_other_cpu: float = option(0.1, ENOUGH, "Repeat a run while others used more than this share of the processors.")

    def plan(self, target: str, machine: MachineOptions, prompts: PromptOptions, answers: AnswerOptions) -> Plan:
        """What the options ask to be measured. Raises ConfigError."""
        from outrider.lab.bench.plan import Plan, default_configurations
        from outrider.lab.configuration import parse_configurations

        has_draft = machine.draft is not None or target == "demo"
        named = parse_configurations(self.drafters) if self.drafters else default_configurations(has_draft)
        if self.draft_endpoint is not None:
            named = _with_endpoint(named, self.draft_endpoint, is_named=bool(self.drafters))
        return Plan(
            configurations=tuple(named),
            temperatures=tuple(numbers("--temperature", answers.temperature, float)),
            batch_sizes=tuple(numbers("--batch-size", self.batch_size, int)),
            context_lengths=tuple(numbers("--context-lengths", self.context_lengths or "", int)),
            grid=self.grid,
            prompts=prompts.limit, sampling=answers.params(), seed=answers.seed, rounds=self.min_rounds,
            max_rounds=self.max_rounds, budget_s=60 * self.budget, precision=self.interval, max_other_cpu=self.max_other_cpu,
            lossy=self.lossy,
        )  # fmt: skip


@with_groups
def bench(
    target: ServerTarget,
    options: BenchOptions,
    prompts: ConversationOptions,
    answers: AnswerOptions,
    machine: MachineOptions,
    servers: BaselineOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Measure plain against speculative decoding on the same prompts."""
    check_lab("bench")
    from outrider.lab.bench.run import run_bench

    output.check()
    if is_server(target):
        refuse_for_server(given(options, machine), resume=resume)
        return ask_server("bench", target, servers, answers.one_temperature(), prompts, output)
    refuse_without_server(servers)
    plan, workload = options.plan(target, machine, prompts, answers), prompts.load(target)
    asked = replace(machine.options(target), lossy=options.lossy)
    run = partial(run_bench, asked, plan, workload, on_bad=prompts.on_bad, chat_template=prompts.chat_template)
    return measure("bench", output, run, resume=resume)


def _with_endpoint(named: list[Configuration], endpoint: str, *, is_named: bool) -> list[Configuration]:
    """The service's address for configurations that ask one; without a list of drafters, one such in addition. Raises ConfigError
    where none of a list asks a service."""
    from outrider import build
    from outrider.lab.configuration import Configuration

    if not is_named:
        named = [*named, Configuration(build.REMOTE)]
    if not any(one.drafter == build.REMOTE for one in named):
        raise ConfigError("--draft-endpoint is for drafter 'remote', which is not among --drafters: add it, or leave this out")
    return [
        replace(one, drafter_options={"endpoint": endpoint, **one.drafter_options}) if one.drafter == build.REMOTE else one
        for one in named
    ]
