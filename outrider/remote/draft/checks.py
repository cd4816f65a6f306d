"""Checks of a draft service's replies: everything is checked, because one wrong distribution biases the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.remote.draft.tree import MAX_NODES, Sent, SentDistribution
from outrider.remote.protocol import messages

SUM_ERROR = 1e-3  # of a distribution, at most: floats over the wire, summed in any order


class InvalidReplyError(Exception):
    """A reply that no honest service sends; the message names the mistake."""


def checked_nodes(nodes: Sequence[messages.Node], num_sent: int, vocab_size: int, *, with_probs: bool) -> list[Sent]:
    """The nodes of one reply for a base of which `num_sent` nodes have arrived before. Raises InvalidReplyError.

    Without `with_probs` every node counts as placed, whatever the service claims.
    """
    if num_sent + len(nodes) > MAX_NODES:
        raise InvalidReplyError(f"{num_sent + len(nodes)} nodes for one text, more than {MAX_NODES}")
    found = []
    for number, node in enumerate(nodes, num_sent):
        if not -1 <= node.parent < number:
            raise InvalidReplyError(f"node {number} hangs on node {node.parent}, which was not sent before it")
        if node.token >= vocab_size:
            raise InvalidReplyError(f"token {node.token} is outside the vocabulary of {vocab_size}")
        distribution = checked_distribution(node, vocab_size) if node.drawn and with_probs else None
        found.append(Sent(node.parent, node.token, distribution))
    return found


def checked_distribution(node: messages.Node, vocab_size: int) -> SentDistribution:
    """The distribution of a drawn node, scaled to sum 1. Raises InvalidReplyError for one that it cannot have been drawn from."""
    tokens, probs = np.array(node.distribution.tokens, dtype=np.int64), np.array(node.distribution.probs, dtype=np.float64)
    if not len(tokens) or len(tokens) != len(probs):
        raise InvalidReplyError(f"a distribution of {len(tokens)} tokens and {len(probs)} probabilities")
    if tokens.max() >= vocab_size:
        raise InvalidReplyError(f"a distribution names token {tokens.max()}, outside the vocabulary of {vocab_size}")
    if len(np.unique(tokens)) != len(tokens):
        raise InvalidReplyError("a distribution names a token twice")
    total = probs.sum()
    if not np.isfinite(probs).all() or (probs < 0).any() or abs(total - 1) > SUM_ERROR:
        raise InvalidReplyError(f"probabilities that are no distribution: sum {total:.4g}, least {probs.min():.4g}")
    if not probs[tokens == node.token].any():
        raise InvalidReplyError(f"token {node.token} was drawn from a distribution in which it has no probability")
    return SentDistribution(tokens, (probs / total).astype(np.float32))
