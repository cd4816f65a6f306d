"""transformers' warnings about its slow code reach the user where that code runs, and only there."""

from __future__ import annotations

import inspect
import logging

import pytest
from transformers.integrations import hub_kernels

from outrider.models.loading.older_code import LOGGER, slow_paths_held


@pytest.mark.parametrize("runs_natively", [True, False])
def test_slow_paths_are_reported_where_they_run(
    monkeypatch: pytest.MonkeyPatch, *, runs_natively: bool
) -> None:
    shown: list[str] = []
    logger = logging.getLogger(LOGGER)
    monkeypatch.setattr(logger, "callHandlers", lambda record: shown.append(record.getMessage()))
    # other tests quieten transformers
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: True)
    slow = "`f` is falling back to its reference PyTorch implementation because `causal_conv1d` is not installed."
    with slow_paths_held() as held:
        logger.warning(slow)
        logger.warning("another warning")
    assert shown == ["another warning"]
    if not runs_natively:
        held.tell()
    logger.warning(slow)
    assert shown.count(slow) == (1 if runs_natively else 2)


def test_transformers_still_says_it_so() -> None:
    """Guards against words and a logger that a new release of transformers has renamed."""
    assert hub_kernels.logger.name == LOGGER
    assert "is falling back to its reference PyTorch implementation" in inspect.getsource(
        hub_kernels
    )
