"""Drafts for the likely outcomes of a target's pass, made while it runs: trees over the draft model's cache, a level a pass.

    text  t t t  chain  a b c          the pass keeps k of the chain and then emits another token x: the outcome (k, x)
                        | | |
                        x y z          the likeliest outcomes; after each of them a chain of its own

P(k, x) = P(k kept) q(x), q the draft's distribution there without the token that was rejected. Earlier drafts tell how many are
kept (`ChainSurvival`), so there are many alternatives where the chain probably breaks, and few elsewhere. Each pass feeds the
whole tree again after the same committed positions: no keys are copied for an outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.models.tokens.vocabulary import fit_width
from outrider.remote.draft.model_host import ModelHost
from outrider.remote.draft.nodes import DraftNode, TokenDistribution, distributions_of
from outrider.rows import Row, Rows
from outrider.sampling.coupling import gumbel_choice
from outrider.sampling.distribution import distribution
from outrider.sampling.rng import inverse_cdf
from outrider.types import Draft

OUTCOME = 16  # purpose of an outcome's coin, apart from those of rows (`sampling.rng.Purpose`)


@dataclass
class OutcomeTree:
    """One row's chain and what may follow. Nodes are numbered: the chain first, then level by level, `width` nodes a level."""

    uid: int
    base: int  # tokens of the text
    tokens: list[int]
    survival: list[float]  # P(at least 1, 2, ... of the chain are kept)
    max_nodes: int  # behind the chain
    depth: int  # tokens drafted behind each outcome
    parents: list[int] = field(init=False)
    num_chain: int = field(init=False)
    width: int = 0  # outcomes, once they are chosen
    level: int = 0  # passes made

    def __post_init__(self) -> None:
        self.num_chain = len(self.tokens)
        self.parents = list(range(-1, self.num_chain - 1))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to draft."""
        return self.level > self.depth or (self.level > 0 and not self.width)

    def path(self, node: int) -> list[int]:
        """Tokens from the text to a node, itself included."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def add(self, parent: int, token: int, drawn_from: TokenDistribution | None = None) -> DraftNode:
        """One more node."""
        self.tokens.append(token)
        self.parents.append(parent)
        return DraftNode(parent, token, drawn_from)


@torch.inference_mode()
def grow(host: ModelHost, trees: Sequence[OutcomeTree]) -> dict[int, list[DraftNode]]:
    """One pass of the draft model over trees of equal level and width: the new nodes of each, by uid."""
    by_uid = {tree.uid: tree for tree in trees}
    with host.batch(list(by_uid)) as (uids, rows, kv):
        ordered = [by_uid[uid] for uid in uids]
        held = list(kv.lengths)
        kv.lengths = [tree.base - 1 for tree in ordered]
        try:
            shape = _Layout(ordered, rows.device)
            logits = host.lm.forward(shape.fed(rows), shape.fed_parents, shape.columns).logits
        finally:
            kv.lengths = held  # the chain's keys were written again where they were
        logits = fit_width(logits, rows.vocab_size)
        if not ordered[0].level:
            probs = distribution(logits, rows.soft_sampling, rows.history, shape.nodes, first_node=0, drafting=True)
            found = [_outcomes(tree, probs[index]) for index, tree in enumerate(ordered)]
        else:
            found = _continued(ordered, rows, logits, shape)
    for tree in ordered:
        tree.level += 1
    return dict(zip(uids, found, strict=True))


class _Layout:
    """Trees of one pass side by side: chains padded to one length, so that the outcomes' nodes have the same columns."""

    def __init__(self, trees: Sequence[OutcomeTree], device: torch.device) -> None:
        longest = max(tree.num_chain for tree in trees)
        tokens, parents = [], []
        for tree in trees:
            chain, gap = tree.num_chain, longest - tree.num_chain
            tokens.append(tree.tokens[:chain] + [0] * gap + tree.tokens[chain:])
            line = tree.parents[:chain] + [-1] * gap + tree.parents[chain:]
            parents.append([parent + gap if parent >= chain else parent for parent in line])
        total = len(tokens[0])
        self.nodes = Draft(
            torch.tensor(tokens, device=device), torch.tensor([total] * len(trees), device=device),
            torch.tensor(parents, device=device),
        )  # fmt: skip
        self.fed_parents = self.nodes.parents
        width = trees[0].width
        self.first = total + 1 - width if trees[0].level else 0  # output behind the first leaf
        last = total if trees[0].level else longest
        self.columns = torch.arange(self.first, last + 1, device=device)

    def fed(self, rows: Rows) -> Tensor:
        """(B, T): the last committed token, then the nodes."""
        pending = torch.tensor([[row.tokens[-1]] for row in rows], device=self.nodes.tokens.device)
        return torch.cat([pending, self.nodes.tokens], dim=1)


