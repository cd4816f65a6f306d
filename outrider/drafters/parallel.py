"""Drafts whose every level is there at once: one pass of a head gave the logits of all draft positions, what remains is choosing.

Medusa heads and block heads differ in where their logits come from. Once they are there, level d's law depends on nothing of
the draft but, with a Markov head, the token before (`Guesses.logits`); so chains and trees of any shape cost no further pass.
Drawn tokens are drawn from exactly these laws, under the row's sampling options, and the laws travel along as `Draft.probs`.

Trees follow the same rule as a draft model's (`draft_tree.py`): drawn nodes get a shape that is fixed beforehand, since choosing
among drawn nodes would bias the output; placed ones may go where the laws say that acceptance is likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.children import draw, likeliest
from outrider.drafters.choice import choose, chosen_chain
from outrider.models.vocabulary import fit_width
from outrider.rows import Rows
from outrider.sampling.confidence import StopRule
from outrider.sampling.distribution import distribution
from outrider.trees.growth import Child, Growth, ShapeGrowth
from outrider.trees.plan import TreePlan
from outrider.types import Draft


class Guesses(Protocol):
    """What a head has to say about the next `num_levels` tokens of B rows."""

    num_levels: int

    def logits(self, level: int, parents: Tensor) -> Tensor:
        """(B, M, V): of the token behind each of `parents` (B, M), tokens of the level above (level 0: the pending token)."""


class Stop(Protocol):
    """When a chain ends early. Sees laws and earlier tokens only, never the token it decides about (non-anticipation)."""

    going: Tensor  # (B,) bool: rows that are still drafting
    needs_law: bool  # False: it looks at no laws, and is given logits in their place

    def before(self, node: int, law: Tensor, previous: Tensor) -> None:
        """Token `node` would be drawn from `law` (B, V), behind token `previous` (B,)."""

    def after(self, law: Tensor, token: Tensor) -> None:
        """It was, and is `token` (B,)."""


class LawStop:
    """The stop rules of `sampling/confidence.py`, which look at laws alone."""

    needs_law = True

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self.going = rule.going

    def before(self, node: int, law: Tensor, previous: Tensor) -> None:
        self._rule.before(law)

    def after(self, law: Tensor, token: Tensor) -> None:
        self._rule.after(law, token)


# ---------------------------------------------------------------- chains


def draft_chain(rows: Rows, wanted: list[int], guesses: Guesses, stop: Stop | None = None) -> Draft:
    """One chain a row, of at most wanted[b] tokens."""
    lengths = torch.tensor(wanted, device=rows.device).clamp(max=guesses.num_levels)
    steps = int(lengths.max())
    plain, start = rows.sampling.is_plain_greedy, rows.positions
    previous = torch.tensor([row.tokens[-1] for row in rows], device=rows.device)
    tokens: list[Tensor] = []  # each (B,)
    laws: list[Tensor] = []  # each (B, V)
    for node in range(steps):
        logits = fit_width(guesses.logits(node, previous[:, None]), rows.vocab_size)
        so_far = Draft(torch.stack(tokens, 1), lengths.clamp(max=node)) if tokens else None
        if stop is not None:
            soft = logits[:, 0]
            if stop.needs_law:
                soft = distribution(logits, rows.soft_sampling, rows.history, so_far, first_node=node, drafting=True)[:, 0]
            stop.before(node, soft, previous)
            lengths = torch.where(stop.going, lengths, lengths.clamp(max=node))
            if not bool((lengths > node).any()):
                break
        if plain:
            tokens.append(logits[:, 0].argmax(dim=-1))
        else:
            laws.append(distribution(logits, rows.sampling, rows.history, so_far, first_node=node, drafting=True)[:, 0])
            tokens.append(choose(laws[-1], rows, start, node))
        previous = tokens[-1]
        if stop is not None:
            stop.after(soft, previous)
    if not tokens:
        return Draft.empty(len(rows), rows.device)
    return Draft(torch.stack(tokens, dim=1), lengths) if plain else chosen_chain(tokens, laws, lengths, rows)


# ---------------------------------------------------------------- trees


@dataclass
class _RowTree:
    """One row while its tree grows."""

    growth: Growth
    sampled: bool  # its nodes are drawn


@dataclass
class _Level:
    """The laws behind outputs first .. first + M - 1 of every row; `outputs`: which of them get children."""

    first: int
    law: Tensor  # (B, M, V)
    outputs: list[list[int]]


def draft_tree(rows: Rows, budgets: list[int], guesses: Guesses, plan: TreePlan) -> tuple[Draft, list[Growth]]:
    """One tree a row, of at most budgets[b] nodes, and how each grew, for `plan.observe`."""
    coupled = [False] * len(rows) if rows.coupled_rows is None else rows.coupled_rows.tolist()
    trees = []
    for row, budget, is_coupled in zip(rows, budgets, coupled, strict=True):
        sampled = plan.samples(row.params) and not is_coupled
        trees.append(_RowTree(plan.growth(budget, sampled=sampled), sampled))
    levels: list[_Level] = []
    while len(levels) < guesses.num_levels and any(tree.growth.wanted() for tree in trees):
        levels.append(_next_level(rows, trees, guesses, len(levels)))
        for tree, children in zip(trees, _children(rows, trees, levels[-1], len(levels) - 1, plan), strict=True):
            if children:
                tree.growth.add(children)
    return _finished(rows, trees, levels, plan), [tree.growth for tree in trees]


def _next_level(rows: Rows, trees: list[_RowTree], guesses: Guesses, depth: int) -> _Level:
    outputs = [[output for output, _ in tree.growth.wanted()] for tree in trees]
    wanted = [output for line in outputs for output in line]
    first, last = min(wanted), max(wanted)
    parents = [
        [_token_before(row.tokens[-1], tree.growth, output) for output in range(first, last + 1)]
        for row, tree in zip(rows, trees, strict=True)
    ]
    logits = fit_width(guesses.logits(depth, torch.tensor(parents, device=rows.device)), rows.vocab_size)
    so_far = _as_draft(trees, [list(range(len(tree.growth.tokens))) for tree in trees], rows.device) if depth else None
    law = distribution(logits, rows.soft_sampling, rows.history, so_far, first_node=first, drafting=True)
    return _Level(first, law, outputs)


def _token_before(pending: int, growth: Growth, output: int) -> int:
    if 1 <= output <= len(growth.tokens):
        return growth.tokens[output - 1]
    return pending  # of output 0; of outputs this row does not have, any token


def _children(rows: Rows, trees: list[_RowTree], level: _Level, depth: int, plan: TreePlan) -> list[list[list[Child]]]:
    """Per row, per wanted output, its children."""
    scores = level.law if rows.coupled_rows is None else _raced(rows, rows.coupled_rows, level.law, depth)
    found: list[list[list[Child]]] = []
    for index, (tree, outputs) in enumerate(zip(trees, level.outputs, strict=True)):
        counts = [count for _, count in tree.growth.wanted()]
        if tree.sampled or not counts:
            found.append([[] for _ in counts])
        else:
            found.append(likeliest(scores[index, [output - level.first for output in outputs]], counts))
    _draw(rows, trees, level, found, plan.replacement)
    return found


def _raced(rows: Rows, coupled_rows: Tensor, law: Tensor, depth: int) -> Tensor:
    """The laws (B, M, V) with those of coupled rows as the target's own noise ranks their tokens."""
    coupled, scores = coupled_rows.nonzero()[:, 0], law.double()
    noise = rows.rng.select(coupled.tolist()).gumbel(rows.positions[coupled, None] + depth, law.shape[2])  # (C, 1, V)
    scores[coupled] = (scores[coupled].log() + noise).softmax(-1)
    return scores


