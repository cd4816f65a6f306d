"""Which programs make up a draft of any length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.drafters.requirements import lengths_for_any
from outrider.models.draft_loop import DraftLoop


@pytest.mark.parametrize("limit", range(1, 9))
def test_two_calls_make_up_any_length_to_eight(limit: int) -> None:
    """Each further call costs: catches a program missing between the long one and that of one
    token, and drafts too long."""
    lm: Any = SimpleNamespace(kv=SimpleNamespace(device="cpu"))
    program: Any = None
    loop = DraftLoop(lm, dict.fromkeys(lengths_for_any(limit), program))
    for wanted in range(1, limit + 1):
        assert len(loop._calls(wanted)) <= 2
        assert loop.length(wanted) == wanted


def test_lengths_made_of_others() -> None:
    """Catches a loop that makes another number of tokens than its program, or that calls programs
    for nothing."""
    lm: Any = SimpleNamespace(kv=SimpleNamespace(device="cpu"))

    def calls(programs: tuple[int, ...], wanted: int) -> list[int]:
        return DraftLoop(lm, dict.fromkeys(programs, cast(Any, None)))._calls(wanted)

    assert [calls((8, 5, 3, 2, 1), wanted) for wanted in (4, 6, 7, 8)] == [
        [2, 2],
        [3, 3],
        [5, 2],
        [8],
    ]
    assert calls((8, 5, 3, 2, 1), 20) == [8, 8, 2, 2]
    assert calls((1,), 3) == [1, 1, 1]
    assert calls((5,), 3) == [5]  # near the end of a text: cut off
