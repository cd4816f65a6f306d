"""The one thread of a process in which its connections to services live, with their event loop.

It lasts as long as the process: gRPC's own threads know it, and a child that ends with the thread that started it must not end
before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The loop, running."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_report)
    threading.Thread(target=loop.run_forever, name="outrider-remote", daemon=True).start()
    return loop


def in_background(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run `work` there; from any thread."""
    return asyncio.run_coroutine_threadsafe(work, background_loop())


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process for each event, and all but the first find nothing to read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
