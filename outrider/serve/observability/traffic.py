"""`--log-requests FILE`: requests and answers, with their texts, one JSON object a line.

    {"id": "chatcmpl-...", "created": 1790000000, "url": "/v1/chat/completions", "request": {...},
    "response": {...}}

It is the form of a stored OpenAI request that `outrider bench`, `tune` and `train --from-traffic`
read (`lab/workload/formats.py`), so that a server's own traffic can choose its settings and train
its draft. Off unless asked for: it holds what people wrote. The file is made readable by its owner
only, also one that was there before, is appended to, and may be moved away by logrotate at any
time. Writing happens in a thread of its own.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from outrider.errors import ConfigError

log = logging.getLogger("outrider.serve")
OWNER_ONLY = 0o600


class LoggedAnswer(NamedTuple):
    """One answer."""

    text: str | None  # None: nothing but tool calls or thoughts
    thought: str | None
    finish_reason: str | None  # None: it did not end


class LoggedExchange(NamedTuple):
    """One prompt and its answers."""

    id: str
    # the body, with one prompt as text, or of a chat completion whatever the interface
    asked: Mapping[str, Any]
    answers: Sequence[LoggedAnswer]
    usage: Mapping[str, Any]


class TrafficLog:
    """Raises ConfigError when the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            handler = _PrivateFile(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--log-requests {path} cannot be written: {error.strerror or error}"
            ) from error
        handler.setFormatter(logging.Formatter("%(message)s"))
        queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
        self._listener = QueueListener(queue, handler)
        self._listener.start()
        self._file = handler
        # of our own: texts must not reach the server's log
        self._logger = logging.Logger("outrider.traffic")
        self._logger.addHandler(QueueHandler(queue))

    def add(self, url: str, exchange: LoggedExchange) -> None:
        """One prompt and what was answered to it."""
        is_chat = "messages" in exchange.asked
        choices = []
        for index, answer in enumerate(exchange.answers):
            said = {"message": _message(answer)} if is_chat else {"text": answer.text}
            choices.append({"index": index, "finish_reason": answer.finish_reason, **said})
        response: dict[str, Any] = {"choices": choices}
        if exchange.usage:
            response["usage"] = dict(exchange.usage)
        line = {
            "id": exchange.id,
            "created": int(time.time()),
            "url": url,
            "request": dict(exchange.asked),
            "response": response,
        }
        # ASCII: half a character (a lone surrogate) stays escaped
        self._logger.info("%s", json.dumps(line))

    def close(self) -> None:
        """Write what is queued."""
        self._listener.stop()
        try:
            self._file.close()
        except OSError as error:
            log.error(
                "the last requests could not be written to %s: %s",
                self._file.baseFilename,
                error.strerror,
            )


class _PrivateFile(WatchedFileHandler):
    """A file that its owner alone may read, though others could before; also after it was moved
    away."""

    def _open(self) -> TextIOWrapper:
        number = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        try:
            # Windows has no fchmod
            if hasattr(os, "fchmod") and stat.S_ISREG(os.fstat(number).st_mode):
                os.fchmod(number, OWNER_ONLY)
        except OSError:
            os.close(number)
            raise
        return TextIOWrapper(os.fdopen(number, "ab"), encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and survive a file that is gone and cannot be made again. If the writing
        thread died, all later records would wait in memory.
        """
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name for it
        """A full disk, mostly. Python's own way is to print the record, and so what people wrote,
        to standard error."""
        log.error("a request could not be written to %s: %s", self.baseFilename, sys.exc_info()[1])


def _message(answer: LoggedAnswer) -> dict[str, str | None]:
    message = {"role": "assistant", "content": answer.text}
    return message if answer.thought is None else {**message, "reasoning_content": answer.thought}
