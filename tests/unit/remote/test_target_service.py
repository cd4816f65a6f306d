"""The target service over a real small engine: streams, deadlines, slow readers, bad input, and what a handshake compares."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio

from outrider.build import Options
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, QueueFullError, RequestError
from outrider.remote.coordinator.engine import Carriage
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import check_model, model_identity
from outrider.remote.protocol import PROTOCOL, messages, stubs
from outrider.remote.security import ClientSecurity
from outrider.remote.target import run
from outrider.remote.target.facts import model_facts
from outrider.remote.target.refusals import refusal_of
from outrider.remote.target.replies import from_message
from outrider.remote.target.run import terms_of
from outrider.remote.target.service import TargetService
from outrider.serve.settings import ServedModel
from tests.helpers import word_tokenizer
from tests.unit.engine.conftest import MakeEngine, Models, ask, engine_of, models, prompt, request  # noqa: F401
from tests.unit.serve.fake_engine import FakeEngine

TOKENS = prompt(12, 4)


@dataclass
class Served:
    """A service that listens, and a way to call it."""

    engine: Engine
    service: TargetService
    address: str
    counted: list[tuple[str, str]]
    _carriage: Carriage

    def call(self, work: Any) -> Any:
        """What `work(stub)` comes to."""

        async def run() -> Any:
            channel = ClientSecurity().channel(Endpoint.parse(self.address))
            try:
                return await asyncio.wait_for(work(stubs.caller(stubs.TARGET, channel)), 60)
            finally:
                await channel.close()

        return self._carriage.result(run())

    def do(self, work: Any) -> Any:
        """In the service's loop."""
        return self._carriage.result(work)


