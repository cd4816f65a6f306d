"""`--num-draft-tokens N`: the number, what the request itself asked for, or the room that is left."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.draft_length import AutoLength, FixedLength, Goodput
from outrider.sampling.params import SamplingParams
from tests.helpers import make_row
from tests.unit.draft_length.simulator import Batch


def rows_with(*room: int, **fields: Any) -> Any:
    """Rows with so many tokens left."""
    rows = [make_row([1], SamplingParams(max_tokens=left)) for left in room]
    for row in rows:
        for name, value in fields.items():
            setattr(row, name, value)
    return Batch(rows)


def test_a_row_close_to_its_end_gets_less() -> None:
    """The verifier's own token needs room too; nothing is asked for a row with one token left."""
    assert FixedLength(5).choose(rows_with(100, 6, 5, 2, 1)) == [5, 5, 4, 1, 0]


@pytest.mark.parametrize("control", [FixedLength(5), AutoLength({"a": Goodput(5, trees=False)})])
def test_a_request_may_bound_fix_or_refuse_drafts(control: Any) -> None:
    """Whatever the control would choose; room comes last."""
    assert control.choose(rows_with(100, 3, draft_bound=0)) == [0, 0]
    assert control.choose(rows_with(100, 3, draft_bound=4, draft_fixed=True)) == [4, 2]
    assert max(control.choose(rows_with(100, draft_bound=1))) <= 1
