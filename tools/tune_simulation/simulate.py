"""Tuning on a machine that is not there: how good are the choices of `tune`, at the noise that was
seen on a real one?

A `World` has families whose acceptance and costs are known, so the speed of every configuration is
known too. Its contenders decode nothing: they draw how many draft tokens are kept and how long
steps take, with the three kinds of noise that clocks show, and hand over traces as real ones do.
The whole `Tuner` runs on them, stage by stage; what it recommends is then compared with the truth,
and what it spent with what trying everything would have taken.

How families behave is in `behaviour.py`. The noise is that of
benchmarks/results/bench-2026-11-22.json.gz (64 tokens an answer, two cores): runs of one prompt differ
by 0.09 from one configuration to the next and by 0.08 from minute to minute
(standard deviations of logarithms), tau by 0.17 from prompt to prompt. Every world is a draw:
acceptance, costs, and by how much sweeps mislead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from outrider.configuration import PLAIN, Configuration
from outrider.engine.step_costs import Sweep
from outrider.lab.bench import stages
from outrider.lab.journal import Journal
from outrider.lab.runner import Runner, Step, Trace
from outrider.lab.tune import tune
from outrider.lab.tune.decide import recommendations
from outrider.lab.tune.families import default_space
from outrider.lab.tune.run import split
from outrider.lab.tune.space import Family, TrainedHead, TuneRequest
from outrider.lab.tune.tune import Tuner
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import WorkloadRequest
from outrider.outputs import Completion
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from tools.tune_simulation.behaviour import NUM_LAYERS, Behaviour, behaviour_of

PLAIN_S = 0.0054
NINTH = 0.25  # of a plain pass: what the tokens of a pass after the eighth cost at once
# seconds that the machine's mood lasts, and how far it goes
FAST = (0.3, 0.09)
SLOW = (60.0, 0.08)
STEP_NOISE = 0.06
PROMPT_SPREAD = 0.6  # of the log-odds of acceptance, from prompt to prompt
# from world to world: log-odds, log costs
WORLD_SPREAD = 0.4
COST_SPREAD = 0.2
# how far the steps of sweeps cost otherwise than those of real runs: at all, and per node
SWEEP_LEVEL = 0.05
SWEEP_SLOPE = 0.01
POPULATION = 400  # prompts that the truth is computed over
HEADS = (
    TrainedHead(kind="block", folder="", max_chain=8, confidence=True), TrainedHead(kind="eagle3", folder=""),
    TrainedHead(kind="medusa", folder="", max_chain=4),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One rehearsal."""

    advice: str
    best: str
    of_best: float  # true speed of the advice / of the truly best fixed configuration
    # / of the one that looks best when every member has run every prompt once: it is misled by
    # noise, too
    of_exhaustive: float
    # seconds of probes and confirming runs / seconds of every member on every prompt
    cost_share: float


