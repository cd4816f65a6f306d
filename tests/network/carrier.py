"""The program that is the wire: it carries IP packets between network namespaces, late, lossy or
not at all.

`tests/network/network.py` starts it, writes one JSON line per change of the wire to its standard
input and reads one JSON line in return. Every namespace has a TUN device and lives as long as this
process does: nothing is left on the machine when it is killed, and it ends when its standard input
does. Linux and root only; the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
# the host number is the last byte; these addresses exist inside the namespaces only
PREFIX = "10.77.0."
LARGEST = 65536
QUEUE_S = 0.5  # what a slow wire keeps waiting; more is dropped, as a router does


@dataclass
class Wire:
    """One direction between two hosts: what it does to packets, and what it did."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    is_cut: bool = False
    chance: random.Random = field(default_factory=random.Random)
    free_at: float = 0.0  # when the last byte has left
    last_due: float = 0.0
    carried: int = 0
    lost: int = 0

    def due(self, now: float, size: int) -> float | None:
        """When a packet that enters now comes out; None for never. Packets never overtake one
        another."""
        is_lost = self.chance.random() < self.loss
        extra = self.chance.random() * self.jitter_s
        start = max(now, self.free_at)
        if self.is_cut or is_lost or start - now > QUEUE_S:
            self.lost += 1
            return None
        self.free_at = start + (size / self.bytes_per_s if self.bytes_per_s else 0.0)
        self.last_due = max(self.last_due, self.free_at + self.delay_s + extra)
        return self.last_due


class Carrier:
    """Namespaces, their devices, and the wires between each two of them."""

    def __init__(self, count: int, seed: int) -> None:
        self.devices: list[int] = []
        self.namespaces: list[int] = []
        self.wires = {
            (a, b): Wire(chance=random.Random(f"{seed} {a} {b}"))
            for a in range(count)
            for b in range(count)
            if a != b
        }
        self._waiting: list[tuple[float, int, Wire, int, bytes]] = []
        self._number = 0
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        for number in range(count):
            _checked(_libc.unshare(CLONE_NEWNET), "unshare")
            self.namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
            self.devices.append(_tun(number))
            _checked(_libc.setns(home, CLONE_NEWNET), "setns")
        os.close(home)

    def set(self, change: dict[str, Any]) -> dict[str, Any]:
        """Change the wires that a command names; what they have carried and lost so far."""
        for name, value in change.get("set", {}).items():
            for a, b in change["pairs"]:
                setattr(self.wires[a, b], name, value)
        if change.get("set", {}).get("is_cut"):  # what is on the way is lost, too
            self._waiting = [entry for entry in self._waiting if not entry[2].is_cut]
            heapq.heapify(self._waiting)
        chosen = [self.wires[a, b] for a, b in change["pairs"]]
        return {"carried": sum(w.carried for w in chosen), "lost": sum(w.lost for w in chosen)}

    def run(self) -> None:
        """Carry until standard input ends."""
        commands = b""
        while True:
            wait = max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else None
            ready, _, _ = select.select([*self.devices, 0], [], [], wait)
            for device in ready:
                if device != 0:
                    self._take(device)
            self._deliver()
            if 0 in ready:
                read = os.read(0, LARGEST)
                if not read:
                    return
                *lines, commands = (commands + read).split(b"\n")
                for line in lines:
                    print(json.dumps(self.set(json.loads(line))), flush=True)

    def _take(self, device: int) -> None:
        source = self.devices.index(device)
        with suppress(BlockingIOError):
            for _ in range(64):  # then the others' turn
                packet = os.read(device, LARGEST)
                wire = self.wires.get((source, packet[19] - 1)) if packet[0] >> 4 == 4 else None
                if (
                    wire is not None
                    and (due := wire.due(time.monotonic(), len(packet))) is not None
                ):
                    self._number += 1
                    heapq.heappush(self._waiting, (due, self._number, wire, packet[19] - 1, packet))

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, wire, host, packet = heapq.heappop(self._waiting)
            try:
                os.write(self.devices[host], packet)
                wire.carried += 1
            except BlockingIOError:
                wire.lost += 1


_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _tun(number: int) -> int:
    """A device of this namespace with the host's address, up, like the loopback."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    for command in (
        "link set lo up",
        f"addr add {PREFIX}{number + 1}/24 dev wire",
        "link set wire up",
    ):
        subprocess.run(["ip", *command.split()], check=True, stdin=subprocess.DEVNULL)
    return device


def main() -> None:
    """Arguments: number of hosts, seed. The first line says where the namespaces are."""
    with suppress(OSError):  # a wire that waits for a processor is a slower wire than asked for
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    carrier = Carrier(int(sys.argv[1]), int(sys.argv[2]))
    print(
        json.dumps(
            {"namespaces": [f"/proc/{os.getpid()}/fd/{number}" for number in carrier.namespaces]}
        ),
        flush=True,
    )
    carrier.run()


if __name__ == "__main__":
    main()
