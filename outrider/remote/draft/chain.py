"""The chain of draft nodes that a service has sent for one text, from which drafts are taken.

    chain = DraftChain(length=12)     # this many tokens are committed
    chain.add(12, nodes)              # a reply as it arrives, for this base or an earlier one
    nodes = chain.first(5)            # what to propose
    chain.advance(tokens, nodes)      # the step is over: what does not agree with the text is dropped

Three rules make it lossless. A node stays the only one at its position: a second draw there is
dropped with all after it, so arrival alone decides which draw is proposed, never its value. Nodes
after the committed text are fresh draws for that text, whichever base they were sent for. A drawn
node that a verifier has seen is never proposed again. This could happen after a correction that
equals the token it corrects; its value is then no longer distributed as its distribution claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.remote.protocol import messages

MAX_NODES = 1024  # of a reply


class SentDistribution(NamedTuple):
    """The whole distribution that a node was drawn from; every other token has probability 0."""

    tokens: NDArray[np.int64]
    probs: NDArray[np.float32]  # sum 1


@dataclass(eq=False)
class ReceivedNode:
    """One draft token."""

    token: int
    distribution: SentDistribution | None = None  # None: placed without chance
    is_used: bool = False  # was proposed


class DraftChain:
    """The tokens that one row has received and walks along. Used by one thread."""

    def __init__(self, length: int) -> None:
        """`length`: committed tokens of the text."""
        self.length = length
        self._start = length
        self._committed: list[int] = []  # from `_start` on
        self._nodes: list[ReceivedNode] = []  # after the text
        self.wasted = 0  # nodes dropped without having been proposed

    def drop(self) -> None:
        """Drop all nodes."""
        self.wasted += sum(not node.is_used for node in self._nodes)
        self._nodes.clear()

    def add(self, base: int, nodes: Sequence[ReceivedNode]) -> None:
        """A chain after the first `base` tokens: as far as it agrees with the text and with what
        arrived before, what is after that is new."""
        if base < self._start:
            return  # nobody asked
        known = [*self._committed[base - self._start :], *(node.token for node in self._nodes)]
        agree = 0
        for token, node in zip(known, nodes, strict=False):
            if token != node.token:
                break
            agree += 1
        if agree == len(known):
            self._nodes += nodes[agree:]
        else:
            self.wasted += len(nodes) - agree

    def first(self, max_nodes: int) -> list[ReceivedNode]:
        """The nodes to propose, at most this many."""
        proposed: list[ReceivedNode] = []
        for node in self._nodes[:max_nodes]:
            if node.distribution is not None and node.is_used:
                break
            proposed.append(node)
        return proposed

    def advance(self, tokens: Sequence[int], proposed: Sequence[ReceivedNode] = ()) -> None:
        """`tokens` were committed after the text, after `proposed` was submitted to the target."""
        for node in proposed:
            node.is_used = True
        for token in tokens:
            if self._nodes and self._nodes[0].token == token:
                self._nodes.pop(0)
            else:
                self.drop()
        self.length += len(tokens)
        self._committed += tokens


SUM_ERROR = 1e-3  # of a distribution, at most: floats over the wire, summed in any order


class InvalidReplyError(Exception):
    """A reply that no honest service sends; the message names the mistake."""


def checked_nodes(
    nodes: Sequence[messages.Node], vocab_size: int, *, with_probs: bool
) -> list[ReceivedNode]:
    """The chain of one reply. Raises InvalidReplyError.

    Without `with_probs` every node counts as placed, whatever the service claims.
    """
    if len(nodes) > MAX_NODES:
        raise InvalidReplyError(f"{len(nodes)} nodes for one text, more than {MAX_NODES}")
    checked = []
    for node in nodes:
        if node.token >= vocab_size:
            raise InvalidReplyError(f"token {node.token} is outside the vocabulary of {vocab_size}")
        is_drawn = node.HasField("distribution") and with_probs
        distribution = checked_distribution(node, vocab_size) if is_drawn else None
        checked.append(ReceivedNode(node.token, distribution))
    return checked


def checked_distribution(node: messages.Node, vocab_size: int) -> SentDistribution:
    """The distribution of a drawn node, scaled to sum 1. Raises InvalidReplyError for one that it
    cannot have been drawn from."""
    tokens = np.array(node.distribution.tokens, dtype=np.int64)
    probs = np.array(node.distribution.probs, dtype=np.float64)
    if not len(tokens) or len(tokens) != len(probs):
        raise InvalidReplyError(
            f"a distribution of {len(tokens)} tokens and {len(probs)} probabilities"
        )
    if tokens.max() >= vocab_size:
        raise InvalidReplyError(
            f"a distribution names token {tokens.max()}, outside the vocabulary of {vocab_size}"
        )
    if len(np.unique(tokens)) != len(tokens):
        raise InvalidReplyError("a distribution names a token twice")
    total = probs.sum()
    if not np.isfinite(probs).all() or (probs < 0).any() or abs(total - 1) > SUM_ERROR:
        raise InvalidReplyError(
            f"probabilities that are no distribution: sum {total:.4g}, least {probs.min():.4g}"
        )
    if not probs[tokens == node.token].any():
        raise InvalidReplyError(
            f"token {node.token} was drawn from a distribution in which it has no probability"
        )
    return SentDistribution(tokens, (probs / total).astype(np.float32))
