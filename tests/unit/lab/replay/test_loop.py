"""One step of a replay: what is kept of a draft, and where a text ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.lookup.recycling import RecyclingDrafter
from outrider.errors import CapabilityError
from outrider.lab.replay.loop import LoggedRow, ReplayLoop, text_target
from outrider.lab.replay.texts import Text
from outrider.parts import choose_parts
from outrider.rows import Rows
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft

VOCABULARY = 50


class Scripted(Drafter):
    """Proposes the same tree in every step."""

    shape = "tree"

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return to_draft([self.tree] * len(rows), "cpu")


def tree_of(*paths: Sequence[int]) -> TokenTree:
    tree = TokenTree()
    for path in paths:
        tree.add_path(path, 100)
    return tree


def one_step(drafter: Drafter, text: Text) -> LoggedRow:
    loop = ReplayLoop("scripted", drafter, FixedLength(100), VOCABULARY)
    row = LoggedRow.of(text, 0)
    loop.add(row)
    loop.step()
    return row


def test_the_branch_that_the_text_takes_is_kept() -> None:
    """Catches the target's choice read at a node's number instead of at its depth, and a first
    child that always wins."""
    row = one_step(Scripted(tree_of([7, 8, 9], [3, 4, 5, 6], [3, 1])), Text([1], [3, 4, 5, 2, 2]))
    assert row.output == [3, 4, 5, 2]
    assert row.origins == ["accepted"] * 3 + ["correction"]
    assert (row.stats.drafted, row.stats.accepted, row.stats.tested) == (8, 3, 4)
    assert row.stats.accepted_per_position == [1, 1, 1]
    assert row.finish_reason is None


def test_a_draft_beyond_the_end_is_cut_there() -> None:
    """Catches tokens after the log's end, a token of the replay's own in the text, and a last token
    that is never reached."""
    row = one_step(Scripted(tree_of([3, 4, 5, 6])), Text([1], [3, 4]))
    assert (row.output, row.origins, row.finish_reason) == (
        [3, 4],
        ["accepted", "accepted"],
        "stop",
    )
    assert (row.stats.emitted, row.stats.accepted, row.stats.tested, row.stats.drafted) == (
        2,
        2,
        2,
        4,
    )
    row = one_step(Scripted(tree_of([3])), Text([1], [3, 4]))
    assert (row.output, row.origins, row.finish_reason) == ([3, 4], ["accepted", "bonus"], "stop")


def test_room_is_what_the_log_had() -> None:
    """Catches a limit taken from the answer's length where the answer ended by itself: drafts near
    the end would be cut."""
    control = FixedLength(5)
    # a limit below the answer's length is a mistake of the log's
    for limit, asked in [(None, 5), (2, 1), (4, 3), (1, 1)]:
        rows = Rows(VOCABULARY, torch.device("cpu"))
        rows.add(LoggedRow.of(Text([1], [3, 4], max_tokens=limit), 0))
        assert control.choose(rows) == [asked]


@given(
    paths=st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=4), max_size=5),
    answer=st.lists(st.integers(2, 4), min_size=1, max_size=6),
)
def test_the_kept_path_is_the_longest_that_the_text_follows(
    paths: list[list[int]], answer: list[int]
) -> None:
    """Catches any other verdict: this is what every lossless verifier keeps of placed tokens."""
    row = one_step(Scripted(tree_of(*paths)), Text([1], answer))
    longest = max(
        (n for path in paths for n in range(len(path) + 1) if path[:n] == answer[:n]), default=0
    )
    assert row.stats.accepted == longest
    assert row.output == answer[: longest + 1]


class Reader(Scripted):
    """Runs the target while it drafts."""

    def __init__(self) -> None:
        super().__init__(tree_of([1]))
        self.lm = text_target(None, VOCABULARY).lm

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        self.lm.forward(torch.tensor([[1]]))
        return super().propose(rows, gamma)


class Drawing(Scripted):
    """Says that its tokens were drawn."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        draft = super().propose(rows, gamma)
        draft.probs = torch.full((1, 2, VOCABULARY), 1 / VOCABULARY)
        return draft


def test_drafters_that_want_more_than_text_are_found_out() -> None:
    """Catches numbers made up for a drafter that asks for a model: a third party's need not say
    that it does."""
    parts = choose_parts("recycling", {}, "auto", {}, None, lossy=False)
    recycling = parts.make_drafter(text_target(None, VOCABULARY), None)
    assert isinstance(recycling, RecyclingDrafter)
    with pytest.raises(CapabilityError, match="learns from the target's logits"):
        one_step(recycling, Text([1], [2, 3]))
    with pytest.raises(CapabilityError, match="runs the target's model"):
        one_step(Reader(), Text([1], [2, 3]))
    with pytest.raises(CapabilityError, match="draws tokens at random"):
        one_step(Drawing(tree_of([1])), Text([1], [2, 3]))
