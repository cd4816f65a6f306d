"""The result of `outrider tune`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.configuration import PLAIN, Configuration
from outrider.lab.bench.bench_result import OtherProcesses
from outrider.lab.result import Comparable, Interval, Record, Result
from outrider.lab.tune.confirm import Confirmed
from outrider.lab.tune.forecast import Forecast, LoadStep
from outrider.lab.tune.space import TrainedHead
from outrider.settings_file import SettingsFile


class FamilySummary(Record):
    """One probe."""

    family: str
    # task -> S(1), S(2), ...; empty lists where drafts are not nested
    survival: dict[str, list[float]]
    step_s: dict[int, float]  # nodes drafted -> median seconds
    seconds: float  # the probe took
    failure: str = ""  # why it could not run; everything else is empty then


class Recommendation(Record):
    """For one kind of traffic. `options` are keyword arguments of `outrider.LLM`."""

    task: str  # "all", or one task
    speculate: bool
    configuration: str  # label; "none" when not to speculate
    options: dict[str, Any]
    speedup: Interval | None  # measured; None where it was forecast only
    reason: str  # one sentence
    family: str = ""  # of the configuration; "" where not to speculate


class Words(Record):
    """The recommendation as another engine's launch line; built by `launch_lines.py`."""

    engine: str
    text: str  # to copy; empty where the engine has no such thing
    notes: list[str] = Field(default_factory=list)


class Tried(Record):
    """Sampling and size of what was run."""

    temperature: float
    max_new_tokens: int
    batch_size: int
    probe_prompts: int
    confirm_prompts: int
    tasks: dict[str, int]  # prompts of each in the workload
    workload: str
    target: str
    draft: str | None
    draft_masked: bool = False  # the draft model drafts in one pass (PARD)
    heads: list[TrainedHead] = Field(default_factory=list)
    model_options: dict[str, Any]


class TuneResult(Result):
    """The whole of it."""

    kind: Literal["tune"] = "tune"
    tried: Tried
    families: list[FamilySummary]
    plain_step_s: float
    forecasts: list[Forecast]  # of every size of every family, by task
    overall_speedup: dict[str, float]  # configuration -> forecast over the whole workload
    confirmed: list[Confirmed]
    others: OtherProcesses | None = None  # alongside the confirming runs; None: there were none
    # first of all traffic, then of tasks that want another one
    recommendations: list[Recommendation]
    schedule: list[LoadStep]  # at each load the best of the families that were timed there
    by_load: dict[str, list[LoadStep]] = Field(default_factory=dict)  # each of these families alone
    advice: list[Words] = Field(default_factory=list)
    next_command: str = ""  # what serves the recommendation; "": the run was interrupted
    seconds: float  # everything that was run

    def settings_file(self) -> SettingsFile:
        """The settings that `generate`, `chat` and `serve` load with --settings. The recommended
        configuration has its length by load, where that was measured; `for_batch_sizes` says which
        configuration is the best for each."""
        first, *others = self.recommendations
        options = dict(first.options)
        table = self.lengths_by_load()
        if len(table) > 1:
            options["num_draft_tokens"] = ",".join(f"{rows}:{nodes}" for rows, nodes in table)
        by_size = {entry.batch_size: self._options_at(entry) for entry in self.schedule}
        return SettingsFile(
            self.tried.target,
            options,
            {other.task: other.options for other in others},
            by_size,
            f"outrider tune, {self.created:%Y-%m-%d}: {first.reason}",
        )

    def lengths_by_load(self) -> list[tuple[int, int]]:
        """(Rows, nodes from this many rows on) of what is recommended, 0: none, the first at 1 row,
        never more than at fewer rows. Empty where nothing, or no fixed length, is recommended."""
        first = self.recommendations[0]
        size = first.options.get("num_draft_tokens")
        if not first.speculate or not isinstance(size, int):
            return []
        sizes = {
            length.batch_size: length.size for length in self.by_load.get(first.family, ())
        } | {self.tried.batch_size: size}
        table: list[tuple[int, int]] = []
        for rows in sorted(sizes):
            nodes = min(sizes[rows], table[-1][1]) if table else sizes[rows]
            if not table or nodes < table[-1][1]:
                table.append((rows if table else 1, nodes))
        return table

    def nodes_at(self, rows: int) -> str:
        """Draft tokens of a server that loads the settings, at this number of requests; in words
        where that is no number."""
        if not self.recommendations[0].speculate:
            return "none"
        nodes = [nodes for first, nodes in self.lengths_by_load() if first <= rows]
        return (
            str(nodes[-1] or "none")
            if nodes
            else str(self.recommendations[0].options.get("num_draft_tokens", "-"))
        )

    def _options_at(self, load: LoadStep) -> dict[str, Any]:
        if not load.size:
            return {"drafter": PLAIN}
        return Configuration.parse(load.configuration).options(self.tried.draft)

    def comparable(self) -> list[Comparable]:
        """Measured speedups."""
        return [
            Comparable(
                f"{summary.configuration}: speedup",
                summary.speedup,
                higher_is_better=True,
                unit="x",
            )
            for summary in self.confirmed
        ]
