"""One stream to one draft service, shared by all drafters of a process that name it; it comes back
by itself when it breaks.

The engine's thread and the network meet here in two ways only: `send` leaves requests for the event
loop and returns at once, and replies wait in a `ReplyBox` until the engine's thread looks. Whatever
goes wrong on the wire has a short name (a reason), which is counted, and logged when it changes;
then the connection is tried again, later and later while it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import grpc
from grpc import aio

from outrider.errors import CapabilityError, ConfigError, OutriderError
from outrider.remote.access import TOKEN_VARIABLE, Access
from outrider.remote.draft.counts import RemoteCounts
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import check_protocol, check_vocabulary
from outrider.remote.probe import in_words
from outrider.remote.protocol import PROTOCOL, fitting, messages, stubs
from outrider.remote.security import channel_to, check_access, metadata_of
from outrider.version import __version__

log = logging.getLogger("outrider.remote")
Message = TypeVar("Message")
OPEN_S = 5.0  # that a service has to say who it is
SILENT_S = 30.0  # without any reply to a request, after which the line is taken for dead
# before a broken line is tried again
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
# the same after wrong replies, and for what only a person can mend
DISTRUST_PAUSE_S = 2.0
LONGEST_DISTRUST_S = 120.0
MAX_LIES = 3  # invalid replies of one stream
# bytes that a request may bring, those that may come at once whatever was asked before, and those
# that a reply counts for at least; more is a flood
BYTES_EACH = 1 << 20
MAX_BYTES = 64 << 20
REPLY_BYTES = 1 << 14
LASTING = (
    "invalid",
    "malformed",
    "flood",
    "too_large",
    "other_model",
    "no_draft_service",
    "token",
    "internal",
)
REASONS = {
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "silent",
    grpc.StatusCode.UNAUTHENTICATED: "token",
    grpc.StatusCode.PERMISSION_DENIED: "token",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "too_large",
    grpc.StatusCode.UNIMPLEMENTED: "no_draft_service",
}


class TroubleError(Exception):
    """The stream cannot continue; `reason` is its short name."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class DraftReply:
    """A service's reply for one row, and when it came, on `time.perf_counter`'s clock."""

    row: messages.RowReply
    at_s: float


