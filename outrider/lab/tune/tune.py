"""The stages of tuning, in their order (docs/tune.md, "How it works"): probe, forecast, confirm,
load.

Every run is in the journal: an interrupted tuning continues where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.configuration import PLAIN, Configuration
from outrider.errors import OutriderError
from outrider.lab.bench.bench_result import OtherProcesses
from outrider.lab.bench.stages import Rounds
from outrider.lab.bench.summary import others_during
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.runner import Runner
from outrider.lab.tune.confirm import MAX_OTHER_CPU, Confirmed, confirmation, summarise
from outrider.lab.tune.forecast import (
    Forecast,
    LoadStep,
    best_at,
    forecast,
    overall,
    plain_tokens_per_s,
    step_costs,
)
from outrider.lab.tune.probe import Probe, Sample, run_probe
from outrider.lab.tune.space import PLAIN_FAMILY, Family

# of plain decoding's speed: a family whose every size is forecast below this is not run on
GIVE_UP = 0.6
MAX_AUTO = 8  # of the `auto` member of the best family
MIN_PROBING_S = 60.0  # nothing is saved by leaving families out before that
MIN_PROMPTS = 6  # that the forecasts leave finalists time for, whatever the budget


@dataclass(frozen=True)
class TunePlan:
    """The runs to make."""

    probe: Sequence[Sample]
    confirm: Sequence[Sample]
    batch_size: int = 1
    load_sizes: Sequence[int] = ()  # further batch sizes for the schedule
    num_finalists: int = 4  # families
    # of what running every member on every prompt would cost: probes and confirmation
    most_share: float = 0.075


@dataclass
class Findings:
    """Everything that was measured and forecast; `decide.py` makes recommendations of it."""

    plain: Probe
    probes: dict[str, Probe] = field(default_factory=dict)  # by family label
    failures: dict[str, str] = field(default_factory=dict)
    forecasts: list[Forecast] = field(default_factory=list)
    overall: dict[str, float] = field(default_factory=dict)
    finalists: list[Configuration] = field(default_factory=list)
    family_of: dict[str, str] = field(default_factory=dict)  # of the finalists
    confirmed: list[Confirmed] = field(default_factory=list)
    others: OtherProcesses | None = None  # alongside the confirming runs
    # the best of the families that were timed, at each load
    schedule: list[LoadStep] = field(default_factory=list)
    # family -> its best size, at each load
    by_load: dict[str, list[LoadStep]] = field(default_factory=dict)
    seconds_spent: float = 0.0  # of this run: what the journal had costs nothing
    shares: dict[str, float] = field(default_factory=dict)  # of output tokens, by task
    interrupted: bool = False  # Ctrl-C ended it after the forecasts

    def seconds(self, plan: TunePlan, labels: Sequence[str], samples: Sequence[Sample]) -> float:
        """Forecast of running some configurations, reading prompts included; one without a forecast
        counts as plain."""
        tokens = sum(sample.params.required_max_tokens for sample in samples)
        base = plain_tokens_per_s(self.plain, plan.batch_size)
        if not base:
            return 0.0
        reading_s = max(0.0, self.plain.seconds - self.plain.tokens / base) / max(
            1, self.plain.num_prompts
        )
        decoding_s = sum(1 / self.overall.get(label, 1.0) for label in labels) * tokens / base
        return decoding_s + len(labels) * len(samples) * reading_s

    def exhaustive_seconds(self, plan: TunePlan) -> float:
        """Forecast of running plain decoding and every member on every prompt."""
        return self.seconds(plan, [PLAIN, *self.overall], [*plan.probe, *plan.confirm])


class Tuner:
    """One tuning; `run` goes through the stages."""

    def __init__(
        self,
        runner: Runner,
        families: Sequence[Family],
        plan: TunePlan,
        journal: Journal,
        progress: Progress,
    ) -> None:
        self._runner = runner
        self._families = {family.label: family for family in families}
        self._plan = plan
        self._journal = journal
        self._progress = progress

    def run(self) -> Findings:
        """All stages; after Ctrl-C after the forecasts what is known by then.

        Raises OutriderError only where plain decoding itself fails.
        """
        self._progress.stage("probing plain decoding", 1)
        found = Findings(plain=self._probe(PLAIN_FAMILY))
        steps = {task: len(notes) for task, notes in found.plain.steps.items()}
        found.shares = {task: count / sum(steps.values()) for task, count in steps.items()}
        began = time.perf_counter()
        self._probe_all(found)
        for label, probe in found.probes.items():
            found.forecasts += self._forecasts_of(found, self._families[label], probe)
        found.overall = overall(found.forecasts, found.shares)
        try:
            self._confirm(found)
            self._load(found)
        except KeyboardInterrupt:
            found.interrupted = True
        found.seconds_spent = time.perf_counter() - began
        return found

    # ---------------------------------------------------------------- stages

    def _probe_all(self, found: Findings) -> None:
        """Families for which no time is left are named, and not probed."""
        max_s = max(len(self._families) * found.plain.seconds / GIVE_UP, MIN_PROBING_S)
        self._progress.stage("probing families", len(self._families), max_s)
        until = time.perf_counter() + max_s
        for label, family in self._families.items():
            try:
                if time.perf_counter() >= until:
                    raise OutriderError(
                        "no time was left to probe it (--drafters NAME,... probes only some)"
                    )
                found.probes[label] = self._probe(
                    family, partial(self._is_enough, found, family, until)
                )
            except OutriderError as error:
                found.failures[label] = str(error)
            self._progress.advance()

    def _is_enough(self, found: Findings, family: Family, until: float, probe: Probe) -> bool:
        """Whether no time is left, or all its sizes are hopeless; one that did not come up yet may
        be better."""
        if time.perf_counter() >= until:
            return True
        speedups = overall(self._forecasts_of(found, family, probe), found.shares)
        return len(speedups) == len(family.sizes) and max(speedups.values()) < GIVE_UP

    def _forecasts_of(self, found: Findings, family: Family, probe: Probe) -> list[Forecast]:
        costs = step_costs(probe, self._plan.batch_size)
        base = plain_tokens_per_s(found.plain, self._plan.batch_size)
        return forecast(family, probe, costs, base) if costs is not None and base else []

    def _confirm(self, found: Findings) -> None:
        chosen = self._chosen(found)
        if not chosen or not self._plan.confirm:
            return
        found.finalists = [one for _, one in chosen]
        found.family_of = {one.label: family.label for family, one in chosen}
        plan = self._plan
        try:
            rounds, failures = confirmation(
                self._runner,
                found.finalists,
                plan.confirm,
                plan.batch_size,
                self._budget_s(found),
                self._journal,
                self._progress,
            )
        except OutriderError as error:
            found.failures.update(dict.fromkeys(found.family_of, str(error)))
            return
        found.failures |= failures
        try:
            rounds.run()
        finally:
            self._judge(found, rounds)

    def _judge(self, found: Findings, rounds: Rounds) -> None:
        """Notes of all runs, or of those before Ctrl-C."""
        found.confirmed = summarise(rounds)
        (cell,) = rounds.cells
        found.others = others_during(cell.notes, MAX_OTHER_CPU)
        found.failures |= {
            rounds.configurations[number].label: why for number, why in cell.failures.items()
        }

    def _load(self, found: Findings) -> None:
        """The two best families at other loads: acceptance is what it was, steps cost what a
        server's start times."""
        best = self._favourites(found)[:2]
        self._progress.stage("timing other loads", len(self._plan.load_sizes) * len(best))
        for rows in self._plan.load_sizes:
            timed = []
            for family in best:
                run = partial(self._runner.step_seconds, family.largest, rows)
                seconds = self._journal.unit(f"steps {family.label} / {rows}", run)
                costs = {int(nodes): taken for nodes, taken in seconds.items()}
                timed.append((family, found.probes[family.label], costs))
                found.by_load.setdefault(family.label, []).append(
                    best_at(rows, timed[-1:], found.shares)
                )
                self._progress.advance()
            if timed:
                found.schedule.append(best_at(rows, timed, found.shares))

    # ---------------------------------------------------------------- parts

    def _probe(
        self, family: Family, is_enough: Callable[[Probe], bool] = lambda probe: False
    ) -> Probe:
        """From the journal, or run now."""

        def run() -> dict[str, Any]:
            contender = self._runner.open(family.largest, any_length=True)
            return run_probe(
                contender, family, self._plan.probe, self._plan.batch_size, is_enough
            ).model_dump()

        return Probe.model_validate(self._journal.unit(f"probe {family.label}", run))

    def _chosen(self, found: Findings) -> list[tuple[Family, Configuration]]:
        """The finalists: the best member of the best families and of every task, the best nested
        family with a free length."""
        ranking = self._ranking(found)
        chosen = ranking[: self._plan.num_finalists]
        forecasts = [one for one in found.forecasts if one.configuration in found.overall]
        if len(found.shares) > 1 and forecasts:
            for task in found.shares:
                best = max(
                    (one for one in forecasts if one.task == task), key=lambda one: one.speedup
                )
                family = self._families[best.family]
                chosen.append((family, family.member(best.size)))
        nested = next(
            (family for family, _ in ranking if family.nested and len(family.sizes) > 1), None
        )
        if nested is not None:
            chosen.append((nested, nested.member(f"auto:{min(MAX_AUTO, nested.sizes[-1])}")))
        return list({one.label: (family, one) for family, one in chosen}.values())

    def _ranking(self, found: Findings) -> list[tuple[Family, Configuration]]:
        """The best member of every family, by the forecast over the whole workload."""
        members = [
            (family, one)
            for family in self._families.values()
            for _, one in family.members()
            if one.label in found.overall
        ]
        ranking: dict[str, tuple[Family, Configuration]] = {}
        for family, one in sorted(members, key=lambda pair: -found.overall[pair[1].label]):
            ranking.setdefault(family.label, (family, one))
        return list(ranking.values())

    def _budget_s(self, found: Findings) -> float:
        """For the confirmation: what the probes left, and time for MIN_PROMPTS prompts, or one of
        each task, whatever they left. Forecasts of the best are too high, so no finalist is taken
        to be faster than plain decoding."""
        probes = sum(probe.seconds for probe in (found.plain, *found.probes.values()))
        prompts = self._plan.confirm[: max(MIN_PROMPTS, len(found.shares))]
        warming_up = prompts[:1]  # takes as long as one more
        min_s = found.seconds(
            self._plan, [PLAIN] * (1 + len(found.family_of)), [*prompts, *warming_up]
        )
        return max(self._plan.most_share * found.exhaustive_seconds(self._plan) - probes, min_s)

    def _favourites(self, found: Findings) -> list[Family]:
        """By what their best fixed length reached; after these, those that were forecast only."""
        fixed = [
            one
            for one in found.confirmed
            if not Configuration.parse(one.configuration).is_automatic
        ]
        fixed.sort(key=lambda one: -one.speedup.value)
        measured = [self._families[found.family_of[one.configuration]] for one in fixed]
        forecast_only = [family for family, _ in self._ranking(found)]
        return list({family.label: family for family in (*measured, *forecast_only)}.values())
