"""The part that both generating endpoints share, once prompts are made: engine requests, answers,
cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.request import Finish, Listener, Request, Update
from outrider.grammar import Spec
from outrider.sampling.params import SamplingParams
from outrider.serve.api.response_format import constraints
from outrider.serve.api.sse import Marks, committed_of
from outrider.serve.api.usage import Cost, metrics, so_far, timings, usage
from outrider.serve.errors import ApiError, as_api_error, unavailable
from outrider.serve.headers import chosen_id, current_id, fresh_id
from outrider.serve.routing import Route
from outrider.serve.schema.base import cut_short
from outrider.serve.schema.sampling import GenerationFields
from outrider.serve.schema.speculation import Prediction, SpeculationFields
from outrider.serve.served import Served
from outrider.serve.serves import Serves
from outrider.version import __version__

log = logging.getLogger("outrider.serve")
# OpenAI has no word for a time limit
FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # for readers of the log
# tokens and log-probabilities that may wait for a reader who holds them up: some 10 MB
MOST = 1 << 16
PATIENCE_S = 2.0  # a reader who takes longer for one update holds up the others


def check(finish: Finish) -> None:
    """Raises ApiError for an end that is no answer."""
    if finish.reason == "error":
        error = finish.error or ApiError("the request failed", status=500)
        mine = as_api_error(error)
        # it was accepted, so what went wrong later is not the client's doing
        if mine.status == 400:
            mine = ApiError(str(mine), status=500, kind="server_error", code="internal_error")
        raise mine
    if finish.reason == "abort":
        raise unavailable("the server is shutting down: the answer was cut off", "shutting_down")


def finish_reason(finish: Finish | None) -> str | None:
    return None if finish is None else FINISH_REASONS[finish.reason]


def stop_reason(finish: Finish | None) -> int | str | None:
    """The stop string or stop token id that ended the text, as in vLLM; "timeout" where the
    server's time limit did."""
    if finish is None:
        return None
    return "timeout" if finish.reason == "timeout" else finish.stop_reason


# (number of the answer to one prompt, the prompt)
MakeParams = Callable[[int, list[int]], SamplingParams]


@dataclass
class Exchange:
    """One HTTP request at work: `num_answers` engine requests for each prompt, prompt by prompt."""

    id: str
    served: Served
    prompts: list[list[int]]
    requests: list[Request]
    num_answers: int
    marks: Marks
    costs: list[Cost] = field(default_factory=list)  # of finished answers
    _bridge: Bridge | None = None
    _num_tokens: dict[int, int] = field(default_factory=dict)  # by answer, of what it has so far

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return self.marks.created

    def prompt_of(self, number: int) -> int:
        return number // self.num_answers

    def launch(self) -> Bridge:
        """Hand everything to the engine. Raises what it raises for the first request that it
        refuses."""
        self._bridge = Bridge(self.served.engine)
        self._bridge.submit(self.requests, ended=self.marks.ended)
        return self._bridge

    def cancel(self) -> None:
        """End what still runs."""
        if self._bridge is not None:
            self._bridge.cancel()

    async def answers(self) -> list[Update]:
        """Each as one update. Cancels what runs when it is cancelled itself. Raises ApiError where
        the engine gave one up."""
        found: list[list[Update]] = [[] for _ in self.requests]
        bridge = self.launch()
        async for number, update in self.updates(bridge):
            found[number].append(update)
        return [Update.joined(updates) for updates in found]

    async def updates(self, bridge: Bridge) -> AsyncGenerator[tuple[int, Update], None]:
        """(number of the answer, update), as they come; what they cost is noted."""
        num_tokens = self._num_tokens
        num_plain = [0] * len(self.requests)
        try:
            async for number, update in self._all_updates(bridge):
                num_tokens[number] = num_tokens.get(number, 0) + len(update.token_ids)
                num_plain[number] += update.origins.count("plain")
                if update.finish is not None:
                    check(update.finish)
                    self.costs.append(
                        Cost(
                            update.finish,
                            num_tokens[number],
                            num_plain[number],
                            self.prompt_of(number),
                        )
                    )
                yield number, update
                await self.marks.passed(number, update)
        finally:
            bridge.cancel()

    async def _all_updates(self, bridge: Bridge) -> AsyncIterator[tuple[int, Update]]:
        """Updates that the client has, then the engine's."""
        for number, update in self.marks.replayed():
            yield number, update
        async for number, update in bridge.updates():
            yield number, self.marks.whole(number, update)

    def head(self, kind: str) -> dict[str, Any]:
        """Fields that every answer and chunk begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": f"outrider-{__version__}",
        }

    def usage_so_far(self, number: int) -> dict[str, Any]:
        """Token counts of one answer so far, for vLLM's `continuous_usage_stats`."""
        return so_far(len(self.prompts[self.prompt_of(number)]), self._num_tokens.get(number, 0))

    def bill(self, num_thought: int | None = None) -> dict[str, Any]:
        """`usage`, `metrics` and `timings`, once everything has finished. `num_thought`: tokens of thoughts,
        where they are separated."""
        asked = self.requests[0]  # they differ in nothing that matters here
        predicted = None if asked.prediction is None else self.costs if asked.is_predicted else []
        return {
            "usage": usage(self.costs, predicted, num_thought),
            "metrics": metrics(self.costs, self._num_spec_tokens(asked)),
            "timings": timings(self.costs),
        }

    @property
    def is_finished(self) -> bool:
        """Whether all answers are there."""
        return len(self.costs) == len(self.requests)

    def _num_spec_tokens(self, asked: Request) -> int | None:
        """Draft tokens per step where that is one number: the request's, or the server's, which is
        about its first drafter."""
        speculation = asked.speculation
        usual = self.served.num_spec_tokens
        if speculation.mode == "fixed":
            return speculation.max_draft_tokens
        if (
            usual is None
            or asked.is_predicted
            or speculation.drafter not in (None, *self.served.engine.drafters[:1])
        ):
            return None
        return min(usual, speculation.max_draft_tokens or usual)


