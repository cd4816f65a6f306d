"""The engine's calls to an observer that measures it. All calls come from the engine's thread and
must return at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.request import Finish, Request
from outrider.stats import PartStats

log = logging.getLogger("outrider.serve")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of the batch."""

    rows: int
    waiting: int
    asked: list[int]  # draft tokens per row that the control wanted
    drafted: list[int]  # and that were submitted
    accepted: list[int]
    rejected: list[bool]  # whether the verifier turned down what the draft had next
    emitted: list[int]
    # per row, by part of its draft, where it has several
    parts: list[dict[str, PartStats]]
    drafters: list[str]  # per row
    seconds: dict[str, float]  # draft, target, verify, other: of the whole step
    kv_tokens: int  # committed positions of running rows; layers with windows count those they hold
    kv_capacity: int  # positions there is memory for
    # distinct experts that the pass read, the mean of its layers; None: no mixture, or not known
    experts: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The engine now, for gauges and health checks."""

    running: int = 0
    waiting: int = 0
    prefilling: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0
    prefix_pages: int = 0  # pages of the prefix store in use
    prefix_capacity: int = 0
    prefix_queries: int = 0  # prompt tokens looked up so far
    prefix_hits: int = 0  # of those, found
    preemptions: int = 0
    steps: int = 0
    draining: bool = False
    failed: str | None = None  # why the engine's thread died, if it did
    turn_age_s: float = 0.0  # since its loop came round; 0 while there is nothing to do
    control: dict[str, Any] = field(default_factory=dict)  # the controller's own summary
    # what drafters count themselves (`Drafter.counters`)
    drafter: dict[str, float] = field(default_factory=dict)


class Observer:
    """The engine's calls to it do nothing here: metrics, traces and logs overwrite those that they
    need."""

    def queued(self, request: Request) -> None:
        """A request waits in the queue."""

    def admitted(self, request: Request, queued_s: float, cached_tokens: int) -> None:
        """Reading a request's prompt begins."""

    def prefilled(self, request: Request, seconds: float, tokens: int) -> None:
        """A request's prompt is read; it joins the batch."""

    def preempted(self, request: Request) -> None:
        """A running request goes back to the queue."""

    def stepped(self, report: StepReport) -> None:
        """A step of the batch is over."""

    def finished(self, request: Request, finish: Finish) -> None:
        """A request ended, for whatever reason."""


class Observers(Observer):
    """Several observers as one, called in order.

    An error in the engine's thread would end requests: an observer that raises is reported and
    never called again, because to measure less is better than to serve less.
    """

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
