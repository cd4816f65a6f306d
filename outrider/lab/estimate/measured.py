"""Costs and acceptance of one configuration, out of a result file of `bench` or `tune`.

    bench    seconds of steps by nodes drafted, and survival by position, from the runs of a cell
    tune     seconds of steps and survival of a family, from its probe

Only chains: a tree's costs and acceptance do not tell about other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from outrider.errors import ConfigError, OutriderError, did_you_mean
from outrider.lab.bench.bench_result import BenchResult, Cell, Measured
from outrider.lab.configuration import Configuration
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.result import read_result
from outrider.lab.tune.tune_result import TuneResult

Found = TypeVar("Found")


@dataclass(frozen=True)
class Known:
    """What a result says about one configuration."""

    costs: StepCosts
    acceptance: list[float]  # P(token i kept | the ones before it kept)
    source: str  # for a person


def read_known(path: Path, configuration: str | None, cell: str | None) -> Known:
    """`configuration`: its label, of `tune` with or without a length; None: the fastest chain that was measured.
    `cell`: of `bench` its label or task, of `tune` the task; None: the first.

    Raises ConfigError for what the file does not have."""
    result = read_result(path)
    if isinstance(result, BenchResult):
        return _of_bench(path, result, configuration, cell)
    if isinstance(result, TuneResult):
        return _of_tune(path, result, configuration, cell)
    raise ConfigError(f"--result {path} is of kind '{result.kind}'; costs and acceptance are in those of bench and tune")


def _of_bench(path: Path, result: BenchResult, configuration: str | None, wanted: str | None) -> Known:
    cells: dict[str, Cell] = {}
    for measured in result.cells:
        cells.setdefault(measured.task, measured)
        cells[measured.label] = measured
    cell = _named(path, "cell", cells, wanted)
    labels = {one.configuration: result.configurations[one.configuration].label for one in cell.configurations}
    able = {labels[one.configuration]: one for one in cell.configurations if _is_chain(labels[one.configuration]) and _timed(one)}
    if not able:
        raise ConfigError(f"--result {path}: no chain was timed in the cell '{cell.label}'")
    fastest = sorted(able, key=lambda label: -_speedup(able[label]))
    one = _named(path, "configuration", {label: able[label] for label in fastest}, configuration)
    assert one.acceptance is not None
    label = labels[one.configuration]
    costs = StepCosts.of_steps(one.step_s, cell.batch_size)
    return Known(costs, _conditional(one.acceptance.survival), f"bench: {label}, {cell.label}")


def _speedup(one: Measured) -> float:
    return one.speedup.value if one.speedup is not None else 0.0


def _timed(one: Measured) -> bool:
    return one.acceptance is not None and bool(one.acceptance.kept) and len(one.step_s) > 1


def _of_tune(path: Path, result: TuneResult, configuration: str | None, wanted: str | None) -> Known:
    able = {one.family: one for one in result.families if len(one.step_s) > 1 and any(one.survival.values())}
    if not able:
        raise ConfigError(f"--result {path}: no family of chains was timed")
    best = dict.fromkeys(one.family for one in sorted(result.forecasts, key=lambda one: -one.speedup) if one.family in able)
    ranked = {label: able[label] for label in [*best, *(label for label in able if label not in best)]}
    family = _named(path, "configuration", ranked, None if configuration is None else _without_length(configuration))
    task = _named(path, "task", {name: name for name, curve in family.survival.items() if curve}, wanted)
    costs = StepCosts.of_steps(family.step_s, result.tried.batch_size)
    return Known(costs, _conditional(family.survival[task]), f"tune: {family.family}, {task}")


def _without_length(label: str) -> str:
    return " ".join(word for word in label.split() if not word.startswith("k="))


def _is_chain(label: str) -> bool:
    configuration = Configuration.parse(label)
    if configuration.is_plain:
        return False
    try:
        return not configuration.parts().requirements.trees
    except OutriderError:  # of a drafter or verifier that is not here, or a lossy one: costs of such steps say nothing of others
        return False


def _conditional(survival: Sequence[float]) -> list[float]:
    """S(i) / S(i - 1), as far as anything survived."""
    return [later / before for before, later in pairwise([1.0, *survival]) if before > 0]


def _named(path: Path, what: str, choices: dict[str, Found], wanted: str | None) -> Found:
    """The one with this name, or the first."""
    if wanted is None:
        return next(iter(choices.values()))
    if wanted not in choices:
        raise ConfigError(f"--result {path} has no {what} '{wanted}'.{did_you_mean(wanted, choices)}")
    return choices[wanted]
