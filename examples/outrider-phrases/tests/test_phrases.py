"""The drafter alone, without a model: what it proposes, and that its per-row state follows the
rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_phrases import PhraseDrafter, PhraseSettings, PhraseTrie

from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.settings import parse_settings
from outrider.testing import make_rows
from outrider.types import Draft, TargetOutput, Verdict

PHRASES = [[1, 2, 3, 4], [1, 2, 5], [2, 6, 7, 8], [9]]


def drafter(**settings: Any) -> PhraseDrafter:
    return PhraseDrafter(PhraseTrie(PHRASES), PhraseSettings(**settings))


def drafted(ours: PhraseDrafter, texts: list[list[int]], gamma: list[int]) -> tuple[Draft, Rows]:
    rows = make_rows(ours, texts, vocab_size=20)
    return ours.propose(rows, gamma), rows


def nodes(draft: Draft, row: int) -> list[tuple[int, int]]:
    """(parent, token) of every node that counts."""
    length = draft.lists[1][row]
    return list(zip(draft.parent_nodes()[row].tolist(), draft.lists[0][row], strict=True))[:length]


def test_the_rest_of_a_begun_phrase_is_drafted() -> None:
    """Also where the phrase began inside another one, and not where too little of it stands there."""
    draft, _ = drafted(drafter(), [[7, 1, 2], [7, 1, 2, 6], [7, 1], [1, 2, 3, 4]], [8, 8, 8, 8])
    assert draft.parents is None
    assert [nodes(draft, row) for row in range(4)] == [[(-1, 3), (0, 4)], [(-1, 7), (0, 8)], [], []]


def test_a_tree_holds_all_phrases_that_fit_nearest_nodes_first() -> None:
    """Catches branches that repeat a token, a child before its parent, and a budget spent on one
    phrase."""
    draft, _ = drafted(drafter(tree=True, min_match=1), [[1, 2]], [8])
    assert nodes(draft, 0) == [(-1, 3), (-1, 5), (-1, 6), (0, 4), (2, 7), (4, 8)]
    draft, _ = drafted(drafter(tree=True, min_match=1), [[1, 2], [1, 2]], [2, 0])
    assert [nodes(draft, row) for row in range(2)] == [[(-1, 3), (-1, 5)], []]


def test_after_a_commit_the_state_is_that_of_a_fresh_start() -> None:
    """Catches state that is read from the draft instead of the text."""
    ours = drafter()
    draft, rows = drafted(ours, [[7, 1, 2], [9, 9]], [8, 8])
    kept = Verdict(
        torch.tensor([[0, -1], [-1, -1]]),
        torch.tensor([1, 0]),
        torch.tensor([2, 1]),
        torch.tensor([False, True]),
    )
    logits = torch.zeros(2, 3, 20)
    rows.append(draft, kept, logits)
    ours.commit(rows, draft, kept, TargetOutput(logits))
    again, _ = drafted(drafter(), [row.tokens for row in rows], [8, 8])
    assert [row.tokens for row in rows] == [[7, 1, 2, 3, 2], [9, 9, 1]]
    assert torch.equal(ours.propose(rows, [8, 8]).tokens, again.tokens)


def test_rows_leave_by_swap_remove() -> None:
    """Catches state that stays behind when another row takes the slot of the one that leaves."""
    ours = drafter()
    _, rows = drafted(ours, [[1, 2], [2, 6], [1, 2, 3]], [8, 8, 8])
    rows.swap_remove(0)
    ours.stop(0)
    draft = ours.propose(rows, [8, 8])
    assert [nodes(draft, row) for row in range(2)] == [[(-1, 4)], [(-1, 7), (0, 8)]]


def test_settings(tmp_path: Path) -> None:
    """A fault is reported before a model is loaded."""
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "good.txt").write_text("to whom it may concern\n\n  kind regards \n")
    cases = {
        "missing.txt": "No such file",
        "empty.txt": "has no phrases",
        "latin.txt": "utf-8",
        ".": "one phrase a line",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            PhraseSettings(file=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"at least 1 \(.*, got 0"):
        parse_settings(PhraseSettings, {"min-match": "0"}, "drafter 'phrases'")
    assert PhraseSettings(file=str(tmp_path / "good.txt")).phrases() == [
        "to whom it may concern",
        "kind regards",
    ]
    assert len(PhraseSettings().phrases()) > 5
