"""The stages of tuning, in their order. Every run is in the journal: an interrupted tuning goes on where it was.

    probe      plain decoding and every family, once, on a few prompts of each task; what the first of them show to be hopeless
               is not run on the others
    forecast   tokens per second of every size of every family, from the probes alone
    search     options of the best model-free drafter, replayed on the texts that plain decoding wrote: no model runs
    confirm    the likeliest best race against plain decoding on other prompts, as long as the budget allows
    load       what steps of the best two families cost at other batch sizes, and which size is best there, none included
    decide     a recommendation for all traffic and for each task that wants another one; "do not speculate" when nothing pays
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from outrider.errors import OutriderError
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.replay.search import Found, search
from outrider.lab.replay.texts import Text
from outrider.lab.runner import Runner
from outrider.lab.tune.beliefs import MEMBER_ERROR, NESTED_ERROR, Member
from outrider.lab.tune.confirm import ALL, Confirmed, Lap, summarise
from outrider.lab.tune.forecast import Forecast, forecast, overall, plain_tokens_per_s, step_costs
from outrider.lab.tune.load import LoadStep, best_at
from outrider.lab.tune.probe import Probe, Sample, run_probe
from outrider.lab.tune.race import Race, Rules
from outrider.lab.tune.space import PLAIN_FAMILY, Family, Space
from outrider.lab.tune.tune_result import Stage

GIVE_UP = 0.6  # a family whose every size is forecast below this after a glance is not run on
AUTO_MOST = 8  # of the `auto` member of the best family
SEARCHED = ("ngram", "suffix")  # cheap, replayable, and with options that texts decide
AUTO_SHARE = 0.97  # of the best fixed length: what `auto` keeps in every cell, over all prompts measured (benchmarks/README.md)
AUTO_ERROR = 0.06  # standard deviation of the logarithm of that
MIN_SEARCH_TEXTS = 8


@dataclass(frozen=True)
class TunePlan:
    """What is run."""

    probe: Sequence[Sample]
    confirm: Sequence[Sample]
    batch_size: int = 1
    load_sizes: Sequence[int] = ()  # further batch sizes for the schedule
    num_finalists: int = 4  # at a time
    most_share: float = 0.075  # of what running every member on every prompt would cost: probes and laps together
    search_trials: int = 24  # 0: no search
    greedy: bool = True


@dataclass
class Findings:
    """Everything that was measured and forecast; `decide.py` makes recommendations of it."""

    plain: Probe
    probes: dict[str, Probe] = field(default_factory=dict)  # by family label
    failures: dict[str, str] = field(default_factory=dict)
    forecasts: list[Forecast] = field(default_factory=list)
    overall: dict[str, float] = field(default_factory=dict)
    search: Found | None = None
    finalists: list[Configuration] = field(default_factory=list)
    laps: list[Lap] = field(default_factory=list)
    confirmed: list[Confirmed] = field(default_factory=list)
    family_of: dict[str, str] = field(default_factory=dict)  # of everybody who may have raced
    schedule: list[LoadStep] = field(default_factory=list)  # the best of the families that were timed, at each load
    by_load: dict[str, list[LoadStep]] = field(default_factory=dict)  # family -> its best size, at each load
    stages: list[Stage] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)  # of output tokens, by task
    interrupted: bool = False  # Ctrl-C ended it after the forecasts


class Tuner:
    """One tuning; `run` goes through the stages."""

    def __init__(self, runner: Runner, space: Space, plan: TunePlan, journal: Journal, progress: Progress) -> None:
        self._runner, self._space, self._plan = runner, space, plan
        self._journal, self._progress = journal, progress

    def run(self) -> Findings:
        """All stages; after Ctrl-C behind the forecasts what is known by then.

        Raises OutriderError only where plain decoding itself fails.
        """
        found = Findings(plain=self._probe(PLAIN_FAMILY, self._plan.batch_size))
        steps = {task: len(notes) for task, notes in found.plain.steps.items()}
        found.shares = {task: count / sum(steps.values()) for task, count in steps.items()}
        with self._timed(found, "probe"):
            self._probe_all(found)
        self._forecast(found)
        try:
            self._measure(found)
        except KeyboardInterrupt:
            found.interrupted = True
        return found

    def _measure(self, found: Findings) -> None:
        with self._timed(found, "search"):
            self._search(found)
        with self._timed(found, "confirm"):
            self._confirm(found)
        with self._timed(found, "load"):
            self._load(found)

    # ---------------------------------------------------------------- stages

    def _probe_all(self, found: Findings) -> None:
        self._progress.stage("probing families", len(self._space.families))
        for family in self._space.families:
            try:
                found.probes[family.label] = self._probe(family, self._plan.batch_size, partial(self._is_hopeless, found, family))
            except OutriderError as error:
                found.failures[family.label] = str(error)
            self._progress.advance()

    def _is_hopeless(self, found: Findings, family: Family, probe: Probe) -> bool:
        """Every one of its sizes; one that did not come up yet may be better."""
        speedups = self._speedups(found, self._forecasts_of(found, family, probe))
        return len(speedups) == len(family.sizes) and max(speedups.values()) < GIVE_UP

    def _forecast(self, found: Findings) -> None:
        for family in self._space.families:
            if (probe := found.probes.get(family.label)) is not None:
                found.forecasts += self._forecasts_of(found, family, probe)
        found.overall = self._speedups(found, found.forecasts)

    def _forecasts_of(self, found: Findings, family: Family, probe: Probe) -> list[Forecast]:
        costs = step_costs(probe, self._plan.batch_size)
        base = plain_tokens_per_s(found.plain, self._plan.batch_size)
        return [] if costs is None else forecast(family, probe, costs, base)

    def _speedups(self, found: Findings, forecasts: Sequence[Forecast]) -> dict[str, float]:
        base = plain_tokens_per_s(found.plain, self._plan.batch_size)
        return overall(forecasts, found.shares, dict.fromkeys(found.shares, base)) if base else {}

    def _search(self, found: Findings) -> None:
        """Searches settings where a drafter that replays is worth it and there are texts enough to keep half of them back."""
        family = next((one for one in self._best_families(found) if one.configuration.drafter in SEARCHED), None)
        if family is None or len(self._plan.probe) < MIN_SEARCH_TEXTS or not self._plan.search_trials:
            return
        costs = step_costs(found.probes[family.label], self._plan.batch_size)
        best = max((one for one in found.forecasts if one.family == family.label), key=lambda one: one.speedup)
        texts = [
            Text(sample.tokens, answer, sample.task, sample.id)
            for sample, answer in zip(self._plan.probe, found.plain.answers, strict=True)
        ]
        found.search = search(
            texts, family.member(best.size), trials=self._plan.search_trials, costs=costs, target=self._runner.models.target,
            max_num_seqs=self._plan.batch_size, progress=self._progress,
        )  # fmt: skip

    def _confirm(self, found: Findings) -> None:
        groups = list(_grouped(self._plan.confirm, self._plan.batch_size))
        known = self._known(found)
        found.family_of = {label: str(member.family) for label, (member, _) in known.items()}
        if not known or not groups:
            return
        race = Race(
            [Member(PLAIN, None, 1.0, 0.0), *(member for member, _ in known.values())],
            lambda label: self._runner.open(known[label][1] if label in known else Configuration(PLAIN), any_length=True),
            groups, self._plan.batch_size, self._journal, self._progress,
            Rules(self._plan.num_finalists, self._budget_s(found)),
        )  # fmt: skip
        try:
            race.run(self._invited(found, known))
        finally:
            self._judge(found, race, known)

    def _judge(self, found: Findings, race: Race, known: Mapping[str, tuple[Member, Configuration]]) -> None:
        """What the laps say, all of them or those before Ctrl-C."""
        found.laps = race.laps
        found.failures |= race.failures
        tasks = list(found.shares) if len(found.shares) > 1 else []
        beliefs = {ALL: race.belief(), **{task: race.belief(task) for task in tasks}}
        found.confirmed = summarise(found.laps, Configuration(PLAIN), greedy=self._plan.greedy, beliefs=beliefs)
        found.finalists = [known[one.configuration][1] for one in found.confirmed]

    def _load(self, found: Findings) -> None:
        """Measures the two best families and plain decoding under load."""
        if not self._plan.load_sizes:
            return
        best = self._favourites(found)[:2]
        self._progress.stage("trying other loads", len(self._plan.load_sizes) * (1 + len(best)))
        for size in self._plan.load_sizes:
            plain = self._probe(PLAIN_FAMILY, size)
            self._progress.advance()
            timed = []
            for family in best:
                timed.append((family, found.probes[family.label], self._probe(family, size)))
                found.by_load.setdefault(family.label, []).append(best_at(size, timed[-1:], plain, found.shares))
                self._progress.advance()
            found.schedule.append(best_at(size, timed, plain, found.shares))

    # ---------------------------------------------------------------- parts

    def _probe(self, family: Family, batch_size: int, is_hopeless: Callable[[Probe], bool] | None = None) -> Probe:
        """From the journal, or run now. At other loads than the plan's, as many prompts as there are rows."""
        key = f"probe {family.label} / {batch_size}"
        if key in self._journal:
            return Probe.model_validate(self._journal[key])
        samples = self._plan.probe if batch_size == self._plan.batch_size else _as_many(self._plan.probe, batch_size)
        probe = run_probe(self._runner.open(family.largest, any_length=True), family, samples, batch_size, is_hopeless)
        self._journal.add(key, probe.model_dump())
        return probe

    def _known(self, found: Findings) -> dict[str, tuple[Member, Configuration]]:
        """The candidates by label: everything that was forecast, the best family with a free length, what the search found."""
        families = {family.label: family for family in self._space.families}
        known = {}
        for family in families.values():
            for _, configuration in family.members():
                if (speedup := found.overall.get(configuration.label)) is not None and speedup > 0:
                    error = NESTED_ERROR if family.nested else MEMBER_ERROR
                    known[configuration.label] = Member(configuration.label, family.label, speedup, error), configuration
        if (nested := self._best_nested(found)) is not None:
            best = max((one for one in known.values() if one[0].family == nested.label), key=lambda one: one[0].forecast)[0]
            auto = nested.member(f"auto:{min(AUTO_MOST, nested.sizes[-1])}")
            known[auto.label] = Member(auto.label, nested.label, AUTO_SHARE * best.forecast, AUTO_ERROR), auto
        if (better := self._searched(found)) is not None and found.search is not None:
            start = known[found.search.outcome.start.configuration][0]
            known[better.label] = replace(start, label=better.label, error=MEMBER_ERROR), better
        return known

    def _invited(self, found: Findings, known: Mapping[str, object]) -> list[str]:
        """The candidates that run whatever the forecasts for all traffic say: the best of every task, and what the search
        found."""
        chosen = []
        for task in found.shares if len(found.shares) > 1 else ():
            of_task = [one for one in found.forecasts if one.task == task and one.configuration in known]
            chosen.append(max(of_task, key=lambda one: one.speedup).configuration)
        better = self._searched(found)
        return [*dict.fromkeys(chosen), *([better.label] if better is not None else [])]

    def _searched(self, found: Findings) -> Configuration | None:
        """What the search found, if it is better than the family's own on texts it had not seen."""
        if found.search is None or found.search.outcome.gain is None or found.search.outcome.gain.value <= 0:
            return None
        if found.search.outcome.start.configuration not in found.overall:  # not forecast for every task
            return None
        return found.search.configuration

    def _best_nested(self, found: Findings) -> Family | None:
        return next((family for family in self._best_families(found) if family.nested and len(family.sizes) > 1), None)

    def _budget_s(self, found: Findings) -> float:
        """For the laps: what the probes left."""
        probes = sum(probe.seconds for probe in (found.plain, *found.probes.values()))
        return self._plan.most_share * exhaustive_seconds(found, self._plan) - probes

    def _favourites(self, found: Findings) -> list[Family]:
        """By what their best fixed length is believed to reach; behind these, those that were forecast only."""
        fixed = [one for one in found.confirmed if not _is_auto(one.configuration)]
        fixed.sort(key=lambda one: -one.estimates.get(ALL, one.speedup.value))
        by_label = {family.label: family for family in self._space.families}
        measured = [by_label[found.family_of[one.configuration]] for one in fixed]
        return list({family.label: family for family in (*measured, *self._best_families(found))}.values())

    def _best_families(self, found: Findings) -> list[Family]:
        """By their best member's forecast."""
        best: dict[str, float] = {}
        family_of = {one.configuration: one.family for one in found.forecasts}
        for label, speedup in found.overall.items():
            best[family_of[label]] = max(best.get(family_of[label], 0.0), speedup)
        by_label = {family.label: family for family in self._space.families}
        return [by_label[label] for label in sorted(best, key=lambda label: -best[label])]

    @contextmanager
    def _timed(self, found: Findings, name: str) -> Iterator[None]:
        """Seconds of a stage go into the findings (of this run: what the journal had costs nothing)."""
        began = time.perf_counter()
        try:
            yield
        finally:
            found.stages.append(Stage(name=name, seconds=time.perf_counter() - began, tokens=0))


def exhaustive_seconds(found: Findings, plan: TunePlan) -> float:
    """Forecast of running plain decoding and every member on every prompt."""
    tokens = sum(sample.params.required_max_tokens for sample in (*plan.probe, *plan.confirm))
    base = plain_tokens_per_s(found.plain, plan.batch_size)
    return sum(1 / speedup for speedup in {PLAIN: 1.0, **found.overall}.values()) * tokens / base if base else 0.0


def _is_auto(label: str) -> bool:
    return str(Configuration.parse(label).num_draft_tokens).startswith("auto")


def _grouped(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Groups of one task each, so that a group's time can be charged to a task; tasks take turns."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    queues = [[of_task[i : i + size] for i in range(0, len(of_task), size)] for of_task in by_task.values()]
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def _as_many(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples, again from the first one when there are fewer."""
    return [samples[i % len(samples)] for i in range(count)]

