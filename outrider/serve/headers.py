"""Headers that every answer carries: its request's id, and the fields that had no effect.

The id is one of ours or the client's own; it is in the log, too. An answer's own id ends with the
request's unless the client chose that, because two clients may choose the same. A field without
effect is named once in the log as well, or refused by a strict server.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers

from outrider.errors import nearest
from outrider.serve.errors import ApiError
from outrider.serve.schema.base import Body, UnknownField

ID_HEADER = "x-request-id"  # as OpenAI's clients read it, and vLLM's
ANTHROPIC_HEADER = "request-id"
# a client chooses it: nothing may end a header or a line
GIVEN = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

IGNORED_HEADER = "x-outrider-ignored-fields"
MAX_HEADER = 500  # characters of the header's value
MAX_NAME = 60  # characters of one field in header and log
MAX_LOGGED = 256  # different fields that the log names
# a client chooses the names: nothing may end a header or a line
UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

log = logging.getLogger("outrider.serve")
_current: ContextVar[tuple[str, bool]] = ContextVar(
    "the id of the request being answered, and whether it is the client's"
)


def begin_id(scope: MutableMapping[str, Any]) -> str:
    """The id of a request that comes in now; a header that is no id is left out."""
    given = Headers(scope=scope).get(ID_HEADER, "")
    is_given = GIVEN.fullmatch(given) is not None
    identity = given if is_given else uuid.uuid4().hex
    _current.set((identity, is_given))
    return identity


def current_id() -> dict[str, str]:
    """The id of the request being answered, as a field of a log line."""
    return {"request_id": _current.get(("", True))[0]}


def fresh_id() -> str:
    """The unique ending of ids of answers to the current request."""
    identity, is_given = _current.get(("", True))
    return uuid.uuid4().hex if is_given else identity


def chosen_id() -> dict[str, str]:
    """The client's own id of the current request, as a field of a log line; empty where it gave
    none."""
    identity, is_given = _current.get(("", False))
    return {"client_request_id": identity} if is_given else {}


def id_headers(identity: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that carry the id."""
    return [(name.encode(), identity.encode()) for name in (ID_HEADER, ANTHROPIC_HEADER)]


class IgnoredFields:
    """The fields of one request that have no effect, for its answer. Where `log` is strict, `add`
    raises ApiError instead."""

    def __init__(self, log: IgnoredLog) -> None:
        self._log = log
        self._paths: dict[str, None] = {}  # a set that keeps the order

    def add(self, fields: Iterable[UnknownField]) -> None:
        for field in fields:
            if self._log.is_strict:
                raise ApiError(field.message, param=_safe(field.param))
            path = _safe(field.path)
            if path not in self._paths:
                self._paths[path] = None
                self._log.name(path, field)

    @property
    def header(self) -> str | None:
        """'messages[].cache_control, store'; None where every field has an effect."""
        if not self._paths:
            return None
        value = ""
        left = len(self._paths)
        for path in self._paths:
            if len(value) + len(path) > MAX_HEADER:
                return f"{value}, and {left} more"
            value = f"{value}, {path}" if value else path
            left = left - 1
        return value


class IgnoredLog:
    """Names every such field once while the server runs."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._named: set[str] = set()

    def name(self, path: str, field: UnknownField) -> None:
        """One line, a warning where the field may be a misspelling of one that has an effect."""
        if path in self._named or len(self._named) >= MAX_LOGGED:
            return
        self._named.add(path)
        if field.why is not None:
            log.info("ignored the field '%s', which has no effect: %s", path, field.why)
        elif meant := nearest(_safe(field.name), field.known):
            log.warning("ignored the unknown field '%s'. Did you mean '%s'?", path, meant)
        else:
            log.info("ignored the unknown field '%s'", path)
        if len(self._named) == MAX_LOGGED:
            log.warning(
                "%d fields were ignored; no more are named here, only in the header %s",
                MAX_LOGGED,
                IGNORED_HEADER,
            )


def ignored_fields(request: Request, log: IgnoredLog, body: Body) -> IgnoredFields:
    """Take them out of a body. The answer to `request` will name them, and those that are added
    later."""
    request.state.ignored = ignored = IgnoredFields(log)
    ignored.add(body.take_unknown())
    return ignored


def ignored_headers(scope: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The header that names fields without effect in the answer to `scope`'s request: raw headers,
    none or one."""
    ignored = scope.get("state", {}).get("ignored")
    value = None if ignored is None else ignored.header
    return [] if value is None else [(IGNORED_HEADER.encode(), value.encode())]


def _safe(name: str) -> str:
    short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
    return UNSAFE.sub("?", short) or "?"
