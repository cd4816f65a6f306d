"""Puts requests to one server, so many at once.

One call is one window: an uninterrupted stretch of work whose clock all its answers share. Requests that fail are kept as
failures; a server that refuses connections, or fails PATIENCE requests in a row, is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.lab.progress import Progress
from outrider.lab.server.client import Client
from outrider.lab.server.options import LoadOptions
from outrider.lab.server.types import Failure, Level, MeasuredAnswer
from outrider.lab.workload.types import WorkloadRequest

PATIENCE = 10  # failures in a row


@dataclass
class LoadRun:
    """One server under one level. `keep` is called with every answer as soon as it is there."""

    label: str
    client: Client
    model: str
    options: LoadOptions
    level: Level
    keep: Callable[[MeasuredAnswer], None]
    progress: Progress
    failures: list[Failure] = field(default_factory=list)
    given_up: str = ""  # why, once it is
    _in_a_row: int = 0

    async def run(self, requests: Sequence[WorkloadRequest], window: int) -> None:
        """Ask them all, in order; returns when all are finished or the server was given up."""
        begin, waiting = perf_counter(), deque(requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.level.concurrency, len(waiting))):
                tasks.create_task(self._work_off(waiting, window, begin))

    async def _work_off(self, waiting: deque[WorkloadRequest], window: int, begin: float) -> None:
        while waiting:
            await self._ask(waiting.popleft(), window, begin)

    async def _ask(self, request: WorkloadRequest, window: int, begin: float) -> None:
        if self.given_up:
            return
        path, body = self.options.body(request, self.model)
        start_s = perf_counter() - begin
        outcome = await self.client.ask(request.id, path, body)
        if isinstance(outcome, Failure):
            self._failed(outcome)
        else:
            self._in_a_row = 0
            facts = {"task": request.task, "window": window, "start_s": round(start_s, 6)}
            self.keep(outcome.model_copy(update=facts))
        self.progress.advance()

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._in_a_row += 1
        self.progress.say(f"{self.label}, request {failure.id}: {failure.message}")
        if failure.kind == "refused":
            self.given_up = failure.message
        elif self._in_a_row >= PATIENCE:
            self.given_up = f"{PATIENCE} requests in a row failed; the last: {failure.message}"
