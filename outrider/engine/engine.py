"""Continuous batching: requests join and leave between steps of the one `Decoder`.

    submit -> waiting -> [prompt read in chunks] -> batch: one `Decoder.step` for all rows -> Finish
                 ^                                     |
                 +--------- preempted, keys parked ----+

One thread owns models, caches and rows; other threads hand over requests and cancellations and get `Update`s. A turn of
the loop: hear what came in, let requests start as memory allows, read one chunk of one prompt, make one step. With nothing
to do the thread sleeps.

A request's text does not depend on what runs beside it: rows do not know their neighbours (`Decoder`), a preempted row
comes back with the keys it left with, and a seeded sampled row is drafter-invariant unless it asked not to be, so that a
load-aware draft length cannot show. A request that breaks a step is found and ended alone (`_recover`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from outrider.admission import new_row
from outrider.engine.batch import Batch, Stepped
from outrider.engine.calibrate import calibrate
from outrider.engine.draft_pages import DraftPages
from outrider.engine.lineup import Lineup
from outrider.engine.live import Live
from outrider.engine.observer import EngineSnapshot, Observer, Silent, StepReport
from outrider.engine.prefill import Prefiller, make_pool
from outrider.engine.request import FinishReason, Listener, Request
from outrider.engine.room import Room
from outrider.engine.settings import EngineSettings
from outrider.engine.threads import use_threads
from outrider.engine.waiting import WaitingQueue
from outrider.errors import NumericalError, OutriderError, QueueFullError, RequestError, UnavailableError
from outrider.kv.cache import BLOCK
from outrider.models.memory import available_memory

log = logging.getLogger("outrider.engine")
MARGIN = 64  # positions a step may write behind a row's committed ones: pending token, draft, padding
SUMMARY_S = 0.5  # how old what is known of the control may be
LATEST = 32  # finished requests whose times say how long the queue takes


class Engine:
    """See the module docstring. `make_engine` (start.py) builds one from options."""

    def __init__(self, name: str, lineup: Lineup, settings: EngineSettings, observer: Observer | None = None) -> None:
        self.name = name
        self._lineup, self._settings = lineup, settings
        self._observer = observer or Silent()
        self._batch = Batch(lineup)
        target = self._batch.built.target.lm
        drafter = self._batch.decoder.drafter
        positions = settings.kv_bytes(available_memory(target.device)) // max(1, lineup.kv_bytes_per_token(drafter))
        self._pool = make_pool(target, int(positions * settings.prefix_share))
        self._drafts = DraftPages(drafter.text_caches, self._pool.num_pages * self._pool.page)
        self._prefiller = Prefiller(target, self._pool, self._drafts, drafter.signals)
        self._room = Room(positions - self._pool.num_pages * self._pool.page, target.kv, self._prefiller.lm.kv)
        self._waiting: WaitingQueue[Live] = WaitingQueue()
        self._alive: dict[str, Live] = {}  # by request id; changed under the lock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition(threading.RLock())
        self._arrivals = self._steps = self._preemptions = 0
        self._ran_s: deque[float] = deque([1.0], maxlen=LATEST)
        self._draining = self._stopping = False
        self._control: dict[str, Any] = {}  # the control's summary, made in the engine's thread, which changes what it is of
        self._summarised_s = 0.0
        self._failed: str | None = None
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- what others see; any thread

    @property
    def tokenizer(self) -> Any:
        return self._batch.built.target.tokenizer

    @property
    def context(self) -> int:
        """Tokens a request may hold, prompt and answer: the model's limit, or what there is memory for."""
        return min(self._batch.built.context, self._room.longest - MARGIN)

    @property
    def vocab_size(self) -> int:
        return self._batch.built.target.lm.shape.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._batch.built.target.eos_token_ids

    @property
    def drafters(self) -> list[str]:
        """What `Speculation.drafter` may name; the first is used where a request names none."""
        return self._lineup.names

    @property
    def config(self) -> dict[str, Any]:
        return self._batch.built.config()

    @property
    def notes(self) -> list[str]:
        return self._batch.built.notes

    @property
    def lossless(self) -> bool:
        """Of requests that do not ask for anything else."""
        return self._batch.decoder.verifier.lossless

    def calibrate(self, status: Callable[[str], None] = lambda line: None) -> None:
        """Time steps of many kinds for a load-aware control, before `start`; a few seconds."""
        assert self._thread is None, "before the engine starts"
        calibrate(self._batch, self._lineup, min(self._settings.max_num_seqs, max(1, self._room.positions // BLOCK // 2)), status)

    def start(self) -> None:
        """Begin to work."""
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._loop, name=f"engine-{self.name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. Raises RequestError, ConfigError or CapabilityError for one that cannot be honoured, QueueFullError
        when too many wait, UnavailableError when the engine ends; then `listener` is never called."""
        drafter, verifier = self._lineup.rules_of(request)
        row = new_row(
            self._batch.built, 0, request.prompt, request.params, with_text=True, context=self.context,
            constraint=request.constraint,
        )  # fmt: skip
        row.verifier = verifier
        self._lineup.instruct(row, request, self.context)
        rule = verifier or self._batch.decoder.verifier
        reproducible = self._lineup.is_reproducible(request, rule)
        with self._wake:
            self._refuse(request)
            self._arrivals += 1
            row.request = self._arrivals
            live = Live(request, listener, row, self._arrivals, drafter, rule.lossless, reproducible)
            self._alive[request.id] = live
            self._do(lambda: self._enqueue(live))

    def cancel(self, request_id: str) -> None:
        """End a request as "abort". Unknown or finished ones are left alone."""
        with self._wake:
            live = self._alive.get(request_id)
            if live is not None:
                self._do(lambda: self._end(live, "abort"))

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False when time is up before that."""
        with self._wake:
            self._draining = True
            return self._wake.wait_for(lambda: not self._alive, timeout_s)

    def stop(self) -> None:
        """End everything that is alive as "abort", and the thread. What drafters learned is saved."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._batch.decoder.drafter.close()

    def snapshot(self) -> EngineSnapshot:
        """The engine as it is now. Numbers may be one step old."""
        pool = self._pool
        return EngineSnapshot(
            running=len(self._batch), waiting=self._num_waiting(), prefilling=len(self._prefiller),
            kv_tokens=sum(self._batch.kv.lengths), kv_capacity=self._room.positions,
            prefix_pages=pool.used, prefix_capacity=pool.num_pages, prefix_queries=pool.queries, prefix_hits=pool.hits,
            preemptions=self._preemptions, steps=self._steps, draining=self._draining or self._stopping, failed=self._failed,
            control=self._control,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError when an idle engine holds anything: rows, prompts, pages that are nobody's."""
        assert not self._alive, f"{len(self._alive)} requests are alive: not idle"
        draft = self._batch.built.draft
        caches = {"batch": self._batch.kv, "prompts": self._prefiller.lm.kv, "draft": draft.lm.kv if draft else None}
        for name, cache in caches.items():
            if cache is not None:
                cache.check_integrity()
                assert cache.num_rows == 0, f"{cache.num_rows} rows are left in the {name} cache"
        self._pool.check_integrity()
        self._drafts.check_integrity()

    def _refuse(self, request: Request) -> None:
        if self._draining or self._stopping or self._failed:
            raise UnavailableError(f"'{self.name}' takes no new requests: {self._failed or 'it is shutting down'}")
        if request.id in self._alive:
            raise RequestError(f"a request with id '{request.id}' is running already; ids must be unique")
        waiting = self._num_waiting()
        if waiting >= self._settings.max_queue:
            seconds = sum(self._ran_s) / len(self._ran_s) * (waiting + 1) / self._settings.max_num_seqs
            raise QueueFullError(f"{waiting} requests are waiting, as many as may; try again later", min(max(seconds, 1), 60))

    def _num_waiting(self) -> int:
        return max(0, len(self._alive) - len(self._batch) - len(self._prefiller))

    def _do(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    # ---------------------------------------------------------------- the engine's thread

    def _loop(self) -> None:
        use_threads(self._batch.built.options.threads)
        try:
            while not self._stopping:
                try:
                    self._hear()
                    self._turn()
                except Exception as error:
                    log.exception("the engine's own code failed: every request ends, the engine goes on")
                    self._prefiller.reset()
                    self._batch.reset()
                    self._end_all(error)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            log.exception("the engine's thread died")
            raise
        finally:
            self._end_all(None if self._failed is None else UnavailableError(self._failed))

    def _hear(self) -> None:
        """Commands since the last turn; sleeps while there is nothing to do."""
        with self._wake:
            if not (len(self._batch) or len(self._waiting) or len(self._prefiller)):
                self._wake.wait_for(lambda: self._commands or self._stopping)
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _turn(self) -> None:
        now = time.perf_counter()
        for live in [live for live in list(self._alive.values()) if live.is_late(now)]:
            self._end(live, "timeout")
        self._admit()
        self._read_prompts()
        if len(self._batch):
            self._make_room()
            self._account(self._batch.step())

    def _enqueue(self, live: Live) -> None:
        if self._alive.get(live.request.id) is not live:  # ended before it was heard of, with all the others
            return
        self._waiting.push(live)
        self._observer.queued(live.request)

    # ---------------------------------------------------------------- joining

    def _admit(self) -> None:
        """Let requests start while there are rows and memory; a more urgent one takes the place of the least urgent."""
        while (live := self._waiting.first()) is not None and len(self._prefiller) < self._settings.max_prefills:
            if self._has_place(live):
                self._waiting.remove(live)
                self._begin(live)
                continue
            victim = self._batch.last()
            if victim is None or victim.request.priority <= live.request.priority:
                return
            self._preempt(victim)

    def _has_place(self, live: Live) -> bool:
        if len(self._batch) + len(self._prefiller) >= self._settings.max_num_seqs:
            return False
        length = len(live.row.tokens) + MARGIN  # and its neighbours must be able to grow, or it would be out again at once
        return self._room.has_row(max(length, self._batch.longest + MARGIN), 0 if live.parked is not None else length)

    def _begin(self, live: Live) -> None:
        first = live.started is None
        live.started = live.started or time.perf_counter()
        if live.parked is not None:
            self._batch.join(live)
            return
        self._prefiller.begin(live)
        if first:
            self._observer.admitted(live.request, live.started - live.submitted, live.cached_tokens)

    def _read_prompts(self) -> None:
        """One chunk beside a running batch; without one, until somebody can join."""
        while len(self._prefiller):
            self._batch.control.rest()  # reading is no part of a step's price
            try:
                ready = self._prefiller.advance()
            except Exception as error:  # noqa: BLE001  whatever a model raises ends the prompt being read, nothing else
                self._fail_prompts(error)
                return
            if ready is not None:
                ready.parked = self._prefiller.take(ready)
                self._join_first(ready)
            if len(self._batch) or self._commands:
                return

    def _join_first(self, live: Live) -> None:
        self._batch.join(live)
        if live.joined is None:
            live.joined = time.perf_counter()
            started = live.joined if live.started is None else live.started
            self._observer.prefilled(live.request, live.joined - started, live.row.num_prompt - live.cached_tokens)

    # ---------------------------------------------------------------- a step

    def _make_room(self) -> None:
        """Texts grow: where memory does not, the least urgent row waits."""
        while len(self._batch) > 1 and not self._room.can_grow(self._batch.longest + MARGIN):
            victim = self._batch.last()
            assert victim is not None
            self._preempt(victim)

    def _preempt(self, live: Live) -> None:
        """Out of the batch, to come back as it was."""
        self._batch.park(live)
        live.preemptions += 1
        self._preemptions += 1
        self._waiting.push(live)
        self._observer.preempted(live.request)

    def _account(self, done: Stepped) -> None:
        """Tell everybody what a step brought."""
        for live, error in done.failed:
            self._blame(live, error)
        if done.seconds:
            self._steps += 1
            self._report(done)
        if time.perf_counter() - self._summarised_s > SUMMARY_S:
            self._control, self._summarised_s = self._batch.control.summary(), time.perf_counter()
        for live in done.lives:
            reason = live.row.finish_reason
            if reason is not None:
                self._end(live, "stop" if reason == "stop" else "length")
            elif len(live.row.origins) > live.shown:
                self._tell(live, live.show)

    def _report(self, done: Stepped) -> None:
        control = self._batch.control
        self._observer.stepped(
            StepReport(
                rows=len(done.lives), waiting=len(self._waiting), asked=control.asked, drafted=control.drafted,
                accepted=control.accepted, rejected=control.rejected, emitted=done.taken,
                drafters=[live.drafter for live in done.lives], seconds=done.seconds,
                kv_tokens=sum(self._batch.kv.lengths), kv_capacity=self._room.positions,
            )
        )  # fmt: skip

    # ---------------------------------------------------------------- leaving

    def _end(self, live: Live, reason: FinishReason, error: OutriderError | None = None) -> None:
        """The one way a request ends. Nothing happens when it has ended already."""
        if self._alive.get(live.request.id) is not live:
            return
        if live in self._batch:
            self._batch.leave(live, self._pool, self._drafts)
        elif live in self._prefiller:
            self._prefiller.drop(live)
        else:
            self._waiting.remove(live)
        live.parked = live.draft_state = None
        finish = live.finish(reason, error)
        if live.joined is not None:
            self._ran_s.append(time.perf_counter() - live.joined)
        self._tell(live, lambda: live.show(finish))
        self._observer.finished(live.request, finish)
        with self._wake:
            del self._alive[live.request.id]
            self._wake.notify_all()  # `drain` waits for this

    def _end_all(self, error: Exception | None) -> None:
        for live in list(self._alive.values()):
            self._end(live, "error" if error else "abort", _as_ours(error) if error else None)

    def _blame(self, live: Live, error: Exception) -> None:
        if isinstance(error, NumericalError):
            self._pool.clear()  # what its prompt shares with others may be broken
            self._drafts.clear()
        self._end(live, "error", _as_ours(error))

    def _fail_prompts(self, error: Exception) -> None:
        """Only the prompt whose turn it was is to blame; the others are read again from their beginning."""
        guilty, *others = self._prefiller.reset()
        for live in others:
            self._waiting.push(live)
        self._blame(guilty, error)

    def _tell(self, live: Live, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("the listener of request %s failed; the request is cancelled", live.request.id)
            self._do(lambda: self._end(live, "abort"))


def _as_ours(error: Exception) -> OutriderError:
    """What a client is told: our own errors as they are, others by name (the log has the rest)."""
    if isinstance(error, OutriderError):
        return error
    log.error("a request failed inside the engine", exc_info=error)
    return OutriderError(f"the request failed inside the engine ({type(error).__name__}); the server's log says more")
