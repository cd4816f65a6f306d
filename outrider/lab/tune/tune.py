"""The stages of tuning, in their order (docs/tune.md, "How it works"): probe, forecast, confirm,
load.

Every run is in the journal: an interrupted tuning continues where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from outrider.lab.tune.probe import Probe, run_probe
from outrider.lab.tune.space import PLAIN_FAMILY, Family, TuneRequest
from outrider.lab.workload.prompts import PreparedPrompt

# of plain decoding's speed: a family whose every size is forecast below this is not run on
GIVE_UP = 0.6
MAX_AUTO = 8  # of the `auto` member of the best family
MIN_PROBING_S = 60.0  # nothing is saved by leaving families out before that
MIN_PROMPTS = 6  # that the forecasts leave finalists time for, whatever the budget


class Tuner:
    """One tuning: `run` goes through the stages, and what they measured and forecast stays here;
    `decide.py` makes recommendations of it."""

    plain: Probe

    def __init__(
        self,
        runner: Runner,
        families: Sequence[Family],
        request: TuneRequest,
        probe: Sequence[PreparedPrompt],
        confirm: Sequence[PreparedPrompt],
        journal: Journal,
    ) -> None:
        self.families = {family.label: family for family in families}
        self.to_probe = probe
        self.to_confirm = confirm
        self.probes: dict[str, Probe] = {}  # by family label
        self.failures: dict[str, str] = {}
        self.forecasts: list[Forecast] = []
        self.overall: dict[str, float] = {}
        self.finalists: list[Configuration] = []
        self.family_of: dict[str, str] = {}  # of the finalists
        self.confirmed: list[Confirmed] = []
        self.others: OtherProcesses | None = None  # alongside the confirming runs
        # the best of the families that were timed, at each load
        self.schedule: list[LoadStep] = []
        self.by_load: dict[str, list[LoadStep]] = {}  # family -> its best size, at each load
        self.seconds_spent = 0.0  # of this run: what the journal had costs nothing
        self.shares: dict[str, float] = {}  # of output tokens, by task
        self.interrupted = False  # Ctrl-C ended it after the forecasts
        self._runner = runner
        self._request = request
        self._journal = journal

    def run(self) -> None:
        """All stages; after Ctrl-C after the forecasts what is known by then.

        Raises OutriderError only where plain decoding itself fails.
        """
        self._journal.progress.stage("probing plain decoding", 1)
        self.plain = self._probe(PLAIN_FAMILY)
        steps = {task: len(notes) for task, notes in self.plain.steps.items()}
        self.shares = {task: count / sum(steps.values()) for task, count in steps.items()}
        began = time.perf_counter()
        self._probe_all()
        for label, probe in self.probes.items():
            self.forecasts += self._forecasts_of(self.families[label], probe)
        self.overall = overall(self.forecasts, self.shares)
        try:
            self._confirm()
            self._load()
        except KeyboardInterrupt:
            self.interrupted = True
        self.seconds_spent = time.perf_counter() - began

    def seconds(self, labels: Sequence[str], prompts: Sequence[PreparedPrompt]) -> float:
        """Forecast of running some configurations, reading prompts included; one without a forecast
        counts as plain."""
        tokens = sum(prompt.max_tokens for prompt in prompts)
        base = plain_tokens_per_s(self.plain, self._request.batch_size)
        if not base:
            return 0.0
        reading_s = max(0.0, self.plain.seconds - self.plain.tokens / base) / max(
            1, self.plain.num_prompts
        )
        decoding_s = sum(1 / self.overall.get(label, 1.0) for label in labels) * tokens / base
        return decoding_s + len(labels) * len(prompts) * reading_s

    # ---------------------------------------------------------------- stages

    def _probe_all(self) -> None:
        """Families for which no time is left are named, and not probed."""
        max_s = max(len(self.families) * self.plain.seconds / GIVE_UP, MIN_PROBING_S)
        self._journal.progress.stage("probing families", len(self.families), max_s)
        until = time.perf_counter() + max_s
        for label, family in self.families.items():
            try:
                if time.perf_counter() >= until:
                    raise OutriderError(
                        "no time was left to probe it (--drafters NAME,... probes only some)"
                    )
                self.probes[label] = self._probe(family, until)
            except OutriderError as error:
                self.failures[label] = str(error)
                self._journal.progress.advance()

    def _forecasts_of(self, family: Family, probe: Probe) -> list[Forecast]:
        costs = step_costs(probe, self._request.batch_size)
        base = plain_tokens_per_s(self.plain, self._request.batch_size)
        return forecast(family, probe, costs, base) if costs is not None and base else []

    def _confirm(self) -> None:
        chosen = self._chosen()
        if not chosen or not self.to_confirm:
            return
        self.finalists = [member for _, member in chosen]
        self.family_of = {member.label: family.label for family, member in chosen}
        try:
            rounds, failures = confirmation(
                self._runner,
                self.finalists,
                self.to_confirm,
                self._request,
                self._budget_s(),
                self._journal,
            )
        except OutriderError as error:
            self.failures.update(dict.fromkeys(self.family_of, str(error)))
            return
        self.failures |= failures
        try:
            rounds.run()
        finally:
            self._judge(rounds)

    def _judge(self, rounds: Rounds) -> None:
        """Notes of all runs, or of those before Ctrl-C."""
        self.confirmed = summarise(rounds)
        (cell,) = rounds.cells
        self.others = others_during(cell.notes, MAX_OTHER_CPU)
        self.failures |= {
            rounds.configurations[number].label: why for number, why in cell.failures.items()
        }

    def _load(self) -> None:
        """The two best families at other loads: acceptance is what it was, steps cost what a
        server's start times."""
        best = self._favourites()[:2]
        loads = [rows for rows in self._request.load_sizes if rows != self._request.batch_size]
        self._journal.progress.stage("timing other loads", len(loads) * len(best))
        for rows in loads:
            timed = []
            for family in best:
                seconds = self._journal.unit(
                    f"steps {family.label} / {rows}",
                    self._runner.step_seconds,
                    family.largest,
                    rows,
                )
                costs = {int(nodes): taken for nodes, taken in seconds.items()}
                timed.append((family, self.probes[family.label], costs))
                self.by_load.setdefault(family.label, []).append(
                    best_at(rows, timed[-1:], self.shares)
                )
            if timed:
                self.schedule.append(best_at(rows, timed, self.shares))

    # ---------------------------------------------------------------- parts

    def _probe(self, family: Family, until: float | None = None) -> Probe:
        """From the journal, or run now: until all its sizes are hopeless, or the time is over."""

        def is_enough(probe: Probe) -> bool:
            if until is None or time.perf_counter() >= until:
                return until is not None
            speedups = overall(self._forecasts_of(family, probe), self.shares)
            # one that did not come up yet may be better
            return len(speedups) == len(family.sizes) and max(speedups.values()) < GIVE_UP

        def run() -> dict[str, Any]:
            contender = self._runner.open(family.largest, any_length=True)
            return run_probe(
                contender, family, self.to_probe, self._request, is_enough
            ).model_dump()

        return Probe.model_validate(self._journal.unit(f"probe {family.label}", run))

    def _chosen(self) -> list[tuple[Family, Configuration]]:
        """The finalists: the best member of the best families and of every task, the best nested
        family with a free length."""
        ranking = self._ranking()
        chosen = ranking[: self._request.finalists]
        forecasts = [
            prediction for prediction in self.forecasts if prediction.configuration in self.overall
        ]
        if len(self.shares) > 1 and forecasts:
            for task in self.shares:
                best = max(
                    (prediction for prediction in forecasts if prediction.task == task),
                    key=lambda prediction: prediction.speedup,
                )
                family = self.families[best.family]
                chosen.append((family, family.member(best.size)))
        nested = next(
            (family for family, _ in ranking if family.nested and len(family.sizes) > 1), None
        )
        if nested is not None:
            chosen.append((nested, nested.member(f"auto:{min(MAX_AUTO, nested.sizes[-1])}")))
        return list({member.label: (family, member) for family, member in chosen}.values())

    def _ranking(self) -> list[tuple[Family, Configuration]]:
        """The best member of every family, by the forecast over the whole workload."""
        members = [
            (family, member)
            for family in self.families.values()
            for _, member in family.members()
            if member.label in self.overall
        ]
        ranking: dict[str, tuple[Family, Configuration]] = {}
        for family, member in sorted(members, key=lambda pair: -self.overall[pair[1].label]):
            ranking.setdefault(family.label, (family, member))
        return list(ranking.values())

    def _budget_s(self) -> float:
        """For the confirmation: what the probes left, and time for MIN_PROMPTS prompts, or one of
        each task, whatever they left. Forecasts of the best are too high, so no finalist is taken
        to be faster than plain decoding."""
        everything = self.seconds([PLAIN, *self.overall], [*self.to_probe, *self.to_confirm])
        probes = sum(probe.seconds for probe in (self.plain, *self.probes.values()))
        prompts = self.to_confirm[: max(MIN_PROMPTS, len(self.shares))]
        warming_up = prompts[:1]  # takes as long as one more
        min_s = self.seconds([PLAIN] * (1 + len(self.family_of)), [*prompts, *warming_up])
        return max(self._request.most_share * everything - probes, min_s)

    def _favourites(self) -> list[Family]:
        """By what their best fixed length reached; after these, those that were forecast only."""
        fixed = [
            summary
            for summary in self.confirmed
            if not Configuration.parse(summary.configuration).is_automatic
        ]
        fixed.sort(key=lambda summary: -summary.speedup.value)
        measured = [self.families[self.family_of[summary.configuration]] for summary in fixed]
        forecast_only = [family for family, _ in self._ranking()]
        return list({family.label: family for family in (*measured, *forecast_only)}.values())
