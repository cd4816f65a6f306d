"""`outrider replay` as a whole: every configuration on every text, and the searches. What is done is in the journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.counted import counted
from outrider.draft_length.length import MAX_DRAFT_TOKENS
from outrider.errors import ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.replay.replay import Order, replay, replayable_parts
from outrider.lab.replay.replay_result import ReplayedConfiguration, ReplayResult, SearchOutcome
from outrider.lab.replay.search import check_search, check_texts, search, space_of
from outrider.lab.replay.summary import summarise
from outrider.lab.replay.texts import Log
from outrider.models.loaded import LoadedModel
from outrider.version import __version__

SHOWN = 3  # requests in a note


@dataclass(frozen=True)
class ReplayPlan:
    """What is replayed, and how."""

    configurations: tuple[Configuration, ...]
    sweep: int = 0  # each of them with draft lengths 1 .. sweep; 0: with its own
    trials: int = 0  # of a search around each of them; 0: none
    order: Order = "logged"
    max_num_seqs: int = 1
    seed: int = 0
    costs: StepCosts | None = None

    def check(self) -> list[Configuration]:
        """The configurations to replay. Raises ConfigError and CapabilityError for what cannot be, before any work."""
        for configuration in self.configurations:
            if self.sweep and configuration.num_draft_tokens is not None:
                raise ConfigError(f"'{configuration.label}' has a draft length, and --sweep tries all of them: leave one out")
        if not 0 <= self.sweep <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"--sweep takes a draft length from 1 to {MAX_DRAFT_TOKENS}, got {self.sweep}")
        if self.costs is not None and self.costs.num_rows != self.max_num_seqs:
            raise ConfigError(
                f"the costs are of steps with num_rows={self.costs.num_rows}, and --max-num-seqs is {self.max_num_seqs}: the "
                "predicted speedup needs both alike"
            )
        chosen = [member for configuration in self.configurations for member in self._members(configuration)]
        for configuration in chosen:
            replayable_parts(configuration)
        for configuration in self.configurations if self.trials else ():
            check_search(self.trials, space_of(configuration, lengths=self.costs is not None))
        return chosen

    def _members(self, configuration: Configuration) -> list[Configuration]:
        if not self.sweep or configuration.is_plain:
            return [configuration]
        return [replace(configuration, num_draft_tokens=length) for length in range(1, self.sweep + 1)]


def run_replay(
    plan: ReplayPlan, log: Log, target: LoadedModel, journal_path: Path, *, workload: str, resume: bool = False,
    notes: Sequence[str] = (), progress: Progress,
) -> tuple[ReplayResult, Journal]:  # fmt: skip
    """Replays and searches that the journal does not have yet. Close the journal when the result is safe.

    Raises ConfigError and CapabilityError before any work.
    """
    configurations = plan.check()
    if plan.trials:
        check_texts(len(log.texts))
    how: dict[str, Any] = {
        "target": target, "order": plan.order, "seed": plan.seed, "max_num_seqs": plan.max_num_seqs, "progress": progress,
    }  # fmt: skip

    def replayed(configuration: Configuration) -> dict[str, Any]:
        return summarise(replay(log.texts, configuration, **how), log.texts, plan.costs).model_dump()

    def searched(configuration: Configuration) -> dict[str, Any]:
        return search(log.texts, configuration, trials=plan.trials, costs=plan.costs, **how).outcome.model_dump()

    with Journal.open(journal_path, _identity(plan, log, target), resume=resume) as journal:
        replays = [journal.unit(f"replay {one.label}", replayed, one) for one in configurations]
        searches = [journal.unit(f"search {one.label}", searched, one) for one in plan.configurations if plan.trials]
    found = [ReplayedConfiguration.model_validate(one) for one in replays]
    result = ReplayResult(
        workload=workload,
        tokenizer=target.name,
        order=plan.order,
        seed=plan.seed,
        max_num_seqs=plan.max_num_seqs,
        num_texts=len(log.texts),
        num_tokens=sum(len(text.answer) for text in log.texts),
        skipped=log.skipped,
        costs=plan.costs,
        configurations=found,
        searches=[SearchOutcome.model_validate(one) for one in searches],
        notes=[*notes, *_notes(plan, found, log)],
    )
    return result, journal


def _identity(plan: ReplayPlan, log: Log, target: LoadedModel) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that goes on."""
    texts = [[list(text.prompt), list(text.answer), text.task, text.max_tokens] for text in log.texts]
    return {
        **asdict(plan), "configurations": [one.label for one in plan.configurations],
        "costs": None if plan.costs is None else plan.costs.model_dump(), "outrider": __version__,
        "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(), "vocabulary": target.lm.shape.vocab_size,
    }  # fmt: skip


def _notes(plan: ReplayPlan, replayed: Sequence[ReplayedConfiguration], log: Log) -> Iterator[str]:
    """What a reader should know about these numbers."""
    yield "Texts are the log's, cut into tokens again; a model may have emitted the same text in other tokens."
    if any(one.learns for one in replayed):
        order = "in the order of the log" if plan.order == "logged" else f"in an order drawn by lot (seed {plan.seed})"
        yield f"Some drafters learn from one text for the next; they met the texts {order}, beginning with no memory."
    if any(one.charged_draft_s for one in replayed):
        yield "The costs given are without drafting; predicted speedups charge the time that the drafter took here."
    if plan.order == "alone":
        yield "Every text was met by a drafter that knew nothing before it."
    if plan.costs is not None and (outside := sum(one.outside_costs for one in replayed)):
        yield f"{outside} steps are wider than any the costs were measured for; their cost is a straight line's guess."
    if log.skipped:
        more = " ..." if len(log.skipped) > SHOWN else ""
        yield f"{counted(len(log.skipped), 'request')} left out: {'; '.join(log.skipped[:SHOWN])}{more}"
