"""The plan of a bench run: the cells to measure, when there is enough, and the groups of a batch
size that are decoded.

*Filling up* to L tokens: before the prompt come the other prompts of its task, of which the end is kept (docs/bench.md, "Cells").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from outrider.configuration import PLAIN, Configuration
from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.workload.prompts import Answer, PreparedPrompt, prepare
from outrider.lab.workload.types import OnBad, Workload
from outrider.sampling.params import SamplingParams, usable_temperature

# the verifier whose texts do not depend on the drafter: its baseline draws with the same noise
COUPLED = "gumbel"
MAY_CHANGE = ("rounds", "budget_s")  # what a resumed run may change


@dataclass(frozen=True)
class Plan:
    """See the fields. Raises ConfigError for what makes no sense."""

    configurations: tuple[Configuration, ...]  # plain decoding joins by itself
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    context_lengths: tuple[int, ...] = ()  # tokens per prompt, with the first batch size
    prompts: int = 16  # per task
    # temperature and seed aside
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))
    seed: int = 0
    rounds: int = 2  # over the prompts, budget permitting
    budget_s: float = 1200.0
    max_other_cpu: float = 0.1  # of a run; busier neighbours: once more
    lossy: bool = False

    def __post_init__(self) -> None:
        for name, values in (("temperature", self.temperatures), ("batch size", self.batch_sizes)):
            if not values:
                raise ConfigError(f"give at least one {name}")
        object.__setattr__(self, "temperatures", tuple(map(usable_temperature, self.temperatures)))
        _check_above("batch sizes", min(self.batch_sizes), 1)
        _check_above("context lengths", min(self.context_lengths, default=2), 2)
        _check_above("prompts", self.prompts, 1)
        _check_above("rounds", self.rounds, 1)
        _check_above("the seed", self.seed, 0)
        for name in ("budget_s", "max_other_cpu"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name):g}")
        for temperature in self.temperatures:
            self.params(temperature, 0, 0)  # raises what sampling does not allow

    @property
    def all_configurations(self) -> list[Configuration]:
        """All configurations, baselines first."""
        wanted = [
            configuration for configuration in self.configurations if not configuration.is_plain
        ]
        baselines = [baseline_of(drafter) for drafter in wanted] or [Configuration()]
        everyone = [*sorted(baselines, key=lambda baseline: baseline.label), *wanted]
        return list({configuration.label: configuration for configuration in everyone}.values())

    def params(
        self, temperature: float, prompt: int, turn: int, max_tokens: int | None = None
    ) -> SamplingParams:
        """Sampling parameters of one prompt in one round: the same for every configuration."""
        seed = int(np.random.SeedSequence([self.seed, prompt, turn]).generate_state(1)[0])
        return replace(
            self.sampling,
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens or self.sampling.max_tokens,
        )

    def cell_keys(self, tasks: Sequence[str]) -> list[CellKey]:
        """All cells: every batch size with the prompts as they are, every context length at the
        first batch size."""
        shapes: list[tuple[int, int | None]] = [(size, None) for size in self.batch_sizes]
        shapes += [(self.batch_sizes[0], length) for length in self.context_lengths]
        keys = [
            CellKey(task, t, size, length)
            for task in tasks
            for t in self.temperatures
            for size, length in shapes
        ]
        return list(dict.fromkeys(keys))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, configurations by their labels."""
        return asdict(self) | {
            "configurations": [configuration.label for configuration in self.all_configurations]
        }

    def identity(self) -> dict[str, Any]:
        """The facts that must be the same for a run to continue."""
        return {name: value for name, value in self.as_dict().items() if name not in MAY_CHANGE}


def baseline_of(configuration: Configuration) -> Configuration:
    """The plain decoding that a configuration is compared with."""
    return (
        Configuration(PLAIN, verifier=COUPLED)
        if configuration.verifier == COUPLED
        else Configuration()
    )


def default_configurations(has_draft: bool) -> list[Configuration]:
    """The drafters that take part when none is named."""
    of_draft = ["draft-model", "draft-model k=auto"] if has_draft else []
    return [Configuration.parse(text) for text in [*of_draft, "ngram k=auto", "suffix k=auto"]]


