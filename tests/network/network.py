"""Hosts with addresses of their own on one machine, and wires between them that tests make slow,
lossy or cut.

    with Network("client", "service", round_trip_s=0.01) as network:
        process = network.start("service", ["python", "-m", "http.server"])
        with network.inside("client"):      # sockets opened here belong to that host
            urllib.request.urlopen(f"http://{network.address('service')}:8000")
        network.change(cut=True)

A host is a network namespace of Linux; `carrier.py` carries the packets. Everything ends with the
block, and with the test process however it ends: the namespaces have no names, and processes
started here are killed when their parent dies.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.network.carrier import CLONE_NEWNET, PREFIX

CARRIER = Path(__file__).with_name("carrier.py")


def outliving_nobody(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel when this process dies, or not begun if that has happened
    already."""
    still_there = f'[ "$PPID" = {os.getpid()} ] && exec "$@"'
    return ["setpriv", "--pdeathsig", "KILL", "--", "sh", "-c", still_there, "sh", *command]


def why_not() -> str | None:
    """Why this machine cannot have hosts and wires; None where it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    missing = [name for name in ("ip", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)"
    tried = subprocess.run(
        [sys.executable, str(CARRIER), "1", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return (
        None
        if tried.returncode == 0
        else f"no network namespace: {tried.stderr.strip().splitlines()[-1]}"
    )


class Network:
    """Hosts by name, each of which reaches each other one over a wire."""

    def __init__(
        self, *hosts: str, round_trip_s: float = 0.0, loss: float = 0.0, seed: int = 0
    ) -> None:
        self.hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._carrier = subprocess.Popen(
            outliving_nobody([sys.executable, str(CARRIER), str(len(hosts)), str(seed)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._namespaces: list[str] = self._answer()["namespaces"]
            self.change(round_trip_s=round_trip_s, loss=loss)
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        """The IPv4 address of a host."""
        return f"{PREFIX}{self.hosts.index(host) + 1}"

    def change(
        self,
        *between: str,
        round_trip_s: float | None = None,
        jitter_s: float | None = None,
        loss: float | None = None,
        bytes_per_s: float | None = None,
        cut: bool | None = None,
    ) -> None:
        """Change the wires between the named hosts (none named: all), both ways alike; what is None
        stays.

        A packet takes half of `round_trip_s` one way and up to `jitter_s` more, is lost with
        probability `loss`, and waits for those before it where `bytes_per_s` limits the wire (0: no
        limit). `cut` loses all, those on the way included.
        """
        delay_s = None if round_trip_s is None else round_trip_s / 2
        asked = {
            "delay_s": delay_s,
            "jitter_s": jitter_s,
            "loss": loss,
            "bytes_per_s": bytes_per_s,
            "is_cut": cut,
        }
        self._tell(between, {name: value for name, value in asked.items() if value is not None})

    def counts(self, *between: str) -> dict[str, int]:
        """Packets `carried` and `lost` so far."""
        return self._tell(between, {})

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Sockets that this thread opens in the block, and processes that it starts, belong to the
        host."""
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(self._namespaces[self.hosts.index(host)], os.O_RDONLY)
        try:
            if libc.setns(there, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            yield
        finally:
            if libc.setns(home, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.close(home)
            os.close(there)

    def start(
        self,
        host: str,
        command: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A process on a host, its output appended to `log`; killed when the network ends, if it
        still runs."""
        with self.inside(host), open(os.devnull if log is None else log, "ab") as output:
            process = subprocess.Popen(
                outliving_nobody(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs on the hosts, then cut everything down."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for pipe in (self._carrier.stdin, self._carrier.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._carrier.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._carrier.kill()
            self._carrier.wait()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tell(self, between: Sequence[str], changes: dict[str, Any]) -> dict[str, Any]:
        numbers = [self.hosts.index(name) for name in between or self.hosts]
        command = {"pairs": list(itertools.permutations(numbers, 2)), "set": changes}
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(json.dumps(command).encode() + b"\n")
        self._carrier.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._carrier.stdout is not None
        line = self._carrier.stdout.readline()
        if not line:
            raise RuntimeError(f"the carrier ended with status {self._carrier.wait(timeout=10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
