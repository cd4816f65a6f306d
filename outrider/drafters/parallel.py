"""Chains of any drafter that gives logits token by token, and trees of one whose every level is
there at once.

Medusa heads, block heads and mask tokens differ in where their logits come from. Once they are there, level d's
distribution depends on nothing of the draft but, with a Markov head, the tokens before
(`Guesses.logits`); so chains and trees of any shape cost no further pass. Drawn tokens are drawn
from exactly these distributions, under the row's sampling options, and the distributions travel
along as `Draft.probs`.

Trees follow the same rule as a draft model's (`draft_tree.py`): drawn nodes get a shape that is
fixed beforehand, since choosing among drawn nodes would bias the output; placed ones may go where
the distributions say that acceptance is likeliest.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.children import draw, likeliest, raced
from outrider.drafters.choice import choose, chosen_chain
from outrider.drafters.grown import RowTree, TreeLevel, as_draft, finished, row_trees
from outrider.models.tokens.vocabulary import fit_width
from outrider.rows import Rows
from outrider.sampling.confidence import StopRule
from outrider.sampling.distribution import distribution
from outrider.trees.growth import Child, Growth
from outrider.trees.plan import TreePlan
from outrider.types import Draft


class Guesses(Protocol):
    """A head's predictions for the next `num_levels` tokens of B rows."""

    num_levels: int

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        """(B, M, V): of the token after each of `parents` (B, M), tokens of the level above (level
        0: the pending token).

        `origins` (B, M): after which of the last level's parents each of them stands. Levels are
        asked for in order.
        """


