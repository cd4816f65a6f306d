"""Drafts as they come from drafters, checked: a malformed one would end a step with an error about
something else, or, where it misstates what it was drawn from, change the law of the text without a
word.

What costs nothing is checked always: shapes, numbers of nodes, token ids, parents. Distributions
are checked under `laws_checked`, as in `certify` and the contract tests, or where the environment
says OUTRIDER_CHECK_DRAFTS=1.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from outrider.drafters.base import Drafter
from outrider.errors import DraftError
from outrider.rows import Rows
from outrider.types import Draft

SWITCH = "OUTRIDER_CHECK_DRAFTS"  # in the environment
# fp32 sums of 200,000 probabilities err by less; those of bf16 probabilities by more
SUM_WITHIN = 1e-3


class _Laws:
    """Whether distributions are checked, in the whole process."""

    are_checked = os.environ.get(SWITCH, "0") not in ("", "0")


@contextmanager
def laws_checked() -> Iterator[None]:
    """While it lasts, the distributions of all drafts are checked."""
    before = _Laws.are_checked
    _Laws.are_checked = True
    try:
        yield
    finally:
        _Laws.are_checked = before


def proposed(drafter: Drafter, rows: Rows, gamma: list[int]) -> Draft:
    """The drafter's proposal, checked. Raises DraftError, which names the drafter, for one that is
    no draft."""
    draft = drafter.propose(rows, gamma)
    fault = _shape_fault(draft, len(gamma), rows.vocab_size) or _node_fault(
        draft, gamma, rows.vocab_size
    )
    if fault is None and _Laws.are_checked:
        fault = law_fault(draft)
    if fault is not None:
        name = drafter.name or type(drafter).__name__
        raise DraftError(
            f"drafter '{name}' {fault} (docs/add-a-drafter.md says what a draft must be)"
        )
    return draft


def _shape_fault(draft: Draft, num_rows: int, vocab_size: int) -> str | None:
    """The fault in the shapes of its tensors; None: there is none."""
    tokens = draft.tokens
    num_nodes = draft.tokens.shape[-1]
    if tokens.shape != (num_rows, num_nodes) or tokens.dtype != torch.int64:
        return f"drafted tokens of {tokens.dtype} in shape {tuple(tokens.shape)}; int64 in ({num_rows}, nodes) is expected"
    for name, given, expected in (
        ("lengths", draft.lengths, (num_rows,)),
        ("parents", draft.parents, (num_rows, num_nodes)),
        ("sampled", draft.sampled, (num_rows, num_nodes)),
        ("probs", draft.probs, (num_rows, num_nodes + 1, vocab_size)),
    ):
        if given is not None and given.shape != expected:
            return f"drafted with '{name}' in shape {tuple(given.shape)}; {expected} is expected"
    return None


def _node_fault(draft: Draft, gamma: list[int], vocab_size: int) -> str | None:
    """The fault in its nodes; None: there is none. On the host, where a step needs them anyway, and
    without a loop in Python."""
    (tokens, lengths) = draft.lists
    size = draft.num_nodes
    if not all(map(operator.le, lengths, gamma)) or min(lengths) < 0 or max(lengths) > size:
        row = next(
            row for row, length in enumerate(lengths) if not 0 <= length <= min(gamma[row], size)
        )
        asked = f"which was asked for {gamma[row]} at most, in tensors with room for {size}"
        return f"drafted {lengths[row]} nodes for row {row}, {asked}"
    ids = list(chain.from_iterable(tokens))  # those of padding are fed to the target, too
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        place, token = next(
            (place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size
        )
        node = f"node {place % size} of row {place // size}"
        return f"drafted token {token} as {node}; the target's tokens are 0 to {vocab_size - 1}"
    if draft.parents is None or not size:
        return None
    parents = list(chain.from_iterable(draft.parent_lists))
    nodes = list(range(size)) * draft.num_rows
    if min(parents) >= -1 and all(map(operator.lt, parents, nodes)):
        return None
    place = next(
        place
        for place, (parent, node) in enumerate(zip(parents, nodes, strict=True))
        if not -1 <= parent < node
    )
    node = f"node {nodes[place]} of row {place // size} with parent {parents[place]}"
    return f"drafted {node}: parents stand before their children, so -1 (the pending token) to {nodes[place] - 1} is expected"


def law_fault(draft: Draft) -> str | None:
    """The fault in the distributions that its nodes were drawn from; None: there is none."""
    is_drawn = draft.is_sampled() & (
        torch.arange(draft.num_nodes, device=draft.tokens.device) < draft.lengths[:, None]
    )
    rows, nodes = (indices.tolist() for indices in is_drawn.nonzero(as_tuple=True))
    if not rows:
        return None
    if draft.probs is None:
        return f"says that node {nodes[0]} of row {rows[0]} was drawn, and gives no 'probs' that it was drawn from"
    if not draft.probs.is_floating_point():
        return f"drafted with 'probs' of {draft.probs.dtype}; float32 is expected"
    for row, node in zip(rows, nodes, strict=True):
        parent = draft.parent_lists[row][node]
        token = draft.lists[0][row][node]
        law = draft.probs[row, parent + 1].double()
        place = f"the distribution of node {node} of row {row} (probs[{row}, {parent + 1}])"
        if not bool(law.isfinite().all()):
            return f"drafted with NaN or infinity in {place}"
        if float(law.min()) < 0:
            return f"drafted with a negative probability ({float(law.min()):.3g}) in {place}"
        if abs(float(law.sum()) - 1) > SUM_WITHIN:
            return (
                f"drafted with probabilities that sum to {float(law.sum()):.6g}, not 1, in {place}"
            )
        if float(law[token]) == 0:
            return f"drew token {token}, whose probability is 0, by {place}"
        siblings = draft.children[row][parent + 1]
        earlier = [draft.lists[0][row][sibling] for sibling in siblings[: siblings.index(node)]]
        if token in earlier and not draft.replacement:
            return f"drew token {token} twice among siblings, and does not say 'replacement', in {place}"
    return None
