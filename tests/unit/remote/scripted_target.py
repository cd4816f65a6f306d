"""A target service without a model, in the test's process: it emits a text that follows from the prompt, and fails on demand.

Bytes are tokens. The next token depends on all tokens before, so a lost or repeated token shows."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from grpc import aio

from outrider.engine.request import Finish, Update
from outrider.remote.coordinator.engine import Carriage
from outrider.remote.identity import model_identity
from outrider.remote.protocol import PROTOCOL, messages, stubs
from outrider.remote.target.refusals import KIND, TAKEN
from outrider.remote.target.replies import to_messages
from outrider.stats import DecodeStats
from outrider.text import Detokenizer
from outrider.version import __version__
from tests.helpers import byte_tokenizer

VOCAB = 257
STEP = 2  # tokens of a reply: one accepted, one correction
FACTS = {"weights": "abc", "dtype": "float32"}


def next_token(text: Sequence[int]) -> int:
    """What follows a text: a printable letter, never the end."""
    return hashlib.blake2b(b" ".join(str(token).encode() for token in text), digest_size=1).digest()[0] % 90 + 1


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def text_of(prompt: Sequence[int], count: int) -> str:
    """The emitted tokens as text."""
    detokenizer = Detokenizer(byte_tokenizer(), list(prompt))
    return "".join(detokenizer.push(token) for token in answer(prompt, count)) + detokenizer.flush()


@dataclass(eq=False)
class ScriptedTarget:
    """`cuts`: tokens after which requests one after the other lose their stream; `lies`: what the first replies get wrong."""

    cuts: list[int] = field(default_factory=list)
    stalls: list[int] = field(default_factory=list)  # tokens after which a stream brings nothing more
    lies: list[str] = field(default_factory=list)
    full: int = 0  # requests that find the queue full
    refusal: str | None = None
    facts: dict[str, str] | None = field(default_factory=lambda: dict(FACTS))
    tokenizer: Any = field(default_factory=byte_tokenizer)
    protocol: int = PROTOCOL
    is_target: bool = True
    draining: bool = False
    failed: str = ""
    turn_age_s: float = 0.0
    silent: bool = False  # its watch says nothing more
    pause_s: float = 0.0  # between two replies
    context: int = 500
    delay_s: float = 0.0  # before a request is taken
    seen: list[messages.GenerateRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    cancelled: int = 0
    garbage: str = ""  # the call that is answered with bytes that are no message

    async def Open(self, request: messages.Hello, context: aio.ServicerContext) -> messages.Welcome | bytes:  # noqa: N802
        if self.garbage == "Open":
            return b"\xff\xff"
        terms = messages.TargetTerms(
            max_context=self.context, max_running=4, max_waiting=8, drafters=["ngram"], lossless=True, eos_token_ids=[0],
            config_json=json.dumps({"drafter": "ngram", "num_draft_tokens": 3}), sampling_defaults_json="{}",
        )  # fmt: skip
        identity = model_identity("scripted", self.tokenizer, VOCAB, self.facts)
        given = terms if self.is_target else None
        return messages.Welcome(protocol=self.protocol, release=__version__, model=identity, target=given)

    async def Watch(  # noqa: N802
        self, request: messages.WatchRequest, context: aio.ServicerContext
    ) -> AsyncIterator[messages.TargetState | bytes]:
        while True:
            if self.garbage == "Watch":
                yield b"\xff\xff"
            if not self.silent:
                yield messages.TargetState(draining=self.draining, failed=self.failed, turn_age_s=self.turn_age_s)
            await asyncio.sleep(request.interval_s)

    async def Generate(  # noqa: N802
        self, request: messages.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[messages.GenerateReply]:
        self.seen.append(request)
        self.headers.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        await asyncio.sleep(self.delay_s)
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal, ((KIND, "ConfigError"),))
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down", ((KIND, "UnavailableError"),))
        if self.full:
            self.full -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", (("retry-after", "3"),))
        await context.send_initial_metadata(((TAKEN, "1"),))
        try:
            async for reply in self._say(request, context):
                yield reply
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _say(
        self, request: messages.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[messages.GenerateReply]:
        cut = self.cuts.pop(0) if self.cuts else None
        stall = self.stalls.pop(0) if self.stalls else None
        lie = self.lies.pop(0) if self.lies else None
        prompt, base = list(request.prompt), len(request.committed)
        max_tokens = json.loads(request.sampling_json).get("max_tokens", 256)
        tokens = answer(prompt, max_tokens)
        assert tokens[:base] == list(request.committed), "committed tokens that nobody emitted"
        detokenizer = Detokenizer(self.tokenizer, prompt)
        for token in tokens[:base]:
            detokenizer.push(token)
        stats, sent = DecodeStats(), 0
        while base < max_tokens:
            if cut is not None and sent >= cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the power is gone")
            if stall is not None and sent >= stall:
                await asyncio.sleep(3600)
            await asyncio.sleep(self.pause_s)
            new = tokens[base : base + STEP]
            pieces = [detokenizer.push(token) for token in new]
            is_last = base + len(new) >= max_tokens
            stats.count_step(3, len(new) - 1, len(new), rejected=True)
            rest = detokenizer.flush() if is_last else ""
            origins = ["accepted"] * (len(new) - 1) + ["correction"]
            finish = Finish(reason="length", stats=stats, seed=request.seed, lossless=True, drafter="ngram") if is_last else None
            pieces[-1] += rest
            while lie == "floods":
                yield messages.GenerateReply(base_length=base, prompt_logprobs=[messages.TokenLogprobs(none=True)] * 8)
            update = Update(text="".join(pieces), token_ids=new, origins=origins, pieces=pieces, finish=finish, drafted=3)
            for message in to_messages(update, base):
                yield _spoilt(message, lie) if lie and sent >= 4 else message
            base, sent = base + len(new), sent + len(new)
        if lie == "goes on":
            yield messages.GenerateReply(base_length=base, token_ids=[5], origins=["plain"], pieces=["x"], text="x")
        if lie == "lingers":
            await asyncio.sleep(3600)


def _spoilt(message: messages.GenerateReply, lie: str) -> Any:
    """The message with something wrong in it."""
    match lie:
        case "bytes":
            return b"\xff\xff"
        case "gap":
            message.base_length += 1
        case "again":
            message.base_length -= 2
        case "vocabulary":
            message.token_ids[0] = VOCAB + 3
        case "text":
            message.text = "something else"
        case "origins":
            del message.origins[:]
        case "origin":
            message.origins[0] = "dreamt"
        case "finish":
            message.finish.reason = "bored"
        case "stats":
            message.finish.CopyFrom(messages.Finish(reason="length", stats_json='{"steps": "many"}'))
        case "negative stats":
            message.finish.CopyFrom(messages.Finish(reason="length", stats_json='{"steps": -1}'))
        case "endless numbers":
            message.finish.CopyFrom(messages.Finish(reason="length", stats_json='{"decode_s": 1e999}'))
        case "nested stats":
            message.finish.CopyFrom(messages.Finish(reason="length", stats_json="[" * 100_000))
        case "aborts":
            message.finish.CopyFrom(messages.Finish(reason="abort", stats_json=json.dumps(asdict(DecodeStats()))))
        case "fails":
            message.finish.CopyFrom(messages.Finish(reason="error", error="a GPU fell off", error_kind="OutriderError"))
    return message


class Running:
    """A target that listens. `kill` cuts all connections at once; `again` listens on the same port."""

    def __init__(self, target: ScriptedTarget, carriage: Carriage) -> None:
        self.target, self._carriage, self.port = target, carriage, 0
        self._server: Any = None
        self.again()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def again(self) -> None:
        self._carriage.result(self._start())

    def kill(self) -> None:
        self._carriage.result(self._stop())

    async def _start(self) -> None:
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        stubs.add_to_server(stubs.TARGET, self.target, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)


@contextmanager
def running(*targets: ScriptedTarget) -> Iterator[list[Running]]:
    """The targets, listening on free ports of the loopback."""
    carriage = Carriage()
    found = [Running(target, carriage) for target in targets]
    try:
        yield found
    finally:
        for one in found:
            one.kill()
        carriage.close()
