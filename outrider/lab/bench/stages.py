"""The rounds: each goes through all cells, so a bench that is cut short knows something of every
cell.

docs/bench.md, "How it is measured", says what a group goes through, in which order, and how the
budget is shared. Every finished group is in the journal. A resumed run reads those and continues
after them; configurations that learn first go through the finished groups of the round again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.configuration import Configuration
from outrider.errors import OutriderError
from outrider.lab.bench.bench_result import CellKey, Ending
from outrider.lab.bench.notes import RunNote, notes_of
from outrider.lab.bench.plan import Material, Plan, baseline_of, groups
from outrider.lab.bench.summary import samples, speedup
from outrider.lab.disturbance import Repeats
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner, Trace
from outrider.lab.workload.prompts import PreparedPrompt

REPEATS = 3  # further attempts alongside busy neighbours
WARMUP_TOKENS = 32  # so that every draft length has run once, nearly always


class Contenders:
    """The configurations of a bench, ready to run, by number. Those that learn are opened afresh
    for every round."""

    def __init__(self, runner: Runner, contenders: Mapping[int, Contender]) -> None:
        self._runner = runner
        self._kept = dict(contenders)
        self._now = dict(contenders)

    @classmethod
    def open(
        cls, runner: Runner, configurations: Sequence[Configuration]
    ) -> tuple[Contenders, dict[int, str]]:
        """Everyone who can be built, and why the others cannot. Raises what a plain one raises, and
        the first error where none but plain ones are left."""
        contenders: dict[int, Contender] = {}
        errors: dict[int, OutriderError] = {}
        for number, configuration in enumerate(configurations):
            try:
                contenders[number] = runner.open(configuration)
            except OutriderError as error:
                if configuration.is_plain:
                    raise
                errors[number] = error
        if errors and all(contender.configuration.is_plain for contender in contenders.values()):
            raise next(iter(errors.values()))
        return cls(runner, contenders), {
            number: one_line(error) for number, error in errors.items()
        }

    @property
    def numbers(self) -> list[int]:
        return list(self._kept)

    def restart(self) -> None:
        self._now = {number: self.spare(number) for number in self._kept}

    def spare(self, number: int) -> Contender:
        """One that may see anything: of those that learn a fresh one, of the others the only one."""
        contender = self._kept[number]
        return self._runner.open(contender.configuration) if contender.keeps_learning else contender

    def __getitem__(self, number: int) -> Contender:
        return self._now[number]


def order_of(numbers: Sequence[int], group: int, turn: int) -> list[int]:
    """The order in which configurations run."""
    order = deque(numbers)
    order.rotate(-(group + turn))
    return list(order) if turn % 2 == 0 else list(reversed(order))


def one_line(error: OutriderError) -> str:
    return " ".join(str(error).split())


@dataclass
class CellState:
    cell_key: CellKey
    prompts: list[PreparedPrompt]
    notes: list[RunNote] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    ended_by: Ending | None = None

    def take(self, unit: dict[str, Any]) -> None:
        """A finished unit, fresh or from the journal."""
        self.notes += [RunNote.model_validate(note) for note in unit["notes"]]
        self.failures |= {int(number): reason for number, reason in unit["failures"].items()}
        self.seconds += unit["seconds"]

    def of(self, number: int) -> list[RunNote]:
        """Runs of one configuration; none of one that failed later, whose sample would be a choice."""
        return (
            []
            if number in self.failures
            else [note for note in self.notes if note.configuration == number]
        )


class Rounds:
    """Measures configurations in rounds, until all are run or the time is spent."""

    def __init__(
        self,
        field: Contenders,
        plan: Plan,
        material: Material,
        keys: list[CellKey],
        journal: Journal,
    ) -> None:
        self._field = field
        self._plan = plan
        self._journal = journal
        self._progress = journal.progress
        self.configurations = plan.all_configurations
        self.baselines = [
            number
            if configuration.is_plain
            else self.configurations.index(baseline_of(configuration))
            for number, configuration in enumerate(self.configurations)
        ]
        self.cells = [CellState(cell_key, material.prompts(cell_key)) for cell_key in keys]
        self._warm: set[str] = set()  # cells that this process has run
        self._repeats = Repeats(plan.max_other_cpu, self._progress.say)

    @property
    def spent_s(self) -> float:
        """Measuring, an interrupted run's included."""
        return sum(cell.seconds for cell in self.cells)

    def run(self) -> list[CellState]:
        """All rounds, or as many as the budget allows."""
        for turn in range(self._plan.rounds):
            waiting = [
                cell for cell in self.cells if not turn or self.spent_s < self._plan.budget_s
            ]
            runs = sum(
                len(cell.prompts) // cell.cell_key.batch_size * len(self._running(cell))
                for cell in waiting
            )
            self._progress.stage(
                f"round {turn + 1}", runs, max(self._plan.budget_s - self.spent_s, 0.0)
            )
            for index, cell in enumerate(waiting):
                left = (self._plan.budget_s - self.spent_s) / (len(waiting) - index)
                self._round(cell, turn, left)
                self._progress.say(self._line(cell))
        for cell in self.cells:
            cell.ended_by = "rounds" if cell.rounds == self._plan.rounds else "budget"
        return self.cells

    def stopped(self) -> list[CellState]:
        """After Ctrl-C: the cells that are known so far, the open ones ended by it."""
        for cell in self.cells:
            cell.ended_by = cell.ended_by or "interrupted"
        return [cell for cell in self.cells if cell.notes]

    # ---------------------------------------------------------------- one round of a cell

    def _round(self, cell: CellState, turn: int, left: float) -> None:
        until = cell.seconds + left
        untaught = []
        with self._counted(cell):
            self._warm_up(cell)
            self._field.restart()
        several = list(groups(cell.prompts, cell.cell_key.batch_size, turn, self._plan.seed))
        for number, group in enumerate(several):
            key = f"{cell.cell_key.key} / round {turn} / group {number}"
            if key in self._journal:
                untaught.append(group)
            elif cell.seconds > until and (turn or number):
                break
            elif untaught:
                with self._counted(cell):
                    self._teach(cell, untaught, turn)
                untaught = []
            self._group(cell, key, group, number, turn, until)
            cell.rounds = turn + 1

    def _warm_up(self, cell: CellState) -> None:
        """Once in each process: touches all memory. Those that learn do it on a copy, for they must
        not know the prompts."""
        if cell.cell_key.key not in self._warm:
            for number in self._running(cell):
                self._short_run(number, cell)
        self._warm.add(cell.cell_key.key)

    @contextmanager
    def _counted(self, cell: CellState) -> Iterator[None]:
        """Time that belongs to no unit counts towards the budget, too."""
        start = time.perf_counter()
        yield
        cell.seconds += time.perf_counter() - start

    def _group(
        self,
        cell: CellState,
        key: str,
        group: list[PreparedPrompt],
        number: int,
        turn: int,
        until: float,
    ) -> None:
        """From the journal, or measured and written there; nothing is repeated once the cell has
        used `until` seconds."""
        if key in self._journal:
            cell.take(self._journal[key])
            self._progress.skip(len(self._running(cell)))
            return
        start = time.perf_counter()
        self._repeats.deadline_s = start + until - cell.seconds
        notes, failures = self._measured(cell, group, number, turn)
        unit = {
            "notes": [note.model_dump() for note in notes],
            "failures": failures,
            "seconds": time.perf_counter() - start,
        }
        self._journal.add(key, unit)
        cell.take(unit)

    def _measured(
        self, cell: CellState, group: list[PreparedPrompt], number: int, turn: int
    ) -> tuple[list[RunNote], dict[int, str]]:
        """Notes of every configuration, one after the other, and why those that failed have none; a
        plain one raises."""
        traces: dict[int, list[Trace]] = {}
        attempts: dict[int, int] = {}
        failures: dict[int, str] = {}
        for who in order_of(self._running(cell), number, turn):
            try:
                run = self._run(cell, group, turn, who)
                max_repeats = 0 if self._field[who].keeps_learning else REPEATS
                traces[who], attempts[who] = self._repeats.calmest(
                    run, lambda of_group: of_group[0].other_cpu, max_repeats
                )
            except OutriderError as error:
                if self.baselines[who] == who:
                    raise
                failures[who] = one_line(error)
            self._progress.advance()
        notes: list[RunNote] = []
        for who, of_group in sorted(traces.items()):
            base = None if self.baselines[who] == who else traces[self.baselines[who]]
            of_who = notes_of(
                of_group,
                who,
                [prompt.number for prompt in group],
                turn,
                attempts[who],
                number,
                base,
            )
            for note, trace, prompt in zip(of_who, of_group, group, strict=True):
                note.right = prompt.request.is_right(trace.completion.text)
            notes += of_who
        return notes, failures

    def _run(
        self, cell: CellState, group: Sequence[PreparedPrompt], turn: int, who: int
    ) -> Callable[[], list[Trace]]:
        """A run of one configuration on a group, to be called."""
        key = cell.cell_key
        params = [
            self._plan.params(key.temperature, prompt.number, turn, prompt.max_tokens)
            for prompt in group
        ]
        return partial(
            self._field[who].run, [prompt.tokens for prompt in group], params, key.batch_size
        )

    def _teach(
        self, cell: CellState, groups: Sequence[Sequence[PreparedPrompt]], turn: int
    ) -> None:
        """Groups that an interrupted run had finished, for those who must have seen them."""
        for group in groups:
            for who in self._running(cell):
                if self._field[who].keeps_learning:
                    self._run(cell, group, turn, who)()

    def _short_run(self, number: int, cell: CellState) -> None:
        prompts = [prompt.tokens for prompt in cell.prompts[: cell.cell_key.batch_size]]
        params = self._plan.params(cell.cell_key.temperature, 0, 0, WARMUP_TOKENS)
        try:
            self._field.spare(number).run(prompts, params, cell.cell_key.batch_size)
        except OutriderError:  # the first group will say so, too
            if self.baselines[number] == number:
                raise

    def _running(self, cell: CellState) -> list[int]:
        return [number for number in self._field.numbers if number not in cell.failures]

    def _line(self, cell: CellState) -> str:
        """How the cell stands."""
        words = []
        for number in self._running(cell):
            if (
                self.baselines[number] != number
                and (speed := speedup(samples(cell.of(number)))) is not None
            ):
                words.append(f"{self.configurations[number].label} {speed.words('x')}")
        return f"{cell.cell_key.label}: {', '.join(words) or 'no speedup to tell'}"