@dataclass
class World:
    """One machine, one pair, one workload."""

    seed: int
    families: Sequence[Family]
    noise: float = 1.0  # times the noise that was seen
    # texts leave nothing to chance: whoever drafts with the same model agrees at the same positions
    greedy: bool = True
    now: float = 0.0
    moods: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        world = self.rng.normal(0, WORLD_SPREAD)
        self.behaviours = {}
        self.bias = {}
        for family in self.families:
            behaviour = behaviour_of(family)
            odds = world + self.rng.normal(0, WORLD_SPREAD / 2)
            cost = math.exp(self.rng.normal(0, COST_SPREAD))
            shifted = tuple(_shifted(one, odds) for one in behaviour.acceptance)
            self.behaviours[family.label] = Behaviour(
                shifted, behaviour.step * cost, behaviour.node * cost, behaviour.offers
            )
            self.bias[family.label] = (
                self.rng.normal(0, SWEEP_LEVEL),
                self.rng.normal(0, SWEEP_SLOPE),
            )
        self.prompts = self.rng.normal(0, PROMPT_SPREAD, POPULATION)

    # ---------------------------------------------------------------- the truth

    def step_cost(self, family: str, nodes: int) -> float:
        """In plain steps."""
        behaviour = self.behaviours.get(family)
        if behaviour is None or nodes == 0:
            return 1.0
        return 1 + behaviour.step + behaviour.node * nodes + NINTH * (nodes // 8)

    def tau(self, family: str, size: int) -> np.ndarray:
        """Expected tokens of a step, of every prompt of the population."""
        behaviour = self.behaviours[family]
        total = np.ones(POPULATION)
        alive = np.full(POPULATION, behaviour.offers)
        for depth in range(size):
            alive = alive * _shifted(_at(behaviour.acceptance, depth), self.prompts)
            total += alive
        return total

    def speedup(self, configuration: Configuration) -> float:
        """True, over the population: seconds of the same number of tokens of every prompt."""
        family, size = self.parse(configuration)
        behaviour = self.behaviours[family]
        cost = behaviour.offers * self.step_cost(family, size) + (1 - behaviour.offers)
        return float(1 / np.mean(cost / self.tau(family, size))) * (
            AUTO_LOSS if _is_auto(configuration) else 1.0
        )

    # ---------------------------------------------------------------- what tuning sees of it

    def coins(self, drafter: str, prompt: int, length: int) -> np.ndarray:
        """A draft token at a position of the text is kept where its coin lies below its acceptance."""
        if not self.greedy:
            return self.rng.random(length)
        return np.random.default_rng([self.seed, prompt, *drafter.encode()]).random(length)

    def open(self, configuration: Configuration) -> RehearsedContender:
        """Ready to run."""
        return RehearsedContender(configuration, self)

    def tick(self, seconds: float) -> float:
        """What a step of `seconds` takes now; the clock continues."""
        for index, (lasts, spread) in enumerate((FAST, SLOW)):
            keep = math.exp(-seconds / lasts)
            self.moods[index] = keep * self.moods[index] + math.sqrt(1 - keep**2) * self.rng.normal(
                0, self.noise * spread
            )
        taken = seconds * math.exp(sum(self.moods) + self.rng.normal(0, self.noise * STEP_NOISE))
        self.now += taken
        return taken

    def parse(self, configuration: Configuration) -> tuple[str, int]:
        family = Configuration(
            configuration.drafter, None, configuration.drafter_options, configuration.verifier
        ).label
        if not _is_auto(configuration):
            return family, int(configuration.num_draft_tokens or 0)
        sizes = next(one.sizes for one in self.families if one.label == family)
        best = max(
            sizes, key=lambda size: self.speedup(replace(configuration, num_draft_tokens=size))
        )
        return family, best


AUTO_LOSS = 0.97


class RehearsedContender:
    """One configuration in a world; stands in for `lab/runner.py: Contender`."""

    def __init__(self, configuration: Configuration, world: World) -> None:
        self.configuration = configuration
        self._world = world
        self.keeps_learning = _is_auto(configuration)
        self._family, self._size = ("", 0) if configuration.is_plain else world.parse(configuration)
        self._sweep: Sweep | None = None

    @contextmanager
    def sweeping(self, lengths: Sequence[int]) -> Iterator[Sweep]:
        """As the real one's."""
        self._sweep = Sweep(lengths)
        yield self._sweep
        self._sweep = None

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        batch_size: int = 1,
    ) -> list[Trace]:
        """One after the other; a prompt's only token is its number in the population."""
        several = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [self._trace(prompt, one) for prompt, one in zip(prompts, several, strict=True)]

    def _trace(self, prompt: list[int], params: SamplingParams) -> Trace:
        world = self._world
        began = self._world.now
        done = 0
        steps: list[Step] = []
        world.tick(3 * PLAIN_S)  # the prompt
        coins = world.coins(self.configuration.drafter, prompt[0], params.required_max_tokens)
        while done < params.required_max_tokens:
            step = self._step(done, len(steps), float(world.prompts[prompt[0]]), coins)
            steps.append(step)
            done += step.taken
        stats = DecodeStats(steps=len(steps), emitted=done)
        completion = Completion(
            [1], "", list(range(done)), "length", [], None, stats, lossless=True, seed=0
        )
        return Trace(completion, steps, began, 0.0)

    def _step(self, start: int, number: int, prompt: float, coins: np.ndarray) -> Step:
        world = self._world
        sweep = self._sweep
        family = self._family
        size = self._size
        if sweep is not None and family:
            size = sweep.lengths[number % len(sweep.lengths)]
        size = min(size, len(coins) - start - 1)
        behaviour = world.behaviours.get(family)
        drafted = size if behaviour is not None and world.rng.random() < behaviour.offers else 0
        kept = 0
        while (
            behaviour
            and kept < drafted
            and coins[start + kept] < _shifted(_at(behaviour.acceptance, kept), prompt)
        ):
            kept += 1
        seconds = (
            PLAIN_S
            * world.step_cost(family, drafted)
            / (AUTO_LOSS if _is_auto(self.configuration) else 1.0)
        )
        if sweep is not None and drafted:
            level, slope = world.bias[family]
            seconds *= math.exp(level + slope * drafted)
        taken = world.tick(seconds)
        path = list(range(kept))
        return Step(
            start,
            size,
            [7] * drafted,
            None,
            None,
            path,
            7,
            kept == drafted,
            kept + 1,
            1,
            taken,
            world.now,
        )


