"""`outrider reasoning TARGET`: how far drafts are kept on worked solutions, why not further, and what that brings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.bench_options import ENOUGH, PROMPTS, numbers
from outrider.cli.lab import OUTPUT, OutputOptions, command_line, deliver, journal_path, shown_progress
from outrider.cli.options import SAMPLING, MachineOptions, Target, with_groups

if TYPE_CHECKING:
    from outrider.lab.reasoning.study import StudyPlan
    from outrider.lab.workload.types import Workload

INTERRUPTED = 130
STUDIED = "What is studied"


def _option(panel: str, text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **extra)


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The workload."""

    workload: Annotated[
        str | None,
        _option(
            PROMPTS, "A file or built-in name with reasoning problems (docs/workloads.md).", metavar="FILE_OR_NAME",
            show_default="demo for the demo target, else gsm8k",
        ),
    ] = None  # fmt: skip
    data: Annotated[Path | None, _option(PROMPTS, "Folder with the files of named workloads.", show_default=False)] = None
    on_bad: Annotated[Literal["refuse", "skip"], _option(PROMPTS, "Bad lines, and problems that do not fit.")] = "refuse"
    problems: Annotated[int, _option(PROMPTS, "Most problems.", min=1)] = 32

    def load(self, target: str) -> Workload:
        """All of it. Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        return load_workload(self.workload or ("demo" if target == "demo" else "gsm8k"), on_bad=self.on_bad, data=self.data)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What is run, and when it is enough."""

    longest: Annotated[int, _option(STUDIED, "Draft tokens per step while acceptance is recorded.", min=2)] = 12
    lengths: Annotated[
        str | None,
        _option(
            STUDIED, "Draft lengths to confirm, beside the best one and 'auto'.", metavar="N,...",
            show_default="2,5,8, up to the longest",
        ),
    ] = None  # fmt: skip
    own_weights: Annotated[
        bool, _option(STUDIED, "Also quantised and early-exit drafts of the target.", "--own-weights/--no-own-weights")
    ] = True
    max_new_tokens: Annotated[int, _option(SAMPLING, "Most tokens of a solution.", min=8)] = 128
    temperature: Annotated[str, _option(SAMPLING, "0 is greedy; several with commas.", metavar="T,...")] = "0,1"
    seed: Annotated[int, _option(SAMPLING, "Of sampled texts.", min=0)] = 0
    rounds: Annotated[int, _option(ENOUGH, "Rounds over the problems that confirm, budget permitting.", min=1)] = 1
    budget: Annotated[float, _option(ENOUGH, "Minutes of confirming, all temperatures together.")] = 10.0
    max_other_cpu: Annotated[
        float, _option(ENOUGH, "Repeat a run while others used more than this share of the processors.")
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
    resume: Annotated[bool, _option(OUTPUT, "Go on with an interrupted run.", "--resume")] = False,
) -> int:
    """Study speculation on worked solutions: acceptance by kind of step, forecasts and the clock, what would help."""
    output.check()
    from outrider.cli.session import quieten_libraries
    from outrider.lab.reasoning.study import run_study

    plan, path = study.plan(problems.problems), journal_path(output.out, "reasoning")
    workload = problems.load(target)
    quieten_libraries()
    if path.exists() and not resume:
        sys.stderr.write(f"note: {path} of an interrupted run is begun anew (--resume would have gone on with it)\n")
    try:
        with shown_progress() as progress:
            result, journal = run_study(
                machine.options(target), plan, workload, path, resume=resume, on_bad=problems.on_bad, progress=progress,
                status=progress.say,
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"; what is finished is in {path}: the same command with --resume goes on" if path.exists() else ""
        sys.stderr.write(f"interrupted{kept}\n")
        return INTERRUPTED
    deliver(result.model_copy(update={"command": command_line()}), output)
    journal.close()
    return 0
