"""The draft service over gRPC: opening, streams, what a restart and a slow or wrong asker meet, and
its process."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.app import run
from outrider.remote.draft.hosted import HostedDrafter
from outrider.remote.draft.run import RunningDraftService
from outrider.remote.draft.service import MAX_UNSENT, OpenStream
from outrider.remote.draft.texts import DraftLimits
from outrider.remote.protocol import PROTOCOL, messages, stubs
from outrider.remote.serving import ServiceSettings
from tests.draft_bench import chain_of, fresh_chain, hosted_model, save_draft

TEXT = [5, 6, 7, 8]
GREEDY = messages.Sampling()
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> HostedDrafter:
    """A random model in a service."""
    return hosted_model(save_draft(tmp_path_factory.mktemp("draft")))


Use = Callable[[RunningDraftService, Any], Awaitable[None]]


def with_service(hosted: HostedDrafter, tmp_path: Path, use: Use, **limits: Any) -> None:
    """A service on a socket of its own while `use` runs."""

    async def main() -> None:
        for uid in list(hosted.host.uids):
            hosted.host.stop(uid)
        running = RunningDraftService(
            ServiceSettings(host=f"unix:{tmp_path}/draft.sock"), DraftLimits(**limits)
        )
        address = await running.start()
        await running.serve(hosted)
        async with aio.insecure_channel(address) as channel:
            try:
                await asyncio.wait_for(use(running, stubs.caller(channel)), PATIENCE_S)
            finally:
                await running.stop()

    asyncio.run(main())


def hello(hosted: HostedDrafter, **changes: Any) -> messages.Hello:
    """A right opening."""
    return messages.Hello(
        **{
            "protocol": PROTOCOL,
            "release": "0",
            "model": hosted.identity,
            **changes,
        }
    )


def request(**fields: Any) -> messages.DraftRequest:
    """One row's message."""
    return messages.DraftRequest(
        rows=[messages.RowRequest(**{"row": 1, "num_draft_tokens": 3, **fields})]
    )


async def answer(call: Any, row: int = 1) -> messages.RowReply:
    """The next reply about a row."""
    while True:
        for reply in (await call.read()).rows:
            if reply.row == row:
                return reply


@pytest.mark.slow
def test_a_draft_over_the_wire(hosted: HostedDrafter, tmp_path: Path) -> None:
    """Terms, a first draft, the next one; two askers with the same row number are apart; end of a
    row."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        welcome = await stub.Open(hello(hosted))
        assert (welcome.protocol, welcome.draft.max_context) == (PROTOCOL, 2048)
        assert welcome.model == hosted.identity
        calls = {name: stub.Draft() for name in "ab"}
        for index, call in enumerate(calls.values()):
            await call.write(request(tokens=[*TEXT, index], sampling=GREEDY))
        for index, call in enumerate(calls.values()):
            reply = await answer(call)
            assert chain_of(reply) == [
                node.token for node in fresh_chain(hosted, [*TEXT, index], GREEDY, 3)
            ]
        await calls["a"].write(request(base_length=5, tokens=[9]))
        assert chain_of(await answer(calls["a"])) == [
            node.token for node in fresh_chain(hosted, [*TEXT, 0, 9], GREEDY, 3)
        ]
        await calls["a"].write(request(end=True))
        await calls["a"].write(request(base_length=6, tokens=[9]))
        assert (await answer(calls["a"])).trouble == messages.TROUBLE_UNKNOWN_ROW
        assert running.texts is not None
        assert running.texts.num_rows() == 1

    with_service(hosted, tmp_path, use)


WRONG: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "protocol": ({"protocol": 99}, grpc.StatusCode.FAILED_PRECONDITION, "version 99"),
    "vocabulary": (
        {"model": messages.ModelIdentity(name="other", vocab_size=5, vocabulary_sha256="ff")},
        grpc.StatusCode.FAILED_PRECONDITION, "same family",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_who_does_not_fit_is_refused_with_the_reason(
    hosted: HostedDrafter, tmp_path: Path, wrong: str
) -> None:
    """When it opens, not in the middle of a text."""
    changes, code, words = WRONG[wrong]

    async def use(running: RunningDraftService, stub: Any) -> None:
        with pytest.raises(aio.AioRpcError, match=words) as raised:
            await stub.Open(hello(hosted, **changes))
        assert raised.value.code() == code

    with_service(hosted, tmp_path, use)


def test_askers_are_bounded(hosted: HostedDrafter, tmp_path: Path) -> None:
    """With what to do about it."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        call = stub.Draft()
        await call.write(request(tokens=TEXT, sampling=GREEDY))
        await answer(call)
        with pytest.raises(aio.AioRpcError, match="--limits max_instances") as raised:
            await stub.Draft().read()
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    with_service(hosted, tmp_path, use, max_instances=1)


