"""Tests that need hosts and wires skip, with the reason, where the machine cannot have them."""

from __future__ import annotations

import pytest

from tests.network.network import why_not


@pytest.fixture(scope="session")
def _wires() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
