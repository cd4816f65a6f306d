"""`--num-draft-tokens N`: the number, or the room that is left."""

from __future__ import annotations

from types import SimpleNamespace

from outrider.control import FixedLength


def test_a_row_close_to_its_end_gets_less() -> None:
    """The verifier's own token needs room too; nothing is asked for a row with one token left."""
    rows = [SimpleNamespace(room=room) for room in (100, 6, 5, 2, 1)]
    assert FixedLength(5).choose(rows) == [5, 5, 4, 1, 0]