def test_nonsense_on_the_wire_stops_nobody(hosted: HostedDrafter, tmp_path: Path) -> None:
    """Refused rows are named, and the next right one has its draft."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        await stub.Open(hello(hosted))
        call = stub.Draft()
        rows = [
            messages.RowRequest(row=2, tokens=[9999], sampling=GREEDY, num_draft_tokens=2**32 - 1),
            messages.RowRequest(row=2**64 - 1, base_length=2**64 - 1, num_draft_tokens=1),
            messages.RowRequest(
                row=3,
                tokens=TEXT,
                sampling=messages.Sampling(temperature=float("nan")),
                num_draft_tokens=1,
            ),
            messages.RowRequest(),
        ]
        await call.write(messages.DraftRequest(rows=rows))
        await call.write(messages.DraftRequest())
        await call.write(request(tokens=TEXT, sampling=GREEDY, num_draft_tokens=2**32 - 1))
        kinds = {row: (await answer(call, row)).trouble for row in (2,)}
        assert kinds == {2: messages.TROUBLE_REFUSED}
        assert len((await answer(call)).nodes) == 8  # --max-draft-tokens

    with_service(hosted, tmp_path, use)


@pytest.mark.slow
def test_bytes_that_are_no_request(
    hosted: HostedDrafter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ends with a status that names them, without a traceback, and the service goes on."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        troubles: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: troubles.append(context)
        )
        await stub.Open(hello(hosted))
        async with aio.insecure_channel(running.server.address) as channel:
            raw = channel.stream_stream(f"/{messages.DESCRIPTOR.package}.DraftService/Draft")
            call = raw()
            await call.write(b"\xff\xff")
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        gc.collect()
        await asyncio.sleep(0)
        assert not troubles
        call = stub.Draft()
        await call.write(request(tokens=TEXT, sampling=GREEDY))
        assert len((await answer(call)).nodes) > 0

    with_service(hosted, tmp_path, use)
    assert "Traceback" not in caplog.text


def test_rows_end_with_their_stream(hosted: HostedDrafter, tmp_path: Path) -> None:
    """They hold no places while the line is broken: the asker sends again what goes on."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        for row in (1, 2):
            await stub.Open(hello(hosted))
            call = stub.Draft()
            await call.write(request(row=row, tokens=TEXT, sampling=GREEDY))
            assert (await answer(call, row)).trouble == messages.TROUBLE_NONE
            call.cancel()

    with_service(hosted, tmp_path, use, max_rows=1)


