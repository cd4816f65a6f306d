"""An engine without a model: a thread that emits a scripted text in steps, as
`outrider.engine.Engine` would.

Every step emits one accepted token and one correction (one plain token where the request switched
drafting off). Bytes are tokens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.observer import EngineSnapshot
from outrider.engine.request import Finish, FinishReason, Listener, Request, Update
from outrider.errors import OutriderError, QueueFullError, RequestError
from outrider.models.loading.generation_config import SamplingDefaults
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.stops import StopStrings
from outrider.text import Detokenizer
from outrider.thoughts import StopsBehindThoughts
from tests.helpers import EOS, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# the text or its tokens, or how its request fails
Reply = str | list[int] | Callable[[Request], str] | OutriderError


@dataclass
class FakeEngine:
    """`gate`: when given, a step waits for it. `reply`: the emitted text; max_tokens cuts it, else
    EOS ends it."""

    name: str = "fake"
    reply: Reply = "Hello, world"
    context: int = 200
    max_queue: int = 100
    drafters: list[str] = field(default_factory=lambda: ["draft-model", "ngram"])
    gate: threading.Semaphore | None = None
    failed: str | None = None
    turn_age_s: float = 0.0
    cached: int = 0
    tokenizer: Any = field(default_factory=byte_tokenizer)
    seen: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    # bad words, and who looked for them
    prepared: list[tuple[list[str], threading.Thread]] = field(default_factory=list)
    drained: float | None = None
    stopped: bool = False
    late: bool = False  # requests run into their time limit after one step

    vocab_size: int = 257
    num_parameters: int = 7_000_000_000
    is_demo: bool = False
    eos_token_ids: frozenset[int] = frozenset({EOS})
    lossless: bool = True
    notes: list[str] = field(default_factory=list)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    config: dict[str, Any] = field(
        default_factory=lambda: {"num_draft_tokens": 3, "drafter": "draft-model"}
    )

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = TEMPLATE
        self._queue: queue.Queue[tuple[Request, Listener] | None] = queue.Queue()
        self._alive: set[str] = set()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def check_room(self, count: int) -> None:
        if count > max(1, self.max_queue):  # 0: a queue that is always full
            raise RequestError(f"{count} answers, and at most {self.max_queue} requests may wait")
        if len(self._alive) + count > self.max_queue:
            raise QueueFullError(f"{self.max_queue} requests wait already", retry_after_s=2.5)

    def prepare(self, params: SamplingParams) -> None:
        self.prepared.append((list(params.bad_words), threading.current_thread()))

    def submit(self, request: Request, listener: Listener) -> None:
        if len(self._alive) >= self.max_queue:
            raise QueueFullError(f"{self.max_queue} requests wait already", retry_after_s=2.5)
        self.seen.append(request)
        self._alive.add(request.id)
        self._queue.put((request, listener))

    def cancel(self, request_id: str) -> None:
        if request_id in self._alive:
            self.cancelled.append(request_id)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            running=len(self._alive), failed=self.failed, turn_age_s=self.turn_age_s
        )

    def drain(self, timeout_s: float) -> bool:
        self.drained = timeout_s
        limit = time.monotonic() + timeout_s
        while self._alive and time.monotonic() < limit:
            time.sleep(0.005)
        return not self._alive

    def stop(self) -> None:
        self.stopped = True
        self._queue.put(None)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            self._answer(*item)

    def _answer(self, request: Request, listener: Listener) -> None:
        reply = self.reply(request) if callable(self.reply) else self.reply
        speech = _Speech(self, request, listener)
        if isinstance(reply, OutriderError):
            speech.end("error", reply)
            return
        tokens = [
            *(self.tokenizer(reply)["input_ids"] if isinstance(reply, str) else reply),
            *self.eos_token_ids,
        ]
        size = 1 if request.speculation.mode == "off" else 2
        speech.take_up(tokens[: len(request.committed)])
        for start in range(len(request.committed), len(tokens), size):
            self._wait(request)
            if request.id in self.cancelled:
                speech.end("abort")
                return
            if self.late and start >= size:
                speech.end("timeout")
                return
            if speech.step(tokens[start : start + size]):
                return
        speech.end("stop")  # ignore_eos: this engine has no more to say

    def _wait(self, request: Request) -> None:
        while self.gate is not None and not self.gate.acquire(timeout=0.005):
            if request.id in self.cancelled:
                return

    def left(self, request: Request) -> None:
        self._alive.discard(request.id)


def engine(
    reply: str, more: str = "{# </think> #}", tokens: tuple[str, ...] = (), *, special: bool = True
) -> FakeEngine:
    """One whose model thinks. `more`: behind the usual template; `tokens`: marks that are tokens,
    special or not."""
    made = FakeEngine(reply=reply, context=2000)
    made.tokenizer.chat_template = TEMPLATE + more
    made.tokenizer.add_tokens(
        [token for token in tokens if token != "final"], special_tokens=special
    )
    made.tokenizer.add_tokens([token for token in tokens if token == "final"])
    made.vocab_size = len(made.tokenizer)
    if "<|return|>" in tokens:
        made.eos_token_ids = frozenset({made.tokenizer.convert_tokens_to_ids("<|return|>")})
    return made


class _Speech:
    """One answer."""

    def __init__(self, engine: FakeEngine, request: Request, listener: Listener) -> None:
        self._engine = engine
        self._request = request
        self._listener = listener
        self._text = Detokenizer(
            engine.tokenizer, request.prompt, special=not request.params.skip_special_tokens
        )
        stops = request.params.stop
        include = request.params.include_stop_str_in_output
        thinking = request.params.thinking
        self._stops = (
            StopsBehindThoughts(stops, thinking, include=include)
            if thinking
            else StopStrings(stops, include=include)
        )
        self._stats = DecodeStats(ttft_s=0.25, decode_s=0.75)
        self._num_emitted = 0
        self._ended_by: int | str | None = None
        self._first = True

    def take_up(self, committed: list[int]) -> None:
        """Come to where another engine left the answer."""
        for token in committed:
            self._stops.push(self._text.push(token), token)
        self._num_emitted = len(committed)

    def step(self, tokens: list[int]) -> bool:
        """Whether the answer ends with it."""
        params = self._request.params
        plain = self._request.speculation.mode == "off"
        emitted = []
        pieces = []
        reason = None
        for token in tokens:
            is_eos = token in self._engine.eos_token_ids and not params.ignore_eos
            ends = is_eos or token in params.stop_token_ids
            emitted.append(token)
            is_hidden = ends and not params.include_stop_str_in_output
            pieces.append("" if is_hidden else self._stops.push(self._text.push(token), token))
            self._num_emitted += 1
            if ends or self._stops.found:
                reason = "stop"
                self._ended_by = self._stops.match or (token if token != EOS else None)
            elif self._num_emitted >= params.max_tokens:
                reason = "length"
            if reason:
                if not self._stops.found:
                    pieces[-1] += self._stops.push(self._text.flush()) + self._stops.flush()
                break
        origins = (["plain"] if plain else ["accepted", "correction"][-len(tokens) :])[
            : len(emitted)
        ]
        self._stats.count_step(
            0 if plain else 3, origins.count("accepted"), len(emitted), rejected=not plain
        )
        self._send(emitted, origins, pieces, reason)
        return reason is not None

    def end(self, reason: FinishReason, error: OutriderError | None = None) -> None:
        self._engine.left(self._request)
        self._listener(Update(finish=self._finish(reason, error)))

    def _send(self, emitted: list[int], origins: list[str], pieces: list[str], reason: Any) -> None:
        count = self._request.params.logprobs
        first = self._first
        self._first = False
        logprobs = [] if count is None else [_logprobs(token, count) for token in emitted]
        wanted = self._request.prompt_logprobs
        prompt = (
            [None, *(_logprobs(t, wanted) for t in self._request.prompt[1:])]
            if first and wanted is not None
            else None
        )
        if reason:
            self._engine.left(self._request)
        self._listener(
            Update(
                text="".join(pieces),
                token_ids=emitted,
                origins=origins,
                pieces=pieces,
                logprobs=logprobs,
                prompt_logprobs=prompt,
                finish=self._finish(reason) if reason else None,
            )
        )

    def _finish(self, reason: FinishReason, error: OutriderError | None = None) -> Finish:
        return Finish(
            reason=reason,
            stop_reason=self._ended_by,
            stats=self._stats,
            seed=self._request.params.seed or 7,
            lossless=True,
            drafter="prediction"
            if self._request.is_predicted
            else self._request.speculation.drafter or self._engine.drafters[0],
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._engine.cached,
            error=error,
        )


def _logprobs(token: int, count: int) -> dict[int, float]:
    """Likeliest first; the token itself is the second best."""
    others = [other for other in range(1, count + 2) if other != token][:count]
    logprobs = {other: -0.1 - rank for rank, other in enumerate(others)}
    logprobs[token] = -0.5 - token / 1000
    return dict(sorted(logprobs.items(), key=lambda item: -item[1]))
