"""Traces and contenders without models: a text, how it was cut into steps, and a clock that only
they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from outrider.configuration import Configuration
from outrider.errors import CapabilityError, OutriderError
from outrider.lab.runner import Step, Trace
from outrider.outputs import Completion
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

OVERHEAD_S = 0.001  # of a step, beside its drafting and its target pass


def step_of(
    start: int,
    taken: int,
    at_s: float,
    seconds: float,
    *,
    drafted: int | None = None,
    rows: int = 1,
) -> Step:
    """A chain of `drafted` nodes of which taken - 1 were kept."""
    count = taken - 1 if drafted is None else drafted
    return Step(
        start,
        count,
        [7] * count,
        None,
        None,
        list(range(taken - 1)),
        7,
        taken - 1 == count,
        taken,
        rows,
        seconds,
        at_s,
    )


def trace_of(
    takes: Sequence[int],
    gaps: Sequence[float],
    *,
    tokens: Sequence[int] | None = None,
    prompt: int = 4,
    began_s: float = 100.0,
    drafted: Sequence[int] | None = None,
    other_cpu: float = 0.0,
    finish_reason: str = "stop",
    text: str = "",
    rows: int = 1,
) -> Trace:
    """Steps that took `takes` tokens and ended `gaps` seconds after the one before; of the first
    one 0.4 are the prompt."""
    stats = DecodeStats()
    steps = []
    at_s = began_s
    for number, (taken, gap) in enumerate(zip(takes, gaps, strict=True)):
        at_s += gap
        seconds = 0.6 * gap if number == 0 else gap
        steps.append(
            step_of(
                sum(takes[:number]),
                taken,
                at_s,
                seconds,
                drafted=None if drafted is None else drafted[number],
                rows=rows,
            )
        )
        count = len(steps[-1].tokens)
        stats.count_step(count, taken - 1, taken, rejected=taken - 1 < count)
        stats.time_s["target"] += (gap - OVERHEAD_S) / rows
    ids = list(range(sum(takes))) if tokens is None else list(tokens)
    completion = Completion(
        [1] * prompt,
        text,
        ids,
        finish_reason,
        ["plain"] * len(ids),
        None,
        stats,
        lossless=True,
        seed=0,
    )
    return Trace(completion, steps, began_s, other_cpu)


@dataclass
class Clock:
    """`time.perf_counter` of a test."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeContender:
    """Writes `answer(prompt)`, `pace` tokens a step, `step_s` seconds a step."""

    configuration: Configuration
    clock: Clock
    pace: int = 1
    step_s: float = 0.01
    keeps_learning: bool = False
    other_cpu: list[float] = field(default_factory=list)  # of the next runs; then 0
    error: OutriderError | None = None
    stutter: float = 0.0  # share by which every run is slower than the one before
    log: list[tuple[str, list[list[int]], int]] = field(default_factory=list)
    wrong: bool = False  # writes another text
    runs: int = 0

    def run(self, prompts: Sequence[list[int]], params: Any, batch_size: int = 1) -> list[Trace]:
        several = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self.log.append(
            (self.configuration.label, [list(prompt) for prompt in prompts], several[0].seed or 0)
        )
        if self.error is not None:
            raise self.error
        self.runs += 1
        share = self.other_cpu.pop(0) if self.other_cpu else 0.0
        pace_s = self.step_s * (1 + self.stutter * self.runs)
        found = []
        for prompt, one in zip(prompts, several, strict=True):
            takes = [self.pace] * (one.max_tokens // self.pace)
            gaps = [0.1, *[pace_s * (1 + sum(prompt) % 5 / 10)] * (len(takes) - 1)]
            tokens = [sum(prompt) + index + self.wrong * (index > 4) for index in range(sum(takes))]
            found.append(
                trace_of(
                    takes,
                    gaps,
                    tokens=tokens,
                    prompt=len(prompt),
                    began_s=self.clock.now,
                    other_cpu=share,
                    rows=len(prompts),
                )
            )
        self.clock.now += max(trace.steps[-1].at_s for trace in found) - self.clock.now
        return found

    def close(self) -> None:
        """Nothing to save."""


@dataclass
class FakeRunner:
    """Opens copies of what it was given; `log` is everybody's, in the order of the runs."""

    contenders: dict[str, FakeContender]
    opened: list[str] = field(default_factory=list)
    unbuildable: set[str] = field(default_factory=set)

    def open(self, configuration: Configuration) -> FakeContender:
        self.opened.append(configuration.label)
        if configuration.label in self.unbuildable:
            raise CapabilityError(f"{configuration.label} cannot be built")
        return replace(self.contenders[configuration.label])


def fake_tokenizer() -> Any:
    """Words are numbers; 0 begins every text."""

    def encode(text: str) -> dict[str, list[int]]:
        return {"input_ids": [0, *(int(word) for word in text.split())]}

    encode.bos_token_id = 0  # type: ignore[attr-defined]
    encode.decode = lambda ids, **_: " ".join(map(str, ids))  # type: ignore[attr-defined]
    return encode


def nothing(**values: Any) -> SimpleNamespace:
    """Something with these attributes."""
    return SimpleNamespace(**values)
