"""The children of a tree's nodes, from the distributions after them: the likeliest tokens, or
drawn ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.grown import RowTree
from outrider.rows import Rows
from outrider.runtime.top_tokens import TopTokens
from outrider.sampling.rng import Purpose
from outrider.trees.growth import Child


def likeliest(probs: Tensor, counts: list[int]) -> list[list[Child]]:
    """The counts[i] likeliest tokens of every distribution (M, V), likeliest first."""
    top = probs.topk(min(max(counts), probs.shape[1]))
    lines = zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
    return [
        [Child(token, prob) for token, prob in zip(tokens[:count], chances[:count], strict=True)]
        for tokens, chances, count in lines
    ]


def ranked_by_scores(rows: Rows) -> list[bool]:
    """Per row, whether the softmax of the scores ranks its candidates: no penalty, bias, ban or
    filter."""
    return [row.constraint is None and row.params.is_softmax for row in rows]


def raced_scores(
    rows: Rows,
    scores: Tensor,
    columns: Sequence[Sequence[int]],
    depths: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    """Scores (B, M, V') whose softmax is that of `raced`, in these columns of racing rows; `depths`
    (B, M): of their nodes.

    `known` (V',): ids of the tokens that are scored, None: all, in order.
    """
    racing = [(row, column) for row in rows.racing_rows for column in columns[row]]
    if not racing:
        return scores
    width = min(scores.shape[2], rows.vocab_size)
    begins = rows.positions.tolist()
    deep = depths.tolist()
    heat = rows.soft_sampling.options[:, 0].tolist()
    positions: list[list[int]] = [[] for _ in columns]
    for row, column in racing:
        positions[row].append(begins[row] + deep[row][column])
    scores = scores.to(torch.float32, copy=True)
    for (row, column), noise in zip(
        racing, rows.rng.noise(positions, rows.vocab_size), strict=True
    ):
        columns_noise = noise[:width] if known is None else noise[known.to(noise.device)]
        scores[row, column, : len(columns_noise)].add_(
            columns_noise.to(scores.device), alpha=heat[row]
        )
    return scores


def likeliest_scores(
    top_tokens: TopTokens,
    rows: Rows,
    scores: Tensor,
    columns: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    known: Tensor | None = None,
) -> list[list[list[Child]]] | None:
    """`likeliest` in the softmax of scores (B, M, V') in these columns of each row; None where
    scores are no numbers.

    `known` (V',): ids of the tokens that are scored, None: all, in order.
    """
    width = min(scores.shape[2], rows.vocab_size) if known is None else scores.shape[2]
    soft = rows.soft_sampling.options.tolist()
    asked = [(row, column) for row, line in enumerate(columns) for column in line]
    if not asked:
        return [[] for _ in counts]
    outputs = [row * scores.shape[1] + column for row, column in asked]
    temperatures = [soft[row][0] for row, _ in asked]
    max_candidates = min(max(count for line in counts for count in line), width)
    shares = top_tokens.shares(scores, outputs, max_candidates, width, temperatures)
    if not np.isfinite(shares.shares).all() or shares.tokens.min() < 0:
        return None
    tokens = torch.from_numpy(shares.tokens)
    ids = (tokens if known is None else known[tokens.to(known.device)]).tolist()
    lines = iter(zip(ids, shares.shares.tolist(), strict=True))
    return [
        [[*map(Child, *(part[:count] for part in next(lines)))] for count in line]
        for line in counts
    ]


def raced(rows: Rows, probs: Tensor, depths: Tensor) -> Tensor:
    """The distributions (B, M, V) with those of racing rows as the target's own noise ranks their
    tokens; `depths` (B, M or 1): of the nodes after which they are."""
    racing = torch.tensor(rows.racing_rows, dtype=torch.int64, device=probs.device)
    scores = probs.to(torch.float64, copy=True)
    noise = rows.rng.select(rows.racing_rows).gumbel(
        rows.positions[racing, None] + depths[racing], probs.shape[2]
    )
    scores[racing] = (scores[racing].log() + noise).softmax(-1)
    return scores


def draw(
    rows: Rows,
    probs: Tensor,
    trees: Sequence[RowTree],
    columns: Sequence[Sequence[int]],
    children: list[list[list[Child]]],
    *,
    replacement: bool,
) -> None:
    """Append drawn children to `found[row][which]` of sampled rows, one draw for all rows at a
    time, each keyed by its node's number. probs (B, M, V); `columns`: the columns of each row's
    wanted outputs."""
    # per row, per child: (which wanted output, its column of `probs`)
    turns: list[list[tuple[int, int]]] = []
    for tree, row_scores in zip(trees, columns, strict=True):
        wanted = zip(tree.growth.wanted(), row_scores, strict=True) if tree.sampled else ()
        turns.append(
            [(i, column) for i, ((_, count), column) in enumerate(wanted) for _ in range(count)]
        )
    if not any(turns):
        return
    rest = probs.clone()
    nobody = torch.ones_like(rest[0, 0])
    for turn in range(max(map(len, turns))):
        lines = [
            rest[index, mine[turn][1]] if turn < len(mine) else nobody
            for index, mine in enumerate(turns)
        ]
        weights = torch.stack(lines)
        possible = weights.sum(dim=-1) > 0
        weights = torch.where(possible[:, None], weights, nobody)
        offsets = [len(tree.growth.tokens) + turn for tree in trees]
        drawn = rows.rng.categorical(weights, Purpose.DRAFT, rows.positions, offsets).tolist()
        for index, (mine, token) in enumerate(zip(turns, drawn, strict=True)):
            if turn < len(mine):
                which, column = mine[turn]
                # nothing left to draw from: a guess that is known to be wrong keeps the shape
                children[index][which].append(Child(token, 0.0, drawn=bool(possible[index])))
                if not replacement:
                    rest[index, column, token] = 0
