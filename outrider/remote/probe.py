"""Asks a service how it is, by the standard health service of gRPC; for probes that cannot speak TLS themselves."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ServerError
from outrider.remote.endpoint import Endpoint
from outrider.remote.security import ClientSecurity


async def check_health(endpoint: Endpoint, security: ClientSecurity, timeout_s: float) -> None:
    """Return when the service takes calls. Raises ServerError when it is loading, draining, or not to be reached in time."""
    async with security.channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            code, details = getattr(error, "code", str)(), getattr(error, "details", str)()
            raise ServerError(f"{endpoint} does not answer: {getattr(code, 'name', code)}, {details}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ServerError(f"{endpoint} takes no calls now: it loads its model, drains, or has failed")
