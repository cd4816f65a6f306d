"""Invalid replies are refused: each kind of mistake by itself."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.remote.draft.chain import (
    MAX_NODES,
    InvalidReplyError,
    checked_distribution,
    checked_nodes,
)
from outrider.remote.protocol import messages

V = 10


def node(
    token: int = 3,
    tokens: list[int] | None = None,
    probs: list[float] | None = None,
) -> messages.Node:
    if tokens is None:
        return messages.Node(token=token)
    sent = messages.Distribution(tokens=tokens, probs=probs or [])
    return messages.Node(token=token, distribution=sent)


LIES = {
    "a token outside the vocabulary": ([node(V)], "token 10 is outside"),
    "an empty distribution": ([node(3, tokens=[])], "0 tokens"),
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
        checked_nodes(nodes, V, with_probs=True)


def test_distributions_are_scaled_to_one() -> None:
    """Rounding on the way is mended: the distribution is what was drawn from."""
    distribution = checked_distribution(node(3, tokens=[3, 4, 9], probs=[0.4001, 0.3, 0.2996]), V)
    assert distribution.probs.sum() == pytest.approx(1, abs=1e-6)
    assert np.array_equal(distribution.tokens, [3, 4, 9])


def test_without_distributions_nothing_is_drawn() -> None:
    """probs=off: a node counts as placed whatever the service claims, and its distribution is not
    read."""
    found = checked_nodes([node(3, tokens=[4], probs=[7.0])], V, with_probs=False)
    assert found[0].distribution is None
