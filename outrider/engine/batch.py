"""The rows being decoded, and the one `Decoder` they share: joining, leaving, stepping, and finding who broke a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.build import Built
from outrider.decode import Decoder
from outrider.engine.draft_pages import DraftPages
from outrider.engine.lineup import Lineup
from outrider.engine.live import Live
from outrider.engine.mailbox import Heartbeat
from outrider.engine.prefill import Pool
from outrider.engine.watch import WatchedControl
from outrider.kv import KVCache
from outrider.models.lm import PREFILL_CHUNK
from outrider.stats import PHASES

log = logging.getLogger("outrider.engine")


@dataclass
class Stepped:
    """What a step did. `failed`: requests that cannot go on, which have left the batch."""

    lives: list[Live]
    taken: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, of the whole step; empty after a failure
    failed: list[tuple[Live, Exception]] = field(default_factory=list)


class Batch:
    """Lives in the engine's thread."""

    def __init__(self, lineup: Lineup, heartbeat: Heartbeat) -> None:
        self._lineup, self._heartbeat = lineup, heartbeat
        self.built: Built = lineup.build()
        self._running: dict[int, Live] = {}  # by number, which is the row's `request`

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, live: Live) -> bool:
        return live.number in self._running

    @property
    def decoder(self) -> Decoder:
        return self.built.decoder

    @property
    def kv(self) -> KVCache:
        """The target's."""
        return self.built.target.lm.kv

    @property
    def control(self) -> WatchedControl:
        control = self.decoder.control
        assert isinstance(control, WatchedControl)
        return control

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((len(row.tokens) for row in self.decoder.rows), default=0)

    def last(self) -> Live | None:
        """The least urgent request."""
        return max(self._running.values(), default=None)

    def join(self, live: Live) -> None:
        """With the keys, values and hidden states it brings."""
        parked, live.parked = live.parked, None
        state, live.draft_state = live.draft_state, None
        parts, live.draft_parts = live.draft_parts, []
        signals, live.signals = live.signals, []
        self._lineup.choose(self.decoder.drafter, live.drafter)
        self.decoder.add(live.row)
        self._running[live.number] = live
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

    def park(self, live: Live, *, anew: bool = False) -> None:
        """Out of the batch, to come back as it was. `anew`: what its drafter knew of it is not to be trusted. What a drafter must
        read again (hidden states) only a pass gives: then the request comes back through its prompt."""
        index, drafter = self._index(live), self.decoder.drafter
        live.draft_state = None if anew else drafter.pack(index)
        if not drafter.signals or live.draft_state is not None:
            live.parked = self.kv.pack(index)
        self._remove(live, index)

    def leave(self, live: Live, pool: Pool, drafts: DraftPages) -> None:
        """For good. What it read and wrote stays known, where decoding writes the bits that reading would; a draft's keys may
        have any."""
        index = self._index(live)
        if pool.page < PREFILL_CHUNK:
            pool.save(live.row.tokens, self.kv, index, self.kv.lengths[index])
        drafts.save(live.row.tokens, self.decoder.drafter.text_caches, index)
        self._remove(live, index)

    def step(self) -> Stepped:
        """One step of all rows."""
        rows = self.decoder.rows
        lives = [self._running[row.request] for row in rows]
        stats = rows[0].stats
        before = dict(stats.time_s)
        try:
            taken = self.decoder.step()
        except Exception as error:  # noqa: BLE001  drafters, verifiers and grammars may be anybody's code
            return self._one_by_one(lives, error)
        seconds = {phase: len(lives) * (stats.time_s[phase] - before[phase]) for phase in PHASES}
        return Stepped(lives, taken, seconds)

    def reset(self) -> None:
        """Nobody runs; a decoder as new on the same models, with what its control has learned."""
        control = self.control
        for model in (self.built.target, self.built.draft):
            if model is not None:
                model.lm.kv.clear()
        self.built = self._lineup.build()
        self.decoder.control = WatchedControl(control.inner, self.decoder.drafter)
        self._running.clear()

    def _one_by_one(self, lives: list[Live], error: Exception) -> Stepped:
        """A step failed. Every row makes it alone: whoever fails alone is to blame, the others go on. A step that failed behind
        its verdict may have brought rows to their end: they say nothing more."""
        log.warning("a step of %d rows failed: looking for the request to blame", len(lives), exc_info=error)
        for live in lives:
            self.park(live, anew=True)
        self.reset()
        over, going = ([live for live in lives if bool(live.row.finish_reason) is ended] for ended in (True, False))
        if len(lives) == 1 and going:
            return Stepped([], failed=[(lives[0], error)])
        done = Stepped([*over])
        for live in going:
            self._heartbeat.beat()  # all of them in one turn may take long
            self.join(live)
            try:
                self.decoder.step()
            except Exception as own:  # noqa: BLE001
                self.reset()
                done.failed.append((live, own))
            else:
                done.lives.append(live)
                self.park(live, anew=True)
        for live in done.lives[len(over) :]:
            self.join(live)
        return done

    def _remove(self, live: Live, index: int) -> None:
        self.decoder.remove(index)
        del self._running[live.number]

    def _index(self, live: Live) -> int:
        return next(index for index, row in enumerate(self.decoder.rows) if row.request == live.number)
