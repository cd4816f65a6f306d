"""The limits of a wire: large messages, idle lines, many calls, damaged bytes, addresses and tokens
of other forms."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from outrider.errors import ConfigError
from outrider.remote import serving
from outrider.remote.access import Access
from outrider.remote.draft import connection
from outrider.remote.draft.connection import (
    Connection,
    ReplyBox,
    TroubleError,
    background_loop,
)
from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.service import DraftService, OpenStream
from outrider.remote.draft.text import sampling_of
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import model_identity
from outrider.remote.protocol import MAX_MESSAGE_BYTES, messages, stubs
from outrider.remote.security import OPTIONS, ServerSecurity, channel_to
from outrider.remote.serving import GrpcServer, ServiceSettings
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.stops import StopStrings
from tests.draft_service import FakeDraftService, Known
from tests.helpers import byte_tokenizer
from tests.unit.remote.conftest import until

pytestmark = pytest.mark.usefixtures("short_pauses")

CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture
def silent(folder: Path) -> Iterator[FakeDraftService]:
    """A service that reads and says nothing."""
    with FakeDraftService(folder, Known([]), misbehave=lambda service, request: []) as service:
        yield service


@pytest.fixture
def line(silent: FakeDraftService) -> Iterator[Connection]:
    """A connection to it."""
    to_silent = Connection(
        Endpoint.parse(silent.address),
        Access(),
        model_identity("mine", byte_tokenizer(), 257),
    )
    to_silent.start(10.0)
    assert to_silent.trouble is None
    yield to_silent
    to_silent.close()


@pytest.mark.slow
def test_texts_that_are_too_much_for_one_message(
    silent: FakeDraftService, line: Connection
) -> None:
    """A service that comes back gets all texts of a batch at once."""
    text = [100_000] * 1_000_000
    requests = [
        messages.RowRequest(row=row, tokens=text, sampling=messages.Sampling(), num_draft_tokens=1)
        for row in range(8)
    ]
    assert sum(request.ByteSize() for request in requests) > MAX_MESSAGE_BYTES
    assert line.send(requests)
    until(lambda: len(silent.requests) == 8 or line.counts.troubles, "the texts to arrive")
    assert not line.counts.troubles


def test_replies_that_are_too_much_for_one_message() -> None:
    """What a slow line let pile up arrives in parts."""

    async def sent() -> list[int]:
        stream = OpenStream()
        stream.put(
            [messages.RowReply(row=row, reason="x" * (MAX_MESSAGE_BYTES // 3)) for row in range(6)]
        )
        stream.close()
        parts = []
        while (part := await stream.next()) is not None:
            assert part.ByteSize() < MAX_MESSAGE_BYTES
            parts += [reply.row for reply in part.rows]
        return parts

    assert asyncio.run(sent()) == list(range(6))


@pytest.mark.slow
def test_nothing_is_owed_to_rows_that_ended(
    silent: FakeDraftService, line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that dropped an ended row's request is not silent."""
    monkeypatch.setattr(connection, "SILENT_S", 0.2)
    number = line.new_row(ReplyBox())
    request = messages.RowRequest(
        row=number, tokens=[5], sampling=messages.Sampling(), num_draft_tokens=2
    )
    line.send([request, messages.RowRequest(row=number, end=True)])
    until(lambda: len(silent.requests) == 2, "both messages")
    time.sleep(2.5)  # the line is looked at once a second
    assert line.is_open
    assert not line.counts.troubles


def test_a_service_that_reads_nothing_is_silent(
    silent: FakeDraftService, line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is looked at although its writer stands still."""
    monkeypatch.setattr(connection, "SILENT_S", 0.2)
    monkeypatch.setattr(line._call, "write", lambda message: asyncio.sleep(1000))
    number = line.new_row(ReplyBox())
    ask = messages.RowRequest(row=number, tokens=[5], num_draft_tokens=2)

    def is_silent() -> bool:
        line.send([ask])
        return "silent" in line.counts.troubles

    until(is_silent, "the line to be given up")


def test_closing_a_line_that_is_being_broken(silent: FakeDraftService, line: Connection) -> None:
    """It does not come back: nobody could close it again."""

    async def both() -> None:
        line._break(TroubleError("silent", "a test"))
        line.close()

    asyncio.run_coroutine_threadsafe(both(), background_loop()).result(10)
    until(
        lambda: (
            not [task for task in asyncio.all_tasks(background_loop()) if "_live" in repr(task)]
        ),
        "its end",
        5.0,
    )


def test_a_top_k_that_no_message_holds() -> None:
    """Larger than any vocabulary: off, as it is for the target."""
    row = Row(
        request=0,
        tokens=[1],
        num_prompt=1,
        params=SamplingParams(temperature=1.0, top_k=2**70),
        seed=0,
        max_tokens=5,
        stop_tokens=frozenset(),
        detokenizer=None,
        stops=StopStrings([]),
    )
    assert sampling_of(row, 257, coupled=False, with_probs=True).top_k >= 2**31 - 1


@pytest.mark.parametrize("token", ["secret\n", "geheimnis-ä", "two\0words"])
def test_tokens_that_no_call_can_carry(token: str) -> None:
    """Both sides refuse it at the start, without showing the secret."""
    for side in (lambda: Access(token=token), lambda: ServerSecurity(token=token)):
        with pytest.raises(ConfigError, match="OUTRIDER_SERVICE_TOKEN") as raised:
            side()
        assert token.strip() not in str(raised.value)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_addresses(host: str) -> None:
    """Either way of writing one, metrics included."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")

    async def main() -> None:
        server = GrpcServer(ServiceSettings(host=host, metrics_port=0))
        await server.listen()
        await server.set_serving(True)
        async with channel_to(Endpoint.parse(server.address), Access()) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.stop()

    asyncio.run(main())


def test_a_busy_service_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls than there are places wait; a probe that was refused would have the orchestrator
    restart the service."""
    monkeypatch.setattr(serving, "MAX_CALLS", 1)

    async def main() -> None:
        server = GrpcServer(ServiceSettings())
        await server.listen()
        await server.set_serving(True)
        mine = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with (
            aio.insecure_channel(server.address, mine) as busy,
            aio.insecure_channel(server.address, mine) as probe,
        ):
            stub = health_pb2_grpc.HealthStub(busy)
            call = stub.Watch(CHECK)
            await call.read()
            with pytest.raises(aio.AioRpcError) as raised:
                await stub.Check(CHECK, timeout=0.3)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await health_pb2_grpc.HealthStub(probe).Check(CHECK, timeout=10)
            call.cancel()
            await stub.Check(CHECK, timeout=10)
        await server.stop()

    asyncio.run(main())


def test_an_opening_that_is_no_message_writes_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against one for every request that somebody makes up."""

    async def ask() -> grpc.StatusCode:
        server = GrpcServer(ServiceSettings())
        stubs.add_to_server(DraftService(DraftCounters(CollectorRegistry())), server.server)
        await server.listen()
        async with aio.insecure_channel(server.address) as channel:
            code = await channel.unary_unary(f"/{stubs.SERVICE}/Open")(b"\xff\xff\xff").code()
        await server.stop()
        return code

    assert asyncio.run(ask()) is grpc.StatusCode.INVALID_ARGUMENT
    assert not [
        record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ]
