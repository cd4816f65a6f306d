"""The scheduler: the state of every request, and how requests move between states as rows and memory allow.

    waiting -> prompt being read -> batch
       ^                              |
       +--- preempted, keys parked ---+

A request starts when there is a row for it and room for its text beside its neighbours', which must be able to grow. Where
that is not so, the least urgent row makes room: for a more urgent request, or for texts that have grown.
"""

from __future__ import annotations

import time

from outrider.engine.batch import Batch
from outrider.engine.draft_pages import DraftPages
from outrider.engine.lineup import Lineup
from outrider.engine.live import Live
from outrider.engine.mailbox import Heartbeat
from outrider.engine.observer import Observer
from outrider.engine.prefill import Prefiller, make_pool
from outrider.engine.room import Room
from outrider.engine.settings import EngineSettings
from outrider.engine.waiting import WaitingQueue
from outrider.models.memory import available_memory

MARGIN = 64  # positions a step may write behind a row's committed ones: pending token, draft, padding


class Places:
    """Changed in the engine's thread alone. Raises ConfigError where memory is too small for a single request."""

    def __init__(self, lineup: Lineup, settings: EngineSettings, observer: Observer, heartbeat: Heartbeat) -> None:
        self._settings, self._observer = settings, observer
        self.batch = Batch(lineup, heartbeat)
        target = self.batch.built.target.lm
        drafter = self.batch.decoder.drafter
        positions = settings.kv_bytes(available_memory(target.device)) // max(1, lineup.kv_bytes_per_token(drafter))
        self.pool = make_pool(target, int(positions * settings.prefix_share))
        self.drafts = DraftPages(drafter.text_caches, self.pool.num_pages * self.pool.page)
        self.prefiller = Prefiller(target, self.pool, self.drafts, drafter.signals)
        self.room = Room(positions - self.pool.num_pages * self.pool.page, target.kv, self.prefiller.lm.kv)
        self.waiting: WaitingQueue[Live] = WaitingQueue()
        self.preemptions = 0

    @property
    def num_started(self) -> int:
        """Requests that are read or answered."""
        return len(self.batch) + len(self.prefiller)

    @property
    def longest(self) -> int:
        """Tokens of a request, prompt and answer, that there is memory for."""
        return self.room.longest - MARGIN

    # ---------------------------------------------------------------- joining

    def admit(self) -> None:
        """Let requests start while there are rows and memory; a more urgent one takes the place of the least urgent."""
        while (live := self.waiting.first()) is not None and len(self.prefiller) < self._settings.max_prefills:
            if self._has_place(live):
                self.waiting.remove(live)
                self._begin(live)
                continue
            victim = self.batch.last()
            if victim is None or victim.request.priority <= live.request.priority:
                return
            self._preempt(victim)

    def join(self, live: Live) -> None:
        """Its prompt is read: into the batch."""
        live.parked = self.prefiller.take(live)
        self.batch.join(live)
        if live.joined is None:
            live.joined = time.perf_counter()
            started = live.joined if live.started is None else live.started
            self._observer.prefilled(live.request, live.joined - started, live.row.num_prompt - live.cached_tokens)

    def _has_place(self, live: Live) -> bool:
        if self.num_started >= self._settings.max_num_seqs:
            return False
        length = len(live.row.tokens) + MARGIN  # and its neighbours must be able to grow, or it would be out again at once
        return self.room.has_row(max(length, self.batch.longest + MARGIN), 0 if live.parked is not None else length)

    def _begin(self, live: Live) -> None:
        first = live.started is None
        live.started = live.started or time.perf_counter()
        if live.parked is not None:
            self.batch.join(live)
            return
        self.prefiller.begin(live)
        if first:
            self._observer.admitted(live.request, live.started - live.submitted, live.cached_tokens)

    # ---------------------------------------------------------------- leaving

    def make_room(self) -> None:
        """Texts grow: where memory does not, the least urgent row waits."""
        while len(self.batch) > 1 and not self.room.can_grow(self.batch.longest + MARGIN):
            victim = self.batch.last()
            assert victim is not None
            self._preempt(victim)

    def leave(self, live: Live) -> None:
        """For good, wherever it stands."""
        if live in self.batch:
            self.batch.leave(live, self.pool, self.drafts)
        elif live in self.prefiller:
            self.prefiller.drop(live)
        else:
            self.waiting.remove(live)
        live.parked = live.draft_state = None

    def reset(self) -> None:
        """Nobody is read or answered, whatever state a failure left them in."""
        self.prefiller.reset()
        self.batch.reset()

    def forget_texts(self) -> None:
        """All that is kept of texts seen before."""
        self.pool.clear()
        self.drafts.clear()

    def _preempt(self, live: Live) -> None:
        """Out of the batch, to come back as it was."""
        self.batch.park(live)
        live.preemptions += 1
        self.preemptions += 1
        self.waiting.push(live)
        self._observer.preempted(live.request)

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is left of requests that are all over: rows, prompts, pages that are nobody's."""
        draft = self.batch.built.draft
        caches = {"batch": self.batch.kv, "prompts": self.prefiller.lm.kv, "draft": draft.lm.kv if draft else None}
        for name, cache in caches.items():
            if cache is not None:
                cache.check_integrity()
                assert cache.num_rows == 0, f"{cache.num_rows} rows are left in the {name} cache"
        self.pool.check_integrity()
        self.drafts.check_integrity()
