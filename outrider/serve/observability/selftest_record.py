"""Self-tests that found nothing wrong, kept for the next start of the same server: it is ready the sooner.

A test with findings is made again at every start, for a busy minute may have been the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from outrider.cache import cache_folder, keep_json, kept_json
from outrider.serve.observability.selftest import SelfTest

log = logging.getLogger("outrider.serve")
VERSION = 1  # of the test: another one is made anew
MAX_FILES = 200  # the oldest go first


def kept_test(facts: dict[str, Any] | None) -> SelfTest | None:
    """What an earlier start found, where all these facts were the same. `facts`: None where tomorrow may differ from today."""
    if facts is None:
        return None
    content = kept_json(_path(facts))
    return None if content is None else SelfTest([], content["numbers"])


def keep_test(facts: dict[str, Any] | None, result: SelfTest) -> None:
    """Remember a test without findings. A folder that cannot be written costs that start its time, nothing else."""
    if facts is None or result.findings:
        return
    try:
        keep_json(_path(facts), {"numbers": result.numbers}, max_files=MAX_FILES)
    except OSError as error:
        log.info("the self-test is not kept for the next start: %s", error)


def _path(facts: dict[str, Any]) -> Path:
    content = json.dumps([VERSION, facts], sort_keys=True, default=str)
    return cache_folder() / "self-tests" / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.json"
