"""The tree of what a draft service sent: grafting, walking, re-rooting, and what is never proposed."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.remote.draft.tree import (
    KEPT_BASES,
    DraftTree,
    Sent,
    SentDistribution,
    UnknownBaseError,
)


def distribution(*tokens: int) -> SentDistribution:
    """Uniform."""
    return SentDistribution(
        np.array(tokens), np.full(len(tokens), 1 / len(tokens), dtype=np.float32)
    )


def placed(parent: int, token: int) -> Sent:
    return Sent(parent, token, None)


def drawn(parent: int, token: int, of: SentDistribution | None = None) -> Sent:
    return Sent(parent, token, of or distribution(token, token + 100))


def tokens(tree: DraftTree, max_nodes: int = 9) -> list[int]:
    return [node.token for node in tree.chain(max_nodes)]


def asked(length: int = 3) -> DraftTree:
    tree = DraftTree(length)
    tree.ask()
    return tree


def test_a_chain_is_cut_to_what_is_wanted() -> None:
    """The control asks for fewer nodes than were sent."""
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 6), placed(1, 7)])
    assert tokens(tree) == [5, 6, 7]
    assert tokens(tree, 2) == [5, 6]
    assert tokens(tree, 0) == []


def test_nodes_of_several_replies_are_numbered_together() -> None:
    """The second reply hangs on nodes of the first."""
    tree = asked()
    tree.add(3, [placed(-1, 5)])
    tree.add(3, [placed(0, 6), placed(1, 7)])
    assert tokens(tree) == [5, 6, 7]


def test_the_text_walks_through_an_outcome() -> None:
    """One token kept, another one behind it that was prepared: its continuation is the draft."""
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 6), placed(0, 8), placed(2, 9), placed(3, 10)])
    tree.advance([5, 8], tree.chain(2))
    assert (tree.length, tokens(tree)) == (5, [9, 10])


def test_another_text_leaves_nothing() -> None:
    """What was prepared for other outcomes must not be proposed."""
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 6)])
    tree.advance([5, 7])
    assert tokens(tree) == []
    assert tree.wasted == 1  # node 6; 5 is text


def test_a_late_reply_is_grafted_where_it_agrees() -> None:
    """Nodes for base 3 arrive when the text has continued as they predict, in part."""
    tree = asked()
    tree.advance([5, 6])
    tree.ask()
    tree.add(3, [placed(-1, 5), placed(0, 6), placed(1, 7), placed(0, 9), placed(3, 10)])
    assert tokens(tree) == [7]
    assert tree.wasted == 2  # 9 and 10


def test_late_nodes_on_a_dropped_node_are_dropped() -> None:
    """The parent's number is known, but its position in the text is gone."""
    tree = asked()
    tree.add(3, [placed(-1, 5)])
    tree.advance([6])
    tree.add(3, [placed(0, 7), placed(1, 8)])
    assert tokens(tree) == []
    assert tree.wasted == 3


def test_both_bases_of_one_position_meet() -> None:
    """The service sends nodes again that the client has already, under new numbers."""
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 6), placed(1, 7)])
    tree.advance([5])
    tree.ask()
    tree.add(4, [placed(-1, 6), placed(0, 7), placed(1, 8)])
    assert tokens(tree) == [6, 7, 8]


def test_the_first_draw_stays() -> None:
    """Guards against choosing between two draws, since a choice by value biases the text."""
    tree = asked()
    tree.add(3, [drawn(-1, 5)])
    tree.add(3, [drawn(-1, 6), placed(1, 7)])
    assert tokens(tree) == [5]


def test_a_draw_counts_before_what_was_placed() -> None:
    """Whichever came first; and a placed node of the drawn token becomes the drawn one, with what
    hangs on it."""
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 9), drawn(-1, 6)])
    assert tokens(tree) == [6]
    tree = asked()
    tree.add(3, [placed(-1, 5), placed(0, 9), drawn(-1, 5)])
    nodes = tree.chain(2)
    assert [node.token for node in nodes] == [5, 9]
    assert nodes[0].distribution is not None
    assert nodes[1].distribution is None


def test_a_tested_draw_is_never_proposed_again() -> None:
    """A correction that equals the token it corrects leads back into the chain that was judged: it
    is closed there."""
    tree = asked()
    tree.add(3, [drawn(-1, 5), drawn(0, 6), drawn(1, 7), drawn(2, 8)])
    tree.advance([5, 6], tree.chain(3))  # 5 kept, 6 a correction: 7 was looked at
    assert tokens(tree) == []
    tree.ask()
    tree.add(5, [drawn(-1, 7), drawn(0, 9)])  # sent again, or drawn anew: nobody can tell
    assert tokens(tree) == []
    tree.add(5, [drawn(-1, 11), drawn(0, 12)])
    assert tokens(tree) == []
    tree.advance([7])  # plainly: 8 was never looked at
    assert tokens(tree) == [8]


def test_what_was_not_proposed_is_fresh() -> None:
    """A shorter draft than was sent: the rest goes on being one."""
    tree = asked()
    tree.add(3, [drawn(-1, 5), drawn(0, 6), drawn(1, 7)])
    tree.advance([5, 6], tree.chain(1))
    assert tokens(tree) == [7]


def test_unknown_bases() -> None:
    """Replies for a base that was never requested, or so long ago that its numbers are gone."""
    tree = asked()
    with pytest.raises(UnknownBaseError):
        tree.add(4, [placed(-1, 5)])
    for _ in range(KEPT_BASES):
        tree.advance([1])
        tree.ask()
    with pytest.raises(UnknownBaseError):
        tree.add(3, [placed(-1, 5)])
    tree.add(3 + KEPT_BASES, [placed(-1, 5)])
    assert tokens(tree) == [5]


def test_dropping_drafts() -> None:
    """After a lie nothing that has arrived counts, nor what still arrives for the same request."""
    tree = asked()
    tree.add(3, [placed(-1, 5)])
    tree.drop_drafts()
    assert tokens(tree) == []
    with pytest.raises(UnknownBaseError):
        tree.add(3, [placed(0, 6)])
    tree.advance([5])
    tree.ask()
    tree.add(4, [placed(-1, 6)])
    assert tokens(tree) == [6]


def test_against_a_list_of_texts() -> None:
    """Random nodes, replies, bases and commits: the draft is what a search through all texts ever
    sent finds."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = [0]
        tree = asked(1)
        # by base: the texts that its nodes stand for, the anchor's first
        sent: dict[int, list[list[int]]] = {1: [[0]]}
        order: list[list[int]] = []  # of placed texts, as they came
        for _ in range(30):
            if rng.random() < 0.6:
                base = list(sent)[-1 - int(rng.integers(min(3, len(sent))))]
                parent = int(rng.integers(-1, len(sent[base]) - 1))
                path = [*sent[base][parent + 1], int(rng.integers(3))]
                tree.add(base, [placed(parent, path[-1])])
                sent[base].append(path)
                order.append(path)
            else:
                text.append(int(rng.integers(3)))
                tree.advance([text[-1]])
                if rng.random() < 0.7:
                    tree.ask()
                    sent[len(text)] = [list(text)]
            expected: list[int] = []
            while True:
                here = [*text, *expected]
                found = [path[-1] for path in order if path[:-1] == here]
                if not found:
                    break
                expected.append(found[0])
            got = tokens(tree)
            assert got == expected
