"""The three calls of TargetService over one engine: Open, Generate and Watch.

A request belongs to its call: a caller that leaves, or whose deadline passes, ends it. Updates wait in an `Outbox` until the
caller reads, so a slow caller delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import grpc
from grpc import aio

from outrider.engine.request import Request, Update
from outrider.errors import GOT, OutriderError, RequestError, UnavailableError
from outrider.grammar import Grammars
from outrider.remote.identity import check_protocol, check_tokenizer
from outrider.remote.protocol import PROTOCOL, messages
from outrider.remote.target.refusals import TAKEN, status_of
from outrider.remote.target.replies import to_messages
from outrider.remote.target.requests import from_message
from outrider.serve.backlog import MOST, Backlog, too_slow
from outrider.serve.errors import ApiError
from outrider.serve.served import Serves
from outrider.version import __version__

log = logging.getLogger("outrider.service")
RUNNING, DRAINING, OVER = range(3)
INTERVALS_S = (0.05, 60.0)  # least and most that `Watch` waits between two states
LONGEST = 600  # characters of a reason: gRPC encodes each as up to 12 bytes, and takes 8 KiB of metadata
LEVELS = {  # of a line about a refusal; a coordinator asks once a second whether the model is loaded
    grpc.StatusCode.RESOURCE_EXHAUSTED: logging.WARNING, grpc.StatusCode.UNAVAILABLE: logging.DEBUG,
}  # fmt: skip
Spans = Callable[[str, Mapping[str, str]], AbstractContextManager[Any]]  # (name, headers) -> a span in the caller's trace


def no_span(name: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
    """No span, where tracing is off."""
    return nullcontext()


class TargetService:
    """An engine as a gRPC service. UNAVAILABLE until `serve` is called; all in one event loop."""

    def __init__(self, instance: str, count: Callable[[str, str], None], spans: Spans = no_span) -> None:
        """`count` is called with every call that ended: (method, status)."""
        self._instance, self._count, self._spans = instance, count, spans
        self._engine: Serves | None = None
        self._changed = asyncio.Condition()
        self._phase = RUNNING

    def serve(self, engine: Serves, identity: messages.ModelIdentity, terms: messages.TargetTerms, notes: list[str]) -> None:
        """Loaded: answer from now on."""
        self._grammars = Grammars(engine.tokenizer, engine.vocab_size, engine.eos_token_ids, of_strangers=True)
        self._identity, self._terms, self._notes = identity, terms, notes
        self._engine = engine

    async def drain(self) -> None:
        """Tell those who watch that nothing new is taken."""
        await self._enter(DRAINING)

    async def close(self) -> None:
        """End the calls of those who watch."""
        await self._enter(OVER)

    async def _enter(self, phase: int) -> None:
        self._phase = phase
        async with self._changed:
            self._changed.notify_all()

    async def Open(self, request: messages.Hello, context: aio.ServicerContext) -> messages.Welcome:  # noqa: N802
        """The handshake: both sides must speak one protocol and have one tokenizer."""
        try:
            self._loaded()
            who = f"this caller (release {request.release or 'unknown'})"
            try:
                check_protocol(request, who)
                if request.HasField("model"):
                    check_tokenizer(self._identity, request.model, who)
            except OutriderError as error:
                await self._abort(context, "Open", grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OutriderError as error:
            await self._abort(context, "Open", *status_of(error))
        self._count("Open", "OK")
        return messages.Welcome(
            protocol=PROTOCOL, release=__version__, instance=self._instance, model=self._identity, notes=self._notes,
            target=self._terms,
        )  # fmt: skip

    async def Generate(  # noqa: N802
        self, request: messages.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[messages.GenerateReply]:
        """One answer, piece by piece. Initial metadata is sent when the engine has taken the request."""
        outbox, base_length = Outbox(), len(request.committed)
        try:
            engine, asked = await self._submitted(request, context, outbox)
        except OutriderError as error:
            await self._abort(context, "Generate", *status_of(error))
            return
        status = "CANCELLED"
        outbox.spills = lambda: engine.cancel(asked.id)
        try:
            await context.send_initial_metadata(((TAKEN, "1"),))
            while status == "CANCELLED":
                update = await outbox.take()
                if update.finish is not None:
                    status = "OK"
                for message in to_messages(update, base_length):
                    yield message
                base_length += len(update.token_ids)
        except ApiError as error:
            await self._abort(context, "Generate", *status_of(RequestError(str(error))))
        finally:
            engine.cancel(asked.id)
            self._count("Generate", status)

    async def Watch(  # noqa: N802
        self, request: messages.WatchRequest, context: aio.ServicerContext
    ) -> AsyncIterator[messages.TargetState]:
        """The engine's state at once, then every `interval_s`, and when draining begins."""
        min_s, max_s = INTERVALS_S
        interval_s = min(max_s, max(min_s, request.interval_s or 1.0))
        try:
            engine = self._loaded()
        except OutriderError as error:
            await self._abort(context, "Watch", *status_of(error))
            return
        try:
            while (phase := self._phase) != OVER:
                yield self._state(engine)
                await self._left(phase, interval_s)
        finally:
            self._count("Watch", "OK")

    async def _left(self, phase: int, seconds: float) -> None:
        """Wait until a phase is over, or for so long."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: self._phase != phase)

    async def _submitted(
        self, message: messages.GenerateRequest, context: aio.ServicerContext, outbox: Outbox
    ) -> tuple[Serves, Request]:
        """Read and handed over. Raises what the engine raises."""
        engine = self._loaded()
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}

        def work() -> Request:  # in a thread: grammars compile, bad words read the vocabulary, and committed tokens are replayed
            asked = from_message(message, self._grammars)
            if asked.params.bad_words:
                engine.prepare(asked.params)
            engine.submit(asked, outbox.put)
            return asked

        with self._spans("TargetService/Generate", headers):
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return engine, await asyncio.shield(working)
            except asyncio.CancelledError:  # the caller left; the thread goes on, and what it submits must not stay
                working.add_done_callback(lambda done: None if done.exception() else engine.cancel(message.id))
                raise

    def _loaded(self) -> Serves:
        if self._engine is None:
            raise UnavailableError("the model is still loading")
        return self._engine

    def _state(self, engine: Serves) -> messages.TargetState:
        now = engine.snapshot()
        return messages.TargetState(
            running=now.running, waiting=now.waiting, prefilling=now.prefilling, kv_tokens=now.kv_tokens,
            kv_capacity=now.kv_capacity, draining=now.draining or self._phase != RUNNING, failed=now.failed or "",
            turn_age_s=now.turn_age_s,
        )  # fmt: skip

    async def _abort(
        self, context: aio.ServicerContext, method: str, code: grpc.StatusCode, text: str, trailing: Any = ()
    ) -> None:
        self._count(method, code.name)
        reason = text.partition(GOT)[0][:200]  # without the value that was sent
        log.log(LEVELS.get(code, logging.INFO), "refused", extra={"call": method, "status": code.name, "reason": reason})
        await context.abort(code, text[:LONGEST], trailing)


class Outbox:
    """Updates that wait for a reader, who may be slow. `put` is the engine's listener: any thread may call it.

    `spills` is called when too much waits; `take` then raises ApiError.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._pending: list[Update] = []
        self._backlog, self._is_spilt = Backlog(), False
        self.spills: Callable[[], None] = lambda: None

    def put(self, update: Update) -> None:
        """Hand an update over."""
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._add, update)

    async def take(self) -> Update:
        """All that came since the last time, as one update; waits while there is nothing."""
        self._backlog.ask()
        await self._filled.wait()
        if self._is_spilt:
            raise too_slow()
        self._filled.clear()
        update, self._pending = Update.joined(self._pending), []
        self._backlog.give(update)
        return update

    def _add(self, update: Update) -> None:
        if self._is_spilt:
            return
        self._pending.append(update)
        self._filled.set()
        if not self._backlog.add(update):
            log.warning("an answer is ended: more than %d of its tokens and log-probabilities wait for their reader", MOST)
            self._is_spilt, self._pending = True, []
            self.spills()
