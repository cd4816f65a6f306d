"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a
status that fits.

    400  the request cannot be honoured: refused field, bad value, prompt too long      invalid_request_error
    401  no key, or a wrong one                                                          invalid_request_error, invalid_api_key
    404  no such model or path          405  wrong method          413  body too large
    429  the queue is full, with Retry-After                                             rate_limit_error
    500  a failure of ours              503  loading, draining or dead                   server_error
"""

from __future__ import annotations

import math
from typing import Any

from outrider.errors import (
    CapabilityError,
    ConfigError,
    OutriderError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from outrider.messages import CallError

ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
INVALID = "invalid_request_error"
LIMITED = "rate_limit_error"
SERVER = "server_error"


class ApiError(OutriderError):
    """An answer that is an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """In Anthropic's shape, which has its own types and no place for a field's name: that of
        one inside others begins the message."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else INVALID)
        is_deep = self.param is not None and "." in self.param and self.param not in str(self)
        message = f"{self.param}: {self}" if is_deep else str(self)
        return {"type": "error", "error": {"type": kind, "message": message}}


def unavailable(message: str, code: str) -> ApiError:
    """503: try again later, here or elsewhere."""
    return ApiError(message, status=503, kind=SERVER, code=code, headers={"Retry-After": "5"})


def as_api_error(error: OutriderError) -> ApiError:
    """The answer to a client for an error of the library."""
    message = " ".join(str(error).split())
    match error:
        case ApiError():
            return error
        case QueueFullError():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(message, status=429, kind=LIMITED, code="queue_full", headers=after)
        case UnavailableError():
            return unavailable(message, "engine_unavailable")
        case CallError():
            return ApiError(message, param="messages")
        case RequestError() | ConfigError() | CapabilityError():
            return ApiError(message, param=_named(message))
        case _:
            return ApiError(message, status=500, kind=SERVER, code="internal_error")


def _named(message: str) -> str | None:
    """The field a message of `SamplingParams` or `Speculation` is about: they begin with it."""
    first = message.split(maxsplit=1)[0].strip("':") if message else ""
    is_field = (
        "_" in first
        or first in ("temperature", "stop", "seed", "logprobs", "tools")
        or "." in first.rstrip(".")
    )
    return first if is_field else None
