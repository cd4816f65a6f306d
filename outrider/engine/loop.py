"""The engine's thread: turn after turn, until it is stopped.

A turn: take commands, end late requests, start requests as memory allows, read one chunk of one
prompt, make one step of all rows, and deliver its tokens. With nothing to do the thread sleeps.

Every request ends in `_end`, once. One that breaks a step or its prompt ends alone (`Batch.step`
finds it); when code of ours breaks between steps all end, and the engine continues.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from outrider.engine.batch import Stepped
from outrider.engine.mailbox import Mailbox
from outrider.engine.observer import Observer, StepReport
from outrider.engine.request import ActiveRequest, FinishReason
from outrider.engine.scheduler import Scheduler
from outrider.errors import NumericalError, OutriderError, UnavailableError, without_values
from outrider.step import StepFacts

log = logging.getLogger("outrider.engine")
SUMMARY_S = 0.5  # how old what is known of the control may be
LATEST = 32  # finished requests whose times say how long the queue takes


class EngineLoop:
    """The engine's thread: it takes commands, makes steps and hands out tokens.

    What has no underscore may be read from any thread, and is one step old at most.
    """

    def __init__(self, mailbox: Mailbox, scheduler: Scheduler, observer: Observer) -> None:
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._observer = observer
        self.steps = 0
        # the control's summary, made in this thread, which changes what it is of
        self.control: dict[str, Any] = {}
        # seconds in the batch, of the latest requests
        self.ran_s: deque[float] = deque([1.0], maxlen=LATEST)
        self._summarised_s = 0.0

    def run(self) -> None:
        """The thread's whole life."""
        use_threads(self._scheduler.batch.built.options.threads)
        mailbox = self._mailbox
        try:
            while not mailbox.stopping:
                try:
                    self._receive()
                    self._turn()
                except Exception as error:
                    log.exception(
                        "the engine's own code failed: every request ends, the engine continues"
                    )
                    self._scheduler.reset()
                    self._end_all(error)
        except BaseException as error:
            # a request that is being submitted is in, and ends with the others, or is refused
            with mailbox.lock:
                mailbox.failed = without_values(error)  # clients of others read it
            log.exception("the engine's thread died")
            raise
        finally:
            self._end_all(None if mailbox.failed is None else UnavailableError(mailbox.failed))
            mailbox.heartbeat.rest()  # dead is not hung

    def enqueue(self, active: ActiveRequest) -> None:
        """Queue a request, unless it ended with all others before it arrived. The committed tokens
        may already be its whole answer.
        """
        if active in self._mailbox:
            self._observer.queued(active.request)
            if active.row.finish_reason is None:
                self._scheduler.waiting.push(active)
            else:
                self._end(active, "stop" if active.row.finish_reason == "stop" else "length")

    def abort(self, active: ActiveRequest) -> None:
        """It is not wanted any more."""
        self._end(active, "abort")

    # ---------------------------------------------------------------- a turn

    def _receive(self) -> None:
        """Commands since the last turn; sleeps while there is nothing to do."""
        for command in self._mailbox.receive(
            wait=not (self._scheduler.num_started or len(self._scheduler.waiting))
        ):
            command()

    def _turn(self) -> None:
        now = time.perf_counter()
        for active in [active for active in self._mailbox if active.is_late(now)]:
            self._end(active, "timeout")
        self._scheduler.admit()
        self._read_prompt()
        if len(self._scheduler.batch):
            self._scheduler.preempt_to_fit()
            self._account(self._scheduler.batch.step(self._scheduler.drafts))
        for active, error in self._scheduler.batch.take_failed():
            self._blame(active, error)

    def _read_prompt(self) -> None:
        """One chunk of one prompt: a long one is many passes, and keeps neither commands nor time
        limits waiting."""
        if not len(self._scheduler.prefiller):
            return
        try:
            ready = self._scheduler.prefiller.advance()
        except Exception as error:  # noqa: BLE001  whatever a model raises ends the prompt being read, nothing else
            self._fail_prompts(error)
            return
        if ready is not None:
            self._scheduler.join(ready)

    def _account(self, done: Stepped) -> None:
        """Tell everybody what a step brought."""
        if done.facts is not None:
            self.steps += 1
            self._report(done, done.facts)
        if time.perf_counter() - self._summarised_s > SUMMARY_S:
            self.control = self._scheduler.batch.control.summary()
            self._summarised_s = time.perf_counter()
        for active in done.requests:
            reason = active.row.finish_reason
            if reason is not None:
                self._end(active, "stop" if reason == "stop" else "length")
            elif len(active.row.origins) > active.shown:
                self._notify(active, active.show)

    def _report(self, done: Stepped, facts: StepFacts) -> None:
        scheduler = self._scheduler
        self._observer.stepped(
            StepReport(
                rows=len(done.requests),
                waiting=len(scheduler.waiting),
                asked=facts.asked,
                drafted=facts.drafted,
                accepted=facts.accepted,
                rejected=facts.rejected,
                emitted=done.taken,
                parts=facts.by_part(done.taken),
                drafters=[active.drafter for active in done.requests],
                seconds=done.seconds,
                kv_tokens=scheduler.kv_budget.used,
                kv_capacity=scheduler.kv_budget.positions,
                experts=facts.experts,
            )
        )

    # ---------------------------------------------------------------- leaving

    def _end(
        self, active: ActiveRequest, reason: FinishReason, error: OutriderError | None = None
    ) -> None:
        """The one way a request ends. Nothing happens when it has ended already."""
        if active not in self._mailbox:
            return
        self._leave(active)
        finish = active.finish(reason, error)
        if active.joined is not None:
            self.ran_s.append(time.perf_counter() - active.joined)
        self._notify(active, lambda: active.show(finish))
        self._observer.finished(active.request, finish)
        self._mailbox.leave(active)

    def _leave(self, active: ActiveRequest) -> None:
        """End all requests. In a dead thread a device may refuse everything, and waiting clients
        must get an answer all the same.
        """
        try:
            self._scheduler.leave(active)
        except Exception:
            if self._mailbox.failed is None:
                raise
            log.exception("request %s leaves a broken engine", active.request.id)

    def _end_all(self, error: Exception | None) -> None:
        for active in self._mailbox:
            self._end(
                active, "error" if error else "abort", _as_ours(error, active) if error else None
            )

    def _blame(self, active: ActiveRequest, error: Exception) -> None:
        if isinstance(error, NumericalError):
            self._scheduler.forget_texts()  # what its prompt shares with others may be broken
        self._end(active, "error", _as_ours(error, active))

    def _fail_prompts(self, error: Exception) -> None:
        """Only the prompt whose turn it was is to blame; the others are read again from their
        beginning."""
        guilty, *others = self._scheduler.prefiller.reset()
        for active in others:
            self._scheduler.waiting.push(active)
        self._blame(guilty, error)

    def _notify(self, active: ActiveRequest, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception(
                "the listener of request %s failed; the request is cancelled", active.request.id
            )
            self._mailbox.put(lambda: self.abort(active))


def _as_ours(error: Exception, active: ActiveRequest) -> OutriderError:
    """The error for a client: our own errors as they are, others by name (the log has the rest)."""
    if isinstance(error, OutriderError):
        return error
    log.error(
        "a request failed inside the engine",
        exc_info=error,
        extra={"request_id": active.request.id},
    )
    return OutriderError(
        f"the request failed inside the engine ({type(error).__name__}); the server's log says more"
    )


def use_threads(count: int | None) -> None:
    """For the thread that calls; None: as torch chose. torch keeps the number per thread, but gives
    a thread that computes for the first time what was set last in the whole process, by an engine
    that was loaded after this one. So that happens first."""
    torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
