"""Our errors as gRPC's statuses, and back, so that a coordinator's client gets the engine's own message.

    INVALID_ARGUMENT    RequestError, ConfigError, CapabilityError: asking again elsewhere would not help
    RESOURCE_EXHAUSTED  QueueFullError, with `retry-after` in seconds
    UNAVAILABLE         UnavailableError: loading, draining or dead
    FAILED_PRECONDITION the handshake: another protocol, tokenizer or model
    INTERNAL            anything else
"""

from __future__ import annotations

import grpc
from grpc import aio

from outrider.errors import CapabilityError, ConfigError, OutriderError, QueueFullError, RequestError, UnavailableError
from outrider.remote.target.replies import error_of

KIND, RETRY_AFTER = "outrider-error", "retry-after"  # trailing metadata
TAKEN = "outrider-taken"  # initial metadata of a request that the engine has taken
Metadata = tuple[tuple[str, str], ...]


def status_of(error: OutriderError) -> tuple[grpc.StatusCode, str, Metadata]:
    """(status, message, trailing metadata) of an error."""
    kind: Metadata = ((KIND, type(error).__name__),)
    text = " ".join(str(error).split())
    match error:
        case QueueFullError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, text, (*kind, (RETRY_AFTER, f"{error.retry_after_s:g}"))
        case UnavailableError():
            return grpc.StatusCode.UNAVAILABLE, text, kind
        case RequestError() | ConfigError() | CapabilityError():
            return grpc.StatusCode.INVALID_ARGUMENT, text, kind
        case _:
            return grpc.StatusCode.INTERNAL, text, kind


def refusal_of(error: aio.AioRpcError) -> OutriderError | None:
    """The engine's own error where a call failed with one that holds everywhere, or a full queue; None where another replica may
    do better."""
    code, trailing = error.code(), dict(error.trailing_metadata() or ())
    text = error.details() or code.name
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return error_of(str(trailing.get(KIND, "RequestError")), text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError(text, _seconds(trailing.get(RETRY_AFTER)))
    return None


def _seconds(text: object) -> float:
    try:
        return min(60.0, max(1.0, float(str(text))))
    except ValueError:
        return 1.0
