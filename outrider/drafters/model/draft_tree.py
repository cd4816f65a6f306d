"""A draft model that drafts a tree: several guesses for the next token, several for the one after
each, and so on.

One draft pass per level, over the nodes that have or get children, with the tree's own mask. The
draft's cache stays at the committed text while the tree grows; after the step the kept path is
compacted from the last pass, like the target's. Where no row's nodes are drawn and scores rank
them, the native runtime grows best-first trees in one call (`runtime/growing.py`).

How nodes are chosen depends on the row, because what is best depends on its temperature
(docs/algorithms/trees.md):

    temperature below `sample_from`    deterministic: the likeliest tokens (greedy rows too)
    at or above it                     drawn without replacement (with, for parallel chains), the shape fixed beforehand
    drafter-invariant mode             deterministic: the winners of the target's own noise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.children import (
    draw,
    likeliest,
    likeliest_scores,
    raced,
    raced_scores,
    ranked_by_scores,
)
from outrider.drafters.grown import RowTree, TreeLevel, drawn_rows, finished, row_trees, table
from outrider.drafters.model.draft_model import ModelDrafter, draft_model_of
from outrider.drafters.parallel import draft_tree
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS, Requirements
from outrider.drafters.window import Window, check_window
from outrider.errors import ConfigError
from outrider.kv.state_slots import StateSlots
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import fit_width
from outrider.rows import Rows
from outrider.runtime.growing import GrownTrees, ModelTrees, TreeLimits
from outrider.runtime.run import NativeRun
from outrider.runtime.top_tokens import TopTokens
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.distribution import distribution
from outrider.settings import checked, setting
from outrider.trees.growth import Child, Growth
from outrider.trees.paying import paying
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.types import Draft, TargetOutput, Verdict


@checked()
@dataclass(frozen=True)
class DraftModelSettings(TreeSettings, ConfidenceSettings):
    """How guesses branch, when a chain of them stops early, and how far the draft sees back."""

    window: Window = setting(
        0,
        "last tokens that the draft sees, which then drafts in texts longer than it knows: a number, "
        "auto (as many as it was trained on), or 0 (all)",
    )

    def __post_init__(self) -> None:
        check_window(self.window)
        TreeSettings.__post_init__(self)
        ConfidenceSettings.__post_init__(self)
        if self.tree != "chain" and self.stop != "none":
            raise ConfigError(
                f"stop={self.stop} is for chains; tree '{self.tree}' is cut by its node budget "
                "and min_gain"
            )


@dataclass
class _RowTree(RowTree):
    """One row while its tree grows. Only nodes whose children are asked for are fed to the model,
    each from then on."""

    # committed tokens the draft's cache lacks; the last one is the pending token
    missing: list[int]
    fed: list[int] = field(default_factory=list)  # nodes in the order they were first fed
    fed_index: dict[int, int] = field(default_factory=dict)  # node -> its index in `fed`

    def feed(self) -> list[int]:
        """Take in the nodes of this level; where its wanted outputs stand among those of the fed
        nodes (0 = pending)."""
        for output, _ in self.growth.wanted():
            if output > 0:
                self.fed_index[output - 1] = len(self.fed)
                self.fed.append(output - 1)
        return [self.fed_output(output) for output, _ in self.growth.wanted()]

    def fed_output(self, output: int) -> int:
        """A node's output as the model numbers it."""
        return 0 if output == 0 else 1 + self.fed_index[output - 1]

    def fed_tokens(self) -> list[int]:
        return [self.growth.tokens[node] for node in self.fed]

    def fed_parents(self) -> list[int]:
        """The parent's index of every fed node; -1 = pending."""
        parents = (self.growth.parents[node] for node in self.fed)
        return [-1 if parent < 0 else self.fed_index[parent] for parent in parents]


