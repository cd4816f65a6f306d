"""One request on its way over replicas, from submission to its one `Finish`. It owns the committed tokens.

Every reply must begin where the text ends (`base_length`); what does not fit is a lie, and its replica is given up like one that
died. The request then goes on at another one, behind the tokens that its reader has: no token twice, none lost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grpc import aio

from outrider.engine.observer import Observer
from outrider.engine.request import Finish, FinishReason, Listener, Request, Update
from outrider.errors import (
    CapabilityError,
    ConfigError,
    OutriderError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from outrider.remote.coordinator.choice import beginning_of
from outrider.remote.coordinator.fleet import Fleet, ReplicaNeeds
from outrider.remote.coordinator.replica import Replica
from outrider.remote.coordinator.tally import Tally, total
from outrider.remote.protocol import messages
from outrider.remote.target.refusals import KIND, TAKEN, refusal_of
from outrider.remote.target.replies import from_message
from outrider.remote.target.requests import to_message
from outrider.remote.troubles import in_words
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

log = logging.getLogger("outrider.service")
THEIR_FAULT = (RequestError, ConfigError, CapabilityError)  # the request's own: asking elsewhere would not help
OVERTIME_S = 5.0  # beyond a request's time limit, or its finish, before a replica that does not end it is left
FULL_BREAK_S = 1.0  # before full replicas are asked again for a request that has begun


@dataclass(frozen=True, kw_only=True)
class RetryLimits:
    """How much is tried for one request."""

    max_retries: int = 3  # replicas that it may lose; tokens make up for connections that broke
    wait_s: float = 30.0  # for a replica, when none answers


class LostError(Exception):
    """A replica will not finish this request. `kind`: for the counter; `goes_on`: with all others it does."""

    def __init__(self, kind: str, reason: str, *, lies: bool = False, goes_on: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.lies, self.goes_on = kind, lies, goes_on


class Journey:
    """One request on its way over replicas. Lives in the coordinator's event loop."""

    def __init__(
        self, request: Request, listener: Listener, fleet: Fleet, observer: Observer, limits: RetryLimits, *,
        seed: int, params: SamplingParams, headers: tuple[tuple[str, str], ...], rest_of: Callable[[list[int], str], str],
    ) -> None:  # fmt: skip
        """`params`: the request's with a length; `headers`: of its trace; `rest_of`: text of tokens that was not shown yet."""
        self.request, self.fleet = request, fleet
        self.settled: concurrent.futures.Future[None] = concurrent.futures.Future()  # taken for good, or what refused it
        self.retries = self._losses = 0  # how often it went on; how often it lost its replica, and no token came after
        self._faults = 0  # losses that may be its own fault: tokens do not make up for them
        self._listener, self._observer, self._limits = listener, observer, limits
        self._seed, self._params, self._headers, self._rest_of = seed, params, headers, rest_of
        self._needs = ReplicaNeeds(
            length=len(request.prompt) + (params.max_tokens or 0), drafter=request.speculation.drafter,
            lossy=request.speculation.lossy,
        )  # fmt: skip
        self._beginning = beginning_of(request.prompt)
        self._committed: list[int] = list(request.committed)
        self._shown = ""
        self._parts: list[DecodeStats] = []  # of replicas that were lost
        self._prompt_logprobs: list[Any] = []  # as they come
        self._prompt_is_reported = False
        self._submitted = time.perf_counter()
        self._begun_s = time.monotonic()
        self._taken_s = self._first_s = self._last_s = 0.0
        self._attempts = 0
        self._is_cancelled = self._is_over = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether some replica took it."""
        return self._taken_s > 0

    def start(self, ended: Callable[[Journey], None]) -> None:
        """Set out. `ended` is called once."""
        self._task = asyncio.ensure_future(self._run())

        def over(task: asyncio.Task[None]) -> None:
            if not self._is_over:  # cancelled before it took a step
                self._end("abort")
            ended(self)

        self._task.add_done_callback(over)

    def cancel(self) -> None:
        """End it as "abort"."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            is_over = await self._travel()
        except asyncio.CancelledError:
            self._end("abort")
        except OutriderError as error:
            self._end("error", error)
        except Exception:
            log.exception("request %s failed in the coordinator", self.request.id)
            self._end("error", OutriderError("the request failed inside the coordinator; its log says more"))
        else:
            if not is_over:
                self._end("timeout")

    async def _travel(self) -> bool:
        """Until a replica has finished it; False: time is up. Raises what ends the request otherwise."""
        full: set[Replica] = set()
        failed: set[Replica] = set()  # where it failed alone: asked again when nobody else is left
        waits_until = time.monotonic() + self._limits.wait_s
        while True:
            left_s = self._left_s()
            if left_s is not None and left_s <= 0:
                return False
            until = waits_until if left_s is None else min(waits_until, time.monotonic() + left_s)
            try:
                replica = await self.fleet.choose(self._beginning, self._needs, full | failed, until)
            except UnavailableError as error:
                if left_s is not None and until < waits_until:
                    return False
                raise self._cut_off(error) from error
            if replica is None and failed:
                failed.clear()
                continue
            if replica is None:
                await self._wait_for_room(waits_until)
                full.clear()
                continue
            try:
                await self._ask(replica)
                return True
            except QueueFullError as error:
                full.add(replica)
                self._full = error
            except LostError as lost:
                self._lose(replica, lost)
                failed.update([replica] if lost.goes_on else ())
                waits_until = time.monotonic() + self._limits.wait_s
            finally:
                replica.in_flight -= 1

    async def _wait_for_room(self, until: float) -> None:
        """All queues are full. Raises QueueFullError for a request that has not begun, or when it has waited for long enough."""
        if not self.is_taken or time.monotonic() > until:
            raise self._full
        await asyncio.sleep(FULL_BREAK_S)

    async def _ask(self, replica: Replica) -> None:
        """One try, to the finish. Raises LostError, QueueFullError, or what the request is refused for everywhere."""
        left_s, tally = self._left_s(), Tally()
        self._prompt_logprobs = []
        self._attempts += 1
        message = to_message(
            self.request, attempt=f"{self.request.id}~{self._attempts}", committed=self._committed, seed=self._seed,
            params=self._params, timeout_s=left_s,
            prompt_logprobs=None if self._prompt_is_reported else self.request.prompt_logprobs,
        )  # fmt: skip
        stream = replica.generate(message, self._headers)
        try:
            async with asyncio.timeout(None if left_s is None else left_s + OVERTIME_S):
                if TAKEN in dict(await stream.call.initial_metadata()):
                    self._take(replica)
                while (reply := await stream.call.read()) is not aio.EOF:
                    stream.last_reply_s = time.monotonic()
                    if self._receive(reply, tally):
                        await self._check_end(stream.call, replica)
                        return
            raise LostError("cut", "its stream ended before the answer")
        except aio.AioRpcError as error:
            raise _meaning_of(error) from error
        except TimeoutError:
            raise LostError("stalled", f"it did not end a request {OVERTIME_S:g} s after its time limit") from None
        except asyncio.CancelledError:
            if self._is_cancelled:
                raise
            raise LostError("stalled", replica.reason or "it brought nothing for too long") from None
        finally:
            self._parts.append(tally.stats)
            replica.done(stream)

    def _take(self, replica: Replica) -> None:
        """A replica took it: weights are settled with the first."""
        if not self.is_taken:
            self._taken_s = time.perf_counter()
            self._observer.queued(self.request)
            if not self.settled.done():
                self.settled.set_result(None)
        if replica.identity is not None and self._needs.model_sha256 is None:
            self._needs = replace(self._needs, model_sha256=replica.identity.model_sha256)

    def _receive(self, reply: messages.GenerateReply | None, tally: Tally) -> bool:
        """Hand over what a reply adds; whether it was the last. Raises LostError for a lie, or an end that is none."""
        if reply is None:  # what gRPC makes of it
            raise LostError("lied", "it sent bytes that are no GenerateReply", lies=True)
        try:
            update = from_message(reply, self.fleet.vocab_size, self._params.logprobs is not None)
            self._prompt_logprobs += update.prompt_logprobs or []
            self._check(reply, update)
        except RequestError as lie:
            raise LostError("lied", f"it lied: {lie}", lies=True) from lie
        finish = update.finish
        if finish is not None and (finish.reason == "abort" or _is_elsewhere_better(finish)):
            kind = "leaving" if finish.reason == "abort" else "failed"
            goes_on = kind == "failed" and not isinstance(finish.error, UnavailableError)  # that is what a dead engine says
            raise LostError(kind, f"it gave the request up: {finish.error or 'it is ending'}", goes_on=goes_on)
        tally.add(update)
        if update.token_ids or finish is not None:
            self._show(update, finish)
        return finish is not None

    def _check(self, reply: messages.GenerateReply, update: Update) -> None:
        """Raises RequestError where a reply does not fit what came before it."""
        if reply.base_length != len(self._committed):
            raise RequestError(f"a reply begins behind {reply.base_length} tokens where there are {len(self._committed)}")
        limit = self._params.max_tokens
        if limit is not None and len(self._committed) + len(update.token_ids) > limit:
            raise RequestError(f"it sent more than {limit} tokens")
        wanted = 0 if self.request.prompt_logprobs is None or self._prompt_is_reported else len(self.request.prompt)
        count = len(self._prompt_logprobs)
        if count > wanted or (update.token_ids and count < wanted):
            raise RequestError(f"{wanted} prompt tokens have {count} log-probabilities")

    def _show(self, update: Update, finish: Finish | None) -> None:
        """To the reader; the finish with numbers of all replicas."""
        now = time.perf_counter()
        if update.token_ids and not self._first_s:
            self._first_s = now
            self._observer.admitted(self.request, self._taken_s - self._submitted, 0 if finish is None else finish.cached_tokens)
            self._observer.prefilled(self.request, now - self._taken_s, len(self.request.prompt))
        if update.token_ids:
            self._last_s = now
            self._losses = self._faults  # a wire that breaks often is no fault of a request that gets tokens
        self._committed += update.token_ids
        self._shown += update.text
        prompt = None if self._prompt_is_reported else self._prompt_logprobs or None
        self._prompt_is_reported = self._prompt_is_reported or prompt is not None
        self._notify(replace(update, prompt_logprobs=prompt, finish=None if finish is None else self._whole(finish)))

    async def _check_end(self, call: Any, replica: Replica) -> None:
        """Log messages after the finish; the answer stays valid, and nothing ends it a second time."""
        try:
            async with asyncio.timeout(OVERTIME_S):
                more = await call.read()
        except (aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            return
        if more is not aio.EOF:
            replica.give_up("lied", "it went on after the end of an answer", lies=True)

    def _lose(self, replica: Replica, lost: LostError) -> None:
        """Give the replica up, unless it goes on, and the request too, when it lost too many. Raises UnavailableError."""
        if lost.kind == "leaving":
            replica.is_leaving()
        elif lost.goes_on:
            replica.note_failure(lost.kind)
        else:
            replica.give_up(lost.kind, str(lost), lies=lost.lies)
        log.warning(
            "request %s lost %s after %d tokens: %s", self.request.id, replica.name, len(self._committed), lost,
            extra={"request_id": self.request.id},
        )  # fmt: skip
        self._losses += 1
        self._faults += lost.kind in ("failed", "lied")
        if self._losses > self._limits.max_retries:
            raise self._cut_off(lost)
        self.retries += 1

    def _cut_off(self, why: Exception) -> UnavailableError:
        if not self._losses:
            return UnavailableError(str(why))
        tried = f"{self._losses} replica{'s' if self._losses > 1 else ''} of '{self.fleet.name}' lost this request"
        return UnavailableError(f"{tried} after {len(self._committed)} tokens, the last because: {why}")

    def _left_s(self) -> float | None:
        limit = self.request.timeout_s
        return None if limit is None else limit - (time.monotonic() - self._begun_s)

    # ---------------------------------------------------------------- the end

    def _whole(self, finish: Finish) -> Finish:
        """The finish as if one replica had done everything. A lost replica's part is counted from its updates, the last part
        from its own numbers.
        """
        return replace(finish, stats=self._total([*self._parts, finish.stats]), seed=self._seed)

    def _total(self, parts: list[DecodeStats]) -> DecodeStats:
        ttft_s = self._first_s - self._submitted if self._first_s else 0.0
        return total(parts, ttft_s=ttft_s, decode_s=max(0.0, self._last_s - self._first_s))

    def _end(self, reason: FinishReason, error: OutriderError | None = None) -> None:
        """An end that no replica gave. Text that was held back is released where the answer counts."""
        text = self._rest_of(self._committed, self._shown) if reason == "timeout" else ""
        finish = Finish(
            reason=reason, stats=self._total(self._parts), seed=self._seed, lossless=True,
            drafter=self.request.speculation.drafter or (self.fleet.known.drafters[0] if self.fleet.known else ""),
            prompt_tokens=len(self.request.prompt), error=error,
        )  # fmt: skip
        self._notify(Update(text=text, finish=finish))

    def _notify(self, update: Update) -> None:
        try:
            self._listener(update)
        except Exception:
            log.exception("the listener of request %s failed; the request is cancelled", self.request.id)
            self.cancel()
        if update.finish is not None:
            self._is_over = True
            if not self.settled.done():
                error = update.finish.error
                self.settled.set_exception(error) if error is not None else self.settled.set_result(None)
            if self.is_taken:
                self._observer.finished(self.request, update.finish)


def _is_elsewhere_better(finish: Finish) -> bool:
    """Whether a failure may be the replica's, and no fault of the request."""
    return finish.reason == "error" and not isinstance(finish.error, THEIR_FAULT)


def _meaning_of(error: aio.AioRpcError) -> Exception:
    """What a failed call means for its request: a refusal that holds everywhere, a full queue, or a lost replica."""
    refusal = refusal_of(error)
    if refusal is not None:
        return refusal
    is_leaving = dict(error.trailing_metadata() or ()).get(KIND) == "UnavailableError"
    return LostError("leaving" if is_leaving else "lost", f"{error.code().name}: {in_words(error)}")
