"""`RemoteEngine`: what the HTTP side knows of a model whose steps are made by target services.

It has the interface of `outrider.engine.engine.Engine` (serve/served.py: `Serves`). Any thread may call it; everything that
waits for a service happens in the one event loop of `Carriage`, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from outrider.admission import detokenizer_for
from outrider.engine.observer import EngineSnapshot, Observer
from outrider.engine.request import Listener, Request, Update
from outrider.errors import ConfigError, QueueFullError, RequestError, UnavailableError
from outrider.models.loading.generation_config import SamplingDefaults
from outrider.remote.coordinator.fleet import Fleet
from outrider.remote.coordinator.journey import Journey, RetryLimits
from outrider.sampling.params import SamplingParams
from outrider.wellformed import parsed_json

Result = TypeVar("Result")
MAX_UNASKED = 4096  # requests whose refusal nobody has asked for yet
RETRY_AFTER_S = 2.0


class Carriage:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def do(self, call: Callable[..., object], *arguments: object) -> None:
        """Call it there, soon."""
        self.loop.call_soon_threadsafe(call, *arguments)

    def result(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """What `work` comes to there; waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the thread. Nothing may be under way."""
        self.do(self.loop.stop)
        self._thread.join()
        self.loop.close()


class RemoteEngine:
    """An engine whose work target services do. Some replica of `fleet` must have been admitted."""

    def __init__(
        self, fleet: Fleet, tokenizer: Any, carriage: Carriage, observer: Observer, limits: RetryLimits, *, max_queue: int,
        headers: Callable[[], Mapping[str, str]] = dict, emitted: Callable[[int], None] = lambda tokens: None,
    ) -> None:  # fmt: skip
        """`max_queue`: requests that may wait for a replica; `headers`: of the present trace; `emitted`: counts tokens."""
        assert fleet.known is not None, "no replica was admitted yet"
        self.name, self.tokenizer = fleet.name, tokenizer
        self.retries = 0  # requests that went on elsewhere, each as often as it did
        self._fleet, self._carriage, self._observer, self._limits = fleet, carriage, observer, limits
        self._max_queue, self._headers, self._emitted = max_queue, headers, emitted
        terms = fleet.known
        self.eos_token_ids = frozenset(terms.eos_token_ids)
        self.sampling_defaults = SamplingDefaults(_object(terms.sampling_defaults_json, "sampling_defaults_json"))
        self.config = _object(terms.config_json, "config_json")
        self._lock = threading.Condition()
        self._alive: dict[str, Journey] = {}
        self._unasked: OrderedDict[str, Future[None]] = OrderedDict()
        self._is_closed = False

    @property
    def context(self) -> int:
        """Tokens that a request may hold, prompt and answer: the least of all replicas."""
        return self._fleet.context

    @property
    def vocab_size(self) -> int:
        return self._fleet.vocab_size

    @property
    def drafters(self) -> list[str]:
        """What a request may name: every replica's."""
        lists = [one.terms.drafters for one in self._fleet.replicas if one.terms is not None]
        return list(dict.fromkeys(name for names in lists for name in names))

    @property
    def lossless(self) -> bool:
        return all(one.terms.lossless for one in self._fleet.replicas if one.terms is not None)

    def check_room(self, count: int) -> None:
        """Raises RequestError for more than may ever be under way, QueueFullError for more than may be beside those that are."""
        usable = self._fleet.usable
        rooms = [one.terms.max_running + one.terms.max_waiting for one in usable if one.terms is not None]
        limit, alive = sum(rooms) if rooms else self._max_queue, len(self._alive)
        if count > max(limit, self._max_queue):
            raise RequestError(f"{count} answers are asked for at once, and the replicas take at most {limit}: ask for fewer")
        if alive + count > limit:
            raise QueueFullError(f"{alive} requests are under way of {limit} that may; try again later", RETRY_AFTER_S)

    def prepare(self, params: SamplingParams) -> None:
        """Do nothing: replicas find the tokens of bad words, and refuse words that they cannot write."""

    def submit(self, request: Request, listener: Listener) -> None:
        """Set a request on its way. Raises RequestError for an id that is in use, QueueFullError when too many are under way,
        UnavailableError when the coordinator ends; what a replica refuses is raised by `settle`."""
        params = self._with_length(request)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        headers = tuple(self._headers().items())

        def listen(update: Update) -> None:
            self._emitted(len(update.token_ids))
            listener(update)

        with self._lock:
            if self._is_closed:
                raise UnavailableError(f"'{self.name}' takes no new requests: it is shutting down")
            if request.id in self._alive:
                raise RequestError(f"a request with id '{request.id}' is running already; ids must be unique")
            self.check_room(1)
            journey = Journey(
                request, listen, self._fleet, self._observer, self._limits, seed=seed, params=params, headers=headers,
                rest_of=lambda tokens, shown: self._rest_of(request, tokens, shown),
            )  # fmt: skip
            self._alive[request.id] = journey
            self._unasked[request.id] = journey.settled
            while len(self._unasked) > MAX_UNASKED:
                self._unasked.popitem(last=False)
        self._carriage.do(journey.start, self._ended)

    async def settle(self, request_id: str) -> None:
        """Wait until a replica has taken the request; raises what refused it. From any event loop."""
        with self._lock:
            settled = self._unasked.pop(request_id, None)
        if settled is not None:
            await asyncio.shield(asyncio.wrap_future(settled))

    def cancel(self, request_id: str) -> None:
        """End a request as "abort". Unknown or finished ones are left alone."""
        with self._lock:
            journey = self._alive.get(request_id)
            self._unasked.pop(request_id, None)
        if journey is not None:
            self._carriage.do(journey.cancel)

    def snapshot(self) -> EngineSnapshot:
        """Requests of this coordinator; memory of the replicas, as last reported."""
        with self._lock:
            alive = list(self._alive.values())
            is_closed = self._is_closed
        taken, memory = sum(journey.is_taken for journey in alive), self._fleet.snapshot()
        return EngineSnapshot(
            running=taken, waiting=len(alive) - taken, draining=is_closed, kv_tokens=memory["kv_tokens"],
            kv_capacity=memory["kv_capacity"],
            away=None if self._fleet.usable else self._fleet.reasons(),
        )  # fmt: skip

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is under way; False when time is up before that."""
        with self._lock:
            self._is_closed = True
            return self._lock.wait_for(lambda: not self._alive, timeout_s)

    def stop(self) -> None:
        """End everything that is under way as "abort"."""
        with self._lock:
            self._is_closed = True
            alive = list(self._alive.values())
        for journey in alive:
            self._carriage.do(journey.cancel)
        with self._lock:
            self._lock.wait_for(lambda: not self._alive, 10.0)

    def _ended(self, journey: Journey) -> None:
        with self._lock:
            del self._alive[journey.request.id]
            self.retries += journey.retries
            if journey.settled.done() and journey.settled.exception() is None:
                self._unasked.pop(journey.request.id, None)
            self._lock.notify_all()

    def _with_length(self, request: Request) -> SamplingParams:
        """The parameters with a length that does not depend on a replica's context. Raises RequestError where none is left."""
        room = self.context - len(request.prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; the context holds {self.context}, one must be left to answer: "
                "shorten it"
            )
        limit = request.params.limit(room)
        return replace(request.params, max_tokens=limit, min_tokens=min(request.params.min_tokens, limit))

    def _rest_of(self, request: Request, tokens: list[int], shown: str) -> str:
        """Text of an answer's tokens that was held back: it could have become a stop string or a character."""
        ends = (frozenset() if request.params.ignore_eos else self.eos_token_ids).union(request.params.stop_token_ids)
        detokenizer = detokenizer_for(self.tokenizer, request.prompt, request.params, ends)
        text = "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()
        return text[len(shown) :] if text.startswith(shown) else ""


def _object(text: str, name: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError for what is no JSON object."""
    try:
        found = parsed_json(text or "{}")
    except ValueError as error:
        raise ConfigError(f"a target service sent a {name} that is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"a target service sent a {name} that is no object")
    return found
