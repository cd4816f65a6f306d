"""The calculator: the formula of `lab/predict.py` for all draft lengths, from numbers or from a
result of `bench`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

import torch

from outrider.build import model_source
from outrider.configuration import Configuration
from outrider.errors import ConfigError, OutriderError
from outrider.lab.bench.bench_result import BenchResult, Cell, Measured
from outrider.lab.estimate.estimate_result import (
    EstimateResult,
    LengthEstimate,
    Mixture,
    ModelSize,
)
from outrider.lab.predict import (
    CostPoints,
    StepCosts,
    break_even,
    predict,
    predict_best,
)
from outrider.lab.result import read_result
from outrider.models.loading.load import load_config
from outrider.models.loading.memory import model_memory

LONGEST = 12  # draft tokens per step that are tried
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the plot


@dataclass(frozen=True)
class MeasuredChain:
    """The result for one chain of drafts."""

    costs: StepCosts
    acceptance: list[float]  # P(token i kept | the ones before it kept)
    source: str  # its name, where it was measured, and its speedup there


def estimate(
    acceptance: Sequence[float],
    costs: StepCosts,
    source: str,
    memory: Sequence[ModelSize] = (),
    mixture: Mixture | None = None,
) -> EstimateResult:
    """All lengths up to LONGEST. Raises ConfigError for what is no acceptance."""
    lengths = [
        LengthEstimate(
            **predict(acceptance, costs, k).model_dump(),
            break_even_alpha=break_even(costs, k),
            experts=None if mixture is None else mixture.distinct(k + 1),
        )
        for k in range(LONGEST + 1)
    ]
    return EstimateResult(
        source=source,
        acceptance=list(acceptance),
        costs=costs,
        lengths=lengths,
        best=predict_best(acceptance, costs, LONGEST).num_draft_tokens,
        by_alpha={
            alpha: [predict([alpha], costs, k).speedup for k in range(LONGEST + 1)]
            for alpha in ALPHAS
        },
        memory=list(memory),
        mixture=mixture,
    )


def costs_of(
    c: float, pass_costs: Mapping[int, float], mixture: Mixture | None = None
) -> StepCosts:
    """Costs in plain passes: `c` of a draft token, and v(n) of passes over n tokens. Where none are
    given, a mixture's cost its bytes, and others are flat.

    Raises ConfigError for numbers that cannot be costs.
    """
    if not 0 <= c < float("inf"):
        raise ConfigError(f"c must be a number from 0 on, got {c}")
    for num_tokens, cost in pass_costs.items():
        if num_tokens < 2 or not 1 <= cost < float("inf"):
            raise ConfigError(
                f"a pass over {num_tokens} tokens cannot cost {cost} passes over one: give 2 or "
                "more tokens, and at least 1"
            )
    if mixture is not None and not pass_costs:
        pass_costs = {count: mixture.pass_cost(count) for count in range(2, LONGEST + 2)}
    return StepCosts(
        target=CostPoints.of({1: 1.0, **(pass_costs or {LONGEST + 1: 1.0})}), draft_s_per_token=c
    )


def read_bench(path: Path) -> MeasuredChain:
    """The fastest chain in a result of `bench`; a tree tells nothing about other lengths. Raises
    ConfigError."""
    result = read_result(path)
    if not isinstance(result, BenchResult):
        raise ConfigError(
            f"{path} is a result of {result.kind}; costs and acceptance are in those of 'outrider "
            "bench'"
        )
    chains = list(_chains(result))
    if not chains:
        raise ConfigError(
            f"{path}: no chain of drafts was timed, with acceptance at more than one length"
        )
    measured, cell = max(
        chains, key=lambda chain: chain[0].speedup.value if chain[0].speedup is not None else 0.0
    )
    assert measured.acceptance is not None
    shares = takewhile(lambda share: share is not None, measured.acceptance.conditional)
    acceptance = [share for share in shares if share is not None]
    source = f"{result.configurations[measured.configuration].label}, {cell.label}"
    if measured.speedup is not None:
        source += f"; measured there: {measured.speedup.words('x')}"
    return MeasuredChain(StepCosts.of_steps(measured.step_s, cell.batch_size), acceptance, source)


def model_size(role: Literal["target", "draft"], name: str) -> ModelSize:
    """The memory of a model, from its files' headers. Raises CheckpointError, CapabilityError."""
    source = model_source(name, role)
    config = load_config(source)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    memory = model_memory(source, config, dtype)
    return ModelSize(
        role=role,
        name=name,
        weights_bytes=memory.weights_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
    )


def _chains(result: BenchResult) -> Iterator[tuple[Measured, Cell]]:
    for cell in result.cells:
        for measured in cell.configurations:
            was_timed = (
                len(measured.step_s) > 1
                and measured.acceptance is not None
                and measured.acceptance.kept
            )
            if was_timed and _is_chain(result.configurations[measured.configuration].label):
                yield measured, cell


def _is_chain(label: str) -> bool:
    """Whether a configuration drafts one line of tokens. One that is not installed here tells
    nothing."""
    try:
        return not Configuration.parse(label).parts().requirements.trees
    except OutriderError:
        return False
