"""`run_study`: worked solutions, from how far drafts are kept to what that brings and what would bring more.

    solve        every problem with the draft as long as it may be, and both models' laws at every token (`solved.py`)
    acceptance   by kind of step (`kinds.py`, `acceptance.py`); why not more (`rejections.py`)
    costs        seconds of a step of each length, in turn, step by step (`timing.py`)
    estimate     the speedup of every length by three estimates (`estimates.py`)
    confirm      the best of them, others around it and ideas for better drafts, against plain decoding (`confirm.py`)

Everything that runs a model is in the journal: an interrupted study goes on where it was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.build import DEMO, Options
from outrider.errors import ConfigError
from outrider.lab.bench.material import Material, Prompt
from outrider.lab.bench.plan import Plan
from outrider.lab.bench.result import WorkloadInfo
from outrider.lab.configuration import Configuration
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.explain.labelled import as_columns
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress, Quiet
from outrider.lab.reasoning.acceptance import by_kind
from outrider.lab.reasoning.confirm import TASK, Entry, confirm
from outrider.lab.reasoning.estimates import best_of, estimate_lengths
from outrider.lab.reasoning.ideas import CHAIN, Idea, ideas
from outrider.lab.reasoning.rejections import rejections
from outrider.lab.reasoning.result import Example, LengthEstimate, ReasoningResult, TemperatureStudy
from outrider.lab.reasoning.solved import Solved, asked, solve
from outrider.lab.reasoning.timing import calmest_step_seconds
from outrider.lab.runner import Runner
from outrider.lab.workload.bad import OnBad
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import Workload
from outrider.machine import versions
from outrider.sampling.params import SamplingParams, usable_temperature

COST_PROBLEMS = 10  # whose prompts steps are timed on
USUAL = (2, 5, 8)  # draft lengths
GOES_ON_BY = ("budget_s", "rounds", "max_other_cpu")  # what a resumed study may change


@dataclass(frozen=True)
class StudyPlan:
    """What is run. Raises ConfigError for what makes no sense."""

    problems: int = 32
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    longest: int = 12  # draft tokens of the recordings
    lengths: tuple[int, ...] = ()  # confirmed beside the best one and `auto`; none given: those of `USUAL` up to `longest`
    own_weights: bool = True  # also drafts made of the target's own weights
    rounds: int = 1
    budget_s: float = 600.0  # of confirming
    max_other_cpu: float = 0.1  # of a run; busier neighbours: once more
    seed: int = 0

    def __post_init__(self) -> None:
        for what, number in (("problems", self.problems), ("tokens per answer", self.max_tokens), ("rounds", self.rounds)):
            if number < 1:
                raise ConfigError(f"{what} must be 1 or more, got {number}")
        if self.longest < 2:
            raise ConfigError(f"the longest draft must have 2 tokens or more, got {self.longest}")
        if wrong := [one for one in self.lengths if not 1 <= one <= self.longest]:
            raise ConfigError(f"draft lengths to confirm must lie between 1 and the longest, {self.longest}; got {wrong}")
        for what, limit in (("the budget", self.budget_s), ("max_other_cpu", self.max_other_cpu)):
            if not limit > 0:
                raise ConfigError(f"{what} must be more than 0, got {limit:g}")
        object.__setattr__(self, "temperatures", tuple(map(usable_temperature, self.temperatures)))
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"give one or several different temperatures, got {list(self.temperatures)}")
        for temperature in self.temperatures:
            self.params(temperature)  # raises what sampling does not allow

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=None if temperature == 0 else self.seed)

    def confirming(self, temperature: float, entries: Sequence[Entry]) -> Plan:
        """For `bench`."""
        return Plan(
            configurations=tuple(entry.configuration for entry in entries), temperatures=(temperature,), prompts=self.problems,
            sampling=SamplingParams(max_tokens=self.max_tokens), seed=self.seed, rounds=self.rounds, max_rounds=self.rounds,
            budget_s=self.budget_s / len(self.temperatures), max_other_cpu=self.max_other_cpu,
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in GOES_ON_BY}


def run_study(
    options: Options, plan: StudyPlan, workload: Workload, journal_path: Path, *, resume: bool = False,
    on_bad: OnBad = "refuse", progress: Progress | None = None, status: Callable[[str], None] = lambda line: None,
) -> tuple[ReasoningResult, Journal]:  # fmt: skip
    """`options`: of models and machine. Close the journal when the result is safe. Raises what cannot be built or run."""
    if options.draft is None and options.target != DEMO:
        raise ConfigError("worked solutions are studied with a draft model: give --draft FOLDER_OR_HUB_ID (draft=... in Python)")
    progress = progress or Quiet()
    identity = _identity(options, plan, workload)
    journal = Journal.open(journal_path, identity, resume=True) if resume else None
    runner = Runner(options, [Configuration(CHAIN, plan.longest), *_all_ideas(plan, 4)], status)
    prompts, notes = choose_problems(workload, runner, plan, on_bad)
    journal = journal or Journal.open(journal_path, identity, resume=False)
    began = time.perf_counter()
    study = _Study(runner, plan, prompts, journal, progress)
    studies = study.all()
    resolved = runner.models.options
    return ReasoningResult(
        target=options.target, draft=options.draft,
        workload=WorkloadInfo(name=workload.name, notes=list(workload.notes), num_skipped_lines=len(workload.skipped)),
        problems=len(prompts), max_new_tokens=plan.max_tokens, longest=plan.longest, runtime=resolved.runtime,
        dtype=str(runner.models.target.lm.dtype).removeprefix("torch."), device=str(runner.models.target.lm.device),
        threads=torch.get_num_threads(), studies=studies, example=study.example, seconds=time.perf_counter() - began,
        notes=[*runner.models.notes, *notes, *_left_out(plan, studies)], interrupted=_is_cut(plan, studies),
    ), journal  # fmt: skip


def choose_problems(
    workload: Workload, runner: Runner, plan: StudyPlan, on_bad: OnBad
) -> tuple[list[Prompt], list[str]]:
    """The first reasoning problems, as token ids, and what to say about others. Raises ConfigError where there is none."""
    mine = [request for request in workload.requests if request.task == TASK]
    if not mine:
        tasks = ", ".join(sorted({request.task for request in workload.requests}))
        raise ConfigError(
            f"the workload {workload.name} has no reasoning problems, only {tasks}; in a file of your own, "
            'mark them with "task": "reasoning"'
        )
    wanted = mine if on_bad == "skip" else mine[: plan.problems]
    chosen = replace(workload, requests=tuple(wanted))
    prepared = prepare(chosen, runner.tokenizer, context=runner.context, max_tokens=plan.max_tokens, on_bad=on_bad)
    taken = prepared.prompts[: plan.problems]
    notes = [f"{len(prepared.skipped)} problems left out, the first: {prepared.skipped[0].reason}"] if prepared.skipped else []
    if len(mine) < len(workload.requests):
        notes.append(f"{len(workload.requests) - len(mine)} requests of the workload are no reasoning problems: left out")
    return [Prompt(n, one.request, one.tokens, one.max_tokens) for n, one in enumerate(taken)], notes


class _Study:
    """One temperature after the other, on the same models and problems."""

    def __init__(
        self, runner: Runner, plan: StudyPlan, prompts: list[Prompt], journal: Journal, progress: Progress
    ) -> None:
        self._runner, self._plan, self._prompts = runner, plan, prompts
        self._journal, self._progress = journal, progress
        self.example: Example | None = None

    def all(self) -> list[TemperatureStudy]:
        """One for each temperature; after Ctrl-C those that are known, KeyboardInterrupt where none is."""
        found: list[TemperatureStudy] = []
        try:
            while len(found) < len(self._plan.temperatures) and not _is_stopped(found):
                found.append(self.at(self._plan.temperatures[len(found)]))
        except KeyboardInterrupt:
            if not found:
                raise
        return found

    def at(self, temperature: float) -> TemperatureStudy:
        """All stages."""
        plan, params = self._plan, self._plan.params(temperature)
        longest = Configuration(CHAIN, plan.longest)
        record = solve(self._runner, longest, self._prompts, params, self._journal, self._progress)
        self.example = self.example or _example(record.solved[0], self._prompts[0], self._runner.tokenizer)
        costs = self._costs(longest, params)
        kinds = by_kind(record.solved, plan.longest)
        c = record.draft_token_s / costs.step_s(0)[0]
        alpha = kinds[0].alpha.value if kinds[0].alpha is not None else 0.0
        survival = [one.value for one in kinds[0].survival]
        estimates = estimate_lengths(alpha, c, survival, record.walks, costs, plan.longest)
        best, tried = best_of(estimates), best_of(estimates, least=1)
        self._progress.say(_line(temperature, estimates[tried]))
        entries = self._entries(temperature, tried)
        confirmed = confirm(
            self._runner, entries, Configuration(CHAIN, tried), plan.confirming(temperature, entries),
            Material({TASK: self._prompts}, None), self._journal, self._progress,
        )  # fmt: skip
        return TemperatureStudy(
            temperature=temperature, texts=len(record.solved), tokens=record.tokens, steps=record.steps,
            unfinished=sum(not one.is_complete for one in record.solved), kinds=kinds,
            rejections=rejections(record.solved, self._runner.tokenizer, greedy=params.is_greedy), c=c, estimates=estimates,
            best=best, tried=tried, contestants=confirmed.contestants, rounds=confirmed.rounds, ended_by=confirmed.ended_by,
            other_cpu=confirmed.other_cpu,
        )  # fmt: skip

    def _costs(self, chain: Configuration, params: SamplingParams) -> StepCosts:
        """From the journal, or timed now."""
        key = f"costs T = {params.temperature:g}"
        if key not in self._journal:
            prompts = [one.tokens for one in self._prompts[:COST_PROBLEMS]]
            most = self._plan.max_other_cpu
            found = calmest_step_seconds(self._runner, chain, prompts, params, self._plan.longest, most, self._progress)
            self._journal.add(key, {str(length): seconds for length, seconds in found.items()})
        return StepCosts.of_steps({int(length): seconds for length, seconds in self._journal[key].items()})

    def _entries(self, temperature: float, best: int) -> list[Entry]:
        """Lengths, then ideas."""
        usual = [one for one in USUAL if one <= self._plan.longest]
        lengths = sorted({best, *(self._plan.lengths or usual)})
        found = [Entry(Configuration(CHAIN, one), "length") for one in [*lengths, f"auto:{self._plan.longest}"]]
        layers = self._runner.models.target.config.get_text_config().num_hidden_layers
        return found + [Entry(one.configuration, "idea", one.what) for one in _ideas(self._plan, temperature, best, layers)]


def _is_stopped(studies: Sequence[TemperatureStudy]) -> bool:
    return bool(studies) and studies[-1].ended_by == "interrupted"


def _is_cut(plan: StudyPlan, studies: Sequence[TemperatureStudy]) -> bool:
    """Whether Ctrl-C ended the study before all of it was done."""
    return len(studies) < len(plan.temperatures) or _is_stopped(studies)


def _left_out(plan: StudyPlan, studies: Sequence[TemperatureStudy]) -> list[str]:
    missing = plan.temperatures[len(studies) :]
    return [f"not studied, the run was stopped before: T = {', '.join(f'{one:g}' for one in missing)}"] if missing else []


def _ideas(plan: StudyPlan, temperature: float, best: int, num_layers: int) -> list[Idea]:
    return ideas(temperature, best, plan.longest, num_layers, own_weights=plan.own_weights)


def _all_ideas(plan: StudyPlan, num_layers: int) -> list[Configuration]:
    """For what they need of the models, which does not depend on lengths and layers."""
    return [one.configuration for temperature in plan.temperatures for one in _ideas(plan, temperature, 1, num_layers)]


def _example(one: Solved, prompt: Prompt, tokenizer: Any) -> Example:
    columns = as_columns(one.text, tokenizer)
    return Example(
        id=one.text.id, prompt=asked(prompt.request), pieces=columns.pieces, fates=one.text.fates, kinds=one.kinds,
        rejected=columns.draft,
    )  # fmt: skip


def _line(temperature: float, one: LengthEstimate) -> str:
    return f"T = {temperature:g}: best forecast {one.replay_speedup:.2f}x with {one.num_draft_tokens} draft tokens; confirming"


def _identity(options: Options, plan: StudyPlan, workload: Workload) -> dict[str, Any]:
    """What an interrupted study must have in common with the one that goes on."""
    problems = "\n".join(f"{one.id} {one.prompt} {one.messages}" for one in workload.requests)
    return {
        "verb": "reasoning", **plan.identity(), "models": asdict(options),
        "workload": f"{workload.name} {hashlib.sha256(problems.encode()).hexdigest()[:12]}", "versions": versions(),
    }  # fmt: skip
