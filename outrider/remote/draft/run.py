"""The draft service's life: listen, load, answer, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry

from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.hosted import (
    HostedDrafter,
    HostedDrafterOptions,
    chosen_parts,
    load_drafter,
)
from outrider.remote.draft.service import LAST_WORDS_S, DraftService, OpenStream
from outrider.remote.draft.texts import DraftLimits, HostedTexts, Job
from outrider.remote.draft.worker import Worker
from outrider.remote.protocol import stubs
from outrider.remote.serving import GrpcServer, ServiceSettings, until_signal
from outrider.serve.observability.logs import Logging
from outrider.serve.observability.tracing import Tracing
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
    otlp_endpoint: str | None = None


class RunningDraftService:
    """A service in the current event loop: `start`, `load`, `stop`."""

    def __init__(
        self, settings: ServiceSettings, limits: DraftLimits, tracing: Tracing | None = None
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._tracing = tracing
        registry = CollectorRegistry()
        self.counters = DraftCounters(registry)
        self.service = DraftService(self.counters)
        self.server = GrpcServer(settings, registry)
        stubs.add_to_server(stubs.DRAFT, self.service, self.server.server)
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
            self._span,
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

    def _span(self, name: str, jobs: Sequence[Job]) -> AbstractContextManager[object]:
        """One drafting call in the trace of the first asker whose call named one."""
        if self._tracing is None:
            return nullcontext()
        headers = next(
            (
                h
                for job in jobs
                if "traceparent" in (h := cast(OpenStream, job.text.stream).headers)
            ),
            {},
        )
        return self._tracing.http_span(name, headers)


def run_draft_service(
    settings: DraftServiceSettings, status: Callable[[str], None] = lambda line: None
) -> None:
    """Serve until a signal stops it. Raises ConfigError where it cannot listen, and what loading
    raises."""
    chosen_parts(settings.drafter)  # names first
    with ExitStack() as stack:
        logs = Logging(settings.log_format, settings.log_level)
        stack.callback(logs.close)
        tracing = None if settings.otlp_endpoint is None else Tracing.to(settings.otlp_endpoint)
        if tracing is not None:
            stack.callback(tracing.close)
        asyncio.run(
            _serve(settings, tracing, log.info if settings.log_format == "json" else status)
        )


def _loading(
    options: HostedDrafterOptions, status: Callable[[str], None]
) -> asyncio.Future[HostedDrafter]:
    """The drafter, once a thread has loaded it; a signal need not wait for that."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[HostedDrafter] = loop.create_future()

    def notify(settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if loaded.done() else settle())

    def load() -> None:
        try:
            hosted = load_drafter(options, status)
        except BaseException as error:  # noqa: BLE001  the waiting caller raises it
            notify(partial(loaded.set_exception, error))
        else:
            notify(partial(loaded.set_result, hosted))

    threading.Thread(target=load, name="loading", daemon=True).start()
    return loaded


async def _serve(
    settings: DraftServiceSettings, tracing: Tracing | None, status: Callable[[str], None]
) -> None:
    running = RunningDraftService(settings.listen, settings.limits, tracing)
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
            log.info("drafting for '%s' with %s", hosted.identity.name, hosted.name)
            await signalled
            log.info("draining")
    finally:
        signalled.cancel()
        await running.stop(settings.listen.drain_timeout_s)
