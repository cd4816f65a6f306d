"""What holds for the whole contract: `--drafters ngram,mine` keeps the cases of these drafters
alone, and every draft's distributions are checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.drafters import DRAFTERS
from outrider.drafters.proposals import laws_checked
from outrider.errors import did_you_mean


@pytest.fixture(autouse=True)
def _honest_distributions() -> Iterator[None]:
    with laws_checked():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of other drafters."""
    named = config.getoption("drafters")
    if not named:
        return
    for name in named.split(","):
        if name not in DRAFTERS.names():
            raise pytest.UsageError(
                f"--drafters: unknown drafter '{name}'.{did_you_mean(name, DRAFTERS.names())}"
            )
    left = [item for item in items if drafter_of(item) not in (None, *named.split(","))]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def drafter_of(item: pytest.Item) -> str | None:
    """The drafter of a case of `test_drafters.py`; None for every other test."""
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return case[0] if item.path.name == "test_drafters.py" and case else None
