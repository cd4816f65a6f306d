"""One target service as the coordinator knows it: connected, checked, watched, and given up when it is silent or lies.

    away -> (Open: handshake) -> ready <-> draining       refused: reachable, and not to be mixed with the others
      ^                             |
      +------- silent, hung, dead, lying, unreachable ----+
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from grpc import aio

from outrider.errors import CapabilityError
from outrider.remote.coordinator.choice import ReplicaLoad
from outrider.remote.endpoint import Endpoint
from outrider.remote.protocol import messages, stubs
from outrider.remote.security import ClientSecurity
from outrider.remote.troubles import in_words

log = logging.getLogger("outrider.service")
Standing = Literal["away", "refused", "ready", "draining"]
SHORTEST_BREAK_S, LONGEST_BREAK_S = 0.2, 5.0  # between two tries to reach a replica
REFUSED_BREAK_S = 10.0  # before a replica that was refused, or lied, is asked again
OPEN_S = 10.0  # for a handshake
NEVER = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)  # no matter of time


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long is waited for what."""

    watch_interval_s: float = 1.0
    silence_s: float = 10.0  # without a state a replica is away, and streams that bring nothing are given up
    hang_s: float = 60.0  # longest its engine may not come round
    refused_s: float = REFUSED_BREAK_S


@dataclass(eq=False)
class RunningCall:
    """One running call, as the replica's watcher sees it."""

    call: Any
    last_reply_s: float  # when it brought something last, on the monotonic clock


