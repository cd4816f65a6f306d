"""Self-tests that found nothing wrong, kept for the next start of the same server: it is ready the sooner.

A test with findings is made again at every start, for a busy minute may have been the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from outrider.cache import cache_folder
from outrider.serve.selftest import SelfTest

log = logging.getLogger("outrider.serve")
VERSION = 1  # of the test: another one is made anew
MOST_FILES = 200  # the oldest go first


def kept_test(facts: dict[str, Any] | None) -> SelfTest | None:
    """What an earlier start found, where all these facts were the same. `facts`: None where tomorrow may differ from today."""
    if facts is None:
        return None
    try:
        content = json.loads(_path(facts).read_text(encoding="utf-8"))
        return SelfTest([], dict(content["numbers"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep_test(facts: dict[str, Any] | None, result: SelfTest) -> None:
    """For the next start. A folder that cannot be written costs that start its time, nothing else."""
    if facts is None or result.findings:
        return
    path = _path(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"numbers": result.numbers}, file, indent=1)
        os.replace(scratch, path)
        for old in sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("the self-test is not kept for the next start: %s", error)


def _path(facts: dict[str, Any]) -> Path:
    content = json.dumps([VERSION, facts], sort_keys=True, default=str)
    return cache_folder() / "self-tests" / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.json"
