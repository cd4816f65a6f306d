"""The finalists against plain decoding in `bench`'s rounds, on prompts that no probe has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.configuration import Configuration
from outrider.lab.bench.notes import RunNote
from outrider.lab.bench.plan import Material, Plan
from outrider.lab.bench.stages import Contenders, Rounds
from outrider.lab.bench.summary import samples, speedup
from outrider.lab.journal import Journal
from outrider.lab.result import Interval, Record
from outrider.lab.runner import Runner
from outrider.lab.tune.probe import rounds_of
from outrider.lab.tune.space import TuneRequest
from outrider.lab.workload.prompts import PreparedPrompt

ALL = "all"
MAX_OTHER_CPU = 0.15  # share of the processors; a run alongside busier neighbours is repeated


class Confirmed(Record):
    """The measurements of a finalist."""

    configuration: str
    # plain seconds / own seconds over the same tokens, decode phase; prompts resampled
    speedup: Interval
    by_task: dict[str, Interval]
    tokens_per_s: float  # of one row's decode phase
    tau: float
    identical: int  # texts equal to plain decoding's; sampled ones differ by design
    texts: int

    def of_task(self, task: str) -> Interval | None:
        """The speedup on one task, or on ALL."""
        return self.speedup if task == ALL else self.by_task.get(task)


def confirmation(
    runner: Runner,
    finalists: Sequence[Configuration],
    prompts: Sequence[PreparedPrompt],
    request: TuneRequest,
    budget_s: float,
    journal: Journal,
) -> tuple[Rounds, dict[str, str]]:
    """One round over the prompts, ready to run, and why some of the finalists cannot be built.
    Raises OutriderError where none can. Tasks take turns in one cell: whenever the budget ends,
    they have had about the same number of prompts."""
    plan = Plan(
        tuple(finalists),
        temperatures=(request.sampling.temperature,),
        batch_sizes=(request.batch_size,),
        prompts=len(prompts),
        sampling=request.sampling,
        seed=request.seed,
        rounds=1,
        budget_s=budget_s,
        max_other_cpu=MAX_OTHER_CPU,
    )
    turns = [prompt for several in rounds_of(prompts) for prompt in several]
    contenders, errors = Contenders.open(runner, plan.all_configurations)
    failures = {plan.all_configurations[number].label: why for number, why in errors.items()}
    return Rounds(
        contenders, plan, Material({ALL: turns}, None), plan.cell_keys([ALL]), journal
    ), failures


def summarise(rounds: Rounds) -> list[Confirmed]:
    """Every finalist over plain decoding, without those whose first steps ended the text: nothing
    of them was timed."""
    (cell,) = rounds.cells
    tasks = {prompt.number: prompt.request.task for prompt in cell.prompts}
    confirmed = [
        _confirmed(summary, cell.of(number), tasks)
        for number, summary in enumerate(rounds.configurations)
    ]
    return [summary for summary in confirmed if summary is not None]


def _confirmed(
    configuration: Configuration, notes: list[RunNote], tasks: Mapping[int, str]
) -> Confirmed | None:
    """None for plain decoding, which is paired with nothing. `tasks`: of the prompts, by number."""
    pairs = samples(notes)
    if (whole := speedup(pairs)) is None:
        return None
    parted = [note.pairing.parting is not None for note in notes if note.pairing is not None]
    by_task = {
        task: speedup([pair for pair in pairs if tasks[pair.prompt] == task])
        for task in dict.fromkeys(tasks.values())
    }
    return Confirmed(
        configuration=configuration.label,
        speedup=whole,
        by_task={task: members for task, members in by_task.items() if members is not None},
        tokens_per_s=sum(note.decode_tokens for note in notes)
        / sum(note.decode_s for note in notes),
        tau=sum(note.tokens for note in notes) / sum(note.steps for note in notes),
        identical=parted.count(False),
        texts=len(parted),
    )