def _check_above(what: str, number: int, minimum: int) -> None:
    if number < minimum:
        raise ConfigError(f"{what} must be {minimum} or more, got {number}")


@dataclass(frozen=True)
class Material:
    """Prompts by task, as they are, and what had to be left out."""

    by_task: dict[str, list[PreparedPrompt]]
    first_token: int | None  # that begins every text
    notes: tuple[str, ...] = ()

    def prompts(self, key: CellKey) -> list[PreparedPrompt]:
        prompts = self.by_task[key.task]
        if key.context is None:
            return prompts
        return [
            filled(prompts, number, key.context, self.first_token) for number in range(len(prompts))
        ]


def gather(
    workload: Workload,
    tokenizer: Any,
    plan: Plan,
    context: int,
    *,
    on_bad: OnBad = "refuse",
    chat_template: bool = True,
    answer: Answer | None = None,
) -> Material:
    """The first `plan.prompts` requests of every task, as token ids; `answer` as for `prepare`.

    Raises ConfigError where one of them does not fit into `context` together with its answer (with
    `on_bad="skip"`: where none does; later ones then take its place), and for context lengths that
    the model does not hold.
    """
    max_tokens = plan.sampling.required_max_tokens
    if plan.context_lengths and max(plan.context_lengths) + max_tokens > context:
        raise ConfigError(
            f"context length {max(plan.context_lengths)} and {max_tokens} new tokens are more "
            f"than the {context} tokens that the "
            f"model holds: --context-lengths up to {context - max_tokens}, or fewer --max-tokens"
        )
    prepared = prepare(
        workload,
        tokenizer,
        context=context,
        max_tokens=max_tokens,
        on_bad=on_bad,
        chat_template=chat_template,
        per_task=plan.prompts,
        answer=answer,
    )
    by_task: dict[str, list[PreparedPrompt]] = {}
    for prompt in prepared.prompts:
        by_task.setdefault(prompt.request.task, []).append(prompt)
    return Material(by_task, getattr(tokenizer, "bos_token_id", None), tuple(prepared.notes))


def filled(
    prompts: Sequence[PreparedPrompt], number: int, length: int, first_token: int | None
) -> PreparedPrompt:
    """Prompt `number` with exactly `length` tokens; see the module docstring."""
    prompt = prompts[number]
    head = prompt.tokens[:1] if prompt.tokens[0] == first_token else []
    bodies = [
        other.tokens[1:] if other.tokens[0] == first_token else other.tokens for other in prompts
    ]
    body = bodies[number]
    room = length - len(head)
    others = [
        token
        for step in range(len(bodies), 1, -1)
        for token in bodies[(number - step + 1) % len(bodies)]
    ] or body
    missing = max(room - len(body), 0)
    filler = (others * (missing // len(others) + 1))[-missing:] if missing else []
    return replace(prompt, tokens=[*head, *filler, *body[-room:]])


def runnable_cells(plan: Plan, material: Material) -> tuple[list[CellKey], list[str]]:
    """Cells with enough prompts for their batch size, and a note for each task that has too few.
    Raises ConfigError where none has enough."""
    keys = plan.cell_keys(list(material.by_task))
    able = [key for key in keys if key.batch_size <= len(material.by_task[key.task])]
    notes = [
        f"{key.task}: {len(material.by_task[key.task])} prompts are no batch of {key.batch_size}; left out"
        for key in keys
        if key not in able
    ]
    if not able:
        raise ConfigError(
            f"{notes[0].removesuffix('; left out')}: raise --limit, or take a smaller --batch-size"
        )
    return able, list(dict.fromkeys(notes))


def groups(
    prompts: Sequence[PreparedPrompt], batch_size: int, turn: int, seed: int
) -> list[list[PreparedPrompt]]:
    """The prompts decoded together in round `turn`: whole batches only. Batches of several are
    drawn by lot anew in every round, so that no prompt always has the same neighbours; what is left
    over takes part in the next round."""
    order = list(prompts)
    if batch_size > 1:
        random.Random(f"{seed} {turn}").shuffle(order)
    return [
        order[start : start + batch_size]
        for start in range(0, len(order) - batch_size + 1, batch_size)
    ]