def _outcomes(tree: OutcomeTree, probs: Tensor) -> list[DraftNode]:
    """The likeliest outcomes as the tree's first level. `probs` (N + 1, V): the draft's distributions after each token of the
    chain.
    """
    count = min(tree.max_nodes // (1 + tree.depth), probs.shape[-1] - 1)
    if count < 1:
        return []
    reached = [1.0, *tree.survival]
    candidates: list[tuple[float, int, int]] = []  # -P, chain tokens kept, next token
    for kept in range(tree.num_chain + 1):
        own, chance = probs[kept], reached[kept]
        if kept < tree.num_chain:
            own = own.clone()
            own[tree.tokens[kept]] = 0
            own, chance = own / own.sum().clamp(min=1e-30), chance - reached[kept + 1]
        top = own.topk(count)
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        candidates += [(-chance * prob, kept, token) for prob, token in pairs if prob > 0]
    chosen = sorted(candidates)[:count]
    tree.width = len(chosen)
    return [tree.add(kept - 1, token) for _, kept, token in chosen]


def _continued(trees: Sequence[OutcomeTree], rows: Rows, logits: Tensor, shape: _Layout) -> list[list[DraftNode]]:
    """One more token behind every leaf. logits (B, width, V)."""
    if rows.sampling.is_plain_greedy:
        lines = logits.argmax(dim=-1).tolist()
        return [_behind_leaves(tree, line, [None] * len(line)) for tree, line in zip(trees, lines, strict=True)]
    probs = distribution(logits, rows.sampling, rows.history, shape.nodes, first_node=shape.first, drafting=True)
    found = []
    for index, (tree, row) in enumerate(zip(trees, rows, strict=True)):
        found.append(_behind_leaves(tree, *_chosen(tree, row, rows, index, probs[index])))
    return found


def _chosen(
    tree: OutcomeTree, row: Row, rows: Rows, index: int, probs: Tensor
) -> tuple[list[int], Sequence[TokenDistribution | None]]:
    """A token after each leaf, drawn from `probs` (width, V), and what it was drawn from."""
    paths = [tree.path(leaf) for leaf in range(len(tree.tokens) - tree.width, len(tree.tokens))]
    if row.params.is_greedy:
        return probs.argmax(dim=-1).tolist(), [None] * tree.width
    if rows.coupled_rows is not None and bool(rows.coupled_rows[index]):
        positions = torch.tensor([[tree.base + len(path) for path in paths]])
        noise = rows.rng.select([index]).gumbel(positions, probs.shape[-1])[0].to(probs.device)
        return gumbel_choice(probs, noise).tolist(), [None] * tree.width
    coins = [outcome_coin(row.seed, tree.base, path) for path in paths]
    tokens = inverse_cdf(probs, torch.tensor(coins, dtype=torch.float64, device=probs.device)).tolist()
    return tokens, distributions_of(probs)


def _behind_leaves(tree: OutcomeTree, tokens: list[int], distributions: Sequence[TokenDistribution | None]) -> list[DraftNode]:
    first = len(tree.tokens) - tree.width
    pairs = zip(tokens, distributions, strict=True)
    return [tree.add(number, token, drawn_from) for number, (token, drawn_from) in enumerate(pairs, first)]


def outcome_coin(seed: int, base: int, path: Sequence[int]) -> float:
    """The uniform number in [0, 1) that draws the token behind `path`: another one for each place, whenever it is asked for."""
    text_bytes = np.array([base, *path], dtype=np.int64).tobytes()
    counter = np.frombuffer(hashlib.blake2b(text_bytes, digest_size=32).digest(), dtype=np.uint64)
    key = np.array([seed, OUTCOME], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