class LevelGuesses:
    """One distribution per level, whatever the tokens before it."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits  # (B, levels, V)
        self.num_levels = logits.shape[1]

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        """See `Guesses`."""
        return self._logits[:, level, None].expand(-1, parents.shape[1], -1)


class Stop(Protocol):
    """When a chain ends early: sees distributions and earlier tokens, never the token it decides
    about (non-anticipation)."""

    going: Tensor  # (B,) bool: rows that are still drafting
    needs_probs: bool  # False: it looks at no distributions and is given logits instead

    def before(self, node: int, probs: Tensor, previous: Tensor) -> None:
        """Token `node` would be drawn from `probs` (B, V), after token `previous` (B,)."""

    def after(self, probs: Tensor, token: Tensor) -> None:
        """It was, and is `token` (B,)."""


class DistributionStop:
    """The stop rules of `sampling/confidence.py`, which look at distributions alone."""

    needs_probs = True

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self.going = rule.going

    def before(self, node: int, probs: Tensor, previous: Tensor) -> None:
        self._rule.before(probs)

    def after(self, probs: Tensor, token: Tensor) -> None:
        self._rule.after(probs, token)


# ---------------------------------------------------------------- chains


def draft_chain(rows: Rows, wanted: list[int], guesses: Guesses, stop: Stop | None = None) -> Draft:
    """One chain a row, of at most wanted[b] tokens."""
    lengths = torch.tensor(wanted, device=rows.device).clamp(max=guesses.num_levels)
    steps = int(lengths.max())
    plain = rows.sampling.is_plain_greedy
    start = rows.positions
    previous = torch.tensor([row.tokens[-1] for row in rows], device=rows.device)
    alone = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
    tokens: list[Tensor] = []  # each (B,)
    node_probs: list[Tensor] = []  # each (B, V)
    for node in range(steps):
        logits = fit_width(guesses.logits(node, previous[:, None], alone), rows.vocab_size)
        so_far = Draft(torch.stack(tokens, 1), lengths.clamp(max=node)) if tokens else None
        if stop is not None:
            soft = logits[:, 0]
            if stop.needs_probs:
                soft = distribution(
                    logits, rows.soft_sampling, rows.history, so_far, first_node=node, drafting=True
                )[:, 0]
            stop.before(node, soft, previous)
            lengths = torch.where(stop.going, lengths, lengths.clamp(max=node))
            if not bool((lengths > node).any()):
                break
        if plain:
            tokens.append(logits[:, 0].argmax(dim=-1))
        else:
            node_probs.append(
                distribution(
                    logits, rows.sampling, rows.history, so_far, first_node=node, drafting=True
                )[:, 0]
            )
            tokens.append(choose(node_probs[-1], rows, start, node))
        previous = tokens[-1]
        if stop is not None:
            stop.after(soft, previous)
            lengths = torch.where(stop.going, lengths, lengths.clamp(max=node + 1))
            if not bool((lengths > node + 1).any()):  # before another pass
                break
    if not tokens:
        return Draft.empty(len(rows), rows.device)
    return (
        Draft(torch.stack(tokens, dim=1), lengths)
        if plain
        else chosen_chain(tokens, node_probs, lengths, rows)
    )


# ---------------------------------------------------------------- trees


def draft_tree(
    rows: Rows, budgets: list[int], guesses: Guesses, plan: TreePlan
) -> tuple[Draft, list[Growth]]:
    """One tree a row, of at most budgets[b] nodes, and how each grew, for `plan.observe`."""
    trees = row_trees(rows, budgets, plan)
    growths = [tree.growth for tree in trees]
    levels: list[TreeLevel] = []
    first = 0  # output of the last level's first parent
    while len(levels) < guesses.num_levels and any(growth.wanted() for growth in growths):
        depth = len(levels)
        level, first = _next_level(rows, growths, guesses, depth, first)
        levels.append(level)
        for growth, children in zip(
            growths, _children(rows, trees, levels[-1], depth, plan), strict=True
        ):
            if children:
                growth.add(children)
    return finished(growths, levels, plan, rows.device)[0], growths


def _next_level(
    rows: Rows, growths: list[Growth], guesses: Guesses, depth: int, above: int
) -> tuple[TreeLevel, int]:
    """A level, and the output of its first parent; `above`: that of the level before."""
    outputs = [[output for output, _ in growth.wanted()] for growth in growths]
    wanted = [output for line in outputs for output in line]
    first = min(wanted)
    last = max(wanted)
    parents = [
        [_token_before(row.tokens[-1], growth, output) for output in range(first, last + 1)]
        for row, growth in zip(rows, growths, strict=True)
    ]
    origins = [
        [max(0, _output_before(growth, output) - above) for output in range(first, last + 1)]
        for growth in growths
    ]
    asked = (torch.tensor(each, device=rows.device) for each in (parents, origins))
    logits = fit_width(guesses.logits(depth, *asked), rows.vocab_size)
    so_far = (
        as_draft(growths, [range(len(growth.tokens)) for growth in growths], rows.device)
        if depth
        else None
    )
    probs = distribution(
        logits, rows.soft_sampling, rows.history, so_far, first_node=first, drafting=True
    )
    return TreeLevel(
        probs, outputs, [[output - first for output in line] for line in outputs]
    ), first


def _token_before(pending: int, growth: Growth, output: int) -> int:
    if 1 <= output <= len(growth.tokens):
        return growth.tokens[output - 1]
    return pending  # of output 0; of outputs this row does not have, any token


def _output_before(growth: Growth, output: int) -> int:
    """The output that a node stands after; of the pending token, and of outputs this row does not
    have, 0."""
    return growth.parents[output - 1] + 1 if 1 <= output <= len(growth.tokens) else 0


def _children(
    rows: Rows, trees: list[RowTree], level: TreeLevel, depth: int, plan: TreePlan
) -> list[list[list[Child]]]:
    """Per row, per wanted output, its children."""
    assert level.probs is not None
    depths = torch.full((len(rows), 1), depth, device=rows.device)
    scores = level.probs if rows.coupled_rows is None else raced(rows, level.probs, depths)
    children: list[list[list[Child]]] = []
    for index, (tree, columns) in enumerate(zip(trees, level.columns, strict=True)):
        counts = [count for _, count in tree.growth.wanted()]
        if tree.sampled or not counts:
            children.append([[] for _ in counts])
        else:
            children.append(likeliest(scores[index, columns], counts))
    draw(rows, level.probs, trees, level.columns, children, replacement=plan.replacement)
    return children
