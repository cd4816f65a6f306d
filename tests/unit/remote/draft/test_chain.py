"""The chain that a draft service sent: late replies, walking, and what is never proposed."""

from __future__ import annotations

import numpy as np

from outrider.remote.draft.chain import DraftChain, ReceivedNode, SentDistribution


def placed(*tokens: int) -> list[ReceivedNode]:
    return [ReceivedNode(token) for token in tokens]


def drawn(*tokens: int) -> list[ReceivedNode]:
    """Each from a distribution of two tokens."""
    half = np.full(2, 0.5, dtype=np.float32)
    return [
        ReceivedNode(token, SentDistribution(np.array([token, token + 100]), half))
        for token in tokens
    ]


def tokens(chain: DraftChain, max_nodes: int = 9) -> list[int]:
    return [node.token for node in chain.first(max_nodes)]


def test_a_chain_is_cut_to_what_is_wanted() -> None:
    """The control asks for fewer nodes than were sent."""
    chain = DraftChain(3)
    chain.add(3, placed(5, 6, 7))
    assert tokens(chain) == [5, 6, 7]
    assert tokens(chain, 2) == [5, 6]
    assert tokens(chain, 0) == []


def test_a_longer_reply_continues_the_first() -> None:
    """The service was asked for more."""
    chain = DraftChain(3)
    chain.add(3, placed(5))
    chain.add(3, placed(5, 6, 7))
    assert tokens(chain) == [5, 6, 7]
    assert chain.wasted == 0


def test_another_text_leaves_nothing() -> None:
    """What was drafted for another continuation must not be proposed."""
    chain = DraftChain(3)
    chain.add(3, placed(5, 6))
    chain.advance([5, 7])
    assert (chain.length, tokens(chain)) == (5, [])
    assert chain.wasted == 1  # node 6; 5 is text


def test_a_late_reply_is_used_where_it_agrees() -> None:
    """Nodes for base 3 arrive when the text has continued as they predict, or not."""
    chain = DraftChain(3)
    chain.advance([5, 6])
    chain.add(3, placed(5, 6, 7))
    assert tokens(chain) == [7]
    chain.add(3, placed(5, 9, 10))
    assert tokens(chain) == [7]
    assert chain.wasted == 2  # 9 and 10


def test_replies_for_both_bases_of_one_position_meet() -> None:
    """The service sends nodes again that the client has already."""
    chain = DraftChain(3)
    chain.add(3, placed(5, 6, 7))
    chain.advance([5])
    chain.add(4, placed(6, 7, 8))
    assert tokens(chain) == [6, 7, 8]


def test_the_first_draw_stays() -> None:
    """Guards against choosing between two draws, since a choice by value biases the text."""
    chain = DraftChain(3)
    chain.add(3, drawn(5))
    chain.add(3, drawn(6, 7))
    assert tokens(chain) == [5]


def test_a_tested_draw_is_never_proposed_again() -> None:
    """A correction that equals the token it corrects leads back into the chain that was judged: it
    is closed there."""
    chain = DraftChain(3)
    chain.add(3, drawn(5, 6, 7, 8))
    chain.advance([5, 6], chain.first(3))  # 5 kept, 6 a correction: 7 was looked at
    assert tokens(chain) == []
    chain.add(5, drawn(7, 9))  # sent again, or drawn anew: nobody can tell
    assert tokens(chain) == []
    chain.add(5, drawn(11, 12))
    assert tokens(chain) == []
    chain.advance([7])  # plainly: 8 was never looked at
    assert tokens(chain) == [8]


def test_what_was_not_proposed_is_fresh() -> None:
    """A shorter draft than was sent: the rest goes on being one."""
    chain = DraftChain(3)
    chain.add(3, drawn(5, 6, 7))
    chain.advance([5, 6], chain.first(1))
    assert tokens(chain) == [7]


def test_a_base_before_the_row_began_is_nobodys() -> None:
    """Nobody asked about it."""
    chain = DraftChain(3)
    chain.add(2, placed(4, 5))
    assert tokens(chain) == []


def test_dropping_drafts() -> None:
    """After a lie nothing that has arrived counts."""
    chain = DraftChain(3)
    chain.add(3, placed(5))
    chain.drop()
    assert tokens(chain) == []
    chain.advance([5])
    chain.add(4, placed(6))
    assert tokens(chain) == [6]


def test_against_a_list_of_texts() -> None:
    """Random replies, bases and commits: the draft is made of what was sent, agrees with the text,
    and grows only."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = [0]
        chain = DraftChain(1)
        sent: list[list[int]] = []
        before: list[int] = []
        for _ in range(30):
            if rng.random() < 0.6:
                base = len(text) - int(rng.integers(min(3, len(text))))
                nodes = [int(token) for token in rng.integers(3, size=int(rng.integers(1, 5)))]
                chain.add(base, placed(*nodes))
                sent.append([*text[:base], *nodes])
            else:
                text.append(int(rng.integers(3)))
                chain.advance([text[-1]])
                before = before[1:] if before[:1] == text[-1:] else []
            got = tokens(chain)
            assert got[: len(before)] == before
            assert all(
                any(one[: len(text) + count] == [*text, *got[:count]] for one in sent)
                for count in range(1, len(got) + 1)
            )
            before = got
