"""What `--num-draft-tokens auto` loses against the best fixed length, and to what: a simulation,
seconds on one core.

Machines and texts are those of `control_worlds.py`; every length, and the control, writes the same
texts. The control sees a clock with noise: minutes that are slow as a whole, steps that differ, now
and then one of up to three times its length. It is charged what steps cost without noise, and
credited with the tokens they bring on average.

The best fixed length is best over all cells of a kind together, not in each cell: the luckiest of
nine lengths in one cell of 250 tokens is no rival that anybody could have named beforehand. `lucky`
is the ratio to that one all the same.

Steps of every length are timed when a model is loaded, once per machine; the file that keeps them
is from another hour. `known` is a control that was given them, `unknown` one that must find out.

The loss is split by why a step had the length it had, and adds up: time beyond what the best fixed
length needs for as much,

    start    steps before any size was timed
    probe    steps that ask for another length than the one believed best
    wrong    another length is believed best than is best
    rest     the best length, where it brings less or more than on average
    think    the control itself

    python benchmarks/control.py [--cells 40] [--tokens 64 --prompts 4]
    python benchmarks/control.py --busy                                   a clock as beside busy processes
    python benchmarks/control.py --prompts 16 --recorded benchmarks/results/recorded-texts-DATE.json.gz    real texts
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from control_worlds import KINDS, MAX_NODES, Kind, RecordedText, Text, recorded
from workload import read_result

from outrider.draft_length import Goodput
from outrider.draft_length.goodput import ObservedStep
from outrider.draft_length.survival import Phase
from outrider.types import VerdictLists

World = Sequence[Text] | Sequence[RecordedText]
LENGTHS = range(MAX_NODES + 1)
CALIBRATIONS = 30  # times per length, when a model is loaded
ANOTHER_HOUR = 0.2  # logarithm of a factor: how the machine's speed then differs from now
FLOOR = 0.97  # of the best fixed length
CAUSES = ("start", "probe", "wrong", "rest", "think")
# what the control takes in a step, and to learn from steps: between passes that empty caches
EACH_STEP_MS = 0.02
LESSON_MS = 0.6


@dataclass(frozen=True)
class Clock:
    """How the control's clock errs: standard deviations of the logarithm, per prompt and per step."""

    prompt: float = 0.1
    step: float = 0.05
    outliers: float = 0.02

    def shown(self, ms: float, slow: float, rng: random.Random) -> float:
        """What a step of so many milliseconds seems to take; `slow`: logarithm of the present
        minute's factor."""
        factor = rng.uniform(1.3, 3) if rng.random() < self.outliers else 1.0
        return ms * factor * math.exp(slow + rng.gauss(0, self.step))


BUSY = Clock(step=0.4, outliers=0.1)  # other processes take turns on the same cores


@dataclass
class Total:
    """Milliseconds and tokens."""

    ms: float = 0.0
    tokens: float = 0.0

    def add(self, ms: float, tokens: float) -> None:
        self.ms += ms
        self.tokens += tokens

    @property
    def rate(self) -> float:
        return self.tokens / self.ms if self.ms else 0.0


def fixed(texts: World, kind: Kind, size: int) -> Total:
    """The same number every step, less where a text ends."""
    total = Total()
    for text in texts:
        position = 0
        while position < len(text):
            step = kind.step(text, position, min(size, len(text) - position - 1))
            total.add(step.ms, step.tokens)
            position += step.kept + 1
    return total


@dataclass
class AutoRun:
    """A control on the texts of one cell, from nothing known."""

    control: Any
    kind: Kind
    clock: Clock
    best: int  # fixed length of this kind of cell
    rng: random.Random
    parts: dict[str, Total] = field(default_factory=lambda: {cause: Total() for cause in CAUSES})
    asked: Counter[int] = field(default_factory=Counter)

    def write(self, texts: World) -> AutoRun:
        for text in texts:
            slow = self.rng.gauss(0, self.clock.prompt)
            row = SimpleNamespace(stats=SimpleNamespace(steps=0), room=len(text))
            row.clamp_draft = lambda size, row=row: max(0, min(size, row.room - 1))
            while row.room > 0:
                self._step(text, row, slow)
        return self

    def _step(self, text: Text | RecordedText, row: Any, slow: float) -> None:
        position = len(text) - row.room
        phase = Phase.at(position, thinks=position < getattr(text, "thoughts", 0))
        size = self.control.next_size(1, {phase: 1.0}, position)
        asked = row.clamp_draft(size)
        step = self.kind.step(text, position, asked)
        self.parts[self._cause(asked, row)].add(step.ms, step.tokens)
        self.asked[asked] += 1
        row.room -= step.kept + 1
        row.stats.steps += 1
        seconds = self.clock.shown(step.ms, slow, self.rng) / 1000
        # as `AutoLength.observe` has it: a first step also reads the prompt
        known = seconds if row.stats.steps > 1 else None
        verdict = VerdictLists([[*range(step.kept)]], [step.kept], [0], [step.ran_out])
        lessons = self.control.lessons
        step_seen = ObservedStep(
            1, size, [asked], [step.drafted], verdict, [step.budgets], known, [0], [phase], position
        )
        self.control.learn(step_seen)
        self.parts["think"].add(EACH_STEP_MS + LESSON_MS * (self.control.lessons - lessons), 0)

    def _cause(self, asked: int, row: Any) -> str:
        settled = self.control.settled(1)
        if self.control.goodput(1) is None:
            return "start"
        if asked != row.clamp_draft(settled):
            return "probe"
        return "rest" if settled == self.best else "wrong"

    @property
    def total(self) -> Total:
        return Total(
            sum(part.ms for part in self.parts.values()),
            sum(part.tokens for part in self.parts.values()),
        )


