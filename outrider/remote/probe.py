"""Asks a service how it is, by the standard health service of gRPC; for probes that cannot speak
TLS themselves."""

from __future__ import annotations

import re
import time
from functools import partial
from statistics import median

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ServerError
from outrider.remote.access import Access
from outrider.remote.endpoint import Endpoint
from outrider.remote.security import channel_to

LONGEST = 300  # characters of gRPC's own words
KNOWN = {  # what is in gRPC's words -> what it means; the first that fits
    r"Connection refused": "nobody listens there",
    r"unix:\S+ error No such file|connect failed: addr: unix": "no such socket",
    r"DNS resolution failed|Domain name not found|Name or service not known": "no host of that name is known",
    r"WRONG_VERSION_NUMBER|HTTP_REQUEST|PACKET_LENGTH_TOO_LONG": "no TLS is spoken there: write grpc://, or give it --tls-cert",
    r"CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority that is trusted here: name that authority's file",
    r"Peer name \S+ is not in peer certificate|Hostname Verification Check failed": (
        "its certificate is for another name than the address: give the name that it has"
    ),
    r"last error: UNAVAILABLE: \S+ Socket closed": (
        "it closes the line at once: it wants TLS (grpcs://), or a certificate of an authority that it trusts (mutual TLS)"
    ),
    r"Failed parsing HTTP/2": "what listens there speaks no gRPC, or TLS only (grpcs://)",
}


def in_words(error: grpc.RpcError) -> str:
    """One line: what is known about gRPC's words, else these words, cut."""
    details = getattr(error, "details", str)() or ""
    for pattern, meaning in KNOWN.items():
        if re.search(pattern, details):
            return meaning
    text = re.sub(
        r"^failed to connect to all addresses; last error: ", "", " ".join(details.split())
    )
    # an error's own message may quote a request
    text = re.sub(r"^(Unexpected <class '[^']+'>): .*", r"\1", text)
    code = getattr(error, "code", str)()
    return text[:LONGEST] or getattr(code, "name", str(code))


CALLS = 5  # whose median is the round trip: the first one connects


async def check_health(endpoint: Endpoint, access: Access, timeout_s: float) -> float:
    """Return seconds there and back when the service takes calls.

    Raises ServerError when it is loading, draining, or not to be reached in time.
    """
    async with channel_to(endpoint, access) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        check = partial(stub.Check, health_pb2.HealthCheckRequest(), timeout=timeout_s)
        try:
            answer = await check()
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise ServerError(
                    f"{endpoint} takes no calls now: it loads its model, drains, or has failed"
                )
            seconds = []
            for _ in range(CALLS):
                began = time.perf_counter()
                await check()
                seconds.append(time.perf_counter() - began)
            return median(seconds)
        except grpc.RpcError as error:
            code = getattr(error, "code", str)()
            raise ServerError(
                f"{endpoint} does not answer: {getattr(code, 'name', code)}, {in_words(error)}"
            ) from error
