"""The test network does what is asked: packets are late, lost or stopped as asked, and nothing
outlives the tests."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.network.carrier import QUEUE_S, Wire
from tests.network.network import Network, why_not

PORT = 7000
ENOUGH_S = 30.0


def wire(**settings: float | bool) -> Wire:
    return Wire(chance=random.Random(0), **settings)  # type: ignore[arg-type]


@contextmanager
def echo(network: Network, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """A socket at host `a` towards one at `b` that returns whatever it gets."""
    with network.inside("b"):
        there = socket.socket(socket.AF_INET, kind)
        there.bind((network.address("b"), PORT))
    if kind == socket.SOCK_STREAM:
        there.listen()
    threading.Thread(target=_return_all, args=(there, kind), daemon=True).start()
    with network.inside("a"):
        here = socket.socket(socket.AF_INET, kind)
    here.settimeout(ENOUGH_S)
    here.connect((network.address("b"), PORT))
    with here, there:
        yield here


def _return_all(there: socket.socket, kind: socket.SocketKind) -> None:
    if kind == socket.SOCK_STREAM:
        line, _ = there.accept()
        while data := line.recv(65536):
            line.sendall(data)
        line.close()
        return
    with suppress(OSError):  # `echo` closes the socket while this thread waits for the next packet
        while True:
            data, caller = there.recvfrom(65536)
            if data == b"end":
                return
            there.sendto(data, caller)


def returned(line: socket.socket, count: int, within_s: float) -> int:
    """How many of `count` packets come back, sent one by one and awaited until nothing came for
    `within_s`."""
    came = 0
    for number in range(count):
        line.send(number.to_bytes(4, "big"))
        # no burst that a buffer of the machine drops, neither there nor here
        line.settimeout(0.0005)
        with suppress(TimeoutError, BlockingIOError):
            line.recv(100)
            came += 1
    line.settimeout(within_s)
    with suppress(TimeoutError):
        while came < count:
            line.recv(100)
            came += 1
    return came


# ------------------------------------------------------------------ one wire, without a machine


def test_packets_are_late_and_never_overtake() -> None:
    late = wire(delay_s=0.01, jitter_s=0.02)
    dues = [late.due(now * 0.001, 100) for now in range(200)]
    assert all(
        due is not None and 0.01 <= due - now * 0.001 <= 0.03 + 1e-9
        for now, due in enumerate(dues)
        if due is not None
    )
    assert dues == sorted(due for due in dues if due is not None)
    # it does vary
    assert (
        len({round(due - now * 0.001, 6) for now, due in enumerate(dues) if due is not None}) > 20
    )


def test_loss_is_as_asked_and_repeats_with_its_seed() -> None:
    fates = [
        [wire.due(0.0, 100) is None for _ in range(20_000)]
        for wire in (wire(loss=0.02), wire(loss=0.02))
    ]
    assert fates[0] == fates[1]
    assert 300 < sum(fates[0]) < 500  # 400 expected; five standard deviations


def test_a_slow_wire_takes_a_packet_after_another_and_drops_what_waits_too_long() -> None:
    slow = wire(bytes_per_s=10_000.0)
    dues = [slow.due(0.0, 1000) for _ in range(10)]
    assert dues[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert dues[6:] == [None] * 4
    assert slow.due(0.6 - QUEUE_S + 0.01, 1000) == pytest.approx(0.7)


# ------------------------------------------------------------------ hosts and wires of this machine


@pytest.mark.usefixtures("_wires")
@pytest.mark.parametrize("round_trip_s", [0.001, 0.01, 0.05])
def test_a_round_trip_takes_what_was_asked(round_trip_s: float) -> None:
    """The fastest of several: whatever else the machine does can only add to it."""
    with (
        Network("a", "b", round_trip_s=round_trip_s) as network,
        echo(network, socket.SOCK_DGRAM) as line,
    ):
        taken = []
        for _ in range(20):
            start = time.monotonic()
            line.send(b"there and back")
            line.recv(100)
            taken.append(time.monotonic() - start)
        line.send(b"end")
    assert round_trip_s <= min(taken) < round_trip_s + 0.02


@pytest.mark.usefixtures("_wires")
def test_wires_are_changed_while_packets_run() -> None:
    with Network("a", "b", "c") as network, echo(network, socket.SOCK_DGRAM) as line:
        assert returned(line, 20, ENOUGH_S) == 20
        network.change("a", "c", cut=True)  # another wire
        assert returned(line, 20, ENOUGH_S) == 20
        network.change(cut=True)
        assert returned(line, 20, 0.3) == 0
        network.change("a", "b", cut=False)
        assert returned(line, 20, ENOUGH_S) == 20
        assert network.counts("a", "b") == {"carried": 120, "lost": 20}
        line.send(b"end")


@pytest.mark.slow
@pytest.mark.usefixtures("_wires")
def test_packets_on_the_way_are_lost_when_the_wire_is_cut() -> None:
    with Network("a", "b", round_trip_s=1.0) as network, echo(network, socket.SOCK_DGRAM) as line:
        for _ in range(5):
            line.send(b"too late")
        network.counts()  # the carrier has seen them: it takes packets before commands
        network.change(cut=True)
        network.change(cut=False)
        line.settimeout(1.5)
        with pytest.raises(TimeoutError):
            line.recv(100)
        line.send(b"end")


@pytest.mark.slow
@pytest.mark.usefixtures("_wires")
def test_packets_are_lost_and_tcp_survives_it() -> None:
    with Network("a", "b", round_trip_s=0.002, loss=0.1) as network:
        with echo(network, socket.SOCK_DGRAM) as line:
            came = returned(line, 500, 0.5)
            assert 330 < came < 470  # 0.9 squared of them: 405; five standard deviations and more
            network.change(loss=0.0)
            line.send(b"end")
        network.change(loss=0.05)
        text = random.Random(0).randbytes(200_000)
        with echo(network, socket.SOCK_STREAM) as line:
            sender = threading.Thread(target=line.sendall, args=(text,), daemon=True)
            sender.start()
            got = bytearray()
            while len(got) < len(text):
                got += line.recv(65536)
            assert bytes(got) == text
        assert network.counts()["lost"] > 0


@pytest.mark.usefixtures("_wires")
def test_hosts_do_not_reach_the_machine_and_the_machine_not_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own, Network("a", "b") as network:
        # its own loopback, where nobody listens
        with network.inside("a"), pytest.raises(ConnectionRefusedError):
            socket.create_connection(own.getsockname(), timeout=5)
        addresses = subprocess.run(
            ["ip", "-o", "addr"], capture_output=True, text=True, check=True
        ).stdout
        assert network.address("a") not in addresses


@pytest.mark.usefixtures("_wires")
def test_nothing_outlives_a_killed_test(tmp_path: Path) -> None:
    """Neither the carrier, which holds the namespaces, nor what was started in them."""
    program = """
import time
from tests.network.network import Network
network = Network("a", "b")
process = network.start("b", ["sleep", "1000"])
print(network._carrier.pid, process.pid, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert parent.stdout is not None
    children = [int(number) for number in parent.stdout.readline().split()]
    assert len(children) == 2
    assert all(_runs(child) for child in children)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + ENOUGH_S
    while any(_runs(child) for child in children) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(child) for child in children)


def test_why_not_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"


def _runs(number: int) -> bool:
    try:
        return (
            Path(f"/proc/{number}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False
