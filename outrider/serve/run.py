"""The server's life: listen, load, answer, drain, leave.

/health answers from the first moment, everything else when the models are there. The first SIGTERM
or Ctrl-C drains: /ready turns 503 so that load balancers look elsewhere, new requests are refused,
running ones have `drain_timeout_s` to finish, then the process ends with code 0. A second one cuts
off what runs, and ends it at once with the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL
from types import FrameType
from typing import Generic, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from outrider.engine.engine import Engine, make_engine
from outrider.errors import ConfigError
from outrider.serve.app import make_app
from outrider.serve.observability.logs import Logging
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.served import ServerState
from outrider.serve.serves import Serves
from outrider.serve.settings import ListenSettings, ServedModel, ServerSettings

log = logging.getLogger("outrider.serve")
HINTS = {
    EADDRINUSE: "; another program uses this port: give another --port, or 0 for any free one",
    EADDRNOTAVAIL: "; this machine does not have that address: give one of its own as --host, or 0.0.0.0 for all of them",
    EACCES: "; ports below 1024 are for privileged users: give another --port",
}
KEEP_ALIVE_S = 65  # longer than the idle time of common proxies
LAST_WORDS_S = 5.0  # for connections whose requests were cut off
# for what was answering connections that a second signal, or the time limit, closed
CUT_OFF_S = 1.0
STALLED_S = 60.0  # in which a client took nothing of what waits for it: nobody reads there
STALL_LOOK_S = 10.0  # between two looks at what waits for clients
LOOK_S = 0.05  # between two looks whether that is over
# for an engine whose requests are cut off; one that hangs would keep the process for ever
LAST_TURN_S = 10.0
Status = Callable[[str], None]


def run_server(settings: ServerSettings, status: Status = lambda line: None) -> None:
    """Serve until a signal stops it. Raises ConfigError where it cannot listen, and what loading
    raises."""
    logs = Logging(settings.log_format, settings.log_level)
    if settings.log_format == "json":
        status = log.info  # every line of the log is an object
    try:
        state = ServerState(settings)
        monitoring = Monitoring(
            state.metrics, otlp_endpoint=settings.otlp_endpoint, log_requests=settings.log_requests
        )
        try:
            app = monitoring.around(make_app(state))
            state.self_tests = monitoring.self_tests
            Process(state, app, lambda: load_engines(settings, monitoring, status)).run()
        finally:
            monitoring.close()
    finally:
        logs.close()


class Works(Protocol):
    """The application that answers requests: an engine, or a coordinator."""

    @property
    def name(self) -> str: ...

    def drain(self, timeout_s: float) -> bool: ...

    def stop(self) -> None: ...


Worker = TypeVar("Worker", bound=Works)
Served = TypeVar("Served", bound=Works, contravariant=True)


class Lives(Protocol[Served]):
    """The state that a process is in; its methods are called in the event loop."""

    loading: bool
    draining: bool

    @property
    def settings(self) -> ListenSettings: ...

    @property
    def names(self) -> list[str]: ...

    def serve(self, engines: Sequence[Served], created: int) -> None: ...


class Process(uvicorn.Server, Generic[Worker]):
    """uvicorn, with models to load first and requests to finish last. `load` runs in a thread and
    may raise."""

    def __init__(
        self, state: Lives[Worker], app: ASGIApp, load: Callable[[], Sequence[Worker]]
    ) -> None:
        settings = state.settings
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                lifespan="off",
                ssl_ca_certs=None if settings.ssl_ca_certs is None else str(settings.ssl_ca_certs),
                ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
            )
        )
        self._state = state
        self._load = load
        self._engines: Sequence[Worker] = ()
        self._failure: BaseException | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal. Raises what `load` raised, or an engine that was stopped."""
        try:
            self.config.load()
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"the TLS files cannot be used: {error}") from error
        listener = listen(self._state.settings)
        scheme = "http" if self._state.settings.ssl_certfile is None else "https"
        host, port = listener.getsockname()[:2]
        log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        try:
            super().run(sockets=[listener])
        finally:
            self._stop_engines(LAST_TURN_S if self.force_exit else None)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does; then the models are loaded alongside it."""
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._dropping = asyncio.ensure_future(self._drop_stalled())
        # a signal need not wait for it
        threading.Thread(target=self._load_all, name="loading", daemon=True).start()

    async def _drop_stalled(self) -> None:
        """Closes connections whose clients stopped reading: their answers, whole or half, would
        stay in memory for as long as they like."""
        # bytes, and since when it is as many
        waiting: dict[asyncio.Transport, tuple[int, float]] = {}
        while True:
            await asyncio.sleep(STALL_LOOK_S)
            now = time.monotonic()
            before = waiting
            waiting = {}
            for connection in list(self.server_state.connections):
                transport = connection.transport
                size = transport.get_write_buffer_size()
                known, since = before.get(transport, (0, now))
                if size and size == known and now - since >= STALLED_S:
                    log.warning(
                        "a connection is closed: its client has read nothing for %.0f s",
                        now - since,
                    )
                    transport.abort()
                elif size:
                    waiting[transport] = (size, since if size == known else now)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for answers that are on their way, until a second signal or the time limit closes
        their connections.

        An answer takes that for a client that left. A cancelled one would be an error with a
        traceback.
        """
        self._dropping.cancel()
        waiting = asyncio.ensure_future(super().shutdown(sockets=sockets))
        limit = time.monotonic() + LAST_WORDS_S
        while not waiting.done() and not self.force_exit and time.monotonic() < limit:
            await asyncio.wait({waiting}, timeout=LOOK_S)
        answering = list(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if answering:
            await asyncio.wait(answering, timeout=CUT_OFF_S)
        # what is stuck by now does not keep the process
        self.force_exit = self.force_exit or not waiting.done()
        await waiting

    def _load_all(self) -> None:
        began = time.monotonic()
        try:
            engines = self._load()
        except BaseException as error:  # noqa: BLE001  raised again by `run`, in the thread that can say so
            self._failure = error
            self.should_exit = True
            return
        # the loop is closed: a signal ended the server meanwhile
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._open, engines, time.monotonic() - began)

    def _open(self, engines: Sequence[Worker], seconds: float) -> None:
        self._engines = engines
        gc.collect()
        # libraries and models stay: looking through them all would stop every stream for a fifth of
        # a second
        gc.freeze()
        try:
            self._state.serve(engines, created=int(time.time()))
        except Exception as error:  # noqa: BLE001  a route that fits no model: raised again by `run`
            self._failure = error
            self.should_exit = True
            return
        log.info("ready after %.1f s: %s", seconds, ", ".join(self._state.names))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn would raise it again after its shutdown; having drained, this process
        ends with code 0."""
        if self._state.draining or self.should_exit:
            self.should_exit = self.force_exit = True
            return
        if self._state.loading:
            log.info("received a signal to end while loading")
            self.should_exit = True
            return
        self._state.draining = True
        log.info(
            "%s: finishing what runs (at most %g s)",
            signal.Signals(sig).name,
            self._state.settings.drain_timeout_s,
        )
        threading.Thread(target=self._drain, name="draining", daemon=True).start()

    def _drain(self) -> None:
        limit = time.monotonic() + self._state.settings.drain_timeout_s
        finished = [engine.drain(max(0.0, limit - time.monotonic())) for engine in self._engines]
        if not all(finished):
            log.warning("time is up: what still runs is cut off")
            self._stop_engines(LAST_TURN_S)
        self.should_exit = True

    def _stop_engines(self, timeout_s: float | None) -> None:
        """Once each: what still runs ends as "abort", and drafters save what they learned. One that
        takes longer than `timeout_s` is left behind."""
        engines = self._engines
        self._engines = ()
        threads = [
            threading.Thread(
                target=self._stop, args=(engine,), name=f"stopping {engine.name}", daemon=True
            )
            for engine in engines
        ]
        for thread in threads:
            thread.start()
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if limit is None else max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                log.error(
                    "%s takes more than %g s: the process ends without it", thread.name, timeout_s
                )

    def _stop(self, engine: Worker) -> None:
        try:
            engine.stop()
        except Exception as error:  # noqa: BLE001  raised again by `run`
            self._failure = self._failure or error


def listen(settings: ListenSettings) -> socket.socket:
    """A bound socket. Raises ConfigError with the reason where it cannot bind."""
    try:
        host = settings.host.removeprefix("[").removesuffix("]")  # as addresses write one of IPv6
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, settings.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "")
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}{hint}"
        ) from error
    return listener


def load_engines(
    settings: ServerSettings, monitoring: Monitoring, status: Callable[[str], None]
) -> list[Serves]:
    """Load and start engines, one after another. `status` is called with what takes long.

    Raises what `make_engine` raises; then none is left running.
    """
    started: list[Engine] = []
    try:
        return [_load(model, settings, monitoring, status, started) for model in settings.models]
    except BaseException:
        for engine in started:
            engine.stop()
        raise


def _load(
    model: ServedModel,
    settings: ServerSettings,
    monitoring: Monitoring,
    status: Callable[[str], None],
    started: list[Engine],
) -> Serves:
    engine = make_engine(
        model.options,
        model.engine,
        extra_drafters=model.extra_drafters,
        allow_lossy=model.allow_lossy,
        observer=monitoring.observer(model.name),
        name=model.name,
        generation_config=model.generation_config,
        status=status,
    )
    engine.start()
    started.append(engine)
    for note in engine.notes:
        log.info("%s: %s", model.name, note)
    return monitoring.ready(engine, test=settings.self_test, facts=engine.facts, status=status)
