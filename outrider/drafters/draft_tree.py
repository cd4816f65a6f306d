"""A draft model that drafts a tree: several guesses for the next token, several for the one after each, and so on.

One draft pass per level, over the nodes that have or get children, with the tree's own mask. The draft's cache stays at the
committed text while the tree grows; after the step the kept path is compacted from the last pass, like the target's.

How nodes are chosen depends on the row, because what is best depends on its temperature (docs/algorithms/trees.md):

    temperature below `sample_from`    deterministic: the likeliest tokens (greedy rows too)
    at or above it                     drawn without replacement (with, for parallel chains), the shape fixed beforehand
    drafter-invariant mode             deterministic: the winners of the target's own noise
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.base import DEFAULT_NUM_DRAFT_TOKENS, DraftSetup, lengths_for_any
from outrider.drafters.children import draw, likeliest, likeliest_scores, ranked_by_scores
from outrider.drafters.draft_model import ModelDrafter, draft_model_of
from outrider.errors import ConfigError
from outrider.models.lm import LM
from outrider.models.vocabulary import fit_width
from outrider.rows import Rows
from outrider.runtime.top_tokens import TopTokens
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.distribution import distribution
from outrider.trees.growth import Child, Growth, ShapeGrowth
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.types import Draft, TargetOutput, Verdict


@dataclass(frozen=True)
class DraftModelSettings(TreeSettings, ConfidenceSettings):
    """How guesses branch, and when a chain of them stops early."""

    def __post_init__(self) -> None:
        TreeSettings.__post_init__(self)
        ConfidenceSettings.__post_init__(self)
        if self.tree != "chain" and self.stop != "none":
            raise ConfigError(f"stop={self.stop} is for chains; tree '{self.tree}' is cut by its node budget and min_gain")


@dataclass
class _RowTree:
    """One row while its tree grows. Only nodes whose children are asked for are fed to the model, each from then on."""

    growth: Growth
    sampled: bool  # its nodes are drawn
    missing: list[int]  # committed tokens the draft's cache lacks; the last one is the pending token
    fed: list[int] = field(default_factory=list)  # nodes in the order they were first fed
    place: dict[int, int] = field(default_factory=dict)  # node -> its index in `fed`

    def feed(self) -> list[int]:
        """Take in the nodes of this level; where its wanted outputs stand among those of the fed nodes (0 = pending)."""
        for output, _ in self.growth.wanted():
            if output > 0:
                self.place[output - 1] = len(self.fed)
                self.fed.append(output - 1)
        return [self.fed_output(output) for output, _ in self.growth.wanted()]

    def fed_output(self, output: int) -> int:
        """A node's output as the model numbers it."""
        return 0 if output == 0 else 1 + self.place[output - 1]

    def fed_tokens(self) -> list[int]:
        return [self.growth.tokens[node] for node in self.fed]

    def fed_parents(self) -> list[int]:
        """The parent's index of every fed node; -1 = pending."""
        parents = (self.growth.parents[node] for node in self.fed)
        return [-1 if parent < 0 else self.place[parent] for parent in parents]


@dataclass
class _Level:
    """What the model says at one level."""

    first: int  # fed output that scores[:, 0] belongs to
    scores: Tensor  # (B, M, V'), of the model's own vocabulary
    law: Tensor | None  # (B, M, V); None where nothing is drawn from it and the scores rank the candidates
    outputs: list[list[int]]  # per row, the outputs it expands, in the growth's numbering
    fed: list[list[int]]  # the same in the model's


