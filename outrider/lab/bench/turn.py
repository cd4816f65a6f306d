"""One group of prompts through every configuration, one after the other: whatever slows the machine down for a while slows all of
them. Who begins changes from group to group and the direction from round to round, so nobody always runs behind the same one.

A run beside busy neighbours is repeated within bounds (`lab/disturbance.py`), and the calmest attempt counts. Configurations that
learn run once: a second attempt would know the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from outrider.errors import OutriderError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.bench.material import TaskPrompt
from outrider.lab.bench.notes import RunNote, notes_of
from outrider.lab.bench.plan import Plan
from outrider.lab.configuration import Configuration
from outrider.lab.disturbance import Repeats
from outrider.lab.runner import Contender, Runner, Trace
from outrider.lab.workload.grade import grade
from outrider.sampling.params import SamplingParams

REPEATS = 3  # further attempts beside busy neighbours


class Contenders:
    """The configurations of a bench, ready to run, by number. Those that learn are opened afresh for every round."""

    def __init__(self, runner: Runner, kept: Mapping[int, Contender]) -> None:
        self._runner = runner
        self._kept = dict(kept)
        self._now = dict(kept)

    @classmethod
    def open(cls, runner: Runner, configurations: Sequence[Configuration]) -> tuple[Contenders, dict[int, str]]:
        """Everyone who can be built, and why the others cannot. Raises what a plain one raises, and the first error where none
        but plain ones are left."""
        kept: dict[int, Contender] = {}
        errors: dict[int, OutriderError] = {}
        for number, configuration in enumerate(configurations):
            try:
                kept[number] = runner.open(configuration)
            except OutriderError as error:
                if configuration.is_plain:
                    raise
                errors[number] = error
        if errors and all(one.configuration.is_plain for one in kept.values()):
            raise next(iter(errors.values()))
        return cls(runner, kept), {number: one_line(error) for number, error in errors.items()}

    @property
    def numbers(self) -> list[int]:
        return list(self._kept)

    def restart(self) -> None:
        """A new round or cell begins."""
        self._now = {number: self.spare(number) for number in self._kept}

    def spare(self, number: int) -> Contender:
        """One that may see anything: of those that learn a fresh one, of the others the only one."""
        own = self._kept[number]
        return self._runner.open(own.configuration) if own.keeps_learning else own

    def __getitem__(self, number: int) -> Contender:
        return self._now[number]


def order_of(numbers: Sequence[int], group: int, turn: int) -> list[int]:
    """The order in which configurations run."""
    order = deque(numbers)
    order.rotate(-(group + turn))
    return list(order) if turn % 2 == 0 else list(reversed(order))


def run_group(
    field: Contenders, numbers: Sequence[int], group: Sequence[TaskPrompt], key: CellKey, plan: Plan, turn: int,
    group_number: int, baselines: Mapping[int, int], failed: Callable[[int, OutriderError], None], done: Callable[[], None],
    repeats: Repeats,
) -> list[RunNote]:  # fmt: skip
    """All `numbers`, in this order. One that fails is reported to `failed` and has no notes; a plain one raises."""
    params = [plan.params(key.temperature, one.number, turn, one.max_tokens) for one in group]
    traces: dict[int, list[Trace]] = {}
    attempts: dict[int, int] = {}
    for number in numbers:
        try:
            traces[number], attempts[number] = _calmest(field[number], group, params, key, repeats)
        except OutriderError as error:
            if baselines[number] == number:
                raise
            failed(number, error)
        done()
    notes: list[RunNote] = []
    for number, of_group in sorted(traces.items()):
        base = None if baselines[number] == number else traces[baselines[number]]
        found = notes_of(of_group, number, [one.number for one in group], turn, attempts[number], group_number, base)
        for note, trace, prompt in zip(found, of_group, group, strict=True):
            note.right = grade(prompt.request, trace.completion.text)
        notes += found
    return notes


def teach(
    field: Contenders, numbers: Sequence[int], groups: Sequence[Sequence[TaskPrompt]], key: CellKey, plan: Plan, turn: int
) -> None:
    """Groups that an interrupted run had finished, for those who must have seen them."""
    for group in groups:
        params = [plan.params(key.temperature, one.number, turn, one.max_tokens) for one in group]
        for number in numbers:
            if field[number].keeps_learning:
                field[number].run([one.tokens for one in group], params, key.batch_size)


def one_line(error: OutriderError) -> str:
    """For a list of failures."""
    return " ".join(str(error).split())


def _calmest(
    contender: Contender, group: Sequence[TaskPrompt], params: Sequence[SamplingParams], key: CellKey, repeats: Repeats
) -> tuple[list[Trace], int]:
    """The attempt with the fewest neighbours, and how many there were."""
    prompts = [one.tokens for one in group]
    max_repeats = 0 if contender.keeps_learning else REPEATS
    return repeats.calmest(
        lambda: contender.run(prompts, params, key.batch_size), lambda traces: traces[0].other_cpu, max_repeats
    )
