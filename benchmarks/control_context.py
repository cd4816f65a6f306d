"""What `auto` loses where acceptance and costs depend on how long texts are: a simulation, minutes
on one core.

A head is right with a chance that falls from 0.8 to 0.3 over 4,000 tokens of text. The machine is
this project's CPU with SmolLM2-135M in bf16 (results/runtime-bf16-2026-11-27.json: passes of 1, 8
and 16 tokens, and what each cached token adds), or flat as on a graphics card. `AutoLength` decides
for whole batches, which change as requests end.

    auto     tokens per second over those of an ideal that knows every row's chance and every cost, and takes the best length for
             all rows in each step; both meet the same batches, so the luck of one run hides nothing
    fixed    the same of the best fixed length, in these batches
    ragged   what the ideal would gain if each row could have a length of its own, and a pass had no padding

    python benchmarks/control_context.py
    python benchmarks/control_context.py --blind both      as if all texts were equally long; or acceptance, or costs
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from control_worlds import MAX_NODES

from outrider.draft_length import AutoLength, Goodput, costs, survival
from outrider.types import VerdictLists

LENGTHS = range(MAX_NODES + 1)
NEVER_LONG = 10**12
# tokens in front of an answer, and of it
SHORT = (200, 150)
LONG = (6000, 150)


@dataclass(frozen=True)
class Machine:
    """Milliseconds."""

    is_flat: bool = False
    token: float = 0.9  # of the head

    def ms(self, contexts: Sequence[int], nodes: Sequence[int]) -> float:
        """A step without padding: row b has nodes[b] nodes after contexts[b] tokens."""
        tokens = sum(nodes) + len(nodes)
        longest = max(nodes)
        reads = sum(
            context * (0.00091 + 0.000166 * count)
            for context, count in zip(contexts, nodes, strict=True)
        )
        head_reads = (
            sum(context * count for context, count in zip(contexts, nodes, strict=True)) * 0.00003
        )
        if self.is_flat:
            weights = 20 + 0.05 * tokens
            reads = reads / 10
            head_reads = head_reads / 10
        else:
            weights = 9.4 + 0.157 * min(tokens - 1, 7) + 0.35 * max(0, tokens - 8)
        return 0.3 + weights + reads + (0.4 + self.token * longest + head_reads if longest else 0)


@dataclass
class Text:
    """A row, as far as a control looks at it."""

    length: int
    end: int
    luck: float  # added to its chance
    shape: int
    request: int
    stats: Any = field(default_factory=lambda: SimpleNamespace(steps=0))
    thinks: bool = False
    drafter: str | None = None
    draft_bound: int | None = None
    draft_fixed: bool = False

    @property
    def tokens(self) -> range:
        return range(self.length)

    @property
    def chance(self) -> float:
        """Of a token of the head, here."""
        return min(0.97, max(0.02, max(0.3, 0.8 - 0.5 * self.length / 4000) + self.luck))

    def clamp_draft(self, size: int) -> int:
        return max(0, min(size, self.end - self.length - 1))


@dataclass(frozen=True)
class World:
    """`shapes`: of the requests, which come in turn. `num_rows` run at a time; `fixed`: one of each
    shape does."""

    shapes: tuple[tuple[int, int], ...]
    num_rows: int = 1
    is_fixed: bool = False
    luck: float = 0.0  # standard deviation, of requests
    steps: int = 2500


WORLDS = {
    "one text of 200 to 6,200 tokens": World(((200, 6000),)),
    "200 and 6,000 tokens in turn, answers of 50": World(((200, 50), (6000, 50))),
    "200 and 6,000 tokens in turn, answers of 150": World((SHORT, LONG)),
    "200 and 6,000 tokens in turn, answers of 600": World(((200, 600), (6000, 600))),
    "200 and 30,000 tokens in turn": World((SHORT, (30_000, 150))),
    "one row of 200 beside one of 6,000": World((SHORT, LONG), 2, is_fixed=True),
    "one row of 200 beside three of 6,000": World((SHORT, LONG, LONG, LONG), 4, is_fixed=True),
    "200 to 6,000 tokens in turn, prompts differ": World(
        (SHORT, (1500, 150), LONG, (3000, 150)), luck=0.12
    ),
}
MACHINES = {
    "CPU": Machine(),
    "CPU, expensive head": Machine(token=2.5),
    "flat": Machine(is_flat=True, token=1.2),
}


def tokens_of(rows: Sequence[Text], nodes: Sequence[int]) -> float:
    """Expected ones of a step."""
    chances = [row.chance for row in rows]
    return sum(
        (1 - chance ** (count + 1)) / (1 - chance)
        for chance, count in zip(chances, nodes, strict=True)
    )


def even_rate(machine: Machine, rows: Sequence[Text], size: int) -> float:
    """Tokens per millisecond where all rows ask for as many; a pass is as wide as its widest row."""
    nodes = [row.clamp_draft(size) for row in rows]
    return tokens_of(rows, nodes) / machine.ms(
        [row.length for row in rows], [max(nodes)] * len(rows)
    )


def ragged_rate(machine: Machine, rows: Sequence[Text]) -> float:
    """The best one where each row has a number of its own: nodes are added where they are likeliest
    to be kept."""
    nodes = [0] * len(rows)
    contexts = [row.length for row in rows]
    best = 0.0
    if len(rows) == 1:
        return max(even_rate(machine, rows, size) for size in LENGTHS)
    while True:
        best = max(best, tokens_of(rows, nodes) / machine.ms(contexts, nodes))
        open_rows = [
            index for index, row in enumerate(rows) if nodes[index] < row.clamp_draft(MAX_NODES)
        ]
        if not open_rows:
            return best
        nodes[max(open_rows, key=lambda index: rows[index].chance ** (nodes[index] + 1))] += 1


@dataclass
class Run:
    """A control in a world."""

    machine: Machine
    world: World
    seed: int
    rows: list[Text] = field(default_factory=list)
    ms: float = 0.0
    ideal_ms: float = 0.0  # for the same tokens
    ragged_ms: float = 0.0
    fixed_ms: list[float] = field(default_factory=lambda: [0.0] * len(LENGTHS))

    def write(self, control: Any) -> Run:
        draws, clock, requests = (
            random.Random(f"{self.seed} {what}") for what in ("draws", "clock", "requests")
        )
        slow = 0.0
        count = 0
        for step in range(self.world.steps):
            self.rows = [row for row in self.rows if row.end > row.length]
            while len(self.rows) < self.world.num_rows:
                missing = set(range(self.world.num_rows)) - {row.shape for row in self.rows}
                shape = min(missing) if self.world.is_fixed else count % len(self.world.shapes)
                (start, answer) = self.world.shapes[shape]
                count = count + 1
                self.rows.append(
                    Text(start, start + answer, requests.gauss(0, self.world.luck), shape, count)
                )
            slow = slow if step % 60 else clock.gauss(0, 0.1)
            self._step(control, slow, draws, clock)
        return self

    def _step(self, control: Any, slow: float, draws: random.Random, clock: random.Random) -> None:
        rows = self.rows
        machine = self.machine
        asked = list(control.choose(rows))
        ms = machine.ms([row.length for row in rows], [max(asked)] * len(rows))
        tokens = tokens_of(rows, asked)
        self.ms += ms
        rates = [even_rate(machine, rows, size) for size in LENGTHS]
        self.ideal_ms += tokens / max(rates)
        self.fixed_ms = [
            before + tokens / rate for before, rate in zip(self.fixed_ms, rates, strict=True)
        ]
        self.ragged_ms += tokens / ragged_rate(machine, rows)
        kept = [
            next((k for k in range(n) if draws.random() >= row.chance), n)
            for row, n in zip(rows, asked, strict=True)
        ]
        for row, accepted in zip(rows, kept, strict=True):
            row.length += accepted + 1
            row.stats.steps += 1
        outlier = clock.uniform(1.3, 3) if clock.random() < 0.02 else 1.0
        seconds = ms / 1000 * math.exp(slow + clock.gauss(0, 0.05)) * outlier
        paths = [[*range(accepted), *[-1] * (max(asked) - accepted)] for accepted in kept]
        whole = [accepted == n for accepted, n in zip(kept, asked, strict=True)]
        verdict = SimpleNamespace(lists=VerdictLists(paths, kept, [0] * len(rows), whole))
        draft = SimpleNamespace(budgets=None)
        control.observe(
            SimpleNamespace(
                rows=rows, asked=asked, drafted=asked, verdict=verdict, draft=draft, seconds=seconds
            )
        )

    @property
    def ratio(self) -> float:
        return self.ideal_ms / self.ms


def new_auto(machine: Machine, num_rows: int) -> AutoLength:
    """As a server has it at its start: every length was timed, after short texts."""
    goodput = Goodput(MAX_NODES, trees=False)
    for rows in {1, num_rows}:
        goodput.learn_costs(
            rows, {size: machine.ms([200] * rows, [size] * rows) / 1000 for size in LENGTHS}
        )
    return AutoLength({"head": goodput})


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each world.")] = 3,
    worlds: Annotated[str, typer.Option(help="Only those whose name holds this.")] = "",
    blind: Annotated[
        str, typer.Option(help="acceptance, costs or both: as if all texts were equally long.")
    ] = "",
) -> None:
    """What `auto` loses where texts differ in length."""
    if blind in ("acceptance", "both"):
        survival.LONG = NEVER_LONG
    if blind in ("costs", "both"):
        costs.LONG = NEVER_LONG
    print(f"| | {' | '.join(f'{name}: auto | fixed | ragged' for name in MACHINES)} |")
    print("|---|" + "---:|" * 3 * len(MACHINES))
    each: list[float] = []
    for name, world in WORLDS.items():
        if worlds not in name:
            continue
        cells = []
        for machine in MACHINES.values():
            found = [
                Run(machine, world, seed).write(new_auto(machine, world.num_rows))
                for seed in range(seeds)
            ]
            fixed = max(
                mean(run.ideal_ms / run.fixed_ms[size] for run in found) for size in LENGTHS
            )
            each.append(mean(run.ratio for run in found))
            cells += [
                f"{each[-1]:.3f}",
                f"{fixed:.3f}",
                f"{mean(run.ideal_ms / run.ragged_ms for run in found):.3f}",
            ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nmean of auto {mean(each):.3f}, worst {min(each):.3f}")


if __name__ == "__main__":
    typer.run(main)
