"""Which of the tuned configurations an engine supports, and what the load schedule becomes there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from outrider.lab.configuration import Configuration
from outrider.lab.tune.head import TrainedHead
from outrider.lab.tune.tune_result import TuneResult
from outrider.models.heads.kinds import EARLY_EXIT

TRAINED = {"eagle": "EAGLE heads", "eagle3": "EAGLE-3 heads", "medusa": "Medusa heads", "block": "block heads"}
EXPORTED = "EXPORTED_HEAD"  # the folder that `outrider export` writes
LOOKUPS = ("ngram", "suffix", "retrieval", "ngram-cache")  # drafters that need token ids only
PLUGGED = ("composite", "retrieval", "ngram-cache")  # which no engine has; Outrider brings them along
DRAFT_MODEL = "DRAFT_MODEL"  # stands for the embedded draft, which other engines do not know by name
BEST_FIRST = "best-first"  # EAGLE-2's trees, which some engines build, too


@dataclass(frozen=True)
class EngineChoice:
    """A configuration with a fixed length, for one engine."""

    drafter: str
    size: int
    options: dict[str, Any]  # of the drafter, as strings
    schedule: list[tuple[int, int]]  # (from so many rows on, draft tokens), ascending, the first at 1 row; one entry: no schedule
    notes: list[str]
    head: TrainedHead | None = None  # that drafts

    @property
    def is_tree(self) -> bool:
        return tree_of(self.options) is not None

    @property
    def is_dspark(self) -> bool:
        """A block head that others call DSpark, not DFlash."""
        return self.head is not None and (self.head.markov or self.head.confidence)

    @property
    def length(self) -> int:
        """Draft tokens to ask for. Engines run block heads at a whole block: its masks see one another, so fewer of them would be
        another computation."""
        whole = self.head.max_chain if self.head is not None and self.drafter == "block" else None
        return whole or self.size


@dataclass(frozen=True)
class Engine:
    """Another program: what it can draft with, and how a choice is written there."""

    name: str
    drafters: Collection[str]
    off: str  # how it decodes plainly
    language: str  # of `text`: "bash", "python"
    text: Callable[[EngineChoice, EngineAdvice], str]
    notes: Callable[[EngineChoice, EngineAdvice], list[str]]
    trees: Collection[str] = ()  # drafters of which it has best-first trees


class EngineAdvice(ABC):
    """How to draft for one target, as engines ask about it."""

    exported = EXPORTED  # the folder of a head in the engine's own layout

    def __init__(self, target: str, draft: str | None, *, sampled: bool, speculate: bool, reason: str) -> None:
        self.target = target
        self.draft = draft
        self.sampled = sampled  # requests draw their tokens
        self.speculate = speculate
        self.reason = reason  # one sentence

    @abstractmethod
    def choose(self, engine: Engine) -> EngineChoice | None:
        """The configuration for an engine; None where nothing pays that it has."""

    def ask(self, engine: Engine) -> tuple[EngineChoice | None, list[str]]:
        """What `choose` says with notes, or why there is nothing."""
        if not self.speculate:
            return None, [f"Do not speculate ({self.reason}): {engine.off}."]
        choice = self.choose(engine)
        if choice is None:
            return None, [self.nothing(engine.drafters)]
        blocks = f"It drafts whole blocks, {choice.length} tokens; here {choice.size} were best."
        return choice, [*choice.notes, *([blocks] if choice.drafter == "block" else []), *engine.notes(choice, self)]

    def nothing(self, drafters: Collection[str]) -> str:
        """The sentence for an engine whose drafters were not worth it."""
        return f"It has no drafter that paid here; it has {', '.join(sorted(drafters))}."

    def export_notes(self, choice: EngineChoice, layout: str) -> list[str]:
        """How an engine gets a head that it can read, where that was not written yet."""
        folder = choice.options.get("head") or f"outrider/demo/models/heads/{choice.drafter}"
        first = f"First: outrider export {folder} --target {self.target} --to {layout} --out {EXPORTED}"
        return [first] if self.exported == EXPORTED else []


class Tuned(EngineAdvice):
    """Advice from all that `outrider tune` measured and forecast."""

    def __init__(self, result: TuneResult) -> None:
        self._result = result
        self.recommended = result.recommendations[0]
        super().__init__(
            result.tried.target, result.tried.draft or (DRAFT_MODEL if result.tried.target == "demo" else None),
            sampled=result.tried.temperature > 0, speculate=self.recommended.speculate, reason=self.recommended.reason,
        )  # fmt: skip

    def choose(self, engine: Engine) -> EngineChoice | None:
        """The best configuration that an engine has and that is forecast or measured to pay; None where none does."""
        measured = {one.configuration: one.speedup.value for one in self._result.confirmed}
        found: list[tuple[float, str]] = []
        for label, forecast in self._result.overall_speedup.items():
            configuration = Configuration.parse(label)
            if can_draft(configuration, engine):
                found.append((measured.get(label, forecast), label))
        paying = [one for one in found if one[0] > 1]
        if not paying:
            return None
        confirmed = [one for one in paying if one[1] in measured]
        speedup, label = max(confirmed or paying)
        configuration = Configuration.parse(label)
        size = int(configuration.num_draft_tokens or 0)
        schedule, notes = self._schedule(label, size), self._notes(label, speedup, engine)
        return EngineChoice(
            configuration.drafter, size, configuration.drafter_options, schedule, notes, self._head(configuration)
        )

    def _notes(self, label: str, speedup: float, engine: Engine) -> list[str]:
        notes = []
        if label != self.recommended.configuration:
            how = "measured" if any(one.configuration == label for one in self._result.confirmed) else "forecast"
            lacks = self._lacking(engine)
            recommended = self.recommended.configuration
            notes.append(f"Recommended is {recommended}{lacks}; this is {label}: {speedup:.2f}x, {how} with outrider.")
        if unknown := {name: value for name, value in Configuration.parse(label).drafter_options.items() if name == "stop"}:
            notes.append(f"Without the stop rule {unknown}, which it does not have.")
        return notes

    def _lacking(self, engine: Engine) -> str:
        """Why the engine cannot do what is recommended; "" where it can do something close to it."""
        recommended = Configuration.parse(self.recommended.configuration)
        if is_ours_alone(recommended):
            return ", which no other program reads"
        if recommended.drafter not in engine.drafters:
            return f", which it does not have ({TRAINED.get(recommended.drafter, recommended.drafter)})"
        if tree_of(recommended.drafter_options) is not None and recommended.drafter not in engine.trees:
            return ", whose trees it does not have"
        return ""

    def _head(self, configuration: Configuration) -> TrainedHead | None:
        """The trained head of a configuration."""
        folder = str(configuration.drafter_options.get("head", ""))
        heads = self._result.tried.heads
        return next((one for one in heads if (one.kind, one.folder) == (configuration.drafter, folder)), None)

    def _schedule(self, label: str, size: int) -> list[tuple[int, int]]:
        """Other loads, where they were tuned with the same family (or want plain decoding), never more than at one row."""
        family = self._family(label)
        steps = [(1, size)]
        for load in sorted(self._result.by_load.get(family or "", self._result.schedule), key=lambda load: load.batch_size):
            if load.size and self._family(load.configuration) != family:
                continue
            if load.batch_size > 1 and load.size < steps[-1][1]:
                steps.append((load.batch_size, load.size))
        return steps

    def _family(self, label: str) -> str | None:
        return next((one.family for one in self._result.forecasts if one.configuration == label), None)


def can_draft(configuration: Configuration, engine: Engine) -> bool:
    """Whether an engine has it. Of a composite, which sees token ids alone there, all parts must be look-ups."""
    tree = tree_of(configuration.drafter_options)
    able = engine.drafters if tree is None else engine.trees if tree == BEST_FIRST else ()
    parts = str(configuration.drafter_options.get("parts", "draft-model,suffix")).split(",")
    if configuration.drafter == "composite" and not all(part.strip() in LOOKUPS for part in parts):
        return False
    return configuration.drafter in able and not is_ours_alone(configuration)


def is_ours_alone(configuration: Configuration) -> bool:
    """A head for an early exit."""
    return configuration.drafter == EARLY_EXIT and bool(configuration.drafter_options.get("head"))


def tree_of(options: dict[str, Any]) -> str | None:
    """The shape of a tree; None for a chain."""
    tree = str(options.get("tree", "chain"))
    return None if tree in ("chain", "False", "false") else tree
