"""The vLLM version that this was tested with, and the warning about others.

Its custom drafters are called by an interface of one constructor and one method, which is checked
at every call; another version therefore gets a warning and continues. The new runner is patched
from outside: its signatures must be the known ones (`speculator.py`), whatever the version number.
"""

from __future__ import annotations

import logging

TESTED = (0, 32)
LOG_NAME = "vllm.outrider"  # below vLLM's logger, whose handlers a server has
log = logging.getLogger(LOG_NAME)


def warn_if_untested(version: str) -> None:
    """One warning for a vLLM that is not the tested one."""
    if _numbers(version) != TESTED:
        log.warning(
            "Outrider's drafters were tried in vLLM %d.%d and run in vLLM %s here. What they need "
            "of it is method custom_class "
            "in the old model runner: if drafts are refused or the server does not start, install "
            "vLLM %d.%d.",
            *TESTED,
            version,
            *TESTED,
        )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return (
        tuple(int(part) for part in parts)
        if len(parts) == 2 and all(part.isdigit() for part in parts)
        else ()
    )