class TreeModelDrafter(ModelDrafter):
    """The registered "draft-model": chains unless the `tree` setting says otherwise."""

    shape = "chain or tree"
    Settings = DraftModelSettings

    @classmethod
    def drafts_trees(cls, settings: DraftModelSettings) -> bool:
        return settings.tree != "chain"

    @classmethod
    def default_num_draft_tokens(cls, settings: DraftModelSettings) -> int:
        return settings.default_num_nodes() if settings.tree != "chain" else DEFAULT_NUM_DRAFT_TOKENS

    @classmethod
    def loop_lengths(cls, settings: DraftModelSettings, most: int, *, any_length: bool) -> tuple[int, ...]:
        if settings.tree != "chain" or settings.stop != "none":
            return ()
        return lengths_for_any(most) if any_length else (most,)

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        lm, loop = draft_model_of(setup)
        settings: DraftModelSettings = setup.settings
        if not cls.drafts_trees(settings):
            return ModelDrafter(lm, loop, settings)
        return cls(lm, TreePlan(settings), TopTokens(lm.kernels))

    def __init__(self, lm: LM, plan: TreePlan, top_tokens: TopTokens | None = None) -> None:
        super().__init__(lm)
        self.plan, self._top_tokens = plan, top_tokens or TopTokens()
        self._trees: list[_RowTree] = []
        self._ranked: list[bool] = []  # of the rows in hand: see `ranked_by_scores`
        self._chosen: list[list[int]] = []  # per row: the growth's nodes that became the draft

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        budgets = self._within_context(rows, gamma)
        self._trees = []
        if max(budgets) == 0:
            return Draft.empty(len(rows), rows.device)
        self._idle = [many and not count for many, count in zip(self._lags(rows), budgets, strict=True)]
        pending = self._catch_up(rows)
        is_coupled = [False] * len(rows) if rows.coupled_rows is None else rows.coupled_rows.tolist()
        for row, budget, missing, coupled in zip(rows, budgets, pending, is_coupled, strict=True):
            sampled = self.plan.samples(row.params) and not coupled
            self._trees.append(_RowTree(self.plan.growth(budget, sampled=sampled), sampled, missing))
        self._ranked = ranked_by_scores(rows)
        levels: list[_Level] = []
        while any(tree.growth.wanted() for tree in self._trees):
            levels.append(self._next_level(rows))
            for tree, children in zip(self._trees, self._children(rows, levels[-1]), strict=True):
                if children:
                    tree.growth.add(children)
        return self._draft(rows, levels)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self.plan.observe(draft, verdict, [tree.growth for tree in self._trees])
        kv = self.lm.kv
        for index, (tree, row) in enumerate(zip(self._trees, rows, strict=bool(self._trees))):
            if self._idle[index]:
                continue
            path = verdict.lists.path[index][: verdict.lists.num_accepted[index]]
            nodes = [self._chosen[index][node] for node in path]
            kept = [tree.place[node] for node in nodes if node in tree.place]  # leaves were never fed
            kv.keep(index, [*range(len(tree.missing)), *(len(tree.missing) + place for place in kept)])
            kv.truncate(index, len(row.tokens) - 1)
        self._trees = []

    # ---------------------------------------------------------------- one level

    def _next_level(self, rows: Rows) -> _Level:
        """One pass of the draft model over all fed nodes, and the laws at those that are expanded now."""
        outputs = [[output for output, _ in tree.growth.wanted()] for tree in self._trees]
        fed = [tree.feed() for tree in self._trees]
        first, last = min(min(line) for line in fed if line), max(max(line) for line in fed if line)
        level = _Level(first, self._forward(first, last, rows.device), None, outputs, fed)
        if any(tree.sampled or not ranked for tree, ranked in zip(self._trees, self._ranked, strict=True)):
            level.law = self._level_law(rows, level)
        return level

    def _level_law(self, rows: Rows, level: _Level) -> Tensor:
        scores, so_far = fit_width(level.scores, rows.vocab_size), self._fed_draft(rows.device)
        return distribution(scores, rows.soft_sampling, rows.history, so_far, first_node=level.first, drafting=True)

    def _forward(self, first: int, last: int, device: torch.device) -> Tensor:
        """Logits (B, last - first + 1, V) after fed outputs first .. last of every row."""
        tokens = [tree.missing + tree.fed_tokens() for tree in self._trees]
        offsets = [len(tree.missing) - 1 for tree in self._trees]  # of the pending token, the last of the missing ones
        parents = [
            [*range(-1, offset - 1), *(parent + offset for parent in tree.fed_parents())]
            for tree, offset in zip(self._trees, offsets, strict=True)
        ]
        width = max(map(len, tokens))
        begin = min(offsets) + first
        columns = torch.arange(begin, width, device=device)
        logits = self.lm.forward(_table(tokens, width, 0, device), _table(parents, width - 1, -1, device), columns)
        if min(offsets) == max(offsets):  # one text alone, mostly: nothing to line up
            return logits[:, : last - first + 1]
        columns = torch.tensor(offsets, device=device)[:, None] + torch.arange(first, last + 1, device=device) - begin
        return logits[torch.arange(len(tokens), device=device)[:, None], columns.clamp(max=width - begin - 1)]

    def _fed_draft(self, device: torch.device) -> Draft:
        """The fed nodes as a draft: for penalties and positions along each path."""
        width = max(len(tree.fed) for tree in self._trees)
        return Draft(
            tokens=_table([tree.fed_tokens() for tree in self._trees], width, 0, device),
            lengths=torch.tensor([len(tree.fed) for tree in self._trees], device=device),
            parents=_table([tree.fed_parents() for tree in self._trees], width, -1, device),
        )

    def _children(self, rows: Rows, level: _Level) -> list[list[list[Child]]]:
        """Per row, per wanted output, its children."""
        counts = [[count for _, count in tree.growth.wanted()] for tree in self._trees]
        places = [[output - level.first for output in fed] for fed in level.fed]
        by_scores = [ranked and not tree.sampled for tree, ranked in zip(self._trees, self._ranked, strict=True)]
        own = [[line if mine else [] for line, mine in zip(each, by_scores, strict=True)] for each in (places, counts)]
        placed = likeliest_scores(self._top_tokens, rows, level.scores, *own)
        if placed is not None and level.law is None:
            return placed
        law = self._level_law(rows, level) if level.law is None else level.law  # which says what is wrong with the scores
        scores = law if rows.coupled_rows is None else self._raced(rows, law, level.first)
        found: list[list[list[Child]]] = []
        for index, tree in enumerate(self._trees):
            if tree.sampled or not counts[index]:
                found.append([[] for _ in counts[index]])
            elif by_scores[index] and placed is not None:
                found.append(placed[index])
            else:
                found.append(likeliest(scores[index, places[index]], counts[index]))
        self._draw(rows, law, places, found)
        return found

    def _raced(self, rows: Rows, law: Tensor, first: int) -> Tensor:
        """The laws (B, M, V) with those of coupled rows as the target's own noise ranks their tokens."""
        assert rows.coupled_rows is not None
        coupled, scores = rows.coupled_rows.nonzero()[:, 0], law.to(torch.float64, copy=True)
        depths = self._fed_draft(rows.device).depths()[coupled, first : first + scores.shape[1]]
        places = rows.positions[coupled, None] + depths
        noise = rows.rng.select(coupled.tolist()).gumbel(places, scores.shape[2])
        scores[coupled] = (scores[coupled].log() + noise).softmax(-1)
        return scores

    def _draw(self, rows: Rows, law: Tensor, places: list[list[int]], found: list[list[list[Child]]]) -> None:
        """Fill in the children of sampled rows, one draw for all rows at a time, each keyed by its node's number."""
        turns: list[list[tuple[int, int]]] = []  # per row, per child: (which wanted output, its place in the law)
        for tree, own in zip(self._trees, places, strict=True):
            wanted = zip(tree.growth.wanted(), own, strict=True) if tree.sampled else ()
            turns.append([(i, place) for i, ((_, count), place) in enumerate(wanted) for _ in range(count)])
        counts = [len(tree.growth.tokens) for tree in self._trees]
        draw(rows, law, turns, counts, found, replacement=self.plan.replacement)

    # ---------------------------------------------------------------- the finished tree

    def _draft(self, rows: Rows, levels: list[_Level]) -> Draft:
        """The grown trees as one draft; laws are handed over only where something was drawn."""
        self._chosen = [tree.growth.finish() for tree in self._trees]
        lines = [_finished(tree.growth, nodes) for tree, nodes in zip(self._trees, self._chosen, strict=True)]
        width, device = max(map(len, self._chosen)), rows.device
        draft = Draft(
            _table([tokens for tokens, _, _ in lines], width, 0, device),
            torch.tensor([len(nodes) for nodes in self._chosen], device=device),
            _table([parents for _, parents, _ in lines], width, -1, device),
            replacement=self.plan.replacement,
        )
        if any(any(drawn) for _, _, drawn in lines):
            draft.sampled = _table([drawn for _, _, drawn in lines], width, 0, device).bool()
            draft.probs = _laws_of_children(levels, width)
        return draft


