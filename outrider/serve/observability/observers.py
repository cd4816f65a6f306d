"""Several observers of one engine as one: metrics, traces, logs.

They run in the engine's thread, where an error of theirs would end requests. So an observer that
raises is reported and never called again: to measure less is better than to serve less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outrider.engine.observer import Observer, StepReport
from outrider.engine.request import Finish, Request

log = logging.getLogger("outrider.serve")


class Observers(Observer):
    """An `Observer` that passes everything on, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._is_muted = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Pass nothing on meanwhile: the self-test's requests are nobody's."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def queued(self, request: Request) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.queued(request))

    def admitted(self, request: Request, queued_s: float, cached_tokens: int) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.admitted(request, queued_s, cached_tokens))

    def prefilled(self, request: Request, seconds: float, tokens: int) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.prefilled(request, seconds, tokens))

    def preempted(self, request: Request) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.preempted(request))

    def stepped(self, report: StepReport) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.stepped(report))

    def finished(self, request: Request, finish: Finish) -> None:
        """See `Observer`."""
        self._notify(lambda observer: observer.finished(request, finish))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        if self._is_muted:
            return
        for observer in list(self._observers):
            try:
                call(observer)
            except Exception:
                self._observers.remove(observer)
                log.exception(
                    "%s failed and measures nothing from here on; serving goes on",
                    type(observer).__name__,
                )