async def make_exchange(
    kind: str,
    body: GenerationFields,
    route: Route,
    num_answers: int,
    params: MakeParams,
    timeout_s: float,
    *,
    form: Spec | None = None,
    prompt_logprobs: int | None = None,
) -> Exchange:
    """`kind` begins the id. Raises ApiError for prompts that do not fit, ConfigError for parameters
    out of range."""
    for prompt in route.prompts:
        check_prompt(prompt, route.served)
    identity = f"{kind}-{fresh_id()}"
    predicted = await predicted_tokens(body.prediction, route.served)
    speculation = (body.speculation or SpeculationFields.model_validate({})).merged(
        _defaults(route, predicted)
    )
    num_requests = len(route.prompts) * num_answers
    committed = committed_of(body.resume, num_requests)
    grammars = iter(await constraints(route.served, form, num_requests))
    requests = [
        Request(
            id=f"{identity}-{number * num_answers + answer}",
            prompt=prompt,
            params=params(answer, prompt),
            speculation=speculation,
            constraint=next(grammars),
            prediction=predicted,
            priority=body.priority or 0,
            timeout_s=timeout_s,
            prompt_logprobs=None if committed[number * num_answers + answer] else prompt_logprobs,
            committed=committed[number * num_answers + answer],
        )
        for number, prompt in enumerate(route.prompts)
        for answer in range(num_answers)
    ]
    if body.bad_words:
        # reads the whole vocabulary
        await asyncio.to_thread(route.served.engine.prepare, requests[0].params)
    labels = {
        name: cut_short(value)
        for name in LABELS
        if (value := getattr(body, name, None)) is not None
    }
    labels |= chosen_id()
    if labels:
        log.info("labels", extra={"request_id": identity, **labels})
    marks = Marks(body.resume, requests, identity)
    return Exchange(marks.id, route.served, route.prompts, requests, num_answers, marks)


async def predicted_tokens(prediction: Prediction | None, served: Served) -> list[int] | None:
    """The tokens of a predicted output. Raises ApiError for more than an answer could have."""
    if prediction is None:
        return None
    tokens = await served.texts.encode(prediction.text, special=False)
    context = served.engine.context
    if len(tokens) > context:
        raise ApiError(
            f"this model's context holds {context} tokens, the prediction has {len(tokens)}",
            param="prediction",
            code="context_length_exceeded",
        )
    return tokens


def _defaults(route: Route, predicted: list[int] | None) -> dict[str, Any]:
    """A route's defaults of drafter and length do not apply to requests with a prediction, unless
    they switch drafting off."""
    needs_default = (
        ("invariant", "lossy")
        if predicted and route.defaults.get("mode") != "off"
        else route.defaults
    )
    return {name: value for name, value in route.defaults.items() if name in needs_default}


