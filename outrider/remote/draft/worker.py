"""The computing thread: chains for waiting clients in turn, and drafts for likely outcomes when none waits.

    take jobs -> bring their rows up to date -> one drafting call -> replies
    none waits -> one pass for outcomes -> replies -> look again for waiting clients
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from outrider.drafters.chain_survival import ChainSurvival
from outrider.errors import OutriderError
from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.host import GeneralHost
from outrider.remote.draft.model_host import ModelHost
from outrider.remote.draft.nodes import DraftNode, SentTree
from outrider.remote.draft.outcomes import OutcomeTree, grow
from outrider.remote.draft.settings import MAX_NODES, DraftLimits
from outrider.remote.draft.texts import AskerCall, HostedTexts, Job
from outrider.remote.protocol import messages

log = logging.getLogger("outrider.service")
REST_S = 1.0  # between two looks at what is idle, while nobody asks
Span = Callable[[str, Sequence[Job]], AbstractContextManager[object]]


@dataclass
class _SentDraft:
    """What was sent for a row's present text."""

    stream: AskerCall
    base: int
    sent: SentTree = field(default_factory=SentTree)
    chain: list[int] = field(default_factory=list)  # tokens of the drafted path of first children


@dataclass
class _Ahead:
    """Outcomes of a row that are being drafted."""

    job: Job
    tree: OutcomeTree
    numbers: list[int]  # of the tree's nodes, as they were sent


