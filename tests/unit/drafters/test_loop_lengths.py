"""Which programs make up a draft of any length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.drafters.base import lengths_for_any
from outrider.models.draft_loop import DraftLoop


@pytest.mark.parametrize("most", range(1, 9))
def test_two_calls_make_up_any_length_to_eight(most: int) -> None:
    """Each further call costs: catches a program missing between the long one and that of one token, and drafts far too long."""
    lm: Any = SimpleNamespace(kv=SimpleNamespace(device="cpu"))
    program: Any = None
    loop = DraftLoop(lm, dict.fromkeys(lengths_for_any(most), program))
    for wanted in range(1, most + 1):
        assert len(loop._calls(wanted)) <= 2
        assert wanted <= loop.length(wanted) <= wanted + 1