def _draw(
    rows: Rows, trees: list[_RowTree], level: _Level, found: list[list[list[Child]]], replacement: bool
) -> None:
    """Fill in the children of sampled rows, one draw for all rows at a time, each keyed by its node's number."""
    turns: list[list[tuple[int, int]]] = []  # per row, per child: (which wanted output, its place in the law)
    for tree, outputs in zip(trees, level.outputs, strict=True):
        wanted = zip(tree.growth.wanted(), outputs, strict=True) if tree.sampled else ()
        turns.append([(i, output - level.first) for i, ((_, count), output) in enumerate(wanted) for _ in range(count)])
    draw(rows, level.law, turns, [len(tree.growth.tokens) for tree in trees], found, replacement=replacement)


def _finished(rows: Rows, trees: list[_RowTree], levels: list[_Level], plan: TreePlan) -> Draft:
    """The grown trees as one draft; laws are handed over only where something was drawn."""
    chosen = [tree.growth.finish() for tree in trees]
    draft = _as_draft(trees, chosen, rows.device)
    draft.replacement = plan.replacement
    sampled = torch.zeros_like(draft.tokens, dtype=torch.bool)
    for index, (tree, nodes) in enumerate(zip(trees, chosen, strict=True)):
        if isinstance(tree.growth, ShapeGrowth):
            sampled[index, : len(nodes)] = torch.tensor([tree.growth.drawn[node] for node in nodes], dtype=torch.bool)
    if bool(sampled.any()):
        draft.sampled, draft.probs = sampled, _laws_of_children(levels, draft.num_nodes)
    return draft


def _as_draft(trees: list[_RowTree], chosen: list[list[int]], device: torch.device) -> Draft:
    """The chosen nodes of every growth, renumbered."""
    width = max(map(len, chosen))
    tokens, parents = ([[fill] * width for _ in trees] for fill in (0, -1))
    for index, (tree, nodes) in enumerate(zip(trees, chosen, strict=True)):
        number = {-1: -1} | {node: new for new, node in enumerate(nodes)}
        for new, node in enumerate(nodes):
            tokens[index][new] = tree.growth.tokens[node]
            parents[index][new] = number[tree.growth.parents[node]]
    lengths = torch.tensor([len(nodes) for nodes in chosen], device=device)
    shape = (len(trees), width)
    return Draft(
        torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
        lengths,
        torch.tensor(parents, dtype=torch.int64, device=device).view(shape),
    )


def _laws_of_children(levels: list[_Level], width: int) -> Tensor:
    """(B, N+1, V): the law that the children of every output were drawn from; zero where there are none."""
    like = levels[0].law
    probs = like.new_zeros(like.shape[0], width + 1, like.shape[2])
    for level in levels:
        for index, outputs in enumerate(level.outputs):
            for output in outputs:
                if output <= width:  # a drawn tree is what grew; of a best-first one, no law is needed
                    probs[index, output] = level.law[index, output - level.first]
    return probs