def _finished(growth: Growth, nodes: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A grown tree's chosen nodes: tokens, parents numbered among them, whether they were drawn."""
    number = {-1: -1} | {node: new for new, node in enumerate(nodes)}
    drawn = growth.drawn if isinstance(growth, ShapeGrowth) else [False] * len(growth.tokens)
    return [growth.tokens[n] for n in nodes], [number[growth.parents[n]] for n in nodes], [int(drawn[n]) for n in nodes]


def _table(lines: list[list[int]], width: int, fill: int, device: torch.device) -> Tensor:
    """(B, width) int64."""
    padded = [line + [fill] * (width - len(line)) for line in lines]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(lines), width)


def _laws_of_children(levels: list[_Level], width: int) -> Tensor:
    """(B, N+1, V): the law that the children of every output were chosen from; zero where there are none."""
    like = levels[0].law
    assert like is not None, "laws of what was drawn"
    probs = like.new_zeros(like.shape[0], width + 1, like.shape[2])
    for level in levels:
        assert level.law is not None
        for index, (outputs, fed) in enumerate(zip(level.outputs, level.fed, strict=True)):
            for output, place in zip(outputs, fed, strict=True):
                if output <= width:  # a drawn tree is what grew; of a best-first one, no law is needed
                    probs[index, output] = level.law[index, place - level.first]
    return probs

