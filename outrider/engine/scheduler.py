"""The scheduler: the state of every request, and how requests move between states as rows and
memory allow.

    waiting -> prompt being read -> batch
       ^                              |
       +--- preempted, keys parked ---+

A request starts when there is a row for it and memory for its text alongside its neighbours', which
must be able to grow. Where that is not so, the least urgent row is preempted: for a more urgent
request, or for texts that have grown.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from outrider.engine.batch import Batch
from outrider.engine.drafter_pool import DrafterPool
from outrider.engine.mailbox import Heartbeat
from outrider.engine.observer import Observer
from outrider.engine.prefill import Prefiller, make_pool
from outrider.engine.request import ActiveRequest, EngineSettings
from outrider.errors import ConfigError
from outrider.kv.cache import BLOCK, KVCache
from outrider.kv.draft_pages import DraftPages
from outrider.models.loading.memory import available_memory

# positions: of one request, while its prompt is read and while it is answered
MIN_POSITIONS = 2 * BLOCK
# positions a step may write after a row's committed ones: pending token, draft, padding
MARGIN = 64


class Queued(Protocol):
    """The facts about a waiting request that the queue needs."""

    @property
    def rank(self) -> tuple[int, int]:
        """(priority, number of arrival): smaller runs first."""


Member = TypeVar("Member", bound=Queued)


class WaitingQueue(Generic[Member]):
    """The waiting queue: smaller priority first, then first come, first served. A preempted request
    keeps its turn.

    A heap; members that were taken out by name are skipped when their turn comes.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Member]] = []
        self._alive: dict[tuple[int, int], Member] = {}

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._alive.values()))

    def push(self, member: Member) -> None:
        heapq.heappush(self._heap, (member.rank, member))
        self._alive[member.rank] = member

    def first(self) -> Member | None:
        """The request that is next; it stays in the queue."""
        while self._heap and self._alive.get(self._heap[0][0]) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, member: Member) -> None:
        self._alive.pop(member.rank, None)