@pytest.fixture
def served(engine_of: MakeEngine) -> Iterator[Served]:  # noqa: F811
    """An engine of two slots and two that may wait, behind a service."""
    engine = engine_of(max_num_seqs=2, max_queue=2)
    carriage, counted = Carriage(), []
    model = ServedModel(name="tiny", options=Options(target="tiny"), engine=engine.settings)

    async def start() -> tuple[Any, TargetService, int]:
        service = TargetService("instance", lambda method, status: counted.append((method, status)))
        identity = model_identity("tiny", engine.tokenizer, engine.vocab_size, {"weights": "x"})
        service.serve(engine, identity, terms_of(engine, model), ["a note"])
        server = aio.server()
        stubs.add_to_server(stubs.TARGET, service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, service, port

    server, service, port = carriage.result(start())
    yield Served(engine, service, f"127.0.0.1:{port}", counted, carriage)
    carriage.result(service.close())
    carriage.result(server.stop(None))
    carriage.close()


def message(**fields: Any) -> messages.GenerateRequest:
    sampling = fields.pop("sampling", {"max_tokens": 12, "ignore_eos": True})
    text = sampling if isinstance(sampling, str) else json.dumps(sampling)
    return messages.GenerateRequest(**{"id": "one", "prompt": TOKENS, "seed": 5, "sampling_json": text, **fields})


async def rest_of(call: Any) -> list[messages.GenerateReply]:
    """What is still to be read."""
    replies = []
    while (reply := await call.read()) is not aio.EOF:
        replies.append(reply)
    return replies


async def collect(stub: Any, asked: messages.GenerateRequest, **options: Any) -> list[messages.GenerateReply]:
    """The whole answer."""
    return [reply async for reply in stub.Generate(asked, **options)]


def test_an_answer_comes_in_pieces(served: Served) -> None:
    """Tokens, text and finish are the engine's, and every piece carries its position."""
    (expected,) = ask(served.engine, request(TOKENS, max_tokens=12, logprobs=2))
    replies = served.call(lambda stub: collect(stub, message(sampling={"max_tokens": 12, "ignore_eos": True, "logprobs": 2})))
    updates = [from_message(reply, 257, True) for reply in replies]
    assert [token for update in updates for token in update.token_ids] == expected.token_ids
    assert "".join(update.text for update in updates) == expected.text
    found, given = ([logprobs for one in each for logprobs in one.logprobs] for each in (updates, expected.updates))
    assert found == given
    starts = [0]
    for update in updates:
        starts.append(starts[-1] + len(update.token_ids))
    assert [reply.base_length for reply in replies] == starts[:-1]
    finish = updates[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stats.emitted, finish.prompt_tokens) == ("length", 12, len(TOKENS))
    assert sum(update.drafted for update in updates) == finish.stats.drafted


def test_prompt_logprobs_come_first(served: Served) -> None:
    """They equal the engine's."""
    (expected,) = ask(served.engine, request(TOKENS, max_tokens=3, prompt_logprobs=1))
    replies = served.call(lambda stub: collect(stub, message(prompt_logprobs=1, sampling={"max_tokens": 3, "ignore_eos": True})))
    found = [logprobs for reply in replies for logprobs in from_message(reply, 257, False).prompt_logprobs or []]
    assert expected.wait().updates[0].prompt_logprobs == found


def test_a_slow_reader_delays_nobody(served: Served) -> None:
    """The engine goes on while nothing is read; what waited comes in few messages."""

    async def work(stub: Any) -> list[messages.GenerateReply]:
        call = stub.Generate(message(sampling={"max_tokens": 300, "ignore_eos": True}))
        first = await call.read()
        while served.engine.snapshot().running or served.engine.snapshot().prefilling:
            await asyncio.sleep(0.02)
        return [first, *await rest_of(call)]

    replies = served.call(work)
    assert sum(len(reply.token_ids) for reply in replies) == 300
    assert replies[-1].finish.reason == "length"


def test_leaving_ends_the_request(served: Served) -> None:
    """A cancelled call, and one whose deadline passed."""

    async def leave(stub: Any) -> None:
        call = stub.Generate(message(sampling={"max_tokens": 1500, "ignore_eos": True}))
        await call.read()
        call.cancel()
        while served.engine.snapshot().running:
            await asyncio.sleep(0.02)

    served.call(leave)
    with pytest.raises(aio.AioRpcError) as caught:
        served.call(lambda stub: collect(stub, message(sampling={"max_tokens": 1900, "ignore_eos": True}), timeout=0.05))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def empty(stub: Any) -> None:
        while served.engine.snapshot().running:
            await asyncio.sleep(0.02)

    served.call(empty)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": [5, 999]}, RequestError, "token id 999, outside the vocabulary"),
    ({"prompt": []}, RequestError, "the prompt is empty"),
    ({"committed": [1000]}, RequestError, "committed has token id 1000"),
    ({"id": ""}, RequestError, "id is empty"),
    ({"sampling": "{nonsense"}, RequestError, "sampling_json is not JSON"),
    ({"sampling": "[1]"}, RequestError, "must be an object"),
    ({"sampling": {"temperatur": 1}}, ConfigError, "Did you mean 'temperature'"),
    ({"sampling": {"temperature": "hot"}}, ConfigError, "temperature"),
    ({"sampling": {"ignore_eos": 1}}, ConfigError, "true or false"),
    ({"sampling": {"logit_bias": {"a": 1}}}, ConfigError, "logit_bias"),
    ({"sampling": {"stop": 5}}, ConfigError, "stop"),
    ({"sampling": {"n": 2}}, ConfigError, "unknown field 'n'"),
    ({"sampling": {"bad_words": ["x"], "max_tokens": "many"}}, ConfigError, "max_tokens"),
    ({"grammar": messages.Grammar(kind="haiku", text="x")}, RequestError, "grammar.kind 'haiku' is unknown"),
    ({"grammar": messages.Grammar(kind="json_schema", text="{")}, RequestError, "not the JSON"),
    ({"grammar": messages.Grammar(kind="regex", text="(")}, RequestError, "grammar"),
    ({"speculation": messages.Speculation(mode="wild")}, ConfigError, "speculation.mode"),
    ({"speculation": messages.Speculation(drafter="suffix")}, ConfigError, "not loaded here"),
    ({"timeout_s": -1.0}, RequestError, "timeout_s"),
]


