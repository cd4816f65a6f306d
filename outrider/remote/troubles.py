"""Plain words for why a call did not reach a service, in place of gRPC's messages."""

from __future__ import annotations

import re

import grpc

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
    text = re.sub(r"^failed to connect to all addresses; last error: ", "", " ".join(details.split()))
    text = re.sub(r"^(Unexpected <class '[^']+'>): .*", r"\1", text)  # an error's own message may quote a request
    code = getattr(error, "code", str)()
    return text[:LONGEST] or getattr(code, "name", str(code))
