"""`run_bench`: from options and a plan to a result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.build import Options, notes_of_drafter
from outrider.lab.bench.bench_result import (
    BenchResult,
    Cell,
    CellKey,
    ConfigurationInfo,
    Measured,
    TargetInfo,
    WorkloadInfo,
)
from outrider.lab.bench.machine import added_memory, describe_target
from outrider.lab.bench.plan import COUPLED, Material, Plan, gather, runnable_cells
from outrider.lab.bench.stages import CellState, Contenders, Rounds
from outrider.lab.bench.summary import measured, others_during
from outrider.lab.journal import Journal
from outrider.lab.progress import QUIET, Progress
from outrider.lab.runner import Runner
from outrider.lab.workload.types import OnBad, Workload, identity
from outrider.models.loading import hub

ENOUGH_PROMPTS = 8  # below it an interval is rough


def run_bench(
    options: Options,
    plan: Plan,
    workload: Workload,
    journal_path: Path,
    *,
    resume: bool = False,
    on_bad: OnBad = "refuse",
    chat_template: bool = True,
    keep_runs: bool = False,
    progress: Progress = QUIET,
) -> BenchResult:
    """`options`: of models and machine; what they say about drafting plays no part. `keep_runs`:
    the result has the texts of the first round, step by step. After Ctrl-C
    the result is what was known by then (`interrupted`): the journal stays, a resumed run continues.

    Raises what cannot be built or run, before anything is measured as far as that can be known.
    """
    facts = identity("bench", options, workload, chat_template=chat_template, **plan.identity())
    with Journal.open(journal_path, facts, resume=resume, progress=progress) as journal:
        runner = Runner(options, plan.all_configurations, progress.say)
        material = gather(
            workload,
            runner.tokenizer,
            plan,
            runner.context,
            on_bad=on_bad,
            chat_template=chat_template,
            answer=runner.answer,
        )
        keys, notes = runnable_cells(plan, material)
        field, failures = Contenders.open(runner, plan.all_configurations)
        progress.say("measuring the memory's bandwidth")
        draft = None if options.draft is None else hub.called(options.draft)
        target = describe_target(runner.models, options.target, draft)
        rounds = Rounds(field, plan, material, keys, journal)
        try:
            states = rounds.run()
        except KeyboardInterrupt:
            if not (states := rounds.stopped()):
                raise
    cells = [
        _cell(state, rounds, plan, target, runner.tokenizer, keep_runs=keep_runs)
        for state in states
    ]
    return BenchResult(
        workload=WorkloadInfo.of(workload),
        settings={**plan.as_dict(), "chat_template": chat_template},
        target=target,
        configurations=list(_describe(rounds, field, failures)),
        cells=cells,
        seconds=rounds.spent_s,
        interrupted=any(cell.ended_by == "interrupted" for cell in cells),
        notes=[
            *runner.models.notes,
            *material.notes,
            *notes,
            *_unreached(keys, states),
            *_remarks(cells, plan, material),
        ],
    )


def _cell(
    state: CellState,
    rounds: Rounds,
    plan: Plan,
    target: TargetInfo,
    tokenizer: Any,
    *,
    keep_runs: bool,
) -> Cell:
    key = state.cell_key
    labels = [configuration.label for configuration in rounds.configurations]
    results: list[Measured] = []
    requests = [prompt.request for prompt in state.prompts]
    for number, configuration in enumerate(rounds.configurations):
        if not (notes := state.of(number)):
            continue
        baseline = rounds.baselines[number]
        results.append(
            measured(
                notes,
                None if baseline == number else state.of(baseline),
                target=target,
                rows=key.batch_size,
                max_other_cpu=plan.max_other_cpu,
                prompts=requests,
                tokenizer=tokenizer,
                keep_runs=keep_runs,
                same_text=key.temperature == 0 or configuration.verifier == COUPLED,
            )
        )
    assert state.ended_by is not None
    return Cell(
        task=key.task,
        temperature=key.temperature,
        batch_size=key.batch_size,
        context=key.context,
        prompt_ids=[request.id for request in requests],
        questions=[(request.turn, request.question) for request in requests] if keep_runs else [],
        mean_prompt_tokens=sum(len(prompt.tokens) for prompt in state.prompts) / len(requests),
        max_new_tokens=plan.sampling.required_max_tokens,
        rounds=state.rounds,
        ended_by=state.ended_by,
        seconds=state.seconds,
        failures={labels[number]: reason for number, reason in state.failures.items()},
        others=others_during(state.notes, plan.max_other_cpu),
        configurations=results,
    )


def _describe(
    rounds: Rounds, field: Contenders, failures: dict[int, str]
) -> Iterator[ConfigurationInfo]:
    for number, configuration in enumerate(rounds.configurations):
        info = ConfigurationInfo(
            label=configuration.label,
            arguments=configuration.as_dict(),
            baseline=rounds.baselines[number],
            failure=failures.get(number),
        )
        if number in field.numbers:
            contender = field[number]
            config = contender.config
            names = ("num_draft_tokens", "drafter_options", "verifier", "verifier_options")
            info.resolved = {name: config[name] for name in names}
            info.learns = contender.keeps_learning
            info.lossless = config["lossless"]
            info.exact = config["exact"]
            info.added_weights_bytes, info.added_kv_bytes_per_token = added_memory(contender)
            built = contender.built
            info.notes = notes_of_drafter(built.decoder.drafter, built.draft, built.context)
        yield info


def _unreached(keys: list[CellKey], states: list[CellState]) -> list[str]:
    """Cells that an interrupted run has not begun."""
    reached = [state.cell_key for state in states]
    return [
        f"{key.label}: not measured, the run was stopped before"
        for key in keys
        if key not in reached
    ]


def _remarks(cells: list[Cell], plan: Plan, material: Material) -> Iterator[str]:
    """The warnings that a reader needs before believing a number."""
    if any(cell.temperature > 0 for cell in cells) and any(
        configuration.verifier != COUPLED for configuration in plan.all_configurations
    ):
        yield (
            "T above 0: sampled texts differ between configurations by design (not with verifier=gumbel); both sides draw with "
            "the same seed per prompt and round, and are compared over the same number of tokens"
        )
    if short := sorted({cell.task for cell in cells if len(cell.prompt_ids) < ENOUGH_PROMPTS}):
        yield f"fewer than {ENOUGH_PROMPTS} prompts ({', '.join(short)}): intervals are rough"
    if any(plan.context_lengths):
        yield (
            "context lengths: before each prompt stand the other prompts of its task, again and again, cut to length; the end of "
            "longer prompts is kept"
        )