class KVBudget:
    """Memory for keys and values: who may join, and who must go when texts grow.

    A cache is (slots x positions per slot), the same length for all, and grows in steps; so what a
    row costs depends on its neighbours. All questions are answered by asking the cache what it
    would become.

    `positions`: how many there is memory for, in the batch and in prompts being read together, if
    all layers hold them. `cost`: positions that a slot of some capacity takes as much memory as;
    fewer, where layers with windows forget. `context`: tokens of the longest text. Raises
    ConfigError where not even one request would fit: it would wait for ever.
    """

    def __init__(
        self,
        positions: int,
        batch: KVCache,
        prompts: KVCache,
        cost: Callable[[int], int] = int,
        context: int | None = None,
    ) -> None:
        if positions < MIN_POSITIONS:
            raise ConfigError(
                f"kv_memory is too small: alongside kept prefixes it holds {positions} tokens, and "
                "one request takes "
                f"{MIN_POSITIONS}; raise kv_memory, or lower prefix_share"
            )
        self.positions = positions
        self._batch = batch
        self._prompts = prompts
        self._cost = cost
        self._context = positions if context is None else context + MARGIN + BLOCK

    @property
    def longest(self) -> int:
        """Tokens that a row alone may grow to: once while its prompt is read, once in the batch."""
        lengths = range(BLOCK, max(self._context, BLOCK) + 1, BLOCK)
        return BLOCK * max(1, bisect_right(lengths, self.positions // 2, key=self._cost))

    @property
    def used(self) -> int:
        """Positions that the batch's texts take as much memory as."""
        lengths = self._batch.lengths
        return sum(lengths) if self._cost is int else sum(map(self._cost, lengths))

    def has_row(self, length: int, reading: int) -> bool:
        """Whether one more row fits into the batch alongside those that are being read.

        `length`: its tokens; `reading`: tokens of its prompt that are read alongside theirs (0:
        nothing to read). Gives memory back where caches are larger than they need to be.
        """
        return self._fits(
            self._batch.num_rows + self._prompts.num_rows + 1, length, 1 if reading else 0, reading
        )

    def can_grow(self, length: int) -> bool:
        """Whether the batch's rows may be `length` long; gives memory back like `has_row`."""
        return self._fits(self._batch.num_rows, length, 0, 0)

    def _fits(self, rows: int, length: int, more_prompts: int, reading: int) -> bool:
        prompts = self._prompts.num_rows + more_prompts
        if (
            self._total(
                self._batch.size_for(rows, length), self._prompts.size_for(prompts, reading)
            )
            <= self.positions
        ):
            return True
        tight = _tight(self._batch, rows, length), _tight(self._prompts, prompts, reading)
        if self._total(*tight) > self.positions:
            return False
        for cache, (slots, capacity) in zip((self._batch, self._prompts), tight, strict=True):
            cache.shrink(min(cache.num_slots, slots), min(cache.capacity, capacity))
        return True

    def _total(self, batch: tuple[int, int], prompts: tuple[int, int]) -> int:
        return batch[0] * self._cost(batch[1]) + prompts[0] * self._cost(prompts[1])


def _tight(cache: KVCache, rows: int, length: int) -> tuple[int, int]:
    """The smallest size that holds this many rows, the present ones and one of `length`."""
    longest = max([length, BLOCK, *cache.lengths])
    slots = 1
    while slots < max(rows, cache.num_rows):
        slots *= 2
    return slots, -(-longest // BLOCK) * BLOCK


class Scheduler:
    """Changed in the engine's thread alone. Raises ConfigError where memory is too small for a
    single request."""

    def __init__(
        self,
        drafter_pool: DrafterPool,
        settings: EngineSettings,
        observer: Observer,
        heartbeat: Heartbeat,
    ) -> None:
        self._settings = settings
        self._observer = observer
        self.batch = Batch(drafter_pool, heartbeat)
        target = self.batch.built.target.lm
        drafter = self.batch.decoder.drafter
        caches = drafter_pool.caches(drafter)
        self._token_bytes = max(1, sum(cache.bytes_per_token for cache in caches))
        # of models, which outlive decoders
        self._windowed = [cache for cache in caches if cache.window is not None]
        positions = settings.kv_bytes(available_memory(target.device)) // self._token_bytes
        self.pool = make_pool(target, int(positions * settings.prefix_share))
        self.drafts = DraftPages(drafter.text_caches, self.pool.num_pages * self.pool.page)
        self.prefiller = Prefiller(
            target, self.pool, self.drafts, drafter.signals, self.batch.built.prefill
        )
        self.kv_budget = KVBudget(
            positions - self.pool.num_pages * self.pool.page,
            target.kv,
            self.prefiller.lm.kv,
            self._cost if self._windowed else int,
            self.batch.built.context,
        )
        self.waiting: WaitingQueue[ActiveRequest] = WaitingQueue()
        self.preemptions = 0

    @property
    def num_started(self) -> int:
        """Requests that are read or answered."""
        return len(self.batch) + len(self.prefiller)

    @property
    def longest(self) -> int:
        """Tokens of a request, prompt and answer, that there is memory for."""
        return self.kv_budget.longest - MARGIN

    def _cost(self, capacity: int) -> int:
        """Positions of all layers that a row's slots of this capacity take as much memory as."""
        return (
            capacity
            - sum(cache.saved_bytes(capacity) for cache in self._windowed) // self._token_bytes
        )

    # ---------------------------------------------------------------- joining

    def admit(self) -> None:
        """Let requests start while there are rows and memory; a more urgent one replaces the least
        urgent."""
        while (active := self.waiting.first()) is not None and len(
            self.prefiller
        ) < self._settings.max_prefills:
            if self._can_start(active):
                self.waiting.remove(active)
                self._begin(active)
                continue
            victim = self.batch.last()
            if victim is None or victim.request.priority <= active.request.priority:
                return
            self._preempt(victim)

    def join(self, active: ActiveRequest) -> None:
        """Its prompt is read: into the batch."""
        active.parked = self.prefiller.take(active)
        self.batch.join(active)
        if active.joined is None and active in self.batch:
            active.joined = time.perf_counter()
            started = active.joined if active.started is None else active.started
            self._observer.prefilled(
                active.request,
                active.joined - started,
                round(active.row.prompt_share * active.row.num_prompt) - active.cached_tokens,
            )

    def _can_start(self, active: ActiveRequest) -> bool:
        if self.num_started >= self._settings.max_num_seqs:
            return False
        # and its neighbours must be able to grow, or it would be out again at once
        length = len(active.row.tokens) + MARGIN
        return self.kv_budget.has_row(
            max(length, self.batch.longest + MARGIN), 0 if active.parked is not None else length
        )

    def _begin(self, active: ActiveRequest) -> None:
        first = active.started is None
        cached = active.cached_tokens
        active.started = active.started or time.perf_counter()
        if active.parked is not None:
            self.batch.join(active)
            return
        self.prefiller.begin(active)
        if not first:
            active.cached_tokens = cached  # what its own first reading kept was no gift
        else:
            self._observer.admitted(
                active.request, active.started - active.submitted, active.cached_tokens
            )

    # ---------------------------------------------------------------- leaving

    def preempt_to_fit(self) -> None:
        """Texts grow: where memory does not, the least urgent row waits."""
        while len(self.batch) > 1 and not self.kv_budget.can_grow(self.batch.longest + MARGIN):
            victim = self.batch.last()
            assert victim is not None
            self._preempt(victim)

    def leave(self, active: ActiveRequest) -> None:
        """For good, wherever it stands."""
        if active in self.batch:
            self.batch.leave(active, self.pool, self.drafts)
        elif active in self.prefiller:
            self.prefiller.drop(active)
        else:
            self.waiting.remove(active)
        active.parked = active.draft_state = None

    def reset(self) -> None:
        """Nobody is read or answered, whatever state a failure left them in."""
        self.prefiller.reset()
        self.batch.reset()

    def forget_texts(self) -> None:
        """All that is kept of texts seen before, and what those that left were read into: a masked
        NaN still enters products."""
        self.pool.clear()
        self.drafts.clear()
        self.prefiller.lm.kv.scrub()

    def _preempt(self, active: ActiveRequest) -> None:
        """Out of the batch, to come back as it was."""
        self.batch.park(active)
        active.preemptions += 1
        self.preemptions += 1
        self.waiting.push(active)
        self._observer.preempted(active.request)

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is left of requests that are all over: rows, prompts,
        pages that are nobody's."""
        draft = self.batch.built.draft
        caches = {
            "batch": self.batch.kv,
            "prompts": self.prefiller.lm.kv,
            "draft": draft.lm.kv if draft else None,
        }
        for name, cache in caches.items():
            if cache is not None:
                cache.check_integrity()
                assert cache.num_rows == 0, f"{cache.num_rows} rows are left in the {name} cache"
        self.pool.check_integrity()
        self.drafts.check_integrity()
