"""Invalid replies are refused: each kind of mistake by itself."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.remote.draft.tree import (
    MAX_NODES,
    InvalidReplyError,
    checked_distribution,
    checked_nodes,
)
from outrider.remote.protocol import messages

V = 10


def node(
    token: int = 3,
    parent: int = -1,
    tokens: list[int] | None = None,
    probs: list[float] | None = None,
) -> messages.Node:
    if tokens is None:
        return messages.Node(parent=parent, token=token)
    sent = messages.Distribution(tokens=tokens, probs=probs or [])
    return messages.Node(parent=parent, token=token, drawn=True, distribution=sent)


LIES = {
    "a token outside the vocabulary": ([node(V)], "token 10 is outside"),
    "a parent that was not sent": ([node(parent=0)], "hangs on node 0"),
    "a parent below none": ([node(parent=-2)], "hangs on node -2"),
    "a later parent": ([node(), node(parent=2), node()], "hangs on node 2"),
    "a drawn node without a distribution": (
        [messages.Node(parent=-1, token=3, drawn=True)],
        "0 tokens",
    ),
    "lists of two lengths": ([node(3, tokens=[3, 4], probs=[1.0])], "2 tokens and 1 prob"),
    "a distribution outside the vocabulary": (
        [node(3, tokens=[3, 10], probs=[0.5, 0.5])],
        "names token 10",
    ),
    "a token twice": ([node(3, tokens=[3, 3], probs=[0.5, 0.5])], "twice"),
    "not a number": ([node(3, tokens=[3, 4], probs=[0.5, float("nan")])], "no distribution"),
    "infinite": ([node(3, tokens=[3, 4], probs=[0.5, float("inf")])], "no distribution"),
    "negative": ([node(3, tokens=[3, 4], probs=[1.5, -0.5])], "no distribution"),
    "a sum below 1": ([node(3, tokens=[3, 4], probs=[0.5, 0.4])], "sum 0.9"),
    "a sum above 1": ([node(3, tokens=[3, 4], probs=[0.6, 0.5])], "sum 1.1"),
    "a token that cannot have been drawn": (
        [node(3, tokens=[3, 4], probs=[0.0, 1.0])],
        "no probability",
    ),
    "a token that is not in the distribution": (
        [node(3, tokens=[4], probs=[1.0])],
        "no probability",
    ),
    "too many nodes": ([node()] * (MAX_NODES + 1), f"more than {MAX_NODES}"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str) -> None:
    """Each would be a wrong text, or an error in the middle of a step."""
    nodes, message = LIES[lie]
    with pytest.raises(InvalidReplyError, match=message):
        checked_nodes(nodes, 0, V, with_probs=True)


def test_too_many_nodes_over_several_replies() -> None:
    """The bound is of a base, not of a message."""
    checked_nodes([node()], MAX_NODES - 1, V, with_probs=True)
    with pytest.raises(InvalidReplyError):
        checked_nodes([node()], MAX_NODES, V, with_probs=True)


def test_parents_of_earlier_replies() -> None:
    """Numbers go on from reply to reply."""
    assert [
        one.parent for one in checked_nodes([node(parent=4), node(parent=5)], 5, V, with_probs=True)
    ] == [4, 5]
    with pytest.raises(InvalidReplyError):
        checked_nodes([node(parent=5)], 5, V, with_probs=True)


def test_distributions_are_scaled_to_one() -> None:
    """Rounding on the way is mended: the distribution is what was drawn from."""
    distribution = checked_distribution(node(3, tokens=[3, 4, 9], probs=[0.4001, 0.3, 0.2996]), V)
    assert distribution.probs.sum() == pytest.approx(1, abs=1e-6)
    assert np.array_equal(distribution.tokens, [3, 4, 9])


def test_without_distributions_nothing_is_drawn() -> None:
    """probs=off: a node counts as placed whatever the service claims, and its distribution is not
    read."""
    found = checked_nodes([node(3, tokens=[4], probs=[7.0])], 0, V, with_probs=False)
    assert found[0].distribution is None
