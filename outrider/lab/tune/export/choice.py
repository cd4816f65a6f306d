"""Which of the configurations that were tuned an engine can be told, and what the load schedule becomes there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from outrider.lab.configuration import Configuration
from outrider.lab.tune.result import TuneResult, Words


@dataclass(frozen=True)
class Choice:
    """A configuration with a fixed length, for one engine."""

    drafter: str
    size: int
    options: dict[str, Any]  # of the drafter, as strings
    speedup: float
    measured: bool
    schedule: list[tuple[int, int]]  # (from so many rows on, draft tokens), ascending, the first at 1 row; one entry: no schedule
    notes: list[str]


class Advice:
    """The result, as engines ask about it."""

    def __init__(self, result: TuneResult) -> None:
        self._result = result
        self.target = result.tried.target
        self.draft = result.tried.draft or ("DRAFT_MODEL" if result.tried.target == "demo" else None)
        self.sampled = result.tried.temperature > 0
        self.recommended = result.recommendations[0]

    def off(self, engine: str, how: str) -> Words:
        """Not to speculate is advice, too."""
        return Words(engine=engine, text="", notes=[f"Do not speculate ({self.recommended.reason}): {how}."])

    def nothing(self, engine: str, drafters: Collection[str]) -> Words:
        """Of what the engine has nothing was worth it."""
        return Words(engine=engine, text="", notes=[f"It has no drafter that paid here; it has {', '.join(sorted(drafters))}."])

    def choose(self, drafters: Collection[str]) -> Choice | None:
        """The best chain by one of `drafters` that is forecast or measured to pay; None where none does. Fixed lengths only."""
        measured = {one.configuration: one.speedup.value for one in self._result.confirmed}
        found: list[tuple[float, str]] = []
        for label, forecast in self._result.overall_speedup.items():
            configuration = Configuration.parse(label)
            if configuration.drafter in drafters and not _is_tree(configuration):
                found.append((measured.get(label, forecast), label))
        paying = [one for one in found if one[0] > 1]
        if not paying:
            return None
        confirmed = [one for one in paying if one[1] in measured]
        speedup, label = max(confirmed or paying)
        configuration = Configuration.parse(label)
        size = int(configuration.num_draft_tokens or 0)
        notes = []
        if label != self.recommended.configuration:
            how = "measured" if label in measured else "forecast"
            recommended = self.recommended.configuration
            notes.append(f"Recommended is {recommended}; this is {label}: {speedup:.2f}x, {how} with outrider.")
        if unknown := {name: value for name, value in configuration.drafter_options.items() if name == "stop"}:
            notes.append(f"Without the stop rule {unknown}, which it does not have.")
        schedule = self._schedule(label, size)
        return Choice(configuration.drafter, size, configuration.drafter_options, speedup, label in measured, schedule, notes)

    def _schedule(self, label: str, size: int) -> list[tuple[int, int]]:
        """Other loads, where they were tuned with the same family (or want plain decoding), never more than at one row."""
        steps = [(1, size)]
        family = self._family(label)
        for load in sorted(self._result.schedule, key=lambda load: load.batch_size):
            if load.size and self._family(load.configuration) != family:
                continue
            steps.append((load.batch_size, min(load.size, size)))
        return steps

    def _family(self, label: str) -> str | None:
        return next((one.family for one in self._result.forecasts if one.configuration == label), None)


def _is_tree(configuration: Configuration) -> bool:
    return str(configuration.drafter_options.get("tree", "chain")) not in ("chain", "False", "false")
