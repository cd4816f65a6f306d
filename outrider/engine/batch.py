"""The rows being decoded, and the one `Decoder` they share: joining, leaving, stepping, and finding
who broke a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.build import Built
from outrider.decode import Decoder
from outrider.engine.draft_prefill import DraftPrefill
from outrider.engine.drafter_pool import DrafterPool
from outrider.engine.mailbox import Heartbeat
from outrider.engine.prefill import Pool
from outrider.engine.request import ActiveRequest
from outrider.kv import KVCache
from outrider.kv.draft_pages import DraftPages
from outrider.models.lm import PREFILL_CHUNK
from outrider.stats import PHASES
from outrider.step import Control, StepFacts

log = logging.getLogger("outrider.engine")


@dataclass
class Stepped:
    """The outcome of a step."""

    requests: list[ActiveRequest]
    taken: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, of the whole step
    facts: StepFacts | None = None  # None after a failure


class Batch:
    """Lives in the engine's thread."""

    def __init__(self, drafter_pool: DrafterPool, heartbeat: Heartbeat) -> None:
        self._drafter_pool = drafter_pool
        self._heartbeat = heartbeat
        self.built = self._build()
        self._facts: StepFacts | None = None  # of the latest step
        self._running: dict[int, ActiveRequest] = {}  # by number, which is the row's `request`
        self._failed: list[tuple[ActiveRequest, Exception]] = []

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, active: ActiveRequest) -> bool:
        return active.number in self._running

    @property
    def decoder(self) -> Decoder:
        return self.built.decoder

    @property
    def kv(self) -> KVCache:
        """The target's."""
        return self.built.target.lm.kv

    @property
    def control(self) -> Control:
        """The control that chooses lengths."""
        return self._draft_prefill.control

    @property
    def _draft_prefill(self) -> DraftPrefill:
        control = self.decoder.control
        assert isinstance(control, DraftPrefill), "the drafter pool builds no other"
        return control

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((len(row.tokens) for row in self.decoder.rows), default=0)

    def last(self) -> ActiveRequest | None:
        """The least urgent request."""
        return max(self._running.values(), default=None)

    def take_failed(self) -> list[tuple[ActiveRequest, Exception]]:
        """Requests that cannot continue and have left the batch, since this was asked last."""
        failed = self._failed
        self._failed = []
        return failed

    def join(self, active: ActiveRequest) -> None:
        """With the keys, values and hidden states it brings. One that a drafter, which may be
        anybody's code, cannot take leaves again (`take_failed`)."""
        try:
            self._join(active)
        except Exception as error:
            log.warning("request %s cannot join", active.request.id, exc_info=error)
            if active in self:
                self._remove(active, self._index(active))
            self._failed.append((active, error))

    def _join(self, active: ActiveRequest) -> None:
        parked = active.parked
        active.parked = None
        state = active.draft_state
        active.draft_state = None
        parts = active.draft_parts
        active.draft_parts = []
        signals = active.signals
        active.signals = []
        self._drafter_pool.choose(self.decoder.drafter, active.drafter)
        self.decoder.add(active.row)
        active.row.num_learned = 0
        self._running[active.number] = active
        index = len(self.decoder.rows) - 1
        if parked is not None:
            self.kv.unpack(index, parked)
        drafter = self.decoder.drafter
        if state is not None:
            drafter.unpack(state)
        elif parts:
            for cache, part in zip(drafter.text_caches, parts, strict=True):
                cache.put(index, 0, part)
        for start, hidden in signals:
            drafter.read(index, start, hidden)

    def park(self, active: ActiveRequest, *, anew: bool = False) -> None:
        """Out of the batch, to come back as it was. `anew`: what its drafter knew of it is not to
        be trusted. What a drafter must read again (hidden states) only a pass gives: then the
        request comes back through its prompt."""
        index = self._index(active)
        drafter = self.decoder.drafter
        active.draft_state = None if anew else drafter.pack(index)
        if not drafter.signals or active.draft_state is not None:
            active.parked = self.kv.pack(index)
        active.row.num_learned = 0 if anew else len(active.row.tokens)
        self._remove(active, index)

    def leave(self, active: ActiveRequest, pool: Pool, drafts: DraftPages) -> None:
        """For good. What it read and wrote stays known, where decoding writes the bits that reading
        would; a draft's keys may have any."""
        index = self._index(active)
        is_whole = self.kv.text_length(index) == self.kv.lengths[index]
        if is_whole and pool.page < PREFILL_CHUNK:
            pool.save(active.row.tokens, self.kv, index, self.kv.lengths[index])
        drafts.save(active.row.tokens, self.decoder.drafter.text_caches, index)
        self._remove(active, index)

    def step(self, drafts: DraftPages) -> Stepped:
        """One step of all rows. What a draft with windows has read is kept at once: later it holds
        the ends of texts alone."""
        rows = self.decoder.rows
        requests = [self._running[row.request] for row in rows]
        stats = rows[0].stats
        before = dict(stats.time_s)
        try:
            taken = self.decoder.step()
        except Exception as error:  # noqa: BLE001  drafters, verifiers and grammars may be anybody's code
            return self._one_by_one(requests, error)
        for index in self._draft_prefill.fed if drafts.forget else ():
            drafts.save(rows[index].tokens, self.decoder.drafter.text_caches, index)
        seconds = {phase: len(requests) * (stats.time_s[phase] - before[phase]) for phase in PHASES}
        facts = self._facts
        self._facts = None
        return Stepped(requests, taken, seconds, facts)

    def observe(self, facts: StepFacts) -> None:
        """The decoder's step is over."""
        self._facts = facts

    def reset(self) -> None:
        """Nobody runs; a decoder as new on the same models, with what its control has learned."""
        for model in (self.built.target, self.built.draft):
            if model is not None:
                model.lm.kv.clear()
        self.built = self._build(self.control)
        self._running.clear()

    def _build(self, control: Control | None = None) -> Built:
        built = self._drafter_pool.build(control)
        built.decoder.observers.append(self)
        return built

    def _one_by_one(self, requests: list[ActiveRequest], error: Exception) -> Stepped:
        """Repeat a failed step for every row alone: a row that fails alone caused the failure, the
        others continue. A step that failed after its verdict may have ended rows; these emit
        nothing more.
        """
        log.warning(
            "a step of %d rows failed: looking for the request to blame",
            len(requests),
            exc_info=error,
        )
        for active in requests:
            self.park(active, anew=True)
        self.reset()
        over, going = (
            [active for active in requests if bool(active.row.finish_reason) is ended]
            for ended in (True, False)
        )
        if len(requests) == 1 and going:
            self._failed.append((requests[0], error))
            return Stepped([])
        done = Stepped([*over])
        for active in going:
            self._heartbeat.beat()  # all of them in one turn may take long
            self.join(active)
            if active not in self:
                continue
            try:
                self.decoder.step()
            except Exception as own:  # noqa: BLE001
                self.reset()
                self._failed.append((active, own))
            else:
                done.requests.append(active)
                self.park(active, anew=True)
        for active in done.requests[len(over) :]:
            self.join(active)
        return done

    def _remove(self, active: ActiveRequest, index: int) -> None:
        self.decoder.remove(index)
        del self._running[active.number]

    def _index(self, active: ActiveRequest) -> int:
        return next(
            index for index, row in enumerate(self.decoder.rows) if row.request == active.number
        )
