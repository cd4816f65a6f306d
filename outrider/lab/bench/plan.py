"""What is measured, and when it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.configuration import PLAIN, Configuration
from outrider.sampling.params import SamplingParams, usable_temperature

COUPLED = "gumbel"  # the verifier whose texts do not depend on the drafter: its baseline draws with the same noise
GOES_ON_BY = ("rounds", "max_rounds", "budget_s", "precision")  # what a resumed run may change


@dataclass(frozen=True)
class Plan:
    """See the fields. Raises ConfigError for what makes no sense."""

    configurations: tuple[Configuration, ...]  # plain decoding joins by itself
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    context_lengths: tuple[int, ...] = ()  # tokens per prompt; with the first batch size, or all of them
    grid: bool = False  # every context length with every batch size
    prompts: int = 16  # per task
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))  # temperature and seed aside
    seed: int = 0
    rounds: int = 2  # at least, budget permitting
    max_rounds: int = 10
    budget_s: float = 1200.0
    precision: float = 0.05  # width of a speedup's interval, relative to the speedup
    max_other_cpu: float = 0.1  # of a run; busier neighbours: once more
    lossy: bool = False

    def __post_init__(self) -> None:
        for name, values in (("temperature", self.temperatures), ("batch size", self.batch_sizes)):
            if not values:
                raise ConfigError(f"give at least one {name}")
        object.__setattr__(self, "temperatures", tuple(map(usable_temperature, self.temperatures)))
        _check_above("batch sizes", min(self.batch_sizes), 1)
        _check_above("context lengths", min(self.context_lengths, default=2), 2)
        if self.grid and (len(set(self.batch_sizes)) < 2 or not self.context_lengths):
            raise ConfigError(
                f"a grid wants several batch sizes and at least one context length, got batch sizes {list(self.batch_sizes)} and "
                f"context lengths {list(self.context_lengths)}: give --batch-size and --context-lengths, or no --set grid=true"
            )
        _check_above("prompts", self.prompts, 1)
        _check_above("min_rounds", self.rounds, 1)
        if self.max_rounds < self.rounds:
            raise ConfigError(f"max_rounds must be at least min_rounds = {self.rounds}, got {self.max_rounds}")
        _check_above("the seed", self.seed, 0)
        for name in ("budget_s", "precision", "max_other_cpu"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name):g}")
        for temperature in self.temperatures:
            self.params(temperature, 0, 0)  # raises what sampling does not allow

    @property
    def all_configurations(self) -> list[Configuration]:
        """With the baselines, which come first."""
        wanted = [one for one in self.configurations if not one.is_plain]
        baselines = [baseline_of(one) for one in wanted] or [Configuration()]
        everyone = [*sorted(baselines, key=lambda one: one.label), *wanted]
        return [one for number, one in enumerate(everyone) if one not in everyone[:number]]

    def params(self, temperature: float, prompt: int, turn: int, max_tokens: int | None = None) -> SamplingParams:
        """Sampling parameters of one prompt in one round: the same for every configuration."""
        seed = int(np.random.SeedSequence([self.seed, prompt, turn]).generate_state(1)[0])
        return replace(self.sampling, temperature=temperature, seed=seed, max_tokens=max_tokens or self.sampling.max_tokens)

    def cell_keys(self, tasks: Sequence[str]) -> list[CellKey]:
        """All cells: every batch size with the prompts as they are, every context length at the first batch size; in a grid at
        every batch size."""
        shapes: list[tuple[int, int | None]] = [(size, None) for size in self.batch_sizes]
        filled = self.batch_sizes if self.grid else self.batch_sizes[:1]
        shapes += [(size, length) for length in self.context_lengths for size in filled]
        found = [CellKey(task, t, size, length) for task in tasks for t in self.temperatures for size, length in shapes]
        return list(dict.fromkeys(found))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, configurations by their labels."""
        return asdict(self) | {"configurations": [one.label for one in self.all_configurations]}

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {name: value for name, value in self.as_dict().items() if name not in GOES_ON_BY}


def baseline_of(configuration: Configuration) -> Configuration:
    """The plain decoding that a configuration is compared with."""
    return Configuration(PLAIN, verifier=COUPLED) if configuration.verifier == COUPLED else Configuration()


def default_configurations(has_draft: bool) -> list[Configuration]:
    """What takes part when nobody is named."""
    of_draft = ["draft-model", "draft-model k=auto"] if has_draft else []
    return [Configuration.parse(text) for text in [*of_draft, "ngram k=auto", "suffix k=auto"]]


def _check_above(what: str, number: int, minimum: int) -> None:
    if number < minimum:
        raise ConfigError(f"{what} must be {minimum} or more, got {number}")