class Worker:
    """The thread of a draft service that drafts for its texts in batches. `span`: around each drafting call, for traces."""

    def __init__(
        self, host: ModelHost | GeneralHost, texts: HostedTexts, limits: DraftLimits, counters: DraftCounters, context: int,
        span: Span = lambda name, jobs: nullcontext(), died: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`died` is called in the thread when it cannot go on."""
        self._host, self._texts, self._limits, self._counters, self._context = host, texts, limits, counters, context
        self._span, self._died = span, died
        self._answers: dict[int, _SentDraft] = {}  # by uid
        self._ahead: dict[int, _Ahead] = {}
        self._survival = ChainSurvival()
        self._stopping = threading.Event()
        self._looked_at = time.monotonic()
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
        """One drafting call, one pass for outcomes, or a rest."""
        for uid in self._texts.gone():
            self._forget(uid)
        if time.monotonic() - self._looked_at > REST_S:
            self._looked_at = time.monotonic()
            if expired := self._texts.expire():
                self._counters.evictions.labels("idle").inc(expired)
        jobs = self._texts.take(self._limits.batch_size)
        if jobs:
            self._draft(jobs)
        elif self._ahead:
            self._look_ahead()
        else:
            self._texts.wait(REST_S)

    # ---------------------------------------------------------------- chains

    def _draft(self, jobs: list[Job]) -> None:
        ready: dict[int, Job] = {}
        for job in jobs:
            self._ahead.pop(job.text.uid, None)
            try:
                if self._bring_up_to_date(job, ready):
                    ready[job.text.uid] = job
            except OutriderError as error:
                self._refuse([job], str(error))
        asks = {uid: min(job.num_nodes, self._context - self._host.length(uid)) for uid, job in ready.items()}
        for uid in [uid for uid, nodes in asks.items() if nodes < 1]:
            self._reply([(ready[uid], [], True)])
            del asks[uid]
        if asks:
            self._propose(ready, asks)

    def _propose(self, ready: dict[int, Job], asks: dict[int, int]) -> None:
        began = time.perf_counter()
        try:
            with self._span("draft", [ready[uid] for uid in asks]):
                found = self._host.propose(asks)
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("a drafting call of %d rows failed", len(asks))
            self._after_failure(ready, asks, error)
            return
        self._counters.seconds.labels("chains").observe(time.perf_counter() - began)
        self._counters.batch.observe(len(found))
        replies = []
        for uid in asks:
            if uid not in found:
                self._texts.put_back(ready[uid])
            elif self._texts.fits(ready[uid], self._host.length(uid)):  # the asker takes what its longer text agrees with
                wants_more = ready[uid].outcomes and self._host.has_outcomes and self._limits.outcome_nodes > 0
                ahead = wants_more and self._texts.is_current(ready[uid])
                replies.append((ready[uid], self._number(ready[uid], found[uid]), not ahead))
                self._counters.drafted.inc(len(found[uid]))
            else:
                self._counters.stale.inc()
        self._reply(replies)
        for job, _, is_finished in replies:
            if not is_finished:
                self._plan_outcomes(job, found[job.text.uid])

    def _after_failure(self, ready: dict[int, Job], asks: dict[int, int], error: Exception) -> None:
        """Try each row alone, with its text read again, and refuse the row whose numbers are broken."""
        if len(asks) == 1:
            self._refuse([ready[uid] for uid in asks], f"the drafter failed: {error}")
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
        uid, host = job.text.uid, self._host
        is_new = uid not in host.uids
        length = job.start + len(job.tail)
        if not self._make_room(uid, length, {*batch, uid}):
            alone = host.least_bytes([length]) <= self._limits.memory_bytes  # in a later batch, it can have its neighbours' room
            kind = messages.TROUBLE_BUSY if alone else messages.TROUBLE_REFUSED
            self._refuse([job], f"no room for {length} tokens{' beside the others' if alone else ''} (--memory)", kind)
            return False
        if is_new:
            if job.start:
                self._texts.remove(job.text)  # it was forgotten here in between
                self._trouble(job, messages.TROUBLE_UNKNOWN_ROW, "forgotten since")
                return False
            host.start(job.text, job.tail)
            return True
        before = host.length(uid)
        answer = self._answers.get(uid)
        if answer is not None and answer.chain and job.start == before == answer.base and job.tail:
            self._survival.observe(uid, len(answer.chain), _num_agreeing(answer.chain, job.tail))
        host.change(uid, job.start, job.tail)
        if job.tail or job.start != before:
            self._answers.pop(uid, None)
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
            self._counters.evictions.labels("memory").inc()

    def _number(self, job: Job, nodes: list[DraftNode]) -> list[messages.Node]:
        """Nodes that were not sent for this text yet, numbered behind those that were."""
        uid, base = job.text.uid, self._host.length(job.text.uid)
        answer = self._answers.get(uid)
        if answer is None or answer.stream is not job.stream or answer.base != base:
            answer = self._answers[uid] = _SentDraft(job.stream, base)
        answer.chain = _first_path(nodes)
        return [node.message() for node in answer.sent.add(nodes)[1]]

    # ---------------------------------------------------------------- outcomes

    def _plan_outcomes(self, job: Job, nodes: list[DraftNode]) -> None:
        uid, host = job.text.uid, self._host
        answer, base = self._answers[uid], host.length(uid)
        room = min(self._limits.outcome_nodes, MAX_NODES - len(answer.sent.nodes))
        depth = min(job.num_nodes, self._context - base - len(answer.chain) - 1)
        if not answer.chain or depth < 1 or room < 2:
            self._reply([(job, [], True)])
        elif isinstance(host, GeneralHost):
            self._reply([(job, self._general_outcomes(job, host, min(depth, room - 1)), True)])
        else:
            numbers = answer.sent.add(nodes)[0]  # a model's draft is a chain
            survival = self._survival.curve(len(answer.chain), uid)
            self._ahead[uid] = _Ahead(job, OutcomeTree(uid, base, list(answer.chain), survival, room, depth), numbers)

    def _general_outcomes(self, job: Job, host: GeneralHost, depth: int) -> list[messages.Node]:
        """Draft behind the whole chain, the only outcome that look-ups know."""
        answer = self._answers[job.text.uid]
        began = time.perf_counter()
        nodes = host.ahead(job.text.uid, answer.chain, depth)
        self._counters.seconds.labels("outcomes").observe(time.perf_counter() - began)
        chain = [DraftNode(number - 1, token) for number, token in enumerate(answer.chain)]
        shift = len(chain)
        behind = [DraftNode(node.parent + shift, node.token, node.distribution) for node in nodes]
        new = answer.sent.add([*chain, *behind])[1]
        self._counters.outcomes.inc(len(new))
        return [node.message() for node in new]

    def _look_ahead(self) -> None:
        """One pass for trees of equal depth, of rows without newer messages."""
        for uid in [uid for uid, ahead in self._ahead.items() if not self._texts.is_current(ahead.job)]:
            del self._ahead[uid]
            self._counters.stale.inc()
        if not self._ahead:
            return
        first = next(iter(self._ahead.values())).tree
        alike = [a for a in self._ahead.values() if (a.tree.level, a.tree.width) == (first.level, first.width)]
        alike = alike[: self._limits.batch_size]
        began = time.perf_counter()
        try:
            with self._span("outcomes", [ahead.job for ahead in alike]):
                found = grow(self._host, [ahead.tree for ahead in alike])  # type: ignore[arg-type]
        except OutriderError as error:
            for ahead in alike:
                del self._ahead[ahead.tree.uid]
            self._reply([(ahead.job, [], True) for ahead in alike])
            log.warning("no drafts for outcomes: %s", error)
            return
        self._counters.seconds.labels("outcomes").observe(time.perf_counter() - began)
        replies = []
        for ahead in alike:
            uid = ahead.tree.uid
            new = self._number_ahead(ahead, found[uid])
            self._counters.outcomes.inc(len(new))
            if ahead.tree.is_done:
                del self._ahead[uid]
            if self._texts.is_current(ahead.job):
                replies.append((ahead.job, new, ahead.tree.is_done))
        self._reply(replies)

    def _number_ahead(self, ahead: _Ahead, nodes: list[DraftNode]) -> list[messages.Node]:
        sent, new = self._answers[ahead.tree.uid].sent, []
        for node in nodes:
            parent = ahead.numbers[node.parent] if node.parent >= 0 else -1
            number, added = sent.add_one(parent, node.token, node.distribution)
            ahead.numbers.append(number)
            if added is not None:
                new.append(added.message())
        return new

    # ---------------------------------------------------------------- answers and ends

    def _reply(self, answers: list[tuple[Job, list[messages.Node], bool]]) -> None:
        by_stream: dict[int, tuple[AskerCall, list[messages.RowReply]]] = {}
        for job, nodes, finished in answers:
            base = self._host.length(job.text.uid)
            reply = messages.RowReply(row=job.text.number, base_length=base, nodes=nodes, finished=finished)
            by_stream.setdefault(id(job.stream), (job.stream, []))[1].append(reply)
        for stream, replies in by_stream.values():
            stream.send(replies)

    def _trouble(self, job: Job, kind: messages.Trouble, reason: str) -> None:
        self._counters.trouble(kind)
        base = job.start + len(job.tail)
        job.stream.send([
            messages.RowReply(row=job.text.number, base_length=base, finished=True, trouble=kind, reason=reason)
        ])  # fmt: skip

    def _refuse(self, jobs: list[Job], reason: str, kind: messages.Trouble = messages.TROUBLE_REFUSED) -> None:
        for job in jobs:
            self._texts.remove(job.text)
            self._forget(job.text.uid)
            self._trouble(job, kind, reason)

    def _forget(self, uid: int) -> None:
        self._ahead.pop(uid, None)
        self._answers.pop(uid, None)
        if uid in self._host.uids:
            self._host.stop(uid)
            self._survival.forget(set(self._host.uids))

    def _forget_all(self) -> None:
        for uid in list(self._host.uids):
            victim = self._texts.least_recent([uid], but=())
            if victim is not None:
                self._texts.remove(victim)
            self._forget(uid)


def _first_path(nodes: Sequence[DraftNode]) -> list[int]:
    """Tokens of the path of first children."""
    children: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        children[node.parent].append(number)
    path, at = [], -1
    while children[at]:
        at = children[at][0]
        path.append(nodes[at].token)
    return path


def _num_agreeing(chain: Sequence[int], tokens: Sequence[int]) -> int:
    pairs = zip(chain, tokens, strict=False)
    return next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(chain), len(tokens)))
