"""A draft service for tests: it keeps to the protocol, guesses as a test asks, and misbehaves on
demand.

    with FakeDraftService(tmp_path, Known([prompt + answer])) as service:
        llm = LLM("demo", drafter="remote", drafter_options={"endpoint": service.address})

It lives in a thread of the test's process, on a Unix socket. `misbehave` gets every row request
before the service does, and may answer in its place.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc import aio

from outrider.remote.protocol import PROTOCOL, messages, stubs
from outrider.remote.security import OPTIONS, ServerSecurity, TokenCheck

Answers = Sequence[messages.RowReply] | None
Misbehaviour = Callable[["FakeDraftService", messages.RowRequest], Answers]
DISTRIBUTION_SIZE = 4  # tokens of a made-up distribution


class Guess(Protocol):
    """Who guesses. Both functions see the whole text."""

    def ranked(self, text: Sequence[int]) -> list[int]:
        """Tokens that may follow, the likeliest first; none: no guess."""

    def distribution(self, text: Sequence[int]) -> dict[int, float]:
        """What a sampled row's next token is drawn from; empty: no guess."""


class Known:
    """Knows whole texts, and errs where `errs(position)` says so."""

    def __init__(
        self, texts: Iterable[Sequence[int]], errs: Callable[[int], bool] = lambda position: False
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.errs = errs

    def ranked(self, text: Sequence[int]) -> list[int]:
        for known in self.texts:
            if len(known) > len(text) and known[: len(text)] == list(text):
                right = known[len(text)]
                return [right + 1, right] if self.errs(len(text)) else [right, right + 1]
        return []

    def distribution(self, text: Sequence[int]) -> dict[int, float]:
        ranked = self.ranked(text)
        return dict(zip(ranked, (0.75, 0.25), strict=False)) if ranked else {}


class MadeUp:
    """A distribution for every text, from its last token alone: honest, and nothing the target
    would say."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def distribution(self, text: Sequence[int]) -> dict[int, float]:
        first = text[-1] * 7 % self.vocab_size
        tokens = [
            (first + step) % self.vocab_size
            for step in range(min(DISTRIBUTION_SIZE, self.vocab_size))
        ]
        weights = [2.0**-rank for rank in range(len(tokens))]
        return {token: weight / sum(weights) for token, weight in zip(tokens, weights, strict=True)}

    def ranked(self, text: Sequence[int]) -> list[int]:
        return list(self.distribution(text))


class Repeating:
    """What followed the last token when it last occurred."""

    def ranked(self, text: Sequence[int]) -> list[int]:
        followers = [
            text[index + 1] for index in range(len(text) - 2, -1, -1) if text[index] == text[-1]
        ]
        return list(dict.fromkeys(followers))

    def distribution(self, text: Sequence[int]) -> dict[int, float]:
        ranked = self.ranked(text)[:DISTRIBUTION_SIZE]
        weights = [2.0**-rank for rank in range(len(ranked))]
        return {token: weight / sum(weights) for token, weight in zip(ranked, weights, strict=True)}


class Text:
    """One row as the service knows it."""

    def __init__(self, sampling: messages.Sampling) -> None:
        self.sampling = sampling
        self.tokens = list[int]()

    @property
    def draws(self) -> bool:
        sampling = self.sampling
        return sampling.temperature > 0 and not sampling.coupled and not sampling.deterministic


class FakeDraftService:
    """See the module docstring."""

    def __init__(
        self, folder: Path, guess: Guess, *, misbehave: Misbehaviour | None = None, seed: int = 0
    ) -> None:
        self.address = f"unix:{folder / 'draft.sock'}"
        self.listens_on = self.address
        self.guess = guess
        self.misbehave = misbehave
        self.security = ServerSecurity()
        self.delay_s = 0.0  # of every reply
        # None: the asker's own
        self.protocol = PROTOCOL
        self.model = None
        self.terms = messages.DraftTerms(
            max_draft_tokens=8,
            max_context=100_000,
        )
        self.requests: list[messages.RowRequest] = []
        self.hellos: list[messages.Hello] = []
        self.texts: dict[int, Text] = {}
        self.sent: dict[tuple[int, int], int] = {}  # nodes by (row, base)
        self.random = random.Random(seed)
        # of "Open", "Draft": what is answered with bytes that are no message
        self.garbage: set[str] = set()
        self.break_after: int | None = None  # requests, after which every stream ends with an error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None

    # ---------------------------------------------------------------- life

    def __enter__(self) -> FakeDraftService:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen. May be called again after `stop`: rows are forgotten then."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.texts.clear()
        self.sent.clear()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        """End every stream at once."""
        if self._loop is not None:
            loop = self._loop
            self._loop = None
            asyncio.run_coroutine_threadsafe(self._server.stop(None), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)

    async def _start(self) -> None:
        interceptors = [TokenCheck(self.security.token)] if self.security.token else []
        self._server = aio.server(interceptors=interceptors, options=OPTIONS)
        if self.garbage:
            self._server.add_generic_rpc_handlers((self._with_garbage(),))
        else:
            stubs.add_to_server(self, self._server)
        credentials = self.security.credentials()
        if credentials is None:
            self._server.add_insecure_port(self.listens_on)
        else:
            port = self._server.add_secure_port(self.listens_on, credentials)
            self.address = f"grpcs://localhost:{port}"
        await self._server.start()

    def _with_garbage(self) -> grpc.GenericRpcHandler:
        async def opened(hello: messages.Hello, context: Any) -> bytes:
            return (
                b"\xff\xff"
                if "Open" in self.garbage
                else (await self.Open(hello, context)).SerializeToString()
            )

        async def drafts(
            requests: AsyncIterator[messages.DraftRequest], context: Any
        ) -> AsyncIterator[bytes]:
            async for reply in self.Draft(requests, context):
                yield b"\xff\xff" if "Draft" in self.garbage else reply.SerializeToString()

        handlers = {
            "Open": grpc.unary_unary_rpc_method_handler(opened, messages.Hello.FromString),
            "Draft": grpc.stream_stream_rpc_method_handler(
                drafts, messages.DraftRequest.FromString
            ),
        }
        return grpc.method_handlers_generic_handler("outrider.remote.v1.DraftService", handlers)

    # ---------------------------------------------------------------- the protocol

    async def Open(self, hello: messages.Hello, context: Any) -> messages.Welcome:  # noqa: N802  gRPC's name
        self.hellos.append(hello)
        model = hello.model if self.model is None else self.model
        return messages.Welcome(
            protocol=self.protocol, release="test", model=model, draft=self.terms
        )

    async def Draft(  # noqa: N802
        self, requests: AsyncIterator[messages.DraftRequest], context: Any
    ) -> AsyncIterator[messages.DraftReply]:
        async for request in requests:
            for row in request.rows:
                self.requests.append(row)
                if self.break_after is not None and len(self.requests) >= self.break_after:
                    await context.abort(13, "the service fell over")
                answers = self.misbehave(self, row) if self.misbehave is not None else None
                for answer in self.answers(row) if answers is None else answers:
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    yield messages.DraftReply(rows=[answer])

    def answers(self, request: messages.RowRequest) -> list[messages.RowReply]:
        """What an honest service says to this."""
        if request.end:
            self.texts.pop(request.row, None)
            return []
        if request.HasField("sampling"):
            self.texts[request.row] = Text(request.sampling)
        text = self.texts.get(request.row)
        if text is None:
            return [
                messages.RowReply(
                    row=request.row, trouble=messages.TROUBLE_UNKNOWN_ROW, reason="never seen"
                )
            ]
        if request.base_length > len(text.tokens):
            return [
                messages.RowReply(
                    row=request.row,
                    trouble=messages.TROUBLE_MISSING_TOKENS,
                    have_length=len(text.tokens),
                )
            ]
        text.tokens[request.base_length :] = request.tokens
        if not request.num_draft_tokens:
            return []
        return [
            self.reply(request.row, len(text.tokens), self.drafted(text, request.num_draft_tokens))
        ]

    def reply(
        self, row: int, base: int, nodes: Sequence[messages.Node], **fields: Any
    ) -> messages.RowReply:
        self.sent[row, base] = self.sent.get((row, base), 0) + len(nodes)
        return messages.RowReply(row=row, base_length=base, nodes=nodes, **fields)

    def drafted(self, text: Text, count: int) -> list[messages.Node]:
        """A chain of at most `count` nodes that continue the text."""
        nodes: list[messages.Node] = []
        for _ in range(count):
            node = self.node(text, [*text.tokens, *(earlier.token for earlier in nodes)])
            if node is None:
                break
            nodes.append(node)
        return nodes

    def node(self, text: Text, known: Sequence[int]) -> messages.Node | None:
        if not text.draws:
            ranked = self.guess.ranked(known)
            return messages.Node(token=ranked[0]) if ranked else None
        distribution = self.guess.distribution(known)
        if not distribution:
            return None
        tokens = list(distribution)
        probs = list(distribution.values())
        token = self.random.choices(tokens, probs)[0]
        sent = messages.Distribution(tokens=tokens, probs=probs)
        return messages.Node(token=token, distribution=sent)