def check_prompt(prompt: Sequence[int], served: Served) -> None:
    """Raises ApiError where there is nothing to continue, no room to answer, or an id that is no
    token."""
    context = served.engine.context
    if not prompt:
        raise ApiError("the prompt is empty: there is nothing to continue", param="prompt")
    if len(prompt) >= context:
        raise ApiError(
            f"prompt is too long: {len(prompt)} tokens > {context - 1} maximum. This model's "
            f"maximum context length is {context} "
            "tokens, and one must be left to answer",
            param="prompt",
            code="context_length_exceeded",
        )
    check_ids(prompt, served, "prompt")


def check_ids(tokens: Sequence[int], served: Served, param: str) -> None:
    """Raises ApiError for an id that is no token."""
    vocab_size = served.engine.vocab_size
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ApiError(
            f"token id {str(outside)[:30]} is outside the vocabulary of {vocab_size}", param=param
        )


class Bridge:
    """From the engine's thread to the event loop: updates of one HTTP request's engine requests.
    Make it and use it in one event loop.

    The engine calls listeners in its own thread and must not wait. `call_soon_threadsafe` hands
    every update to the loop, in order; a request that is left before its end (client gone, another
    answer failed) is cancelled, and what still arrives for it is dropped with the bridge. So is
    what waits for a reader who holds it up, when that is too much: a row that waited with its
    reader would keep its place and its memory from others.
    """

    def __init__(self, engine: Serves) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._running: dict[int, str] = {}  # number -> request id
        self._backlog = Backlog()
        self._is_spilt = False
        self._about = current_id()

    def submit(self, requests: Sequence[Request], *, ended: Collection[int] = ()) -> None:
        """All of them but those that have `ended`, or none: raises what the engine raises for the
        first it refuses, and cancels those before it."""
        for number, request in enumerate(requests):
            if number in ended:
                continue
            try:
                self._engine.submit(request, self._listener(number))
            except BaseException:
                self.cancel()
                raise
            self._running[number] = request.id

    def _listener(self, number: int) -> Listener:
        def listen(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._add, number, update)

        return listen

    def _add(self, number: int, update: Update) -> None:
        if self._is_spilt or number not in self._running:
            return
        self._updates.put_nowait((number, update))
        if not self._backlog.add(update):
            message = "an answer is ended: more than %d of its tokens and log-probabilities wait for their reader"
            log.warning(message, MOST, extra=self._about)
            self._is_spilt = True
            self._updates = asyncio.Queue()
            self.cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(number of the request, update) until every request has finished. Raises ApiError for a
        reader who is too slow."""
        while self._running:
            self._backlog.ask()
            number, update = await self._updates.get()
            self._backlog.give(update)
            if number not in self._running:
                continue
            if update.finish is not None:
                del self._running[number]
            yield number, update
        if self._is_spilt:
            raise too_slow()

    def cancel(self) -> None:
        """End what still runs. Safe to call at any time, any number of times."""
        running = self._running
        self._running = {}
        for request_id in running.values():
            self._engine.cancel(request_id)


class Backlog:
    """Counts what waits, and tells whether that is too much. Lives in one event loop."""

    def __init__(self) -> None:
        self._size = 0
        # when the reader got the latest update; None: it waits for one
        self._given_s: float | None = None

    def add(self, update: Update) -> bool:
        """Count an update; False where it is too much. A reader who is quick may have any number:
        then we are slow ourselves."""
        self._size += weight(update)
        return (
            self._size <= MOST
            or self._given_s is None
            or time.monotonic() - self._given_s < PATIENCE_S
        )

    def ask(self) -> None:
        """The reader wants the next update."""
        self._given_s = None

    def give(self, update: Update) -> None:
        """The reader gets an update."""
        self._size -= weight(update)
        self._given_s = time.monotonic()


def weight(update: Update) -> int:
    """Tokens and log-probabilities of an update: what its size in memory follows."""
    of_prompt = sum(len(alternatives or ()) for alternatives in update.prompt_logprobs or ())
    return len(update.token_ids) + sum(map(len, update.logprobs)) + of_prompt


def too_slow() -> ApiError:
    """The end of an answer whose reader let too much wait."""
    return ApiError(
        f"the answer was ended: more than {MOST} of its tokens and log-probabilities waited for "
        "their reader. Read faster, or "
        "ask for fewer answers or log-probabilities",
        status=408,
        code="slow_reader",
    )
