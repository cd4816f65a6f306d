"""The targets of a coordinator: which may replace one another, and which takes the next request.

A request that loses its target continues at another one with the same text, so all targets of one
model must have the same facts (identity.py). The first one that is reached defines them, until no
such target was seen for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Any

import httpx2

from outrider.remote.coordinator.identity import Facts, difference
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.remote.coordinator.target import RefusedError, Target
from outrider.serve.errors import SERVER, ApiError, unavailable

RETRY_AFTER_S = 2


class Fleet:
    """Make it anywhere, start it in the event loop it lives in."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        client = httpx2.AsyncClient(
            verify=settings.access.context(),
            timeout=httpx2.Timeout(None, connect=settings.stall_s),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )
        self.targets = [
            Target(address, settings, client, self._admit, self._notify)
            for address in settings.targets
        ]
        self.retries = 0  # requests that continued elsewhere, each as often as it did
        self.in_flight = 0  # requests that have not ended
        self.waiting = 0  # of those, the ones that wait for a target
        self._measures: dict[str, Facts] = {}  # by model
        # by model, when a target that meets its measure was last in use
        self._met_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to reach targets."""
        self._tasks = [asyncio.ensure_future(target.keep()) for target in self.targets]

    def reasons(self) -> str:
        """Why nobody answers, in a line."""
        return "; ".join(
            f"{target.name} is {target.standing}{f' ({target.reason})' if target.reason else ''}"
            for target in self.targets
        )

    async def choose(
        self, model: str | None, facts: Any, avoided: Collection[Target], until_s: float
    ) -> Target | None:
        """The target with the least to do that serves `model`, with these facts where the answer
        has begun.

        None: only `avoided` ones could. Raises ApiError when nobody answers until `until_s`
        (monotonic), or too many wait.
        """
        while True:
            able = [
                target
                for target in self.targets
                if target.is_usable and self._fits(target, model, facts)
            ]
            free = [target for target in able if target not in avoided]
            if free:
                return min(free, key=lambda target: target.in_flight)
            if able:
                return None
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise unavailable(f"no target answers: {self.reasons()}", "no_replica")
            await self._wait(min(left_s, 1.0), has_begun=facts is not None)

    def _fits(self, target: Target, model: str | None, facts: Any) -> bool:
        if facts is not None:
            return bool(target.facts_of(model) == facts)
        known = any(model in other.names for other in self.targets)
        return not known or model in target.names  # a name that nobody knows is refused by a target

    async def _wait(self, seconds: float, *, has_begun: bool) -> None:
        if self.waiting >= self._settings.max_queue and not has_begun:
            message = f"{self.waiting} requests wait for a target already; try again later"
            raise ApiError(
                message,
                status=429,
                kind=SERVER,
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.waiting += 1
        self._changed.clear()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        finally:
            self.waiting -= 1

    def _admit(self, target: Target) -> None:
        """Let a target answer. Raises RefusedError, naming what differs, where texts could change
        in their middle."""
        now = time.monotonic()
        for name, facts in target.models.items():
            known = self._measures.get(name)
            if known is None or now - self._met_s[name] > self._settings.wait_s:
                self._measures[name] = known = facts
            if (other := difference(facts, known)) is not None:
                raise RefusedError(
                    f"it would answer for '{name}' with other texts than the targets in use "
                    f"({other}): serve the same weights in "
                    "the same way everywhere, or give this one another --served-model-name"
                )
        self._met_s.update(dict.fromkeys(target.models, now))

    def _notify(self) -> None:
        self._changed.set()
