"""Which replica takes a request: the one that has read such a beginning before, unless it has more to do than its share.

Rendezvous hashing (Thaler and Ravishankar, 1998) gives every beginning an order of the replicas that does not change when others
come or go. The first in that order takes the request whose load is below the bound of consistent hashing with bounded loads
(Mirrokni, Thorup and Zadimoghaddam, 2018): `SLACK` times its share of all requests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLACK = 1.25  # of a replica's share of all requests
BEGINNING = 256  # tokens of a prompt that are looked at: conversations with one system prompt go together


@dataclass(frozen=True)
class ReplicaLoad:
    """What a replica has to do, and what it can do at the same time."""

    requests: int
    capacity: int = 1

    @property
    def share(self) -> float:
        """Requests per row."""
        return self.requests / max(1, self.capacity)


def beginning_of(prompt: Sequence[int]) -> bytes:
    """What requests with the same beginning have in common."""
    return b",".join(str(token).encode() for token in prompt[:BEGINNING])


def order(beginning: bytes, names: Sequence[str]) -> list[str]:
    """The replicas by name, the one that should take this beginning first."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(beginning + b" " + name.encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def choose(beginning: bytes, loads: Mapping[str, ReplicaLoad]) -> str:
    """The replica that takes the next request. There must be one."""
    total = sum(load.requests for load in loads.values()) + 1
    capacity = sum(max(1, load.capacity) for load in loads.values())
    for name in order(beginning, list(loads)):
        load = loads[name]
        if load.requests < math.ceil(SLACK * total * max(1, load.capacity) / capacity):
            return name
    return min(loads, key=lambda name: loads[name].share)
