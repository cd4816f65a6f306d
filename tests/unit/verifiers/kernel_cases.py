"""Drafts and the target's distributions of many rows, in which every branch of a rule is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.runtime import library
from outrider.types import Draft

needs_kernels = pytest.mark.skipif(
    library.why_missing() is not None,
    reason="needs AVX2 or AVX-512, and the library or a C++ compiler",
)


def cases(vocab_size: int, kind: str, num_rows: int, num_nodes: int) -> tuple[Draft, Tensor]:
    """Distributions close to their drafts', so that every branch is taken; rows of every length."""
    scores = torch.randn(num_rows, num_nodes + 1, vocab_size)
    favourites = torch.randint(vocab_size, (num_rows, num_nodes + 1, 1))
    # some have most of the mass
    scores.scatter_add_(-1, favourites, torch.full(favourites.shape, math.log(vocab_size) + 1))
    probs = scores.softmax(-1)
    proposals = (scores + 0.7 * torch.randn_like(scores)).softmax(-1)
    if kind == "equal distributions":
        proposals = probs.clone()
    if kind == "point masses":
        probs = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    tokens = torch.multinomial(proposals[:, :-1].reshape(-1, vocab_size), 1).view(
        num_rows, num_nodes
    )
    lengths = torch.arange(num_rows) % (num_nodes + 1)
    if kind == "placed":
        return Draft(scores[:, :-1].argmax(-1), lengths), probs
    sampled = torch.rand(num_rows, num_nodes) < 0.6 if kind == "some placed" else None
    return Draft(tokens, lengths, probs=proposals, sampled=sampled), probs


def trees(vocab_size: int, kind: str, num_rows: int, num_nodes: int) -> tuple[Draft, Tensor]:
    """Another tree in every row, of every length, siblings drawn one after another."""
    chain, probs = cases(vocab_size, "drawn" if kind == "replaced" else kind, num_rows, num_nodes)
    parents = torch.stack(
        [(torch.rand(num_rows) * (node + 1)).long() - 1 for node in range(num_nodes)], dim=1
    )
    tokens = chain.tokens.clone()
    scores = probs if chain.probs is None else chain.probs
    for row in range(num_rows):
        for node in range(num_nodes):
            own = scores[row, parents[row, node] + 1].clone()
            # a sibling is another token, which a tiny vocabulary may be too small for
            if kind != "replaced":
                own[tokens[row, :node][parents[row, :node] == parents[row, node]]] = 1e-9
            tokens[row, node] = own.argmax() if kind == "placed" else torch.multinomial(own, 1)[0]
    tree = Draft(
        tokens, chain.lengths, parents, chain.probs, chain.sampled, replacement=kind == "replaced"
    )
    return tree, probs