def test_a_thread_that_cannot_go_on_is_said(
    hosted: HostedDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken hardware fails whatever is tried: the health check says so, and an orchestrator starts
    the service anew."""

    async def use(running: RunningDraftService, stub: Any) -> None:
        def fails(*given: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        await stub.Open(hello(hosted))
        call = stub.Draft()
        await call.write(request(tokens=TEXT, sampling=GREEDY))
        await answer(call)
        monkeypatch.setattr(hosted.host, "change", fails)
        monkeypatch.setattr(hosted.host, "stop", fails)
        await call.write(request(base_length=4, tokens=[9]))
        while await call.read() is not aio.EOF:
            pass
        async with aio.insecure_channel(running.server.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(aio.AioRpcError, match="drafting thread"):
            await stub.Open(hello(hosted))
        monkeypatch.undo()

    with_service(hosted, tmp_path, use)


def test_health_and_drain(hosted: HostedDrafter, tmp_path: Path) -> None:
    """Not serving while a model loads, serving then; a drain ends open calls without an error."""

    async def main() -> None:
        running = RunningDraftService(
            ServiceSettings(host=f"unix:{tmp_path}/draft.sock"), DraftLimits()
        )
        address = await running.start()
        async with aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            stub = stubs.caller(channel)
            states = health_pb2.HealthCheckResponse
            assert (
                await health.Check(health_pb2.HealthCheckRequest())
            ).status == states.NOT_SERVING
            with pytest.raises(aio.AioRpcError, match="being loaded"):
                await stub.Open(hello(hosted))
            await running.serve(hosted)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
            await stub.Open(hello(hosted))
            call = stub.Draft()
            await call.write(request(tokens=TEXT, sampling=GREEDY))
            await answer(call)
            stopping = asyncio.create_task(running.stop(5.0))
            assert await call.read() == aio.EOF
            assert await call.code() == grpc.StatusCode.OK
            await stopping

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def frames_of(address: str, upstream: str, frames: list[tuple[int, int]]) -> asyncio.Server:
    """A wire in the middle that notes (type, flags) of the service's HTTP/2 frames."""

    async def copy(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: bytearray
    ) -> None:
        while data := await source.read(65536):
            seen += data
            sink.write(data)
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upper_reader, upper_writer = await asyncio.open_unix_connection(upstream)
        seen = bytearray()
        await asyncio.gather(
            copy(reader, upper_writer, bytearray()), copy(upper_reader, writer, seen)
        )
        while seen:
            frames.append((seen[3], seen[4]))
            del seen[: 9 + int.from_bytes(seen[:3], "big")]

    return await asyncio.start_unix_server(connected, address)


END_OF_CALL = (0x1, 0x5)  # HEADERS with END_STREAM and END_HEADERS
GOAWAY = (0x7, 0x0)


def test_a_drain_ends_calls_before_it_closes_the_line(
    hosted: HostedDrafter, tmp_path: Path
) -> None:
    """Guards against an asker that finds the line closed before it reads how its call ended."""
    frames: list[tuple[int, int]] = []

    async def use(running: RunningDraftService, stub: Any) -> None:
        wire = await frames_of(f"{tmp_path}/wire", f"{tmp_path}/draft.sock", frames)
        async with aio.insecure_channel(f"unix:{tmp_path}/wire") as channel:
            call = stubs.caller(channel).Draft()
            await call.write(request(tokens=TEXT, sampling=GREEDY))
            await answer(call)
            await running.stop(5.0)
            assert await call.code() == grpc.StatusCode.OK
        wire.close()

    with_service(hosted, tmp_path, use)
    assert frames.index(END_OF_CALL) < frames.index(GOAWAY)


def test_a_drain_waits_for_the_draft_in_the_works(
    hosted: HostedDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in no queue any more, and its asker waits for it."""
    propose = hosted.host.propose
    begun = threading.Event()

    def slowly(asks: Any) -> Any:
        begun.set()
        time.sleep(0.5)
        return propose(asks)

    async def use(running: RunningDraftService, stub: Any) -> None:
        monkeypatch.setattr(hosted.host, "propose", slowly)
        call = stub.Draft()
        await call.write(request(tokens=TEXT, sampling=GREEDY))
        await asyncio.to_thread(begun.wait)
        stopping = asyncio.create_task(running.stop(60.0))
        assert (await answer(call)).nodes
        await stopping

    with_service(hosted, tmp_path, use)


def test_an_asker_that_does_not_read_is_cut_off() -> None:
    """Unsent replies are bounded."""

    async def main() -> None:
        stream = OpenStream()
        for _ in range(MAX_UNSENT + 2):
            stream.put([messages.RowReply()])
        assert await stream.next() is None
        assert stream.is_slow

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_serves_and_leaves(tmp_path: Path, number: signal.Signals) -> None:
    """From the command line: the demo's draft model, metrics, a signal, exit code 0."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "service",
        "draft",
        "--port",
        "0",
        "--metrics-port",
        "0",
    ]
    command += ["--log-format", "json"]
    environment = {**os.environ, "MODEL": "demo", "MAX_DRAFT_TOKENS": "3"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "drafting for" in line:
                break
        address = re.search(r"listening on ([0-9.:]+)", "".join(lines))
        assert address is not None
        with grpc.insecure_channel(address[1]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(number)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["service draft", "serve"])
def test_a_process_that_gets_a_signal_while_it_loads_just_ends(verb: str) -> None:
    """Exit code 0 and no trace of threads that were in the middle of reading weights."""
    command = [sys.executable, "-m", "outrider", *verb.split(), "demo", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = [next(line for line in process.stderr if line.startswith("loading demo"))]
        process.send_signal(signal.SIGTERM)
        lines += list(process.stderr)
        assert process.wait(60) == 0, "".join(lines)
        output = "".join(lines)
        assert (
            "received a signal to end while loading" in output
            or "draining" in output
            or "finishing what runs" in output
        )
        assert "Traceback" not in output
        assert "terminate called" not in output
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--drafter", "suffix"], "drafts chains with a model"),
        (["demo", "--drafter", "draft-model k=4"], "k and verifier are the targets'"),
        (["demo", "--draft", "other"], "two models were named"),
        (["demo", "--max-draft-tokens", "0"], "max_draft_tokens"),
        (["demo", "--memory", "much"], "--memory"),
        (["demo", "--tls-cert", "cert.pem"], "--tls-key"),
        (["demo", "--port", "99999"], "port"),
        ([], "needs a draft model"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 and one line."""
    assert run(["service", "draft", *arguments]) == 2
    assert words in capsys.readouterr().err
