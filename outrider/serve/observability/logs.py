"""The server's log: one line per event, for people or as JSON, written by a thread of its own.

Everything goes through Python's `logging`, so lines of uvicorn, of the engine and of libraries look
alike; structlog renders them. The engine's thread only puts records into a queue. No line holds
text of a prompt or an answer; what does is the traffic file (`traffic.py`), which an operator has
to ask for. So tracebacks show no variables (`tracebacks.py`), also those of threads that die.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any, TextIO

import structlog

from outrider.engine.observer import Observer
from outrider.engine.request import Finish, Request
from outrider.errors import GOT, without_values
from outrider.serve.settings import LogFormat, LogLevel

CAUSE = "The direct cause of:"
CONTEXT = "During its handling came:"


def plain_traceback(error: BaseException) -> str:
    """The frames of an error and of those before it, the first one first; members of a group follow
    it."""
    return "\n".join(_lines(error, set()))


def _lines(error: BaseException, told: set[int]) -> Iterator[str]:
    told.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in told:
        yield from _lines(earlier, told)
        yield CAUSE if error.__cause__ is not None else CONTEXT
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield without_values(error)
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        if id(member) not in told:
            yield "One of its members:"
            yield from _lines(member, told)


# libraries whose info lines say nothing about requests; uvicorn.error is the logger of all that
# uvicorn says, its start included
QUIET = ("httpx", "httpcore", "urllib3", "asyncio", "opentelemetry", "uvicorn.error", "gguf")

log = logging.getLogger("outrider.requests")


class Logging:
    """The root logger's handlers while a server runs; `close` writes what is queued and puts back
    what was there before.

    `level` is that of our own lines.
    """

    def __init__(
        self, style: LogFormat = "human", level: LogLevel = "info", stream: TextIO | None = None
    ) -> None:
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(_formatter(style, colors=handler.stream.isatty()))
        queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
        self._listener = QueueListener(queue, handler)
        self._root = logging.getLogger()
        self._before = list(logging.getLogger().handlers)
        self._levels = {name: logging.getLogger(name).level for name in ("", "outrider", *QUIET)}
        self._root.handlers = [_Queued(queue)]
        self._root.setLevel(logging.INFO)
        logging.getLogger("outrider").setLevel(level.upper())
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._listener.start()
        self._thread_dies = threading.excepthook
        threading.excepthook = _thread_died

    def close(self) -> None:
        """Write what is queued; the log is as it was before."""
        threading.excepthook = self._thread_dies
        self._root.handlers = self._before
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._listener.stop()


class _Queued(QueueHandler):
    """Hands records over as they are: they stay in this process, and structlog wants their fields
    and exceptions."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def _formatter(style: str, *, colors: bool) -> logging.Formatter:
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _without_colors,
        _without_arguments,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        )
    )
    processors: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _with_plain_traceback,
        renderer,
    ]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)


def _with_plain_traceback(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    error = event.pop("exc_info", None)
    if isinstance(error, tuple):
        error = error[1]
    if isinstance(error, BaseException):
        event["exception"] = plain_traceback(error)
    return event


def _without_arguments(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """asyncio names a callback that failed with its arguments, which may be an answer's text."""
    if event.get("logger") == "asyncio":
        event["event"] = re.split(r"[\n(]", str(event["event"]), maxsplit=1)[0]
    return event


def _thread_died(death: threading.ExceptHookArgs) -> None:
    """Logs it; Python's own way is to print the message, too."""
    name = "a thread" if death.thread is None else death.thread.name
    logging.getLogger("outrider").critical("%s died", name, exc_info=death.exc_value)


def _without_colors(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """uvicorn sends its lines twice, once with escape sequences."""
    event.pop("color_message", None)
    return event


class RequestLog(Observer):
    """One line per request when it ends."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def finished(self, request: Request, finish: Finish) -> None:
        """The line. A request that failed is an error, one that was given up a warning."""
        levels = {"error": logging.ERROR, "timeout": logging.WARNING}
        log.log(
            levels.get(finish.reason, logging.INFO),
            "request",
            extra=request_fields(request, finish, self._model),
        )


def request_fields(request: Request, finish: Finish, model_name: str) -> dict[str, Any]:
    """The fields of a log line: counts, seconds and names, no text."""
    stats = finish.stats
    fields: dict[str, Any] = {
        "request_id": request.id,
        "model": model_name,
        "finish": finish.reason,
        "prompt_tokens": finish.prompt_tokens,
        "cached_tokens": finish.cached_tokens,
        "tokens": stats.emitted,
        "queued_s": round(finish.queued_s, 4),
        "ttft_s": round(stats.ttft_s, 4) if stats.emitted else None,
        "tpot_s": None if stats.tpot_s is None else round(stats.tpot_s, 6),
        "decode_tokens_per_s": _rounded(stats.decode_tokens_per_s),
        "tokens_per_s": _rounded(stats.tokens_per_s),
        "lossless": None if finish.lossless else False,
        "prompt_share": None if finish.prompt_share == 1 else _rounded(finish.prompt_share),
        "drafter": finish.drafter,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tau": _rounded(stats.tau),
        "preemptions": finish.preemptions or None,
        "error": str(finish.error).partition(GOT)[0] if finish.error else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
