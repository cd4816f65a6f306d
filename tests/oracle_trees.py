"""The exact-law oracle for trees: every tree a drafter can draw, with its probability, through the real verifiers.

A `Growth` decides, from the nodes drawn so far, where the next one goes and how it is chosen; so it can stand for fixed
shapes and for trees that follow what was drawn. Kinds of node:

    s   sampled from the parent's law (without its earlier siblings' tokens, or from all of it with replacement)
    d   the likeliest token that no earlier sibling has
    f   a foreign guess: a token fixed in advance, whatever the law
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.types import Draft
from tests.oracle import (
    Law,
    Path,
    Proposals,
    TableModel,
    Verify,
    continued,
    emitted_tokens,
    enumerate_step,
    total_variation,
)

Nodes = tuple[tuple[int, int], ...]  # (parent, token) of every node so far
Growth = Callable[[Nodes], tuple[int, str] | None]  # -> (parent, kind) of the next node; None = the tree is complete


def shape(parents: list[int], kinds: str) -> Growth:
    """A tree whose shape is fixed before anything is drawn."""
    return lambda nodes: None if len(nodes) == len(parents) else (parents[len(nodes)], kinds[len(nodes)])


def tree_drafts(drafter: TableModel, growth: Growth, *, replacement: bool = False) -> Proposals:
    """Every tree that `growth` can give with this drafter's laws."""
    complete: list[tuple[Nodes, tuple[bool, ...], float]] = []
    growing: list[tuple[Nodes, tuple[bool, ...], float]] = [((), (), 1.0)]
    while growing:
        nodes, drawn, weight = growing.pop()
        wanted = growth(nodes)
        if wanted is None:
            complete.append((nodes, drawn, weight))
            continue
        parent, kind = wanted
        for token, prob, is_drawn in _choices(drafter, nodes, parent, kind, replacement):
            growing.append(((*nodes, (parent, token)), (*drawn, is_drawn), weight * prob))
    trees, kinds, weights = (list(part) for part in zip(*complete, strict=True))
    width = max(map(len, trees))
    draft = Draft(
        tokens=_padded([[token for _, token in nodes] for nodes in trees], width, 0),
        lengths=torch.tensor([len(nodes) for nodes in trees]),
        parents=_padded([[parent for parent, _ in nodes] for nodes in trees], width, -1),
        sampled=_padded([list(map(int, drawn)) for drawn in kinds], width, 0).bool(),
        replacement=replacement,
    )
    if bool(draft.sampled.any()):
        draft.probs = laws_on(drafter, draft)
    else:
        draft.sampled = None
    return Proposals([()] * len(trees), weights, draft)


def _choices(
    drafter: TableModel, nodes: Nodes, parent: int, kind: str, replacement: bool
) -> list[tuple[int, float, bool]]:
    """(token, probability, drawn from the law?) of every way to fill the next node."""
    siblings = [token for other, token in nodes if other == parent]
    law = drafter.law(_text(nodes, parent)).clone()
    if kind == "f":
        return [(len(nodes) % drafter.vocab_size, 1.0, False)]
    if not replacement or kind == "d":
        law[siblings] = 0
    if law.sum() == 0:  # nothing is left to draw from: any guess, not drawn
        return [(0, 1.0, False)]
    if kind == "d":
        return [(int(law.argmax()), 1.0, False)]
    return [(token, prob, True) for token, prob in enumerate((law / law.sum()).tolist()) if prob > 0]


def _text(nodes: Nodes, node: int) -> Path:
    path: Path = ()
    while node >= 0:
        parent, token = nodes[node]
        path, node = (token, *path), parent
    return path


def _padded(rows: list[list[int]], width: int, fill: int) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)


def laws_on(model: TableModel, draft: Draft) -> Tensor:
    """(B, N+1, V): one pass over padded trees, penalties applied per path by `distribution` itself; NaN logits in padding."""
    rows = []
    for tokens, parents, length in zip(draft.tokens.tolist(), draft.parents.tolist(), draft.lengths.tolist(), strict=True):
        nodes = tuple(zip(parents[:length], tokens[:length], strict=True))
        line = [model.logits[_text(nodes, node)] for node in range(-1, length)]
        nan = torch.full((model.vocab_size,), torch.nan, dtype=torch.float64)
        rows.append(torch.stack(line + [nan] * (draft.num_nodes - length)))
    history = History.start([model.prompt] * len(rows), [[]] * len(rows), model.vocab_size)
    sampling = BatchSampling.of([model.params] * len(rows), model.vocab_size)
    return distribution(torch.stack(rows), sampling, history, draft, dtype=torch.float64)


def tree_bias(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """TV distance between what a step on trees emits and the target's own joint law, to the depth of the trees plus one."""
    horizon = int(proposals.draft.depths().max()) + 1
    outcomes = enumerate_step(verify, proposals, laws_on(target, proposals.draft))
    law: Law = {}
    for tokens, weight in zip(emitted_tokens(outcomes, proposals), outcomes.weights.tolist(), strict=True):
        if weight > 0:
            law[tokens] = law.get(tokens, 0.0) + weight
    return total_variation(continued(law, target, horizon), target.joint(horizon))


def tree_accepted(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """Expected number of accepted draft tokens."""
    outcomes = enumerate_step(verify, proposals, laws_on(target, proposals.draft))
    return float((outcomes.weights * outcomes.verdict.num_accepted).sum())
