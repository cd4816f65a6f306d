"""Asks a service how it is, by the standard health service of gRPC; for probes that cannot speak TLS themselves."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ServerError
from outrider.remote.endpoint import Endpoint
from outrider.remote.security import ClientSecurity
from outrider.remote.troubles import in_words

CALLS = 5  # whose median is the round trip: the first one connects


async def check_health(endpoint: Endpoint, security: ClientSecurity, timeout_s: float) -> float:
    """Return seconds there and back when the service takes calls.

    Raises ServerError when it is loading, draining, or not to be reached in time.
    """
    async with security.channel(endpoint) as channel:
        try:
            answer = await _ask(channel, timeout_s)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise ServerError(f"{endpoint} takes no calls now: it loads its model, drains, or has failed")
            return median([await health_call_s(channel, timeout_s) for _ in range(CALLS)])
        except grpc.RpcError as error:
            code = getattr(error, "code", str)()
            raise ServerError(f"{endpoint} does not answer: {getattr(code, 'name', code)}, {in_words(error)}") from error


async def health_call_s(channel: aio.Channel, timeout_s: float) -> float:
    """Seconds that a call takes whose answer takes the service no time. Raises grpc's error."""
    began = time.perf_counter()
    await _ask(channel, timeout_s)
    return time.perf_counter() - began


async def _ask(channel: aio.Channel, timeout_s: float) -> Any:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
