"""The life of a target service: listen, load, answer, drain, leave.

Health is NOT_SERVING until the model is loaded, and again from the first SIGTERM on: then nothing new is taken, what runs has
`drain_timeout_s` to finish, and the process ends with code 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import Counter

from outrider.engine.engine import Engine, make_engine
from outrider.remote.identity import model_identity
from outrider.remote.protocol import messages, stubs
from outrider.remote.serving import GrpcServer, ServiceSettings, until_signal
from outrider.remote.target.facts import model_facts
from outrider.remote.target.service import TargetService
from outrider.serve.observability.logs import Logging
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.metrics_families import PREFIX
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.run import LAST_TURN_S
from outrider.serve.served import Serves
from outrider.serve.settings import ServedModel

log = logging.getLogger("outrider.service")
Result = TypeVar("Result")
LAST_WORDS_S = 5.0  # for replies that are on their way when everything has finished


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """What an operator decides about a target service."""

    model: ServedModel
    service: ServiceSettings
    self_test: bool = True
    log_format: str = "human"
    log_level: str = "info"
    otlp_endpoint: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A running engine, and its facts for a handshake."""

    engine: Engine
    ready: Serves  # the engine as requests reach it
    identity: messages.ModelIdentity
    terms: messages.TargetTerms


def run_target(settings: TargetSettings, status: Callable[[str], None] = lambda line: None) -> None:
    """Serve until a signal stops it. Raises ConfigError where it cannot listen, and what loading raises."""
    logs = Logging(settings.log_format, settings.log_level)
    if settings.log_format == "json":
        status = log.info  # every line of the log is an object
    metrics = ServerMetrics()
    monitoring = Monitoring(metrics, otlp_endpoint=settings.otlp_endpoint)
    try:
        asyncio.run(_run(settings, metrics, monitoring, status))
    finally:
        monitoring.close()
        logs.close()


def load(settings: TargetSettings, monitoring: Monitoring, status: Callable[[str], None]) -> Loaded:
    """The engine, hashed, started and tried. Raises what `make_engine` raises."""
    model = settings.model
    engine = make_engine(
        model.options, model.engine, extra_drafters=model.extra_drafters, allow_lossy=model.allow_lossy,
        observer=monitoring.observer(model.name), name=model.name, generation_config=model.generation_config, status=status,
    )  # fmt: skip
    status(f"hashing the weights of {model.name}")
    identity = model_identity(model.name, engine.tokenizer, engine.vocab_size, model_facts(engine.built))
    engine.start()
    for note in engine.notes:
        log.info("%s: %s", model.name, note)
    try:
        served = monitoring.ready(engine, test=settings.self_test, facts=engine.facts)
        return Loaded(engine, served, identity, terms_of(engine, model))
    except BaseException:
        engine.stop()
        raise


def terms_of(engine: Engine, model: ServedModel) -> messages.TargetTerms:
    """What callers may ask for."""
    return messages.TargetTerms(
        max_context=engine.context, max_running=model.engine.max_num_seqs, max_waiting=model.engine.max_queue,
        drafters=engine.drafters, lossless=engine.lossless, eos_token_ids=sorted(engine.eos_token_ids),
        config_json=json.dumps(engine.config, default=str),
        sampling_defaults_json=json.dumps(dict(engine.sampling_defaults.values)),
        lossy_verifiers=model.allow_lossy,
    )  # fmt: skip


async def _run(
    settings: TargetSettings, metrics: ServerMetrics, monitoring: Monitoring, status: Callable[[str], None]
) -> None:
    calls = Counter(PREFIX + "service_calls", "Calls that ended.", ["method", "status"], registry=metrics.registry)
    service = TargetService(uuid.uuid4().hex, lambda method, code: calls.labels(method, code).inc(), monitoring.span)
    server = GrpcServer(settings.service, metrics.registry)
    stubs.add_to_server(stubs.TARGET, service, server.server)
    await server.listen()
    stopped = asyncio.ensure_future(until_signal())
    loading = in_thread(lambda: load(settings, monitoring, status))
    began = time.monotonic()
    try:
        first: set[asyncio.Future[Any]] = {stopped, loading}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("received a signal to end while loading")
            return
        loaded = loading.result()
        service.serve(loaded.ready, loaded.identity, loaded.terms, loaded.engine.notes)
        await server.set_serving(True)
        log.info("ready after %.1f s: %s", time.monotonic() - began, settings.model.name)
        try:
            await stopped
            await _drain(settings, service, server, loaded.engine)
        finally:
            await stop(loaded.engine)
            await service.close()
    finally:
        stopped.cancel()
        await server.stop(LAST_WORDS_S)


async def stop(engine: Serves) -> None:
    """End what still runs. An engine that hangs is left behind. Raises what its `stop` raises."""
    stopping = in_thread(engine.stop)
    await asyncio.wait({stopping}, timeout=LAST_TURN_S)
    if not stopping.done():
        stopping.cancel()
        log.error("stopping %s takes more than %g s: the process ends without it", engine.name, LAST_TURN_S)
        return
    stopping.result()


def in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """The result of `work`, done in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def notify(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if done.cancelled() else set_outcome(outcome))

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001  raised again where the result is waited for
            notify(done.set_exception, error)
        else:
            notify(done.set_result, found)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return done


async def _drain(settings: TargetSettings, service: TargetService, server: GrpcServer, engine: Any) -> None:
    limit = settings.service.drain_timeout_s
    log.info("finishing what runs (at most %g s)", limit)
    await server.set_serving(False)
    await service.drain()
    if not await asyncio.to_thread(engine.drain, limit):
        log.warning("time is up: what still runs is cut off")
