"""Fields of a request that have no effect: named in a header of its answer and once in the log, or
refused by a strict server."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, MutableMapping
from typing import Any

from fastapi import Request

from outrider.errors import nearest
from outrider.serve.errors import ApiError
from outrider.serve.schema.base import Body, UnknownField

HEADER = "x-outrider-ignored-fields"
MAX_HEADER = 500  # characters of the header's value
MAX_NAME = 60  # characters of one field in header and log
MAX_LOGGED = 256  # different fields that the log names
# a client chooses the names: nothing may end a header or a line
UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

log = logging.getLogger("outrider.serve")


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
                HEADER,
            )


def ignored_fields(request: Request, log: IgnoredLog, body: Body) -> IgnoredFields:
    """Take them out of a body. The answer to `request` will name them, and those that are added
    later."""
    request.state.ignored = found = IgnoredFields(log)
    found.add(body.take_unknown())
    return found


def header_of(scope: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The header that names fields without effect in the answer to `scope`'s request: raw headers,
    none or one."""
    ignored = scope.get("state", {}).get("ignored")
    value = None if ignored is None else ignored.header
    return [] if value is None else [(HEADER.encode(), value.encode())]


def _safe(name: str) -> str:
    short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
    return UNSAFE.sub("?", short) or "?"