class Trees(Protocol):
    """Whole best-first trees for a batch, in one call."""

    def grow(
        self, rows: Rows, pending: Sequence[list[int]], limits: TreeLimits, budgets: Sequence[int]
    ) -> GrownTrees | None:
        """Trees of budgets[b] nodes at most, after rows whose caches lack `pending`; commits
        nothing. None where scores are no numbers."""


class TreeModelDrafter(ModelDrafter):
    """The registered "draft-model": chains unless the `tree` setting says otherwise."""

    shape = "chain or tree"
    Settings = DraftModelSettings

    @classmethod
    def requirements(cls, settings: DraftModelSettings) -> Requirements:
        required = super().requirements(settings)
        is_tree = settings.tree != "chain"
        nodes = settings.default_num_nodes() if is_tree else DEFAULT_NUM_DRAFT_TOKENS
        loop = not is_tree and settings.stop == "none"
        return replace(
            required, trees=is_tree, num_draft_tokens=nodes, loop=loop and not required.head
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        settings: DraftModelSettings = setup.settings
        lm, loop, mask_token, notes = draft_model_of(setup, settings.window)
        drafter: ModelDrafter
        if settings.tree == "chain":
            drafter = ModelDrafter(lm, loop, settings, mask_token)
        elif mask_token is not None:
            drafter = MaskedTrees(lm, TreePlan(settings), mask_token)
        else:
            drafter = cls(lm, TreePlan(settings), TopTokens(lm.kernels), _trees_of(lm))
        drafter.loading_notes = notes
        return drafter

    def __init__(
        self,
        lm: LM,
        plan: TreePlan,
        top_tokens: TopTokens | None = None,
        whole_trees: Trees | None = None,
    ) -> None:
        super().__init__(lm)
        self.plan = plan
        self._top_tokens = top_tokens or TopTokens()
        self._whole_trees = whole_trees
        self._trees: list[_RowTree] = []  # empty where they grew in one call
        self._ranked: list[bool] = []  # of the rows in hand: see `ranked_by_scores`
        self._num_missing: list[int] = []  # per row: committed tokens that the open proposal fed
        # per row, of every node of the draft: which of the nodes fed it is; -1: it was not
        self._fed_nodes: list[list[int]] = []

    @property
    def prefers_shared_noise(self) -> bool:
        # drawn trees grow level by level
        return self._whole_trees is not None and self.plan.grows_best_first

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        budgets = self._within_context(rows, gamma)
        self._trees = []
        self._fed_nodes = []
        self._num_missing = []
        if max(budgets) == 0:
            return Draft.empty(len(rows), rows.device)
        self._idle = self._passed_over(rows, budgets)
        pending = self._catch_up(rows)
        self._num_missing = list(map(len, pending))
        self._ranked = ranked_by_scores(rows)
        drafted = self._grown(rows, pending, budgets)
        return self._by_levels(rows, pending, budgets) if drafted is None else drafted

    def _grown(self, rows: Rows, pending: list[list[int]], budgets: list[int]) -> Draft | None:
        """The draft from one call; None where it takes several."""
        settings = self.plan.settings
        if self._whole_trees is None or not self.plan.grows_best_first:
            return None
        if not all(self._ranked) or any(drawn_rows(rows, self.plan)):
            return None
        limits = TreeLimits(settings.top_k, settings.max_depth, settings.min_gain)
        grown = self._whole_trees.grow(rows, pending, limits, budgets)
        if grown is None:  # the path level by level names the row
            return None
        if rows.prices:
            lengths = grown.lengths.tolist()
            values = zip(grown.values, lengths, strict=True)
            grown = grown.only([paying(each[:count], rows.prices) for each, count in values])
        self._fed_nodes = grown.fed
        return Draft(grown.tokens, grown.lengths, grown.parents)

    def _by_levels(self, rows: Rows, pending: list[list[int]], budgets: list[int]) -> Draft:
        begun = zip(row_trees(rows, budgets, self.plan), pending, strict=True)
        self._trees = [_RowTree(tree.growth, tree.sampled, missing) for tree, missing in begun]
        levels: list[TreeLevel] = []
        while any(tree.growth.wanted() for tree in self._trees):
            level, scores, first = self._next_level(rows)
            for tree, children in zip(
                self._trees, self._children(rows, level, scores, first), strict=True
            ):
                if children:
                    tree.growth.add(children)
            levels.append(level)
        draft, chosen = finished(
            [tree.growth for tree in self._trees], levels, self.plan, rows.device
        )
        pairs = zip(self._trees, chosen, strict=True)
        self._fed_nodes = [
            [tree.fed_index.get(node, -1) for node in nodes] for tree, nodes in pairs
        ]
        return draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self.plan.observe(draft, verdict, [tree.growth for tree in self._trees])
        kv = self.lm.kv
        for index, (missing, fed, row) in enumerate(
            zip(self._num_missing, self._fed_nodes, rows, strict=bool(self._fed_nodes))
        ):
            if self._idle[index]:
                continue
            path = verdict.lists.path[index][: verdict.lists.num_accepted[index]]
            fed_path = [fed[node] for node in path if fed[node] >= 0]  # leaves were never fed
            kv.keep(index, [*range(missing), *(missing + offset for offset in fed_path)])
            kv.truncate(index, len(row.tokens) - 1)
        self._trees = []
        self._fed_nodes = []
        self._num_missing = []

    # ---------------------------------------------------------------- the model's vocabulary

    @property
    def known(self) -> Tensor | None:
        """(V',) int64: the target's id of every token that the model scores; None: they are the
        same."""
        return None

    def _logits(self, tokens: Tensor, parents: Tensor, columns: Tensor) -> Tensor:
        """Scores (B, K, V') after these columns of a pass."""
        return self.lm.forward(tokens, parents, columns).logits

    def _in_full(self, scores: Tensor) -> Tensor:
        """(B, K, V') over the ids of the target."""
        return scores

    # ---------------------------------------------------------------- one level

    def _next_level(self, rows: Rows) -> tuple[TreeLevel, Tensor, int]:
        """One pass of the draft model over all fed nodes, and the distributions at those that are
        expanded now: the level, scores (B, M, V') of the model's own vocabulary, and the fed output
        that scores[:, 0] belongs to."""
        outputs = [[output for output, _ in tree.growth.wanted()] for tree in self._trees]
        fed = [tree.feed() for tree in self._trees]
        first = min(min(line) for line in fed if line)
        last = max(max(line) for line in fed if line)
        scores = self._forward(first, last, rows.device)
        level = TreeLevel(None, outputs, [[output - first for output in line] for line in fed])
        if any(
            tree.sampled or not ranked
            for tree, ranked in zip(self._trees, self._ranked, strict=True)
        ):
            level.probs = self._level_probs(rows, scores, first)
        return level, scores, first

    def _level_probs(self, rows: Rows, scores: Tensor, first: int) -> Tensor:
        fitted = fit_width(self._in_full(scores), rows.vocab_size)
        so_far = self._fed_draft(rows.device)
        return distribution(
            fitted, rows.soft_sampling, rows.history, so_far, first_node=first, drafting=True
        )

    def _forward(self, first: int, last: int, device: torch.device) -> Tensor:
        """Logits (B, last - first + 1, V) after fed outputs first .. last of every row."""
        tokens = [tree.missing + tree.fed_tokens() for tree in self._trees]
        # of the pending token, the last of the missing ones
        offsets = [len(tree.missing) - 1 for tree in self._trees]
        parents = [
            [*range(-1, offset - 1), *(parent + offset for parent in tree.fed_parents())]
            for tree, offset in zip(self._trees, offsets, strict=True)
        ]
        width = max(map(len, tokens))
        begin = min(offsets) + first
        columns = torch.arange(begin, width, device=device)
        logits = self._logits(
            table(tokens, width, 0, device), table(parents, width - 1, -1, device), columns
        )
        if min(offsets) == max(offsets):  # one text alone, mostly: nothing to line up
            return logits[:, : last - first + 1]
        columns = (
            torch.tensor(offsets, device=device)[:, None]
            + torch.arange(first, last + 1, device=device)
            - begin
        )
        return logits[
            torch.arange(len(tokens), device=device)[:, None], columns.clamp(max=width - begin - 1)
        ]

    def _fed_draft(self, device: torch.device) -> Draft:
        """The fed nodes as a draft: for penalties and positions along each path."""
        width = max(len(tree.fed) for tree in self._trees)
        return Draft(
            tokens=table([tree.fed_tokens() for tree in self._trees], width, 0, device),
            lengths=torch.tensor([len(tree.fed) for tree in self._trees], device=device),
            parents=table([tree.fed_parents() for tree in self._trees], width, -1, device),
        )

    def _children(
        self, rows: Rows, level: TreeLevel, scores: Tensor, first: int
    ) -> list[list[list[Child]]]:
        """Per row, per wanted output, its children."""
        counts = [[count for _, count in tree.growth.wanted()] for tree in self._trees]
        columns = level.columns
        by_scores = [
            ranked and not tree.sampled
            for tree, ranked in zip(self._trees, self._ranked, strict=True)
        ]
        row_scores, sizes = (
            [line if mine else [] for line, mine in zip(each, by_scores, strict=True)]
            for each in (columns, counts)
        )
        depths = (
            None
            if rows.coupled_rows is None
            else self._fed_draft(rows.device).depths()[:, first : first + scores.shape[1]]
        )
        ranking = (
            scores if depths is None else raced_scores(rows, scores, row_scores, depths, self.known)
        )
        placed = likeliest_scores(self._top_tokens, rows, ranking, row_scores, sizes, self.known)
        if placed is not None and level.probs is None:
            return placed
        # `_level_probs` names the row whose scores are no numbers
        probs = self._level_probs(rows, scores, first) if level.probs is None else level.probs
        ranks = probs if depths is None else raced(rows, probs, depths)
        children: list[list[list[Child]]] = []
        for index, tree in enumerate(self._trees):
            if tree.sampled or not counts[index]:
                children.append([[] for _ in counts[index]])
            elif by_scores[index] and placed is not None:
                children.append(placed[index])
            else:
                children.append(likeliest(ranks[index, columns[index]], counts[index]))
        draw(rows, probs, self._trees, columns, children, replacement=self.plan.replacement)
        return children


class MaskedTrees(ModelDrafter):
    """Trees from the one pass of a model with a mask token: all children of a level are drawn from
    one distribution, whatever their parents."""

    shape = "chain or tree"

    def __init__(self, lm: LM, plan: TreePlan, mask_token: int) -> None:
        super().__init__(lm, mask_token=mask_token)
        self.plan = plan
        self._growths: list[Growth] = []  # of every row's tree, until it is judged

    def _propose_stepwise(self, rows: Rows, pending: list[list[int]], wanted: list[int]) -> Draft:
        settings = self.plan.settings
        levels = max(wanted)
        if settings.tree in ("best-first", "sequoia"):
            levels = min(levels, settings.max_depth)
        draft, self._growths = draft_tree(rows, wanted, self._guesses(pending, levels), self.plan)
        return draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self._close(verdict, draft)
        super().commit(rows, draft, verdict, output)

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        """The open proposal is judged."""
        self.plan.observe(draft, verdict, self._growths)
        self._growths = []


def _trees_of(lm: LM) -> Trees | None:
    """Whole trees of a draft model on the native runtime; None where they grow level by level."""
    return (
        ModelTrees(lm, lm.run)
        if isinstance(lm.run, NativeRun) and not isinstance(lm.kv, StateSlots)
        else None
    )
