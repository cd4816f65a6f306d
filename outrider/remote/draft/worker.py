"""The computing thread: drafts for waiting clients in turn.

take jobs -> bring their rows up to date -> one drafting call -> replies
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.host import ModelHost
from outrider.remote.draft.texts import AskerCall, DraftLimits, HostedTexts, Job
from outrider.remote.protocol import messages

log = logging.getLogger("outrider.service")
REST_S = 1.0  # between two looks whether it ends, while nobody asks


class Worker:
    """The thread of a draft service that drafts for its texts in batches."""

    def __init__(
        self,
        host: ModelHost,
        texts: HostedTexts,
        limits: DraftLimits,
        counters: DraftCounters,
        context: int,
        died: Callable[[], object] = lambda: None,
    ) -> None:
        """`died` is called in the thread when it cannot continue."""
        self._host = host
        self._texts = texts
        self._limits = limits
        self._counters = counters
        self._context = context
        self._died = died
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End after the call that runs."""
        self._stopping.set()
        self._texts.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._host.drafter.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self.turn()
                except Exception:
                    log.exception("a turn of the drafting thread failed; all rows begin anew")
                    self._forget_all()
        except Exception:
            log.exception("the drafting thread has died")
            self._died()

    def turn(self) -> None:
        """One drafting call, or a rest."""
        for uid in self._texts.gone():
            self._forget(uid)
        jobs = self._texts.take(self._limits.batch_size)
        if jobs:
            self._draft(jobs)
        else:
            self._texts.wait(REST_S)

    def _draft(self, jobs: list[Job]) -> None:
        ready: dict[int, Job] = {}
        for job in jobs:
            try:
                if self._bring_up_to_date(job, ready):
                    ready[job.text.uid] = job
            except OutriderError as error:
                self._refuse(job, str(error))
        asks = {
            uid: min(job.num_nodes, self._context - self._host.length(uid))
            for uid, job in ready.items()
        }
        for uid in [uid for uid, nodes in asks.items() if nodes < 1]:
            self._reply([(ready[uid], [])])
            del asks[uid]
        if asks:
            self._propose(ready, asks)

    def _propose(self, ready: dict[int, Job], asks: dict[int, int]) -> None:
        began = time.perf_counter()
        try:
            drafts = self._host.propose(asks)
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("a drafting call of %d rows failed", len(asks))
            self._after_failure(ready, asks, error)
            return
        self._counters.seconds.observe(time.perf_counter() - began)
        self._counters.batch.observe(len(drafts))
        replies = []
        for uid in asks:
            if uid not in drafts:
                self._texts.put_back(ready[uid])
            elif self._texts.fits(
                ready[uid], self._host.length(uid)
            ):  # the asker takes what its longer text agrees with
                replies.append((ready[uid], drafts[uid]))
                self._counters.drafted.inc(len(drafts[uid]))
            else:
                self._counters.stale.inc()
        self._reply(replies)

    def _after_failure(self, ready: dict[int, Job], asks: dict[int, int], error: Exception) -> None:
        """Try each row alone, with its text read again, and refuse the row whose numbers are
        broken."""
        if len(asks) == 1:
            (uid,) = asks
            self._refuse(ready[uid], f"the drafter failed: {error}")
            return
        for uid in asks:
            job = ready[uid]
            tokens = list(self._host.tokens(uid))
            self._host.stop(uid)
            self._host.start(job.text, tokens)
        for uid, nodes in asks.items():
            self._propose(ready, {uid: nodes})

    def _bring_up_to_date(self, job: Job, batch: dict[int, Job]) -> bool:
        """The row as its text is now; False where there is no room for it."""
        uid = job.text.uid
        host = self._host
        is_new = uid not in host.uids
        length = job.start + len(job.tail)
        if not self._make_room(uid, length, {*batch, uid}):
            # in a later batch, it can have its neighbours' room
            alone = host.least_bytes([length]) <= self._limits.memory_bytes
            kind = messages.TROUBLE_BUSY if alone else messages.TROUBLE_REFUSED
            self._refuse(
                job,
                f"no room for {length} tokens{' alongside the others' if alone else ''} (--memory)",
                kind,
            )
            return False
        if is_new:
            if job.start:
                self._texts.remove(job.text)  # it was forgotten here in between
                self._trouble(job, messages.TROUBLE_UNKNOWN_ROW, "forgotten since")
                return False
            host.start(job.text, job.tail)
            return True
        host.change(uid, job.start, job.tail)
        return True

    def _make_room(self, uid: int, length: int, batch: set[int]) -> bool:
        """Forget rows that were not asked about for longest, until the text of this one fits."""
        host = self._host
        while True:
            others = [other for other in host.uids if other != uid]
            lengths = [*(host.length(other) for other in others), length]
            if host.has_room([*others, uid], lengths, self._limits.memory_bytes):
                return True
            victim = self._texts.least_recent(others, but=batch)
            if victim is None:
                return False
            self._texts.remove(victim)
            self._forget(victim.uid)
            self._counters.evictions.inc()

    # ---------------------------------------------------------------- answers and ends

    def _reply(self, answers: list[tuple[Job, list[messages.Node]]]) -> None:
        by_stream: dict[AskerCall, list[messages.RowReply]] = {}
        for job, nodes in answers:
            reply = messages.RowReply(
                row=job.text.number,
                base_length=self._host.length(job.text.uid),
                nodes=nodes,
            )
            by_stream.setdefault(job.text.stream, []).append(reply)
        for stream, replies in by_stream.items():
            stream.send(replies)

    def _trouble(self, job: Job, kind: messages.Trouble, reason: str) -> None:
        self._counters.trouble(kind)
        base = job.start + len(job.tail)
        job.text.stream.send(
            [messages.RowReply(row=job.text.number, base_length=base, trouble=kind, reason=reason)]
        )

    def _refuse(
        self, job: Job, reason: str, kind: messages.Trouble = messages.TROUBLE_REFUSED
    ) -> None:
        self._texts.remove(job.text)
        self._forget(job.text.uid)
        self._trouble(job, kind, reason)

    def _forget(self, uid: int) -> None:
        if uid in self._host.uids:
            self._host.stop(uid)

    def _forget_all(self) -> None:
        for uid in list(self._host.uids):
            victim = self._texts.least_recent([uid], but=())
            if victim is not None:
                self._texts.remove(victim)
            self._forget(uid)
