"""The id of an HTTP request: one of ours or the client's own, in its answer's headers and in the
log.

An answer's own id ends with the request's unless the client chose that, because two clients may
choose the same.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers

HEADER = "x-request-id"  # as OpenAI's clients read it, and vLLM's
ANTHROPIC_HEADER = "request-id"
# a client chooses it: nothing may end a header or a line
GIVEN = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_current: ContextVar[tuple[str, bool]] = ContextVar(
    "the id of the request being answered, and whether it is the client's"
)


def begin(scope: MutableMapping[str, Any]) -> str:
    """The id of a request that comes in now; a header that is no id is left out."""
    given = Headers(scope=scope).get(HEADER, "")
    is_given = GIVEN.fullmatch(given) is not None
    identity = given if is_given else uuid.uuid4().hex
    _current.set((identity, is_given))
    return identity


def current() -> dict[str, str]:
    """The id of the request being answered, as a field of a log line."""
    return {"request_id": _current.get(("", True))[0]}


def fresh() -> str:
    """What ids of answers to the current request end with: nobody else's."""
    identity, is_given = _current.get(("", True))
    return uuid.uuid4().hex if is_given else identity


def chosen() -> dict[str, str]:
    """The client's own id of the current request, as a field of a log line; empty where it gave
    none."""
    identity, is_given = _current.get(("", False))
    return {"client_request_id": identity} if is_given else {}


def headers_of(identity: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that carry the id."""
    return [(name.encode(), identity.encode()) for name in (HEADER, ANTHROPIC_HEADER)]
