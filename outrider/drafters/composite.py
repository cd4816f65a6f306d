"""Several drafters at once: their guesses in one tree, or each step the one that pays most, row by
row.

    merge    every part drafts; the node budget goes where a node is likeliest to be kept (suffix branch + model chain in one
             tree, verified by traversal), and what a free part cannot fill continues to the next, the
             model last. A part is worth the nodes it adds: what an earlier part has as well costs
             nothing and counts for nothing. The model drafts a chain, or a tree of its own shape
    best     the parts that cost nothing draft first; a row asks a model only where the model's expected tokens per second
             beat theirs. Arctic and SAM decide this by match length; here it is one calibrated
             survival estimate for all. Parts of chains give chains, which any target and verifier
             takes

What a part is worth is measured from its own verdicts (`outrider/drafters/chain_survival.py`), what
a model costs by the clock. A free part that is passed over is measured all the same, by what the
text then says, and a row tries a model again that it has long not asked
(`outrider/drafters/composite_part.py`). So each row moves to the part that is better by now, as its
text grows. At most one part may draw tokens from distributions, a model or a trained head; its
nodes come first (`outrider/trees/merge.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from outrider.draft_length.survival import Phase
from outrider.drafters import DRAFTERS
from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup, start_all
from outrider.drafters.composite_part import Part, depth, smoothed
from outrider.drafters.composite_settings import CompositeSettings
from outrider.drafters.proposals import proposed
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.kv import KVCache
from outrider.models.lm import LM
from outrider.rows import PerRow, Row, Rows
from outrider.settings import parse_settings
from outrider.trees.merge import Merged, merge_drafts, part_output, part_verdict
from outrider.trees.plan import PARALLEL
from outrider.trees.side_by_side import side_by_side
from outrider.types import Draft, TargetOutput, Verdict


class CompositeDrafter(Drafter):
    """Drafts with several drafters: their drafts in one tree, or the best of them each step."""

    needs = "what its parts need"
    shape = "chain or tree"
    learns = True
    Settings = CompositeSettings

    def __init__(self, parts: list[Part], mode: str) -> None:
        # drawn nodes come first in the tree
        self.parts = sorted(parts, key=lambda part: not part.is_model)
        self._mode = mode
        # of the rows, in the batch's order: what survival estimates know them by
        self._numbers = PerRow[int]()
        self._started = count()
        self._merged: Merged | None = None
        self._pass_seconds = 0.0  # of the target, as seen between a proposal and its verdict
        self._proposed_at = 0.0

    @classmethod
    def part_classes(cls, settings: CompositeSettings) -> dict[str, tuple[type[Drafter], Any]]:
        """Name -> (class, its settings). Raises ConfigError for an unknown part or option, and for
        parts that do not fit."""
        options = settings.options_by_part()
        classes: dict[str, tuple[type[Drafter], Any]] = {}
        for name in settings.names():
            kind = DRAFTERS.load(name)
            classes[name] = (
                kind,
                parse_settings(kind.Settings, options.get(name, {}), f"drafter '{name}'"),
            )
        if strange := [name for name, (kind, _) in classes.items() if not kind.keeps_costs]:
            raise ConfigError(
                f"a composite cannot contain '{strange[0]}', since what a step takes depends on "
                f"the network: use --drafter {strange[0]} alone"
            )
        models = [name for name, part in classes.items() if _is_model(*part)]
        if len(models) > 1:
            raise ConfigError(
                f"a composite takes one model or head at most, got {' and '.join(models)}"
            )
        for name in models if settings.mode == "merge" else ():
            tree = getattr(classes[name][1], "tree", "chain")
            if tree.startswith(PARALLEL):
                raise ConfigError(
                    f"in one tree with other drafters, '{name}' cannot draft {tree}, whose equal "
                    "nodes were drawn apart; use another tree, like best-first, or mode=best"
                )
        return classes

    @classmethod
    def requirements(cls, settings: CompositeSettings) -> Requirements:
        """The requirements of all parts together. Asked before any model is read: the moment to
        refuse parts that do not fit."""
        classes = cls.part_classes(settings)
        each = {
            name: kind.requirements(part_settings)
            for name, (kind, part_settings) in classes.items()
        }
        chains = settings.mode == "best" and not any(
            requirement.trees for requirement in each.values()
        )
        # a model's tree comes whole where nobody names a number
        sizes = [
            each[name].num_draft_tokens
            for name, part in classes.items()
            if each[name].trees and _is_model(*part)
        ]
        return Requirements(
            draft=any(requirement.draft for requirement in each.values()),
            module=any(requirement.module for requirement in each.values()),
            head=any(requirement.head for requirement in each.values()),
            heads=tuple(head for requirement in each.values() for head in requirement.heads),
            head_part=next((name for name, requirement in each.items() if requirement.head), None),
            prediction=any(requirement.prediction for requirement in each.values()),
            loop=any(requirement.loop for requirement in each.values()),
            trees=not chains,
            num_draft_tokens=max([SMALL_TREE, *sizes]),
            shares_nodes=True,
        )

    @classmethod
    def with_head(cls, options: dict[str, Any], part: str, folder: str) -> dict[str, Any]:
        option = f"{part}.head={folder}"
        return {
            **options,
            "options": f"{options['options']};{option}" if options.get("options") else option,
        }

    @classmethod
    def build(cls, setup: DraftSetup) -> CompositeDrafter:
        parts = [
            Part(
                name,
                kind.build(
                    replace(
                        setup,
                        settings=part_settings,
                        head=kind.requirements(part_settings).head_folder,
                    )
                ),
                _is_model(kind, part_settings),
            )
            for name, (kind, part_settings) in cls.part_classes(setup.settings).items()
        ]
        for part in parts:
            part.drafter.name = part.name
        return cls(parts, setup.settings.mode)

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.drafter.notes]

    @property
    def counters(self) -> dict[str, float]:
        return {
            f"{part.name}.{name}": value
            for part in self.parts
            for name, value in part.drafter.counters.items()
        }

    @property
    def summary(self) -> list[str]:
        return [f"{part.name}: {line}" for part in self.parts for line in part.drafter.summary]

    @property
    def signals(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.drafter.signals}))

    @property
    def runs_modules(self) -> bool:
        return any(part.drafter.runs_modules for part in self.parts)

    @property
    def model(self) -> LM | None:
        return next(
            (part.drafter.model for part in self.parts if part.drafter.model is not None), None
        )

    def may_lose_nodes(self, index: int) -> bool:
        return all(part.drafter.may_lose_nodes(index) for part in self.parts)

    def start(self, row: Row) -> None:
        start_all([part.drafter for part in self.parts], row, len(self._numbers))
        self._numbers.append(next(self._started))

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        for part in self.parts:
            if part.drafter.signals:
                part.drafter.read(
                    index, start, {layer: hidden[layer] for layer in part.drafter.signals}
                )

    def stop(self, index: int) -> None:
        super().stop(index)
        for part in self.parts:
            part.drafter.stop(index)

    def close(self) -> None:
        for part in self.parts:
            part.drafter.close()

    def pack(self, index: int) -> dict[str, Any] | None:
        states = {part.name: part.drafter.pack(index) for part in self.parts}
        return (
            states
            if all(states[part.name] is not None or not part.drafter.signals for part in self.parts)
            else None
        )

    def unpack(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            if state[part.name] is not None:
                part.drafter.unpack(state[part.name])

    @property
    def text_caches(self) -> list[KVCache]:
        return [cache for part in self.parts for cache in part.drafter.text_caches]

    @property
    def caches(self) -> list[KVCache]:
        return [cache for part in self.parts for cache in part.drafter.caches]

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        """While a part still reads a row's text the others draft for it."""
        for part in self.parts:
            ready = part.drafter.prepare(rows, gamma, budget)
            part.waiting = frozenset(
                index for index, count in enumerate(gamma) if count and not ready[index]
            )
        return gamma

    def catch_up(self, rows: Rows, gamma: list[int]) -> None:
        for part in self.parts:
            part.drafter.catch_up(
                rows,
                [0 if index in part.waiting else count for index, count in enumerate(gamma)],
            )

    def unread(self, rows: Rows) -> list[int]:
        return [
            sum(counts)
            for counts in zip(*(part.drafter.unread(rows) for part in self.parts), strict=True)
        ]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        phases = {
            number: Phase.at(len(row.tokens), thinks=False)
            for number, row in zip(self._numbers, rows, strict=True)
        }
        for part in self.parts:
            part.survival.begin_step(phases)
            part.choose_tries()
        turns = self._turns(gamma) if self._mode == "merge" else None
        drafts = self._merge(rows, gamma, turns) if turns else self._best(rows, gamma)
        for part in self.parts:
            part.waiting = frozenset()
            part.count_unused(self._numbers, gamma)
        self._merged = merge_drafts(drafts) if turns else _beside(drafts)
        if turns:
            self._merged.draft.budgets = self._budgets(turns, self._merged)
        self._merged.draft.parts = self._names(self._merged)
        self._proposed_at = time.perf_counter()
        return self._merged.draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        assert self._merged is not None, "commit without propose"
        self._pass_seconds = smoothed(self._pass_seconds, time.perf_counter() - self._proposed_at)
        for index, (path, num_kept) in enumerate(
            zip(verdict.lists.path, verdict.lists.num_accepted, strict=True)
        ):
            self._learn(index, path[:num_kept])
            emitted = [
                *(draft.lists[0][index][node] for node in path[:num_kept]),
                verdict.lists.next_token[index],
            ]
            for part in self.parts:
                part.learn(index, self._numbers[index], emitted)
        for part, nodes in zip(self.parts, self._merged.node_maps, strict=True):
            assert part.draft is not None, "commit without propose"
            verdict_of_part = part_verdict(part.draft, nodes, self._merged.draft, verdict)
            seen = (
                part_output(part.draft, nodes, output) if part.drafter.requires.logits else output
            )
            part.drafter.commit(rows, part.draft, verdict_of_part, seen)

    def _learn(self, index: int, kept: list[int]) -> None:
        """Credit each part for the nodes of one row's draft that no earlier part has as well."""
        assert self._merged is not None
        levels = self._merged.draft.levels[index]
        taken: set[int] = set()
        for part, nodes in zip(self.parts, self._merged.node_maps, strict=True):
            added = set(nodes[index]) - taken
            taken |= added
            if offered := len({levels[node + 1] for node in added}):
                num_kept = len(added & set(kept))
                part.survival.observe(self._numbers[index], offered, num_kept)

    def _names(self, merged: Merged) -> list[list[str]]:
        """The first part that has each node, the model before the others."""
        names = [[""] * length for length in merged.draft.lists[1]]
        for part, nodes in reversed(list(zip(self.parts, merged.node_maps, strict=True))):
            for line, row in zip(names, nodes, strict=True):
                for node in row:
                    line[node] = part.name
        return names

    # ---------------------------------------------------------------- who gets how many nodes

    def _merge(self, rows: Rows, gamma: list[int], turns: list[list[str]]) -> list[Draft]:
        """Every part drafts its share; the free ones first, so that what they leave over goes to
        the model."""
        spare = [0] * len(gamma)
        drafts: list[Draft] = []
        for part in reversed(self.parts):
            budget = [line.count(part.name) + more for line, more in zip(turns, spare, strict=True)]
            # a guess that is passed over can be measured, too
            min_nodes = [0 if part.is_model else min(count, 1) for count in gamma]
            asked = [
                max(part_budget, minimum)
                for part_budget, minimum in zip(budget, min_nodes, strict=True)
            ]
            part.submit(
                self._timed(part, rows, part.ready(asked)),
                [part_budget > 0 for part_budget in budget],
            )
            assert part.draft is not None
            drafts.append(part.draft)
            spare = [left - used for left, used in zip(budget, part.draft.lists[1], strict=True)]
        return drafts[::-1]

    def _turns(self, gamma: Sequence[int]) -> list[list[str]]:
        """Per row, whose turn it is with its first, second, ... node: of the part whose next token
        is likeliest to be kept."""
        turns: list[list[str]] = []
        for index, (number, budget) in enumerate(zip(self._numbers, gamma, strict=True)):
            ready = [part for part in self.parts if index not in part.waiting]
            if tried := [part for part in ready if number in part.tried]:
                ready = tried
            curves = {part.name: iter(part.worth(budget, number)) for part in ready}
            chances = {name: next(curve, 0.0) for name, curve in curves.items()}
            turns.append([])
            for _ in range(budget if ready else 0):
                name = max(chances, key=lambda name: chances[name])
                turns[-1].append(name)
                chances[name] = next(curves[name], 0.0)
        return turns

    def _budgets(self, turns: list[list[str]], merged: Merged) -> list[list[int] | None]:
        """See `Draft.budgets`: which turn brought each node, where a part that has no more leaves
        its turn to the next one. None for a row with a tree that would have another shape with
        fewer nodes."""
        names = [part.name for part in reversed(self.parts)]
        budgets: list[list[int] | None] = []
        for row, line in enumerate(turns):
            if any(part.is_reshaped(row) for part in self.parts):
                budgets.append(None)
                continue
            node_budgets = [len(line)] * merged.draft.num_nodes
            left = {
                part.name: iter(nodes[row])
                for part, nodes in zip(self.parts, merged.node_maps, strict=True)
            }
            for asked, name in enumerate(line, 1):
                heirs = (left[heir] for heir in names[names.index(name) :])
                node = next(
                    (node for nodes in heirs if (node := next(nodes, None)) is not None), None
                )
                if node is not None:
                    node_budgets[node] = min(node_budgets[node], asked)
            budgets.append(node_budgets)
        return budgets

    def _best(self, rows: Rows, gamma: list[int]) -> list[Draft]:
        """The free parts draft at once; of each row, only the draft of the part with the best rate
        stays."""
        offered = {
            part.name: self._timed(part, rows, part.ready(gamma))
            for part in self.parts
            if not part.is_model
        }
        budgets = {part.name: part.ready(gamma) for part in self.parts if part.is_model}
        chosen = [
            self._favourite(
                number,
                {
                    **{name: budget[index] for name, budget in budgets.items()},
                    **{name: depth(draft, index) for name, draft in offered.items()},
                },
            )
            for index, number in enumerate(self._numbers)
        ]
        drafts = []
        for part in self.parts:
            mine = [name == part.name for name in chosen]
            if part.is_model:
                costs = [
                    count * asked for count, asked in zip(budgets[part.name], mine, strict=True)
                ]
                offered[part.name] = self._timed(part, rows, costs)
            part.submit(offered[part.name], mine)
            assert part.draft is not None
            drafts.append(part.draft)
        return drafts

    def _favourite(self, number: int, offered: dict[str, int]) -> str:
        """The part that drafts for one row; `offered`: levels of a free part's draft, nodes that a
        model would be asked for."""
        rates = {}
        for part in self.parts:
            length = offered[part.name]
            if length and number in part.tried:
                return part.name
            rates[part.name] = self._rate(part, number, length)
        return max(rates, key=lambda name: rates[name])

    def _rate(self, part: Part, number: int, num_offered: int) -> float:
        """Expected tokens per second of this row if `part` drafts what it offers (`_favourite`)."""
        tokens = 1 + (
            sum(part.worth(num_offered, number))
            if part.is_model
            else part.survival.expected(num_offered, number)
        )
        if not any(part.is_model for part in self.parts):
            # nobody's drafts cost anything, so no clock decides: the same texts get the same drafts
            return tokens
        return tokens / (max(self._pass_seconds, 1e-9) + num_offered * part.seconds_per_token)

    def _timed(self, part: Part, rows: Rows, budget: list[int]) -> Draft:
        began = time.perf_counter()
        draft = proposed(part.drafter, rows, budget)
        longest = max(draft.lists[1])
        # a draft model then reads the prompt
        first_step = any(row.stats.steps == 0 for row in rows)
        if part.is_model and longest and not first_step:
            part.seconds_per_token = smoothed(
                part.seconds_per_token, (time.perf_counter() - began) / longest
            )
        return draft


def _is_model(kind: type[Drafter], settings: Any) -> bool:
    required = kind.requirements(settings)
    return required.head or required.draft or required.module


def _beside(drafts: Sequence[Draft]) -> Merged:
    """Drafts of which each row has one at most."""
    lengths = [draft.lists[1] for draft in drafts]
    owners = [
        max(range(len(drafts)), key=lambda part: counts[part])
        for counts in zip(*lengths, strict=True)
    ]
    return Merged(
        side_by_side(drafts, owners),
        [[list(range(count)) for count in counts] for counts in lengths],
    )
