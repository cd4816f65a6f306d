"""The draft service's life: listen, load, answer, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.hosted import HostedDrafter, HostedDrafterOptions, load_drafter
from outrider.remote.draft.service import LAST_WORDS_S, DraftService
from outrider.remote.draft.texts import DraftLimits, HostedTexts
from outrider.remote.draft.worker import Worker
from outrider.remote.protocol import stubs
from outrider.remote.serving import GrpcServer, ServiceSettings, until_signal
from outrider.serve.observability.logs import Logging
from outrider.serve.settings import LogFormat, LogLevel
from outrider.settings import checked

log = logging.getLogger("outrider.service")


@checked()
@dataclass(frozen=True, kw_only=True)
class DraftServiceSettings:
    """All that shapes a draft service."""

    drafter: HostedDrafterOptions
    limits: DraftLimits = field(default_factory=DraftLimits)
    listen: ServiceSettings = field(default_factory=ServiceSettings)
    log_format: LogFormat = "human"
    log_level: LogLevel = "info"


class RunningDraftService:
    """A service in the current event loop: `start`, `serve`, `stop`."""

    def __init__(self, settings: ServiceSettings, limits: DraftLimits) -> None:
        self._limits = limits
        self.server = GrpcServer(settings)
        self.counters = DraftCounters(self.server.registry)
        self.service = DraftService(self.counters)
        stubs.add_to_server(self.service, self.server.server)
        self.worker: Worker | None = None
        self.texts: HostedTexts | None = None

    async def start(self) -> str:
        """Listen, not serving yet; the address."""
        await self.server.listen()
        return self.server.address

    async def serve(self, hosted: HostedDrafter) -> None:
        """Answer with this drafter from now on."""
        texts = self.texts = HostedTexts(self._limits, hosted.vocab_size, hosted.max_context)
        self.counters.watch(texts.num_rows, texts.num_waiting)
        loop = asyncio.get_running_loop()
        self.worker = Worker(
            hosted.host,
            texts,
            self._limits,
            self.counters,
            hosted.max_context,
            died=lambda: loop.call_soon_threadsafe(
                asyncio.ensure_future, self._refuse(0.0, "the drafting thread has died")
            ),
        )
        self.worker.start()
        self.service.serve(hosted, self._limits, texts)
        await self.server.set_serving(True)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Answer what waits, for at most this many seconds, and leave."""
        await self._refuse(drain_s, "the service is shutting down")
        await self.server.stop(LAST_WORDS_S)
        if self.worker is not None:
            await asyncio.to_thread(self.worker.stop)

    async def _refuse(self, drain_s: float, why_not: str) -> None:
        """Take no new calls, and tell health checks."""
        await self.server.set_serving(False)
        await self.service.drain(drain_s, why_not)


def run_draft_service(
    settings: DraftServiceSettings, status: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until a signal stops it. Raises ConfigError where it cannot listen, and what loading
    raises."""
    with closing(Logging(settings.log_format, settings.log_level)):
        asyncio.run(_serve(settings, log.info if settings.log_format == "json" else status))


def _loading(
    options: HostedDrafterOptions, status: Callable[[str], None]
) -> asyncio.Future[HostedDrafter]:
    """The drafter, once a thread has loaded it; a signal need not wait for that."""
    loaded: Future[HostedDrafter] = Future()
    loaded.set_running_or_notify_cancel()

    def load() -> None:
        try:
            loaded.set_result(load_drafter(options, status))
        except BaseException as error:  # noqa: BLE001  the waiting caller raises it
            loaded.set_exception(error)

    threading.Thread(target=load, name="loading", daemon=True).start()
    return asyncio.wrap_future(loaded)


async def _serve(settings: DraftServiceSettings, status: Callable[[str], None]) -> None:
    running = RunningDraftService(settings.listen, settings.limits)
    await running.start()
    signalled = asyncio.create_task(until_signal())
    loading = _loading(settings.drafter, status)
    try:
        both: set[asyncio.Future[Any]] = {signalled, loading}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("received a signal to end while loading")
        else:
            hosted = loading.result()
            for note in hosted.notes:
                log.warning(note)
            await running.serve(hosted)
            log.info("drafting for '%s'", hosted.identity.name)
            await signalled
            log.info("draining")
    finally:
        signalled.cancel()
        loading.cancel()
        await running.stop(settings.listen.drain_timeout_s)