@dataclass(frozen=True)
class Found:
    """Of all cells of a kind."""

    best: int
    ratio: float  # rate over that of the best fixed length, all cells together
    cells: list[float]  # the same ratio of single cells
    lucky: float  # mean over cells, against each cell's own luckiest length
    plain: float  # rate over plain decoding's, all cells together
    low_plain: float
    loss: dict[str, float]  # share of time, by cause
    asked: Counter[int]


def new_control(kind: Kind, clock: Clock, rng: random.Random, *, known: bool) -> Goodput:
    """As a decoder gets it. `known`: given what steps took in another hour, medians of a few."""
    control = Goodput(MAX_NODES, trees=kind.trees)
    if known:
        slow = rng.gauss(0, ANOTHER_HOUR)
        then = kind.timed_on or kind.machine
        times = {
            n: [clock.shown(then.ms(n, n), slow, rng) for _ in range(CALIBRATIONS)] for n in LENGTHS
        }
        control.learn_costs(1, {n: median(values) / 1000 for n, values in times.items()})
    return control


def made_up(kind: Kind, cells: int, prompts: int, tokens: int, seed: int) -> list[list[Text]]:
    """The texts of so many cells."""
    assert kind.write is not None
    return [
        [kind.write(random.Random(f"{seed} {c} {p}"), tokens) for p in range(prompts)]
        for c in range(cells)
    ]


def study(
    kind: Kind, worlds: Sequence[World], clock: Clock, *, known: bool, seed: int = 0
) -> Found:
    """Many cells, each with its own texts and a control that starts afresh."""
    rivals = [{size: fixed(texts, kind, size) for size in LENGTHS} for texts in worlds]
    pooled = {size: _sum(cell[size] for cell in rivals) for size in LENGTHS}
    best = max(LENGTHS, key=lambda size: pooled[size].rate)
    runs = []
    for c, texts in enumerate(worlds):
        rng = random.Random(f"{seed} {c} clock")
        runs.append(
            AutoRun(new_control(kind, clock, rng, known=known), kind, clock, best, rng).write(texts)
        )
    total = _sum(run.total for run in runs)
    loss = {}
    for cause in CAUSES:
        part = _sum(run.parts[cause] for run in runs)
        loss[cause] = (part.ms - part.tokens / pooled[best].rate) / total.ms
    return Found(
        best,
        total.rate / pooled[best].rate,
        [run.total.rate / cell[best].rate for run, cell in zip(runs, rivals, strict=True)],
        mean(
            run.total.rate / max(one.rate for one in cell.values())
            for run, cell in zip(runs, rivals, strict=True)
        ),
        total.rate / pooled[0].rate,
        _low([run.total.rate / cell[0].rate for run, cell in zip(runs, rivals, strict=True)]),
        loss,
        sum((run.asked for run in runs), Counter()),
    )


def _sum(totals: Iterable[Total]) -> Total:
    found = Total()
    for total in totals:
        found.add(total.ms, total.tokens)
    return found


def _low(values: Sequence[float]) -> float:
    return quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def table(found: dict[str, Found]) -> str:
    head = ["", "best", "auto / best", "low", "lucky", "auto / plain", "low", *CAUSES]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, one in found.items():
        ratios = (one.ratio, _low(one.cells), one.lucky, one.plain, one.low_plain)
        losses = (f"{100 * one.loss[cause]:.1f}" for cause in CAUSES)
        lines.append([name, str(one.best), *(f"{ratio:.3f}" for ratio in ratios), *losses])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    cells: Annotated[int, typer.Option(min=2, help="Per kind.")] = 40,
    prompts: Annotated[int, typer.Option(min=1, help="Per cell.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Per prompt.")] = 64,
    kinds: Annotated[str, typer.Option(help="Only those whose name holds this.")] = "",
    seed: Annotated[int, typer.Option(help="Other texts, another clock.")] = 0,
    busy: Annotated[bool, typer.Option(help="A clock that errs as beside busy processes.")] = False,
    recorded_texts: Annotated[
        Path | None,
        typer.Option(
            "--recorded", exists=True, help="Instead, all texts of this file of record_texts.py."
        ),
    ] = None,
) -> None:
    """What auto loses against the best fixed length, and to what."""
    worlds: dict[str, tuple[Kind, list[Any]]] = {}
    if recorded_texts is None:
        worlds = {
            name: (kind, made_up(kind, cells, prompts, tokens, seed))
            for name, kind in KINDS.items()
        }
    else:
        for name, (kind, texts) in recorded(read_result(recorded_texts)).items():
            if len(texts) < prompts:
                raise typer.BadParameter(
                    f"{recorded_texts} has {len(texts)} texts a cell, got --prompts {prompts}"
                )
            worlds[name] = (
                kind,
                [texts[i : i + prompts] for i in range(0, len(texts) - prompts + 1, prompts)],
            )
    for known in (True, False):
        clock = BUSY if busy else Clock()
        found = {
            name: study(kind, mine, clock, known=known, seed=seed)
            for name, (kind, mine) in worlds.items()
            if kinds in name
        }
        ratios = [one.ratio for one in found.values()]
        single = [ratio for one in found.values() for ratio in one.cells]
        below = sum(ratio < FLOOR for ratio in single)
        print(
            f"step costs {'known' if known else 'unknown'}: mean {mean(ratios):.3f}, worst "
            f"{min(ratios):.3f}; "
            f"of {len(single)} single cells {below} below {FLOOR}, worst {min(single):.3f}\n"
        )
        print(table(found) + "\n")


if __name__ == "__main__":
    typer.run(main)
