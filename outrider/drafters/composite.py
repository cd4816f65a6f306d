"""Several drafters at once: their guesses in one tree, or each step the one that pays most, row by row.

    merge    every part drafts; the node budget goes where a node is likeliest to be kept (suffix branch + model chain in one
             tree, verified by traversal)
    best     the parts that cost nothing draft first; a row asks a model only where the model's expected tokens per second
             beat theirs. Arctic and SAM decide this by match length; here it is one calibrated survival estimate for all

What a part is worth is measured from its own verdicts (`outrider/survival.py`), what a model costs by the clock. At most one
part may draw tokens from laws; its nodes come first in the tree (`outrider/trees/merge.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.errors import ConfigError
from outrider.rows import Row, Rows
from outrider.settings import parse_settings, setting
from outrider.survival import ChainSurvival
from outrider.trees.merge import Merged, merge_drafts, part_output, part_verdict
from outrider.types import Draft, TargetOutput, Verdict

DEFAULT_NODES = 8
CLOCK_MEMORY = 0.1  # weight of the newest measurement
SOURCES = "ngram, suffix, ngram-cache, recycling, lookahead, retrieval, draft-model, quantised, early-exit, universal"


@dataclass(frozen=True)
class CompositeSettings:
    """Which drafters, and how they share a step."""

    parts: str = setting("draft-model,suffix", f"drafters, with commas: {SOURCES}")
    mode: Literal["merge", "best"] = setting("merge", "one tree of all, or the best part of each row")
    options: str = setting("", "settings of parts, like suffix.max_depth=32;draft-model.stop=entropy")

    def __post_init__(self) -> None:
        names = self.names()
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise ConfigError(f"a composite needs at least two different drafters, like suffix,ngram; got '{self.parts}'")
        if "composite" in names or "none" in names:
            raise ConfigError("a composite cannot contain 'composite' or 'none'")
        for name in self.options_by_part():
            if name not in names:
                raise ConfigError(f"options name '{name}', which is not among the parts {self.parts}")

    def names(self) -> list[str]:
        return [name.strip() for name in self.parts.split(",")]

    def options_by_part(self) -> dict[str, dict[str, str]]:
        """'a.x=1;b.y=2' -> {'a': {'x': '1'}, 'b': {'y': '2'}}. Raises ConfigError."""
        found: dict[str, dict[str, str]] = {}
        for item in filter(None, (part.strip() for part in self.options.split(";"))):
            path, equals, value = item.partition("=")
            name, dot, option = path.partition(".")
            if not (equals and dot):
                raise ConfigError(f"options are PART.NAME=VALUE with semicolons between, got '{item}'")
            found.setdefault(name, {})[option] = value
        return found


@dataclass
class _Part:
    """One drafter in the composite."""

    name: str
    drafter: Drafter
    is_model: bool  # it runs a model: its time counts, and it may draw from laws
    survival: ChainSurvival = field(default_factory=ChainSurvival)
    draft: Draft | None = None  # of this step
    seconds_per_token: float = 0.0


class CompositeDrafter(Drafter):
    """See the module docstring."""

    needs = "what its parts need"
    shape = "tree"
    learns = True
    Settings = CompositeSettings

    def __init__(self, parts: list[_Part], mode: str) -> None:
        self.parts = sorted(parts, key=lambda part: not part.is_model)  # drawn nodes come first in the tree
        self._mode = mode
        self._merged: Merged | None = None
        self._pass_seconds = 0.0  # of the target, as seen between a proposal and its verdict
        self._proposed_at = 0.0

    @classmethod
    def part_classes(cls, settings: CompositeSettings) -> dict[str, tuple[type[Drafter], Any]]:
        """Name -> (class, its settings). Raises ConfigError for an unknown part or option."""
        options = settings.options_by_part()
        found = {}
        for name in settings.names():
            kind = DRAFTERS.load(name)
            found[name] = kind, parse_settings(kind.Settings, options.get(name, {}), f"drafter '{name}'")
        return found

    @classmethod
    def wants_draft(cls, settings: CompositeSettings) -> bool:
        return any(kind.wants_draft(own) for kind, own in cls.part_classes(settings).values())

    @classmethod
    def wants_module(cls, settings: CompositeSettings) -> bool:
        return any(kind.wants_module(own) for kind, own in cls.part_classes(settings).values())

    @classmethod
    def loop_tokens(cls, settings: CompositeSettings, most: int, *, any_length: bool) -> int:
        parts = cls.part_classes(settings).values()
        return max(kind.loop_tokens(own, most, any_length=True) for kind, own in parts)

    @classmethod
    def default_num_draft_tokens(cls, settings: CompositeSettings) -> int:
        return DEFAULT_NODES

    @classmethod
    def build(cls, setup: DraftSetup) -> CompositeDrafter:
        parts = []
        for name, (kind, settings) in cls.part_classes(setup.settings).items():
            is_model = kind.wants_draft(settings) or kind.wants_module(settings)
            if is_model and kind.drafts_trees(settings):
                raise ConfigError(f"in a composite, drafter '{name}' drafts a chain; leave its tree out of the options")
            parts.append(_Part(name, kind.build(replace(setup, settings=settings)), is_model))
        models = [part.name for part in parts if part.is_model]
        if len(models) > 1:
            raise ConfigError(f"a composite takes one model at most, got {' and '.join(models)}")
        return cls(parts, setup.settings.mode)

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.drafter.notes]

    def start(self, row: Row) -> None:
        for part in self.parts:
            part.drafter.start(row)

    def stop(self, index: int) -> None:
        for part in self.parts:
            part.drafter.stop(index)

    def close(self) -> None:
        for part in self.parts:
            part.drafter.close()

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        for part in self.parts:
            part.survival.forget({id(row) for row in rows})
        budgets = self._split(rows, gamma) if self._mode == "merge" else self._best(rows, gamma)
        for part in self.parts:
            if part.draft is None:
                part.draft = self._timed(part, rows, budgets[part.name])
        self._merged = merge_drafts([part.draft for part in self.parts if part.draft is not None])
        self._proposed_at = time.perf_counter()
        return self._merged.draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        assert self._merged is not None, "commit without propose"
        self._pass_seconds = _smoothed(self._pass_seconds, time.perf_counter() - self._proposed_at)
        for part, places in zip(self.parts, self._merged.places, strict=True):
            assert part.draft is not None
            own = part_verdict(part.draft, places, verdict)
            for index, row in enumerate(rows):
                if offered := _depth(part.draft, index):
                    part.survival.observe(id(row), offered, own.lists.num_accepted[index])
            part.drafter.commit(rows, part.draft, own, part_output(part.draft, places, output))
            part.draft = None

    # ---------------------------------------------------------------- who gets how many nodes

    def _split(self, rows: Rows, gamma: list[int]) -> dict[str, list[int]]:
        """Every node to the part whose next token is likeliest to be kept."""
        budgets = {part.name: [0] * len(rows) for part in self.parts}
        for index, (row, budget) in enumerate(zip(rows, gamma, strict=True)):
            curves = {part.name: part.survival.curve(budget, id(row)) for part in self.parts}
            for _ in range(budget):
                name = max(curves, key=lambda name: curves[name][budgets[name][index]])
                budgets[name][index] += 1
        return budgets

    def _best(self, rows: Rows, gamma: list[int]) -> dict[str, list[int]]:
        """The free parts draft at once; of each row, only the draft with the best rate stays."""
        free = [part for part in self.parts if not part.is_model]
        for part in free:
            part.draft = self._timed(part, rows, gamma)
        budgets = {part.name: [0] * len(rows) for part in self.parts}
        for index, row in enumerate(rows):
            rates = {part.name: self._rate(part, row, _drafted(part, index, gamma[index])) for part in self.parts}
            budgets[max(rates, key=lambda name: rates[name])][index] = gamma[index]
        for part in free:
            assert part.draft is not None
            chosen = part.draft.lengths * (part.draft.lengths.new_tensor(budgets[part.name]) > 0)
            part.draft = replace(part.draft, lengths=chosen)
        return budgets

    def _rate(self, part: _Part, row: Row, num_tokens: int) -> float:
        """Expected tokens per second of this row if `part` drafts `num_tokens`."""
        tokens = 1 + part.survival.expected(num_tokens, id(row))
        return tokens / (max(self._pass_seconds, 1e-9) + num_tokens * part.seconds_per_token)

    def _timed(self, part: _Part, rows: Rows, budget: list[int]) -> Draft:
        began = time.perf_counter()
        draft = part.drafter.propose(rows, budget)
        longest = max(draft.lists[1])
        first_step = any(row.stats.steps == 0 for row in rows)  # a draft model then reads the prompt
        if part.is_model and longest and not first_step:
            part.seconds_per_token = _smoothed(part.seconds_per_token, (time.perf_counter() - began) / longest)
        return draft


def _drafted(part: _Part, index: int, budget: int) -> int:
    """Depth of what a free part has drafted for this row; what a model would draft."""
    return budget if part.draft is None else _depth(part.draft, index)


def _depth(draft: Draft, index: int) -> int:
    """Levels of one row's draft."""
    length = draft.lists[1][index]
    return length if draft.parents is None else int(draft.depths()[index, : length + 1].max())


def _smoothed(mean: float, value: float) -> float:
    return value if mean == 0 else mean + CLOCK_MEMORY * (value - mean)
