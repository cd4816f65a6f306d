"""Which of the tuned configurations another engine can run, and what the load schedule becomes
there.

No engine has every drafter: where one lacks the recommended drafter, the advice is about the best
that it has, and says so. Speeds were measured here: acceptance carries over, costs do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.configuration import Configuration
from outrider.lab.tune.space import TrainedHead
from outrider.lab.tune.tune_result import TuneResult
from outrider.models.heads.kinds import EARLY_EXIT

TRAINED = {
    "eagle": "EAGLE heads",
    "eagle3": "EAGLE-3 heads",
    "medusa": "Medusa heads",
    "block": "block heads",
}
EXPORTED = "EXPORTED_HEAD"  # the folder that `outrider export` writes
# stands for the embedded draft, which other engines do not know by name
DRAFT_MODEL = "DRAFT_MODEL"
LOOKUPS = ("ngram", "suffix", "retrieval", "ngram-cache")  # drafters that need token ids only


@dataclass(frozen=True)
class EngineChoice:
    """A configuration with a fixed length, for one engine."""

    configuration: Configuration
    size: int
    # (from so many rows on, draft tokens), the first at 1 row; one entry: no schedule
    schedule: list[tuple[int, int]]
    about: str = ""  # how fast it is here, or how its length was fixed
    head: TrainedHead | None = None  # that drafts

    @property
    def drafter(self) -> str:
        return self.configuration.drafter

    @property
    def options(self) -> dict[str, Any]:
        """Options of the drafter."""
        return self.configuration.drafter_options

    @property
    def is_tree(self) -> bool:
        return _tree_of(self.options) is not None

    @property
    def is_dspark(self) -> bool:
        """Whether others call it DSpark: a block head with a Markov or a confidence head."""
        return self.head is not None and (self.head.markov or self.head.confidence)

    @property
    def length(self) -> int:
        """Draft tokens to ask for: a whole block of a block head."""
        whole = self.head.max_chain if self.head is not None and self.drafter == "block" else None
        return whole or self.size


@dataclass(frozen=True)
class Engine:
    """Another program: what it can draft with, and how a choice is written there."""

    name: str
    drafters: Collection[str]
    off: str  # how it decodes plainly
    text: Callable[[EngineChoice, EngineAdvice], str]
    notes: Callable[[EngineChoice, EngineAdvice], Iterable[str]]
    trees: Collection[str] = ()  # drafters of which it has best-first trees


@dataclass
class EngineAdvice:
    """How to draft for one target, as engines ask about it."""

    target: str
    draft: str | None
    sampled: bool  # requests draw their tokens
    recommended: Configuration
    reason: str  # one sentence
    choices: list[EngineChoice]  # all that pay, the best first
    # may read files, so it is asked about the choice alone
    head_of: Callable[[Configuration], TrainedHead | None]
    exported: str = EXPORTED  # the folder of a head in the engine's own layout

    @property
    def speculate(self) -> bool:
        return not self.recommended.is_plain

    def ask(self, engine: Engine) -> tuple[EngineChoice | None, list[str]]:
        """The best choice that the engine has with notes, or why there is nothing.

        Raises ConfigError for a head that cannot be read.
        """
        if not self.speculate:
            return None, [f"Do not speculate ({self.reason}): {engine.off}."]
        best = self.best_for(engine)
        if best is None:
            return None, [self._nothing(engine)]
        choice = replace(best, head=self.head_of(best.configuration))
        return choice, [*self._notes(choice, engine), *engine.notes(choice, self)]

    def best_for(self, engine: Engine) -> EngineChoice | None:
        """The best choice that the engine has."""
        return next((one for one in self.choices if not lacking(one.configuration, engine)), None)

    def _nothing(self, engine: Engine) -> str:
        has = f"it has {', '.join(sorted(engine.drafters))}."
        return f"It has no drafter that paid here; {has}"

    def _notes(self, choice: EngineChoice, engine: Engine) -> Iterator[str]:
        lacks = lacking(self.recommended, engine)
        if choice.configuration.label != self.recommended.label:
            why = f", {lacks}" if lacks else ""
            yield f"Recommended is {self.recommended.label}{why}; this is {choice.configuration.label}: {choice.about}."
        if stop := choice.options.get("stop"):
            yield f"Without the stop rule '{stop}', which it does not have."
        if choice.drafter == "block":
            yield f"It drafts whole blocks, {choice.length} tokens; here {choice.size} were best."
        layout = "vllm" if choice.drafter == "medusa" else "raw"
        if choice.drafter in TRAINED and self.exported == EXPORTED:
            folder = choice.options.get("head") or f"outrider/demo/models/heads/{choice.drafter}"
            yield f"First: outrider export {folder} --target {self.target} --to {layout} --out {EXPORTED}"


def tuned(result: TuneResult) -> EngineAdvice:
    """Advice from all that `outrider tune` measured and forecast; what was measured goes before
    what was forecast."""
    measured = {one.configuration: one.speedup.value for one in result.confirmed}
    known = {
        label: measured.get(label, forecast) for label, forecast in result.overall_speedup.items()
    }
    heads = {(head.kind, head.folder): head for head in result.tried.heads}
    choices = []
    for label in sorted(
        known, key=lambda label: (label in measured, known[label], label), reverse=True
    ):
        if known[label] > 1:
            how = "measured" if label in measured else "forecast"
            choices.append(_choice(result, label, f"{known[label]:.2f}x, {how} with outrider"))
    first = result.recommendations[0]
    return EngineAdvice(
        target=result.tried.target,
        draft=result.tried.draft or (DRAFT_MODEL if result.tried.target == "demo" else None),
        sampled=result.tried.temperature > 0,
        recommended=Configuration.parse(first.configuration),
        reason=first.reason,
        choices=choices,
        head_of=lambda one: heads.get((one.drafter, head_folder(one))),
    )


def _choice(result: TuneResult, label: str, about: str) -> EngineChoice:
    """With other loads, where they were tuned with the same family (or want plain decoding), never
    more than at one row."""
    family_of = {one.configuration: one.family for one in result.forecasts}
    configuration = Configuration.parse(label)
    family = family_of.get(label)
    steps = [(1, int(configuration.num_draft_tokens or 0))]
    for load in sorted(
        result.by_load.get(family or "", result.schedule), key=lambda load: load.batch_size
    ):
        if load.size and family_of.get(load.configuration) != family:
            continue
        if load.batch_size > 1 and load.size < steps[-1][1]:
            steps.append((load.batch_size, load.size))
    return EngineChoice(configuration, steps[0][1], steps, about)


def lacking(configuration: Configuration, engine: Engine) -> str:
    """Why an engine cannot draft so; "" where it can. Of a composite it must have all parts:
    look-ups."""
    drafter = configuration.drafter
    tree = _tree_of(configuration.drafter_options)
    if drafter == EARLY_EXIT and head_folder(configuration):
        return "which no other program reads"
    if drafter not in engine.drafters:
        return f"which it does not have ({TRAINED.get(drafter, drafter)})"
    if tree is not None and (tree != "best-first" or drafter not in engine.trees):
        return "whose trees it does not have"
    parts = str(configuration.drafter_options.get("parts", "draft-model,suffix")).split(",")
    if drafter == "composite" and not all(part.strip() in LOOKUPS for part in parts):
        return "of whose parts it has look-ups alone"
    return ""


def head_folder(configuration: Configuration) -> str:
    """The folder of a trained head, as options name it; "": none, or one that comes with the
    target."""
    return str(configuration.drafter_options.get("head", ""))


def _tree_of(options: dict[str, Any]) -> str | None:
    """The shape of a tree; None for a chain."""
    tree = str(options.get("tree", "chain"))
    return None if tree in ("chain", "False", "false") else tree