class Replica:
    """The coordinator's connection to one target service.

    Lives in the coordinator's event loop; what has no underscore may be read anywhere.
    """

    def __init__(
        self, endpoint: Endpoint, security: ClientSecurity, hello: messages.Hello, patience: Timeouts,
        admit: Callable[[Replica, messages.Welcome], None], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """`admit` raises CapabilityError for a service that may not answer here; `changed` is called with every new standing."""
        self.name = str(endpoint)
        self.standing: Standing = "away"
        self.reason = "not reached yet"
        self.terms: messages.TargetTerms | None = None
        self.identity: messages.ModelIdentity | None = None
        self.release = ""
        self.state = messages.TargetState()
        self.in_flight = 0  # requests of ours
        self.failures: dict[str, int] = {}  # kind of trouble -> how often
        self._security, self._hello, self._patience = security, hello, patience
        self._admit, self._changed = admit, changed
        self._channel = security.channel(endpoint)
        self._stub = stubs.caller(stubs.TARGET, self._channel)
        self._streams: set[RunningCall] = set()
        self._watching: Any = None
        self._pause_s = SHORTEST_BREAK_S
        self._logged: str | None = None  # the trouble that the log has

    @property
    def is_usable(self) -> bool:
        """Whether it takes new requests."""
        return self.standing == "ready"

    @property
    def load(self) -> ReplicaLoad:
        """The replica's load: our requests, and those of others by its own report."""
        state, terms = self.state, self.terms
        theirs = state.running + state.waiting + state.prefilling
        return ReplicaLoad(max(self.in_flight, theirs), terms.max_running if terms is not None else 1)

    def report(self) -> dict[str, Any]:
        """For /health."""
        found: dict[str, Any] = {"endpoint": self.name, "standing": self.standing, "in_flight": self.in_flight}
        if self.reason:
            found["reason"] = self.reason
        if self.terms is not None:
            found |= {"release": self.release, "running": self.state.running, "waiting": self.state.waiting}
        return found

    # ---------------------------------------------------------------- connection

    async def keep(self) -> None:
        """Reach it, watch it, and begin again, until cancelled."""
        while True:
            try:
                await self._open()
                await self._watch()
            except CapabilityError as error:
                self._stand("refused", str(error), self._patience.refused_s)
            except aio.AioRpcError as error:
                text = f"{error.code().name}: {in_words(error)}"
                if error.code() in NEVER:
                    self._stand("refused", text, self._patience.refused_s)
                else:
                    self._stand("away", text)
            except (TimeoutError, _GoneError) as error:
                self._stand("away", str(error) or f"sent nothing for {self._patience.silence_s:g} s")
            except _GivenUpError:
                pass
            except Exception:
                log.exception("replica %s is not understood", self.name)
                self._stand("away", "it is not understood; the log says more", self._patience.refused_s)
            self._watching = None
            self._cut_silent_streams()
            await asyncio.sleep(self._pause_s)

    async def _open(self) -> None:
        welcome = await self._stub.Open(self._hello, timeout=OPEN_S, metadata=self._security.metadata)
        if welcome is None:  # as gRPC gives bytes that it cannot read
            raise CapabilityError("it answers with bytes that are no Welcome")
        self._admit(self, welcome)
        self.terms, self.identity, self.release = welcome.target, welcome.model, welcome.release

    async def _watch(self) -> None:
        """Return never: raises when it is silent, hung, dead or gone."""
        patience = self._patience
        request = messages.WatchRequest(interval_s=patience.watch_interval_s)
        call = self._stub.Watch(request, metadata=self._security.metadata)
        self._watching = call
        try:
            while True:
                async with asyncio.timeout(patience.silence_s):  # `wait_for` may swallow a cancellation
                    state = await call.read()
                if state is aio.EOF:
                    raise _GoneError("it ended its report of how it is")
                if state is None:
                    raise _GoneError("it sends bytes that are no TargetState")
                self.state = state
                if state.failed:
                    raise _GoneError(f"its engine is dead: {state.failed}")
                if 0 < patience.hang_s < state.turn_age_s:
                    raise _GoneError(f"its engine has not come round for {state.turn_age_s:.0f} s")
                self._pause_s = SHORTEST_BREAK_S
                self._stand("draining" if state.draining else "ready", "")
        except asyncio.CancelledError:  # a call that was cancelled from here says so, too
            task = asyncio.current_task()
            if self._watching is None and not (task and task.cancelling()):
                raise _GivenUpError from None
            raise
        finally:
            call.cancel()

    def give_up(self, kind: str, reason: str, *, lies: bool = False) -> None:
        """Stop using the replica, which lost a request of ours, until it is reached again. `kind`: for the counter.

        A connection that breaks loses all its requests: only the first of them changes anything.
        """
        self.note_failure(kind)
        if self.standing == "away" and not lies:
            return
        self._stand("away", reason, self._patience.refused_s if lies else None)
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()

    def note_failure(self, kind: str) -> None:
        """Count a request of ours that it lost."""
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def is_leaving(self) -> None:
        """Note that it refused a request because it drains; its next state tells whether it still does."""
        self._stand("draining", "")

    def _stand(self, standing: Standing, reason: str, pause_s: float | None = None) -> None:
        if standing in ("away", "refused"):
            self._pause_s = pause_s if pause_s is not None else min(LONGEST_BREAK_S, 2 * self._pause_s)
        if (self.standing, self.reason) == (standing, reason):
            return
        self.standing, self.reason = standing, reason
        trouble = f"{standing} {reason}"
        if trouble != self._logged:
            self._logged = trouble
            level = logging.INFO if standing in ("ready", "draining") else logging.WARNING
            log.log(level, "replica %s is %s%s", self.name, standing, f": {reason}" if reason else "")
        self._changed()

    # ---------------------------------------------------------------- requests

    def generate(self, message: messages.GenerateRequest, headers: tuple[tuple[str, str], ...]) -> RunningCall:
        """Begin a call; `done` must follow."""
        call = self._stub.Generate(message, metadata=(*self._security.metadata, *headers))
        stream = RunningCall(call, time.monotonic())
        self._streams.add(stream)
        return stream

    def done(self, stream: RunningCall) -> None:
        """The call is over, or not wanted any more."""
        self._streams.discard(stream)
        stream.call.cancel()

    def _cut_silent_streams(self) -> None:
        """End calls that brought nothing for long on a replica that is away: nobody else would notice."""
        limit = time.monotonic() - self._patience.silence_s
        for stream in list(self._streams):
            if self.standing == "away" and stream.last_reply_s < limit:
                stream.call.cancel()

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()


class _GoneError(Exception):
    """The replica cannot be used at present."""


class _GivenUpError(Exception):
    """`give_up` was called, and has logged the reason."""