class ReplyBox:
    """Replies for the rows of one drafter, from the event loop to the engine's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._replies: deque[DraftReply] = deque()

    def put(self, reply: DraftReply) -> None:
        """Called by the event loop, which bounds how much may come."""
        with self._changed:
            self._replies.append(reply)
            self._changed.notify_all()

    def take(self, timeout_s: float = 0.0) -> list[DraftReply]:
        """All that is there; with nothing there, what comes first within `timeout_s`."""
        with self._changed:
            if not self._replies and timeout_s > 0:
                self._changed.wait(timeout_s)
            replies = list(self._replies)
            self._replies.clear()
            return replies


class Connection:
    """A caller's connection to a draft service.

    `identity`: what the asker works with, which the service's vocabulary must fit.
    """

    def __init__(
        self, endpoint: Endpoint, access: Access, identity: messages.ModelIdentity
    ) -> None:
        """Raises ConfigError for files that cannot be read."""
        self.endpoint = endpoint
        self.counts = RemoteCounts()
        self.num_users = 0
        self._access = access
        self._identity = identity
        self._numbers = itertools.count(1)
        self._boxes: dict[int, ReplyBox] = {}  # by row
        self._lock = threading.Lock()
        # of the present stream
        self._queue: asyncio.Queue[list[messages.RowRequest]] = asyncio.Queue()
        self._lies = 0
        # by row: when it asked for what may still be answered; empty after any reply
        self._asked_s: dict[int, float] = {}
        self._credit = 0  # bytes that may still come
        self._logged: str | None = None  # the reason that was logged last
        self._call: Any = None
        self._doubt: TroubleError | None = None
        self._life: Any = None
        self._tried = threading.Event()  # the first attempt has opened a stream, or failed
        self.trouble: TroubleError | None = None  # at the start
        self.terms: messages.DraftTerms | None = None  # while the stream is open
        self.service = ""  # what the service calls its model
        self.notes: list[str] = []
        self.epoch = 0  # grows whenever a stream opens: what an earlier one has sent is sent again
        check_access(access, endpoint)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent now."""
        return self.terms is not None

    def start(self, wait_s: float) -> None:
        """Begin to connect, and stay at it; `trouble` is why there is no connection after the first
        attempt, or after `wait_s` seconds.

        Raises CapabilityError where the service answers, and cannot draft for this model;
        ConfigError where it asks for another token.
        """
        self._life = asyncio.run_coroutine_threadsafe(self._live(), background_loop())
        if not self._tried.wait(wait_s):
            self.trouble = TroubleError("silent", "no answer")
        try:
            self._refuse()
        except OutriderError:
            self.close()
            raise

    def new_row(self, box: ReplyBox) -> int:
        """A number for a row whose replies go to `box`."""
        number = next(self._numbers)
        with self._lock:
            self._boxes[number] = box
        return number

    def end_row(self, number: int) -> None:
        """End a row: no more drafts are wanted for it."""
        with self._lock:
            self._boxes.pop(number, None)

    def send(self, requests: list[messages.RowRequest]) -> bool:
        """Leave requests to be written; False where there is no stream to write them to."""
        if not self.is_open or not requests:
            return False
        asking = sum(request.num_draft_tokens > 0 for request in requests)
        if asking:
            self.counts.add(requests=asking)
        background_loop().call_soon_threadsafe(self._put, requests)
        return True

    def report(self, text: str) -> None:
        """A reply was invalid, as the engine's thread found. After a few the service is left alone
        for a while."""
        self.counts.trouble("invalid")
        self._lies += 1
        if self._lies == 1:
            log.warning(
                "draft service %s sent a wrong reply, which is dropped: %s", self.endpoint, text
            )
        if self._lies >= MAX_LIES:
            trouble = TroubleError("invalid", f"{self._lies} wrong replies, the latest: {text}")
            background_loop().call_soon_threadsafe(self._break, trouble)

    def close(self) -> None:
        """End the stream, and try no more."""
        self.terms = None
        if self._life is not None:
            self._life.cancel()

    # ---------------------------------------------------------------- in the event loop

    async def _live(self) -> None:
        """Stream after stream, until `close`."""
        pauses_s = {False: FIRST_PAUSE_S, True: DISTRUST_PAUSE_S}
        longest_s = {False: LONGEST_PAUSE_S, True: LONGEST_DISTRUST_S}
        while True:
            opened = self.epoch
            trouble = await self._until_trouble()
            self._note(trouble)
            if not self._tried.is_set():
                self.trouble = trouble
                self._tried.set()
            if self.epoch != opened:
                pauses_s[False] = FIRST_PAUSE_S
            is_lasting = trouble.reason in LASTING
            wait_s = pauses_s[is_lasting]
            pauses_s[is_lasting] = min(2 * wait_s, longest_s[is_lasting])
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _until_trouble(self) -> TroubleError:
        """One stream, and why it ended."""
        try:
            await self._stream()
            return TroubleError("lost", "the service ended the stream")
        except TroubleError as error:
            return error
        except CapabilityError as error:
            return TroubleError("other_model", str(error))
        except ConfigError as error:  # files that were there before
            return TroubleError("unreachable", str(error))
        except grpc.RpcError as error:
            reason = REASONS.get(error.code(), "lost")
            return self._doubt or TroubleError(reason, in_words(error))
        except Exception as error:
            log.exception(
                "the connection to the draft service %s failed in our own code", self.endpoint
            )
            return TroubleError("internal", f"{type(error).__name__}: {error}")
        finally:
            self.terms = None
            self._call = None

    async def _open(self, stub: Any) -> messages.Welcome:
        hello = messages.Hello(protocol=PROTOCOL, release=__version__, model=self._identity)
        try:
            welcome = await stub.Open(hello, metadata=metadata_of(self._access), timeout=OPEN_S)
        except aio.AioRpcError as error:
            # another vocabulary, or another version
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise CapabilityError(
                    f"the draft service {self.endpoint} refuses: {in_words(error)}"
                ) from error
            raise
        return _read_as(messages.Welcome, welcome)

    def _check(self, welcome: messages.Welcome) -> None:
        who = f"the draft service {self.endpoint}"
        check_protocol(welcome, who)
        check_vocabulary(self._identity, welcome.model, who)
        if not welcome.HasField("draft"):
            raise CapabilityError(f"{who} is no draft service: 'outrider service draft' is one")

    async def _stream(self) -> None:
        """One stream from its opening to its end. Raises TroubleError, OutriderError or grpc's
        error."""
        self._lies = 0
        self._doubt = None
        self._asked_s.clear()
        self._credit = BYTES_EACH
        async with channel_to(self.endpoint, self._access) as channel:
            stub = stubs.caller(channel)
            welcome = await self._open(stub)
            self._check(welcome)
            self._call = call = stub.Draft(metadata=metadata_of(self._access))
            self._queue = asyncio.Queue()
            self.service = welcome.model.name
            self.notes = list(welcome.notes)
            self.epoch += 1
            self.terms = welcome.draft
            self._tried.set()
            if self._logged is not None:
                log.warning("draft service %s is back", self.endpoint)
                self._logged = None
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            finally:
                self.terms = None
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            try:
                rows = await asyncio.wait_for(self._queue.get(), 1.0)
            except TimeoutError:
                self._check_silence()
                continue
            while not self._queue.empty():
                rows = rows + self._queue.get_nowait()
            self._credit = min(self._credit + BYTES_EACH * len(rows), MAX_BYTES)
            for row in rows:
                if row.end:
                    self._asked_s.pop(row.row, None)
                elif row.num_draft_tokens:
                    self._asked_s.setdefault(row.row, time.perf_counter())
            self._check_silence()
            for part in fitting(rows):
                await call.write(messages.DraftRequest(rows=part))

    async def _read(self, call: Any) -> None:
        try:
            await self._read_all(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._doubt is None or (task and task.cancelling()):  # `close`
                raise
            raise self._doubt from None

    async def _read_all(self, call: Any) -> None:
        async for received in call:
            now = time.perf_counter()
            reply = _read_as(messages.DraftReply, received)
            self._asked_s.clear()
            self._credit -= max(reply.ByteSize(), REPLY_BYTES * max(1, len(reply.rows)))
            if self._credit < 0:
                raise TroubleError("flood", "more replies than requests can bring")
            for row in reply.rows:
                with self._lock:
                    box = self._boxes.get(row.row)
                if box is not None:
                    box.put(DraftReply(row, now))

    def _put(self, requests: list[messages.RowRequest]) -> None:
        self._queue.put_nowait(requests)
        self._check_silence()  # here, too: `_write` stands still while the service reads nothing

    def _check_silence(self) -> None:
        if self._asked_s and time.perf_counter() - min(self._asked_s.values()) > SILENT_S:
            self._break(TroubleError("silent", f"no reply in {SILENT_S:.0f} s"))

    def _break(self, trouble: TroubleError) -> None:
        """End the present stream for this reason."""
        if self._call is not None and self._doubt is None:
            self._doubt = trouble
            self.terms = None
            self._call.cancel()

    def _note(self, trouble: TroubleError) -> None:
        """Count a trouble, and log it where it is new."""
        if trouble.reason != "invalid":  # which were counted one by one
            self.counts.trouble(trouble.reason)
        if trouble.reason != self._logged:
            log.warning(
                "draft service %s: %s (%s); decoding continues without it",
                self.endpoint,
                trouble.reason,
                trouble,
            )
            self._logged = trouble.reason

    def _refuse(self) -> None:
        """Raises what a person has to mend before it can work."""
        reason = None if self.trouble is None else self.trouble.reason
        if reason == "other_model":
            raise CapabilityError(str(self.trouble))
        if reason == "token":
            raise ConfigError(
                f"the draft service {self.endpoint} does not take this token: set "
                f"{TOKEN_VARIABLE} to one of its"
            )
        if reason == "no_draft_service":
            raise CapabilityError(
                f"{self.endpoint} is no draft service: 'outrider service draft' is one"
            )


def _read_as(kind: type[Message], received: Any) -> Message:
    """The received message; gRPC gives None for bytes that are none. Raises TroubleError."""
    if not isinstance(received, kind):
        raise TroubleError("malformed", f"bytes that are no {kind.__name__}")
    return received


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of a process, running in a thread that lasts as long: gRPC's
    own threads know it."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_report)
    threading.Thread(target=loop.run_forever, name="outrider-remote", daemon=True).start()
    return loop


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process for each event, and all but the first find nothing to
    read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


CONNECTIONS: dict[tuple[Endpoint, Access, bytes], Connection] = {}  # in use
_LOCK = threading.RLock()


def connect(
    endpoint: Endpoint, access: Access, identity: messages.ModelIdentity, wait_s: float
) -> Connection:
    """The process's connection to this service, for one user more; the last one to `leave` ends it.
    Raises what `Connection.start` raises."""
    key = (endpoint, access, identity.SerializeToString())
    with _LOCK:
        if key not in CONNECTIONS:
            connection = Connection(endpoint, access, identity)
            connection.start(wait_s)
            CONNECTIONS[key] = connection
        CONNECTIONS[key].num_users += 1
        return CONNECTIONS[key]


def leave(connection: Connection) -> None:
    """One user less."""
    with _LOCK:
        connection.num_users -= 1
        if not connection.num_users:
            key = next(key for key, value in CONNECTIONS.items() if value is connection)
            del CONNECTIONS[key]
            connection.close()
