"""The one form of every result: a versioned envelope around what a verb found, checked when it is
written and when it is read.

`read_result` finds the class by the file's `kind`. Reports are rendered from these files alone. Numbers
carry their unit in the name (`_s`, `_bytes`, `tokens_per_s`). No machine paths and no host names:
models and files are named as the user named them, or relative.

A result's method `comparable` says which numbers mean the same in another result of its kind: equal
labels are the same number, so a label holds everything that tells cells apart. An `Interval` is a
measurement (`Interval.unknown`: of unknown spread); a plain float is exact, and any difference is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import ConfigError, counted, did_you_mean
from outrider.machine import describe_machine, versions
from outrider.wellformed import read_json

SCHEMA_VERSION = 4
WRITER = "render it with the outrider that wrote it (see 'versions' in the file)"
MADE_BY = ". A measurement writes a result to --out FILE.json"  # to append to a message
KINDS = {
    "bench": "outrider.lab.bench.bench_result:BenchResult",
    "tune": "outrider.lab.tune.tune_result:TuneResult",
    "explain": "outrider.lab.explain.explain_result:ExplainResult",
    "certify": "outrider.lab.certify.certify_result:CertifyResult",
    "certify-server": "outrider.lab.certify.server_result:ServerCertifyResult",
    "estimate": "outrider.lab.estimate.estimate_result:EstimateResult",
    "replay": "outrider.lab.replay.replay_result:ReplayResult",
    "train": "outrider.train.train_result:TrainResult",
    "export": "outrider.train.train_result:ExportResult",
}
Scale = Literal["ratio", "difference"]


class Record(BaseModel):
    """Base of everything inside a result: plain data, no unknown fields."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Interval(Record):
    """A number with its uncertainty."""

    value: float
    low: float
    high: float
    level: float = 0.95  # of confidence

    @classmethod
    def unknown(cls, value: float) -> Interval:
        """A number that was measured, with an unknown uncertainty."""
        return cls(value=value, low=0.0, high=math.inf)

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.high)

    def words(self, unit: str = "") -> str:
        """1.92x [1.80, 2.04], or 1.92x where the interval is unknown."""
        return f"{self.value:.2f}{unit}" + (
            f" [{self.low:.2f}, {self.high:.2f}]" if self.is_known else ""
        )


class Result(Record):
    """The fields that every result file has."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    created: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    command: str = ""  # what was typed
    versions: dict[str, str] = Field(default_factory=versions)
    machine: dict[str, Any] = Field(default_factory=describe_machine)
    notes: list[str] = Field(default_factory=list)  # one line each, for a person to read
    interrupted: bool = False  # Ctrl-C ended it: this is what was known by then

    def write(self, path: Path) -> None:
        """Writes the result as JSON, whole or not at all. Raises ConfigError where the file cannot
        be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # /dev/null, a pipe: written to, never replaced
            is_device = path.exists() and not path.is_file()
            scratch = path if is_device else path.with_name(f".{path.name}.new")
            scratch.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            if not is_device:
                scratch.replace(path)
        except OSError as error:
            raise ConfigError(
                f"the result cannot be written to {path}: {error.strerror}"
            ) from error


def read_result(path: Path) -> Result:
    """The result in a file, as its own class. Raises ConfigError that says what is wrong with the
    file."""
    content = read_json(path, str(path), MADE_BY)
    if not isinstance(content, dict) or "kind" not in content:
        raise ConfigError(f"{path} is no result of outrider: it has no field 'kind'{MADE_BY}")
    named = str(content["kind"])[:40]
    if named not in KINDS:
        raise ConfigError(f"{path} is of the unknown kind '{named}'.{did_you_mean(named, KINDS)}")
    module, name = KINDS[content["kind"]].split(":")
    kind: type[Result] = getattr(import_module(module), name)
    known = kind.model_fields["schema_version"].default
    if content.get("schema_version") != known:
        version = str(content.get("schema_version"))[:40]
        raise ConfigError(
            f"{path} has schema version {version}; this outrider reads version {known}: {WRITER}"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problems = [
            (".".join(map(str, problem["loc"])), problem["type"], problem["msg"])
            for problem in error.errors()
        ]
        if unknown := [where for where, fault, _ in problems if fault == "extra_forbidden"]:
            raise ConfigError(
                f"{path} has the field '{unknown[0]}', which this outrider does not know: {WRITER}"
            ) from error
        where, _, message = problems[0]
        raise ConfigError(
            f"{path} is damaged: {where}: {message} ({counted(len(problems), 'problem')} in all)"
        ) from error


@dataclass(frozen=True)
class Comparable:
    """One number. `higher_is_better`: None for numbers that are neither good nor bad. `scale`:
    "difference" for numbers that may be 0 or negative (differences, accuracies near 0)."""

    label: str
    value: float | Interval
    higher_is_better: bool | None = None
    unit: str = ""
    scale: Scale = "ratio"


def comparables(result: Result) -> dict[str, Comparable]:
    """By label, in the result's order; none of a result that has no such method. Raises ValueError
    for one label twice."""
    figures: list[Comparable] = list(getattr(result, "comparable", list)())
    by_label = {comparable.label: comparable for comparable in figures}
    if len(by_label) < len(figures):
        labels = [comparable.label for comparable in figures]
        raise ValueError(
            f"a {result.kind} result has two numbers called "
            f"'{next(x for x in labels if labels.count(x) > 1)}'"
        )
    return by_label
