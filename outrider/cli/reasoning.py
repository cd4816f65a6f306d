"""`outrider reasoning TARGET`: how far drafts are kept on worked solutions, why not further, and what that brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from outrider.cli.bench_options import ENOUGH, PROMPTS, numbers
from outrider.cli.lab import OutputOptions, Resume, command_line, deliver, interrupted, journal_for, shown_progress
from outrider.cli.options import SAMPLING, MachineOptions, Target, option, with_groups

if TYPE_CHECKING:
    from outrider.lab.reasoning.study import StudyPlan
    from outrider.lab.workload.types import Workload

STUDIED = "What is studied"


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The workload."""

    workload: Annotated[
        str | None,
        option(
            PROMPTS, "A file or built-in name with reasoning problems (docs/workloads.md).", metavar="FILE_OR_NAME",
            show_default="demo for the demo target, else gsm8k",
        ),
    ] = None  # fmt: skip
    data: Annotated[Path | None, option(PROMPTS, "Folder with the files of named workloads.", show_default=False)] = None
    on_bad: Annotated[Literal["refuse", "skip"], option(PROMPTS, "Bad lines, and problems that do not fit.")] = "refuse"
    problems: Annotated[int, option(PROMPTS, "Most problems.", min=1)] = 32

    def load(self, target: str) -> Workload:
        """All of it. Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        return load_workload(self.workload or ("demo" if target == "demo" else "gsm8k"), on_bad=self.on_bad, data=self.data)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What is run, and when it is enough."""

    longest: Annotated[int, option(STUDIED, "Draft tokens per step while acceptance is recorded.", min=2)] = 12
    lengths: Annotated[
        str | None,
        option(
            STUDIED, "Draft lengths to confirm, beside the best one and 'auto'.", metavar="N,...",
            show_default="2,5,8, up to the longest",
        ),
    ] = None  # fmt: skip
    own_weights: Annotated[
        bool, option(STUDIED, "Also quantised and early-exit drafts of the target.", "--own-weights/--no-own-weights")
    ] = True
    max_new_tokens: Annotated[int, option(SAMPLING, "Most tokens of a solution.", min=8)] = 128
    temperature: Annotated[str, option(SAMPLING, "0 is greedy; several with commas.", metavar="T,...")] = "0,1"
    seed: Annotated[int, option(SAMPLING, "Of sampled texts.", min=0)] = 0
    rounds: Annotated[int, option(ENOUGH, "Rounds over the problems that confirm, budget permitting.", min=1)] = 1
    budget: Annotated[float, option(ENOUGH, "Minutes of confirming, all temperatures together.")] = 10.0
    max_other_cpu: Annotated[
        float, option(ENOUGH, "Repeat a run while others used more than this share of the processors.")
    ] = 0.1

    def plan(self, problems: int) -> StudyPlan:
        """Raises ConfigError for values that make no sense."""
        from outrider.lab.reasoning.study import StudyPlan

        return StudyPlan(
            problems=problems, max_tokens=self.max_new_tokens, longest=self.longest, own_weights=self.own_weights,
            temperatures=tuple(numbers("--temperature", self.temperature, float)),
            lengths=tuple(numbers("--lengths", self.lengths or "", int)), rounds=self.rounds, budget_s=60 * self.budget,
            max_other_cpu=self.max_other_cpu, seed=self.seed,
        )  # fmt: skip


@with_groups
def reasoning(
    target: Target,
    problems: ProblemOptions,
    study: StudyOptions,
    machine: MachineOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Study speculation on worked solutions: acceptance by kind of step, forecasts and the clock, what would help."""
    output.check()
    from outrider.cli.session import quieten_libraries
    from outrider.lab.reasoning.study import run_study

    plan, path = study.plan(problems.problems), journal_for(output.out, "reasoning", resume=resume)
    workload = problems.load(target)
    quieten_libraries()
    try:
        with shown_progress() as progress:
            result, journal = run_study(
                machine.options(target), plan, workload, path, resume=resume, on_bad=problems.on_bad, progress=progress,
                status=progress.say,
            )  # fmt: skip
    except KeyboardInterrupt:
        return interrupted(path)
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return interrupted(path)
    journal.close()
    return 0
