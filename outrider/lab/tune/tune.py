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
    ) -> None:
        self._runner = runner
        self._families = {family.label: family for family in families}
        self._plan = plan
        self._journal = journal
        self._progress = journal.progress

    def run(self) -> Findings:
        """All stages; after Ctrl-C after the forecasts what is known by then.

        Raises OutriderError only where plain decoding itself fails.
        """
        self._progress.stage("probing plain decoding", 1)
        findings = Findings(plain=self._probe(PLAIN_FAMILY))
        steps = {task: len(notes) for task, notes in findings.plain.steps.items()}
        findings.shares = {task: count / sum(steps.values()) for task, count in steps.items()}
        began = time.perf_counter()
        self._probe_all(findings)
        for label, probe in findings.probes.items():
            findings.forecasts += self._forecasts_of(findings, self._families[label], probe)
        findings.overall = overall(findings.forecasts, findings.shares)
        try:
            self._confirm(findings)
            self._load(findings)
        except KeyboardInterrupt:
            findings.interrupted = True
        findings.seconds_spent = time.perf_counter() - began
        return findings

    # ---------------------------------------------------------------- stages

    def _probe_all(self, findings: Findings) -> None:
        """Families for which no time is left are named, and not probed."""
        max_s = max(len(self._families) * findings.plain.seconds / GIVE_UP, MIN_PROBING_S)
        self._progress.stage("probing families", len(self._families), max_s)
        until = time.perf_counter() + max_s
        for label, family in self._families.items():
            try:
                if time.perf_counter() >= until:
                    raise OutriderError(
                        "no time was left to probe it (--drafters NAME,... probes only some)"
                    )
                findings.probes[label] = self._probe(
                    family, partial(self._is_enough, findings, family, until)
                )
            except OutriderError as error:
                findings.failures[label] = str(error)
                self._progress.advance()

    def _is_enough(self, findings: Findings, family: Family, until: float, probe: Probe) -> bool:
        """Whether no time is left, or all its sizes are hopeless; one that did not come up yet may
        be better."""
        if time.perf_counter() >= until:
            return True
        speedups = overall(self._forecasts_of(findings, family, probe), findings.shares)
        return len(speedups) == len(family.sizes) and max(speedups.values()) < GIVE_UP

    def _forecasts_of(self, findings: Findings, family: Family, probe: Probe) -> list[Forecast]:
        costs = step_costs(probe, self._plan.batch_size)
        base = plain_tokens_per_s(findings.plain, self._plan.batch_size)
        return forecast(family, probe, costs, base) if costs is not None and base else []

    def _confirm(self, findings: Findings) -> None:
        chosen = self._chosen(findings)
        if not chosen or not self._plan.confirm:
            return
        findings.finalists = [entry for _, entry in chosen]
        findings.family_of = {entry.label: family.label for family, entry in chosen}
        plan = self._plan
        try:
            rounds, failures = confirmation(
                self._runner,
                findings.finalists,
                plan.confirm,
                plan.batch_size,
                self._budget_s(findings),
                self._journal,
            )
        except OutriderError as error:
            findings.failures.update(dict.fromkeys(findings.family_of, str(error)))
            return
        findings.failures |= failures
        try:
            rounds.run()
        finally:
            self._judge(findings, rounds)

    def _judge(self, findings: Findings, rounds: Rounds) -> None:
        """Notes of all runs, or of those before Ctrl-C."""
        findings.confirmed = summarise(rounds)
        (cell,) = rounds.cells
        findings.others = others_during(cell.notes, MAX_OTHER_CPU)
        findings.failures |= {
            rounds.configurations[number].label: why for number, why in cell.failures.items()
        }

    def _load(self, findings: Findings) -> None:
        """The two best families at other loads: acceptance is what it was, steps cost what a
        server's start times."""
        best = self._favourites(findings)[:2]
        self._progress.stage("timing other loads", len(self._plan.load_sizes) * len(best))
        for rows in self._plan.load_sizes:
            timed = []
            for family in best:
                run = partial(self._runner.step_seconds, family.largest, rows)
                seconds = self._journal.unit(f"steps {family.label} / {rows}", run)
                costs = {int(nodes): taken for nodes, taken in seconds.items()}
                timed.append((family, findings.probes[family.label], costs))
                findings.by_load.setdefault(family.label, []).append(
                    best_at(rows, timed[-1:], findings.shares)
                )
            if timed:
                findings.schedule.append(best_at(rows, timed, findings.shares))

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

    def _chosen(self, findings: Findings) -> list[tuple[Family, Configuration]]:
        """The finalists: the best member of the best families and of every task, the best nested
        family with a free length."""
        ranking = self._ranking(findings)
        chosen = ranking[: self._plan.num_finalists]
        forecasts = [
            prediction
            for prediction in findings.forecasts
            if prediction.configuration in findings.overall
        ]
        if len(findings.shares) > 1 and forecasts:
            for task in findings.shares:
                best = max(
                    (prediction for prediction in forecasts if prediction.task == task),
                    key=lambda one: one.speedup,
                )
                family = self._families[best.family]
                chosen.append((family, family.member(best.size)))
        nested = next(
            (family for family, _ in ranking if family.nested and len(family.sizes) > 1), None
        )
        if nested is not None:
            chosen.append((nested, nested.member(f"auto:{min(MAX_AUTO, nested.sizes[-1])}")))
        return list(
            {prediction.label: (family, prediction) for family, prediction in chosen}.values()
        )

    def _ranking(self, findings: Findings) -> list[tuple[Family, Configuration]]:
        """The best member of every family, by the forecast over the whole workload."""
        members = [
            (family, member)
            for family in self._families.values()
            for _, member in family.members()
            if member.label in findings.overall
        ]
        ranking: dict[str, tuple[Family, Configuration]] = {}
        for family, member in sorted(members, key=lambda pair: -findings.overall[pair[1].label]):
            ranking.setdefault(family.label, (family, member))
        return list(ranking.values())

    def _budget_s(self, findings: Findings) -> float:
        """For the confirmation: what the probes left, and time for MIN_PROMPTS prompts, or one of
        each task, whatever they left. Forecasts of the best are too high, so no finalist is taken
        to be faster than plain decoding."""
        probes = sum(probe.seconds for probe in (findings.plain, *findings.probes.values()))
        prompts = self._plan.confirm[: max(MIN_PROMPTS, len(findings.shares))]
        warming_up = prompts[:1]  # takes as long as one more
        min_s = findings.seconds(
            self._plan, [PLAIN] * (1 + len(findings.family_of)), [*prompts, *warming_up]
        )
        return max(self._plan.most_share * findings.exhaustive_seconds(self._plan) - probes, min_s)

    def _favourites(self, findings: Findings) -> list[Family]:
        """By what their best fixed length reached; after these, those that were forecast only."""
        fixed = [
            summary
            for summary in findings.confirmed
            if not Configuration.parse(summary.configuration).is_automatic
        ]
        fixed.sort(key=lambda one: -one.speedup.value)
        measured = [self._families[findings.family_of[summary.configuration]] for summary in fixed]
        forecast_only = [family for family, _ in self._ranking(findings)]
        return list({family.label: family for family in (*measured, *forecast_only)}.values())
