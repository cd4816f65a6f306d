"""Warnings of transformers that its own code for running states is slow here: held back until it is known whether that code runs.

A model is compared with transformers' code while it is loaded, and may run on the native runtime afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

LOGGER = "transformers.integrations.hub_kernels"
SLOW = "is falling back to its reference PyTorch implementation"


class SlowPaths(logging.Filter):
    """The warnings that were held back; `tell` passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        is_slow = SLOW in record.getMessage()
        if is_slow:
            self._records.append(record)
        return not is_slow

    def tell(self) -> None:
        """Log them now: transformers does so only once."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)


@contextlib.contextmanager
def slow_paths_held() -> Iterator[SlowPaths]:
    """Hold such warnings back meanwhile."""
    held, logger = SlowPaths(), logging.getLogger(LOGGER)
    logger.addFilter(held)
    try:
        yield held
    finally:
        logger.removeFilter(held)
