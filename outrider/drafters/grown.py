"""The base of all drafters that grow trees from distributions: beginning a tree per row, a level,
and grown trees as one draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.rows import Rows
from outrider.trees.growth import Growth, ShapeGrowth
from outrider.trees.plan import TreePlan
from outrider.types import Draft


@dataclass
class RowTree:
    """One row while its tree grows."""

    growth: Growth
    sampled: bool  # its nodes are drawn


@dataclass
class TreeLevel:
    """The distributions at one level of all trees."""

    # (B, M, V); None where nothing is drawn from it and the scores rank the candidates
    probs: Tensor | None
    outputs: list[list[int]]  # per row, the outputs that get children, in the growth's numbering
    columns: list[list[int]]  # the columns of `probs` that these outputs have


def row_trees(rows: Rows, budgets: Sequence[int], plan: TreePlan) -> list[RowTree]:
    """An empty tree for each row, for at most budgets[b] nodes."""
    drawn = drawn_rows(rows, plan)
    return [
        RowTree(plan.growth(budget, sampled=sampled, prices=rows.prices), sampled)
        for budget, sampled in zip(budgets, drawn, strict=True)
    ]


def drawn_rows(rows: Rows, plan: TreePlan) -> list[bool]:
    """Per row, whether the nodes of its tree are drawn."""
    return [
        plan.samples(row.params) and not races
        for row, races in zip(rows, rows.are_coupled, strict=True)
    ]


def as_draft(
    growths: Sequence[Growth], chosen: Sequence[Sequence[int]], device: torch.device
) -> Draft:
    """The chosen nodes of every growth as a draft, renumbered."""
    width = max(map(len, chosen))
    numbers = [{-1: -1} | {node: new for new, node in enumerate(nodes)} for nodes in chosen]
    parts = list(zip(growths, chosen, numbers, strict=True))
    return Draft(
        tokens=table(
            [[growth.tokens[node] for node in nodes] for growth, nodes, _ in parts],
            width,
            0,
            device,
        ),
        lengths=torch.tensor([len(nodes) for nodes in chosen], device=device),
        parents=table(
            [[number[growth.parents[node]] for node in nodes] for growth, nodes, number in parts],
            width,
            -1,
            device,
        ),
    )


def finished(
    growths: Sequence[Growth], levels: Sequence[TreeLevel], plan: TreePlan, device: torch.device
) -> tuple[Draft, list[list[int]]]:
    """The grown trees as one draft, with distributions only where something was drawn; and which
    nodes became the draft."""
    chosen = [growth.finish() for growth in growths]
    draft = as_draft(growths, chosen, device)
    draft.replacement = plan.replacement
    drawn = [
        [int(growth.drawn[node]) for node in nodes] if isinstance(growth, ShapeGrowth) else []
        for growth, nodes in zip(growths, chosen, strict=True)
    ]
    if any(map(any, drawn)):
        draft.sampled = table(drawn, draft.num_nodes, 0, device).bool()
        draft.probs = _child_probs(levels, draft.num_nodes)
    return draft, chosen


def table(lines: Sequence[list[int]], width: int, fill: int, device: torch.device) -> Tensor:
    """(B, width) int64."""
    padded = [line + [fill] * (width - len(line)) for line in lines]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(lines), width)


def _child_probs(levels: Sequence[TreeLevel], width: int) -> Tensor:
    """(B, N+1, V): the distribution that the children of every output were drawn from; zero where
    there are none."""
    like = levels[0].probs
    assert like is not None, "distributions of what was drawn"
    probs = like.new_zeros(like.shape[0], width + 1, like.shape[2])
    for level in levels:
        assert level.probs is not None
        for index, (outputs, columns) in enumerate(zip(level.outputs, level.columns, strict=True)):
            for output, column in zip(outputs, columns, strict=True):
                # a drawn tree is what grew; of a best-first one, no distribution is needed
                if output <= width:
                    probs[index, output] = level.probs[index, column]
    return probs
