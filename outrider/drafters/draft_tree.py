"""A draft model that drafts a tree: several guesses for the next token, several for the one after each, and so on.

One draft pass per level, over all nodes so far, with the tree's own mask. The draft's cache stays at the committed text
while the tree grows; after the step the kept path is compacted from the last pass, like the target's.

How nodes are chosen depends on the row, because what is best depends on its temperature (docs/algorithms/trees.md):

    temperature below `sample_from`    deterministic: the likeliest tokens (greedy rows too)
    at or above it                     drawn without replacement (with, for parallel chains), the shape fixed beforehand
    drafter-invariant mode             deterministic: the winners of the target's own noise
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import DEFAULT_NUM_DRAFT_TOKENS, DraftSetup
from outrider.drafters.draft_model import ModelDrafter, draft_model_of
from outrider.errors import ConfigError
from outrider.models.lm import LM
from outrider.models.vocabulary import fit_width
from outrider.rows import Rows
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.distribution import distribution
from outrider.sampling.rng import Purpose
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
    """One row while its tree grows."""

    growth: Growth
    sampled: bool  # its nodes are drawn
    missing: list[int]  # committed tokens the draft's cache lacks; the last one is the pending token
    fed: int = 0  # nodes of the tree that the last pass went over


@dataclass
class _Level:
    """The laws of one level, over the outputs that some row expands."""

    first: int  # output that law[:, 0] belongs to
    law: Tensor  # (B, M, V)
    outputs: list[list[int]]  # per row, those it expands


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
    def loop_tokens(cls, settings: DraftModelSettings, most: int, *, any_length: bool) -> int:
        if settings.tree != "chain" or settings.stop != "none":
            return 0
        return 1 if any_length else most

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        lm, loop = draft_model_of(setup)
        settings: DraftModelSettings = setup.settings
        return cls(lm, TreePlan(settings)) if cls.drafts_trees(settings) else ModelDrafter(lm, loop, settings)

    def __init__(self, lm: LM, plan: TreePlan) -> None:
        super().__init__(lm)
        self.plan = plan
        self._trees: list[_RowTree] = []
        self._fed_nodes: list[dict[int, int]] = []  # per row: node of the draft -> its place in the last pass

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        context = self.lm.shape.context_length
        budgets = [max(0, min(g, context - len(row.tokens))) for g, row in zip(gamma, rows, strict=True)]
        self._trees = []
        if max(budgets) == 0:
            return Draft.empty(len(rows), rows.device)
        pending = self._catch_up(rows)
        for row, budget, missing in zip(rows, budgets, pending, strict=True):
            sampled = self.plan.samples(row.params) and not rows.coupled
            self._trees.append(_RowTree(self.plan.growth(budget, sampled=sampled), sampled, missing))
        levels: list[_Level] = []
        while any(tree.growth.wanted() for tree in self._trees):
            first, law = self._level_laws(rows)
            levels.append(_Level(first, law, [[output for output, _ in tree.growth.wanted()] for tree in self._trees]))
            children = self._children(rows, first, law)
            for tree, found in zip(self._trees, children, strict=True):
                if found:
                    tree.growth.add(found)
        return self._draft(rows, levels)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self.plan.observe(draft, verdict)
        kv = self.lm.kv
        for index, (tree, row) in enumerate(zip(self._trees, rows, strict=bool(self._trees))):
            nodes, place = verdict.lists.path[index][: verdict.lists.num_accepted[index]], self._fed_nodes[index]
            kept = [place[node] for node in nodes if place[node] < tree.fed]  # the last level was never fed
            num_missing = len(tree.missing)
            kv.keep(index, [*range(num_missing), *(num_missing + node for node in kept)])
            kv.truncate(index, len(row.tokens) - 1)
        self._trees = []

    # ---------------------------------------------------------------- one level

    def _level_laws(self, rows: Rows) -> tuple[int, Tensor]:
        """(first output, laws (B, M, V)) of the outputs that some row wants children for, from one pass over everything."""
        wanted = [[output for output, _ in tree.growth.wanted()] for tree in self._trees]
        first = min(output for outputs in wanted for output in outputs)
        last = max(output for outputs in wanted for output in outputs)
        logits = self._forward(first, last, rows.device)
        draft = self._so_far(rows.device)
        sampling = rows.soft_sampling
        law = distribution(fit_width(logits, rows.vocab_size), sampling, rows.history, draft, first_node=first)
        return first, law

    def _forward(self, first: int, last: int, device: torch.device) -> Tensor:
        """Logits (B, last - first + 1, V) after outputs first .. last of every row; one pass of the draft model."""
        tokens = [tree.missing + tree.growth.tokens for tree in self._trees]
        parents = []
        for tree in self._trees:
            offset = len(tree.missing) - 1  # the pending token is the last of the missing ones
            chain = list(range(-1, offset - 1))
            parents.append(chain + [parent + offset for parent in tree.growth.parents])
            tree.fed = len(tree.growth.tokens)
        width = max(map(len, tokens))
        logits = self.lm.forward(
            torch.tensor([line + [0] * (width - len(line)) for line in tokens], device=device),
            torch.tensor([line + [-1] * (width - 1 - len(line)) for line in parents], dtype=torch.int64, device=device),
        )
        offsets = torch.tensor([len(tree.missing) - 1 for tree in self._trees], device=device)
        columns = offsets[:, None] + torch.arange(first, last + 1, device=device)
        return logits[torch.arange(len(tokens), device=device)[:, None], columns.clamp(max=width - 1)]

    def _so_far(self, device: torch.device) -> Draft:
        """What has grown, as a draft: for penalties along each path."""
        width = max(len(tree.growth.tokens) for tree in self._trees)
        tokens = [tree.growth.tokens + [0] * (width - len(tree.growth.tokens)) for tree in self._trees]
        parents = [tree.growth.parents + [-1] * (width - len(tree.growth.parents)) for tree in self._trees]
        return Draft(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device).view(len(tokens), width),
            lengths=torch.tensor([len(tree.growth.tokens) for tree in self._trees], device=device),
            parents=torch.tensor(parents, dtype=torch.int64, device=device).view(len(tokens), width),
        )

    def _children(self, rows: Rows, first: int, law: Tensor) -> list[list[list[Child]]]:
        """Per row, per wanted output, its children."""
        scores = law
        if rows.coupled:
            depths = self._so_far(rows.device).depths()[:, first : first + law.shape[1]]
            scores = (law.log() + rows.rng.gumbel(rows.positions[:, None] + depths, law.shape[2])).softmax(-1)
        found: list[list[list[Child]]] = []
        for index, tree in enumerate(self._trees):
            if tree.sampled:
                found.append([[] for _ in tree.growth.wanted()])
                continue
            found.append([_likeliest(scores[index, output - first], count) for output, count in tree.growth.wanted()])
        self._draw(rows, first, law, found)
        return found

    def _draw(self, rows: Rows, first: int, law: Tensor, found: list[list[list[Child]]]) -> None:
        """Fill in the children of sampled rows, one draw for all rows at a time, each keyed by its node's number."""
        turns = [
            [(place, output) for place, (output, count) in enumerate(tree.growth.wanted()) for _ in range(count)]
            if tree.sampled
            else []
            for tree in self._trees
        ]
        rest = law.clone() if any(turns) else law
        nobody = torch.ones_like(law[0, 0])
        for turn in range(max(map(len, turns))):
            weights, offsets = [], []
            for index, (tree, mine) in enumerate(zip(self._trees, turns, strict=True)):
                weights.append(rest[index, mine[turn][1] - first] if turn < len(mine) else nobody)
                offsets.append(len(tree.growth.tokens) + turn)
            stacked = torch.stack(weights)
            possible = stacked.sum(dim=-1) > 0
            stacked = torch.where(possible[:, None], stacked, nobody)
            drawn = rows.rng.categorical(stacked, Purpose.DRAFT, rows.positions, offsets).tolist()
            for index, (mine, token) in enumerate(zip(turns, drawn, strict=True)):
                if turn < len(mine):
                    place, output = mine[turn]
                    # nothing left to draw from: a guess that is known to be wrong keeps the shape
                    found[index][place].append(Child(token, 0.0, drawn=bool(possible[index])))
                    if not self.plan.replacement:
                        rest[index, output - first, token] = 0

    # ---------------------------------------------------------------- the finished tree

    def _draft(self, rows: Rows, levels: list[_Level]) -> Draft:
        """The grown trees as one draft; laws are handed over only where something was drawn."""
        chosen = [tree.growth.finish() for tree in self._trees]
        self._fed_nodes = [dict(enumerate(nodes)) for nodes in chosen]
        width, device = max(map(len, chosen)), rows.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        parents = torch.full_like(tokens, -1)
        sampled = torch.zeros_like(tokens, dtype=torch.bool)
        for index, (tree, nodes) in enumerate(zip(self._trees, chosen, strict=True)):
            number = {-1: -1} | {node: new for new, node in enumerate(nodes)}
            growth = tree.growth
            for new, node in enumerate(nodes):
                tokens[index, new], parents[index, new] = growth.tokens[node], number[growth.parents[node]]
                sampled[index, new] = isinstance(growth, ShapeGrowth) and growth.drawn[node]
        lengths = torch.tensor([len(nodes) for nodes in chosen], device=device)
        draft = Draft(tokens, lengths, parents, replacement=self.plan.replacement)
        if bool(sampled.any()):
            draft.sampled, draft.probs = sampled, _laws_of_children(levels, width)
        return draft


def _laws_of_children(levels: list[_Level], width: int) -> Tensor:
    """(B, N+1, V): the law that the children of every output were chosen from; zero where there are none."""
    like = levels[0].law
    probs = like.new_zeros(like.shape[0], width + 1, like.shape[2])
    for level in levels:
        for index, outputs in enumerate(level.outputs):
            inside = torch.tensor([output for output in outputs if output <= width], dtype=torch.int64, device=like.device)
            probs[index, inside] = level.law[index, inside - level.first]
    return probs


def _likeliest(law: Tensor, count: int) -> list[Child]:
    """The `count` likeliest tokens of a law (V,), likeliest first."""
    top = law.topk(min(count, law.shape[0]))
    return [Child(token, prob) for token, prob in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
