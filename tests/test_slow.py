"""The list of slow tests: what is on it is marked, and what is no longer there is not on it."""

from __future__ import annotations

import pytest

from tests.conftest import REPOSITORY, SLOW


def test_listed_tests_are_marked(request: pytest.FixtureRequest) -> None:
    listed = set(SLOW.read_text().splitlines())
    chosen = [item for item in request.session.items if item.nodeid in listed]
    assert all(item.get_closest_marker("slow") for item in chosen)


def test_listed_tests_exist() -> None:
    """Catches a test that was renamed, which `make test` would run again, however long it takes."""
    gone = []
    for name in SLOW.read_text().splitlines():
        file, *_, function = name.partition("[")[0].split("::")
        path = REPOSITORY / file
        if not path.is_file() or (
            f"def {function}(" not in path.read_text() and function != "runTest"
        ):
            gone.append(name)
    assert not gone, "make slow lists them anew"
