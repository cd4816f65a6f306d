"""`--drafters ngram,mine` keeps the contract's cases of these drafters alone."""

from __future__ import annotations

import pytest

from outrider.drafters import DRAFTERS
from outrider.errors import did_you_mean


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of other drafters."""
    named = config.getoption("drafters")
    if not named:
        return
    for name in named.split(","):
        if name not in DRAFTERS.names():
            raise pytest.UsageError(f"--drafters: unknown drafter '{name}'.{did_you_mean(name, DRAFTERS.names())}")
    left = [item for item in items if drafter_of(item) not in (None, *named.split(","))]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def drafter_of(item: pytest.Item) -> str | None:
    """The drafter of a case of `test_drafters.py`; None for every other test."""
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return case[0] if item.path.name == "test_drafters.py" and case else None