@pytest.mark.parametrize(("fields", "kind", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input_is_refused_in_the_engines_words(
    served: Served, fields: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """INVALID_ARGUMENT, and the caller can raise the same error again."""
    with pytest.raises(aio.AioRpcError) as caught:
        served.call(lambda stub: collect(stub, message(**fields)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    again = refusal_of(caught.value)
    assert isinstance(again, kind)
    assert text in str(again)
    assert ("Generate", "INVALID_ARGUMENT") in served.counted


def test_repeated_ids_and_full_queues(served: Served) -> None:
    """Two run, two wait; the fifth gets a time to retry."""

    async def work(stub: Any) -> list[aio.AioRpcError]:
        long = {"max_tokens": 1500, "ignore_eos": True}
        calls = [stub.Generate(message(id=str(number), sampling=long)) for number in range(2)]
        for call in calls:
            await call.read()
        calls += [stub.Generate(message(id=str(number), sampling=long)) for number in (2, 3)]
        for call in calls[2:]:
            await call.initial_metadata()
        errors = []
        for name in ("0", "4"):
            try:
                await collect(stub, message(id=name, sampling=long))
            except aio.AioRpcError as error:
                errors.append(error)
        for call in calls:
            call.cancel()
        return errors

    repeated, full = served.call(work)
    assert "running already" in str(refusal_of(repeated))
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    refusal = refusal_of(full)
    assert isinstance(refusal, QueueFullError)
    assert refusal.retry_after_s >= 1


def test_the_handshake_compares(served: Served) -> None:
    """Protocol and tokenizer; terms and notes come back."""

    def hello(protocol: int, tokenizer: Any) -> messages.Hello:
        return messages.Hello(protocol=protocol, model=model_identity("mine", tokenizer, 257))

    welcome = served.call(lambda stub: stub.Open(hello(PROTOCOL, served.engine.tokenizer)))
    assert welcome.target.max_waiting == 2
    assert list(welcome.target.drafters) == ["draft-model"]
    assert list(welcome.notes) == ["a note"]
    for wrong, text in ((hello(7, served.engine.tokenizer), "version 7"), (hello(PROTOCOL, word_tokenizer(257)), "vocabulary")):
        with pytest.raises(aio.AioRpcError) as caught:
            served.call(lambda stub, asked=wrong: stub.Open(asked))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert text in str(caught.value.details())


def test_a_refused_watch_is_counted_once(served: Served) -> None:
    """The count says why, and says it once."""
    served.service._engine, engine = None, served.service._engine
    try:
        with pytest.raises(aio.AioRpcError):
            served.call(lambda stub: stub.Watch(messages.WatchRequest()).read())
    finally:
        served.service._engine = engine
    assert served.counted == [("Watch", "UNAVAILABLE")]


def test_long_reasons_arrive(served: Served) -> None:
    """Cut: a longer status than gRPC takes would look like a full queue."""
    with pytest.raises(aio.AioRpcError) as caught:
        served.call(lambda stub: collect(stub, message(sampling={"temperatur" + "ä" * 20_000: 1})))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unknown field 'temperatur" in str(refusal_of(caught.value))


def test_an_engine_that_hangs_does_not_keep_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that never returns cannot be ended; the loop's own threads would be waited for."""
    monkeypatch.setattr(run, "LAST_TURN_S", 0.1)
    hung, free, began = FakeEngine(), threading.Event(), time.monotonic()
    hung.stop = lambda: free.wait(20)
    asyncio.run(run.stop(hung))
    free.set()
    assert time.monotonic() - began < 15


def test_what_goes_wrong_when_an_engine_stops_is_raised() -> None:
    engine = FakeEngine()

    def fails() -> None:
        raise OSError("no space is left for what was learned")

    engine.stop = fails
    with pytest.raises(OSError, match="no space"):
        asyncio.run(run.stop(engine))


def test_watching_sees_the_drain_begin(served: Served) -> None:
    """At once, not at the next interval; new requests are refused, and running ones finish."""

    async def work(stub: Any) -> tuple[list[bool], aio.AioRpcError, list[messages.GenerateReply]]:
        watch = stub.Watch(messages.WatchRequest(interval_s=50))
        states = [(await watch.read()).draining]
        call = stub.Generate(message(sampling={"max_tokens": 60, "ignore_eos": True}))
        replies = [await call.read()]
        await served.service.drain()
        draining = asyncio.ensure_future(asyncio.to_thread(served.engine.drain, 30))
        states.append((await watch.read()).draining)
        try:
            await collect(stub, message(id="late"))
        except aio.AioRpcError as refused:
            error = refused
        replies += await rest_of(call)
        assert await draining
        return states, error, replies

    states, error, replies = served.call(work)
    assert states == [False, True]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert replies[-1].finish.reason == "length"


def test_facts_tell_models_apart(engine_of: MakeEngine, models: Models) -> None:  # noqa: F811
    """Weights by content, arithmetic by bits; the same model twice is the same."""
    first, second = engine_of(), engine_of(drafter="ngram", draft=False)
    facts = model_facts(first.built)
    assert facts == model_facts(second.built), "how it drafts decides no text"
    assert {"weights", "arithmetic", "dtype", "device", "config", "ends"} <= set(facts)
    mine = model_identity("m", first.tokenizer, 257, facts)
    check_model(mine, mine, "it")
    other = model_identity("m", first.tokenizer, 257, {**facts, "weights": "other", "dtype": "bfloat16"})
    with pytest.raises(Exception, match=r"dtype bfloat16 instead of float32; weights other instead of"):
        check_model(mine, other, "it")