def rehearse(
    seed: int,
    *,
    prompts: int = 32,
    max_tokens: int = 48,
    noise: float = 1.0,
    greedy: bool = True,
    most_share: float = 0.075,
    heads: bool = True,
) -> Outcome:
    """One world, tuned as the command tunes at temperature 0 with a draft model; `heads`: and with
    three heads and the target's own weights, as the demo is."""
    wide = TuneRequest(has_draft=True, heads=HEADS, num_layers=NUM_LAYERS)
    families = default_space(wide if heads else TuneRequest(has_draft=True, own_weights=False))
    world = World(seed, families, noise, greedy)
    numbers = world.rng.choice(POPULATION, prompts, replace=False).tolist()
    probe, confirm = split(
        [
            PreparedPrompt(WorkloadRequest(str(number), task="all"), [number], max_tokens, number)
            for number in numbers
        ]
    )
    request = TuneRequest(load_sizes=(), most_share=most_share)
    clock = SimpleNamespace(perf_counter=lambda: world.now)  # budgets are of the world's seconds
    with patch.object(stages, "time", clock), patch.object(tune, "time", clock):
        found = Tuner(cast(Runner, _Models(world)), families, request, probe, confirm, Journal())
        found.run()
    spent = world.now
    advice = recommendations(found, None)[0]
    truth = {
        PLAIN: 1.0,
        **{one.label: world.speedup(one) for family in families for _, one in family.members()},
    }
    best = max(truth, key=lambda label: truth[label])
    chosen = _exhaustive(world, families, [*probe, *confirm])
    by_label = {one.label: one for one in found.finalists}
    own = (
        1.0
        if not advice.speculate
        else truth.get(advice.configuration) or world.speedup(by_label[advice.configuration])
    )
    plain_s = prompts * max_tokens * PLAIN_S
    everything = plain_s * sum(
        1 / speedup for speedup in truth.values()
    ) + 3 * PLAIN_S * prompts * len(truth)
    return Outcome(
        advice.configuration, best, own / truth[best], own / truth[chosen], spent / everything
    )


def _exhaustive(world: World, families: Sequence[Family], prompts: Sequence[PreparedPrompt]) -> str:
    """The configuration that trying everything would choose, plain decoding included."""
    seconds = {}
    for one in (
        Configuration(PLAIN),
        *(member for family in families for _, member in family.members()),
    ):
        contender = world.open(one)
        traces = [
            contender.run([prompt.tokens], SamplingParams(max_tokens=prompt.max_tokens))[0]
            for prompt in prompts
        ]
        seconds[one.label] = sum(trace.seconds_per_token for trace in traces)
    return min(seconds, key=lambda label: seconds[label])


@dataclass(frozen=True)
class _Models:
    """Stands in for `Runner`."""

    world: World

    def open(self, configuration: Configuration, *, any_length: bool = False) -> Any:
        return self.world.open(configuration)


def _at(acceptance: Sequence[float], depth: int) -> float:
    return acceptance[min(depth, len(acceptance) - 1)]


def _shifted(chance: float, odds: Any) -> Any:
    """With its log-odds shifted; a number or an array of them."""
    return 1 / (1 + (1 - chance) / chance * np.exp(-odds))


def _is_auto(configuration: Configuration) -> bool:
    return str(configuration.num_draft_tokens).startswith("auto")
