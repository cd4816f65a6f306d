"""The tree of draft nodes that a service has sent for one text, from which drafts are taken.

    tree = DraftTree(length=12)       # so many tokens are committed
    tree.ask()                        # a request for base 12 goes out: nodes of its replies are numbered from 0
    tree.add(12, sent)                # nodes as they arrive, for this base or an earlier one
    nodes = tree.chain(5)             # what to propose
    tree.advance(tokens, nodes)       # the step is over: the tree hangs on the new last token, the rest is dropped

Three rules make it lossless. A node drawn from a distribution stays the only draw at its position:
a second one is dropped, so arrival alone decides which draw is proposed, never its value. Nodes
below the committed text are fresh draws for that text, whichever base they were sent for. A drawn
node that a verifier has seen is never proposed again. This could happen after a correction that
equals the token it corrects; its value is then no longer distributed as its distribution claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.remote.protocol import messages

MAX_NODES = 1024  # that a service may send for one base
KEPT_BASES = 8  # requests whose late replies are still understood


class SentDistribution(NamedTuple):
    """The whole distribution that a node was drawn from; every other token has probability 0."""

    tokens: NDArray[np.int64]
    probs: NDArray[np.float32]  # sum 1


class Sent(NamedTuple):
    """A node as it came over the wire, checked."""

    # number of a node sent for the same base; -1: the last committed token of that base
    parent: int
    token: int
    distribution: SentDistribution | None  # None: placed without chance


class UnknownBaseError(Exception):
    """Nodes hang on a length that was never asked about."""


@dataclass(eq=False)
class ReceivedNode:
    """One draft token, or a committed one."""

    token: int
    distribution: SentDistribution | None = None
    drawn: ReceivedNode | None = None  # the child drawn from the distribution here
    placed: list[ReceivedNode] | None = None  # children placed without chance, the best first
    behind: ReceivedNode | None = None  # committed: the committed token behind it
    is_dead: bool = False  # the text went another way
    is_used: bool = False  # was proposed

    def children(self) -> list[ReceivedNode]:
        """The drawn one first."""
        return ([] if self.drawn is None else [self.drawn]) + (self.placed or [])

    def child(self, token: int) -> ReceivedNode | None:
        """The child that stands for this token."""
        return next((node for node in self.children() if node.token == token), None)


LOST = ReceivedNode(-1, is_dead=True)  # stands for what was dropped when it arrived


class DraftTree:
    """The tree of drafts that one row has received and walks along. Of one row, used by one thread."""

    def __init__(self, length: int) -> None:
        """`length`: committed tokens of the text."""
        self.length = length
        self._root = ReceivedNode(-1)  # the last committed token
        # by base: its anchor, then nodes in the order of their numbers
        self._bases: dict[int, list[ReceivedNode]] = {}
        self.wasted = 0  # nodes dropped without having been proposed

    def ask(self) -> None:
        """A request about the present length goes out. The tokens sent before for the same length
        keep their numbers."""
        self._bases.setdefault(self.length, [self._root])
        while len(self._bases) > KEPT_BASES:
            self._bases.pop(min(self._bases))

    def forget_numbers(self) -> None:
        """Forget the numbers of earlier replies, because the service has restarted. Nodes that
        arrived stay."""
        self._bases.clear()

    def drop_drafts(self) -> None:
        """Drop all nodes, those that have arrived and those that still arrive for earlier requests."""
        self._bases.clear()
        for node in self._root.children():
            self._drop(node)
        self._root.drawn = self._root.placed = None

    def was_asked(self, base: int) -> bool:
        """Whether nodes for this base have numbers: it was asked about, and not long ago."""
        return base in self._bases

    def num_sent(self, base: int) -> int:
        """Nodes that arrived for this base."""
        return len(self._bases[base]) - 1 if base in self._bases else 0

    def add(self, base: int, nodes: Iterable[Sent]) -> None:
        """Graft nodes. Those on another path than the committed one are dropped. Raises
        UnknownBaseError."""
        known = self._bases.get(base)
        if known is None:
            raise UnknownBaseError
        for sent in nodes:
            known.append(self._grafted(known[sent.parent + 1], sent))

    def chain(self, max_tokens: int) -> list[ReceivedNode]:
        """The nodes to propose, at most so many, one below the other."""
        found: list[ReceivedNode] = []
        node = self._root
        while len(found) < max_tokens:
            following = (
                node.drawn if node.drawn is not None else node.placed[0] if node.placed else None
            )
            if following is None or (following.distribution is not None and following.is_used):
                break
            found.append(following)
            node = following
        return found

    def advance(self, tokens: Sequence[int], proposed: Sequence[ReceivedNode] = ()) -> None:
        """`tokens` were committed behind the text, after `proposed` was submitted to the target."""
        for node in proposed:
            node.is_used = True
        for token in tokens:
            following = self._root.child(token) or ReceivedNode(token)
            for other in self._root.children():
                if other is not following:
                    self._drop(other)
            self._root.drawn = None
            self._root.placed = None
            self._root.behind = following
            self._root = following
        self.length += len(tokens)

    def _grafted(self, parent: ReceivedNode, sent: Sent) -> ReceivedNode:
        if parent.is_dead:
            self.wasted += 1
            return LOST
        if parent.behind is not None:  # the text is longer by now
            return parent.behind if parent.behind.token == sent.token else self._lost()
        if sent.distribution is None:
            return self._placed(parent, sent.token)
        return self._drawn(parent, sent.token, sent.distribution)

    def _placed(self, parent: ReceivedNode, token: int) -> ReceivedNode:
        found = parent.child(token)
        if found is None:
            found = ReceivedNode(token)
            parent.placed = [*(parent.placed or []), found]
        return found

    def _drawn(
        self, parent: ReceivedNode, token: int, distribution: SentDistribution
    ) -> ReceivedNode:
        """The first draw at a place is the draw there; one that was placed before keeps what hangs
        on it."""
        if parent.drawn is not None:
            return parent.drawn if parent.drawn.token == token else self._lost()
        node = parent.child(token)
        if node is None:
            node = ReceivedNode(token)
        else:
            parent.placed = [other for other in parent.placed or [] if other is not node]
        node.distribution = distribution
        parent.drawn = node
        return node

    def _lost(self) -> ReceivedNode:
        self.wasted += 1
        return LOST

    def _drop(self, top: ReceivedNode) -> None:
        open_nodes = [top]
        while open_nodes:
            node = open_nodes.pop()
            node.is_dead = True
            self.wasted += not node.is_used
            open_nodes.extend(node.children())
            node.drawn = node.placed = None


SUM_ERROR = 1e-3  # of a distribution, at most: floats over the wire, summed in any order


class InvalidReplyError(Exception):
    """A reply that no honest service sends; the message names the mistake."""


def checked_nodes(
    nodes: Sequence[messages.Node], num_sent: int, vocab_size: int, *, with_probs: bool
) -> list[Sent]:
    """The nodes of one reply for a base of which `num_sent` nodes have arrived before. Raises
    InvalidReplyError.

    Without `with_probs` every node counts as placed, whatever the service claims.
    """
    if num_sent + len(nodes) > MAX_NODES:
        raise InvalidReplyError(
            f"{num_sent + len(nodes)} nodes for one text, more than {MAX_NODES}"
        )
    found = []
    for number, node in enumerate(nodes, num_sent):
        if not -1 <= node.parent < number:
            raise InvalidReplyError(
                f"node {number} hangs on node {node.parent}, which was not sent before it"
            )
        if node.token >= vocab_size:
            raise InvalidReplyError(f"token {node.token} is outside the vocabulary of {vocab_size}")
        distribution = checked_distribution(node, vocab_size) if node.drawn and with_probs else None
        found.append(Sent(node.parent, node.token, distribution))
    return found


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
