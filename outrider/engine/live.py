"""One request while it lives, from submission to its one `Finish`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outrider.engine.draft_pages import Parts
from outrider.engine.request import Finish, FinishReason, Listener, Request, Update
from outrider.errors import OutriderError
from outrider.rows import Row


@dataclass(eq=False)
class Live:
    """A request that is waiting, being read or decoded. Belongs to the engine's thread once it is queued."""

    request: Request
    listener: Listener
    row: Row
    number: int  # of arrival
    drafter: str
    lossless: bool
    reproducible: bool
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None  # its prompt began to be read
    joined: float | None = None  # it was first in the batch
    first_token: float | None = None
    shown: int = 0  # output tokens that were handed over, or were there before
    has_told: bool = False  # whether anything was handed over
    drafted: int = 0  # draft tokens that were told of
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    parked: Any = None  # its keys and values while it is out of the batch (`KVCache.pack`)
    draft_state: Any = None  # what its drafter knew then (`Drafter.pack`)
    draft_parts: Parts = field(default_factory=list)  # what drafters' pages know of its prompt, until it joins the batch
    signals: list[tuple[int, dict[int, Tensor]]] = field(default_factory=list)  # (start, layer -> (T, H)) for its drafter

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller runs first."""
        return self.request.priority, self.number

    def __lt__(self, other: Live) -> bool:
        return self.rank < other.rank

    def is_late(self, now: float) -> bool:
        timeout = self.request.timeout_s
        return timeout is not None and now - self.submitted > timeout

    def show(self, finish: Finish | None = None) -> None:
        """Hand over what is new."""
        row, new = self.row, slice(self.shown, len(self.row.origins))
        now = time.perf_counter()
        is_more = len(row.origins) > self.shown
        if is_more and self.first_token is None:
            self.first_token = now
        if self.first_token is not None and is_more:
            row.stats.ttft_s = self.first_token - self.submitted
            row.stats.decode_s = now - self.first_token
        pieces = row.pieces[new]
        rest = row.release() if finish is not None else ""  # a time limit may end a row while text is held back
        self.listener(
            Update(
                text="".join(pieces) + rest, token_ids=row.output[new], origins=row.origins[new], pieces=pieces,
                logprobs=row.logprobs[new], prompt_logprobs=None if self.has_told else self.prompt_logprobs, finish=finish,
                drafted=row.stats.drafted - self.drafted,
            )
        )  # fmt: skip
        self.shown, self.has_told, self.drafted = len(row.origins), True, row.stats.drafted

    def finish(self, reason: FinishReason, error: OutriderError | None = None) -> Finish:
        """The end, as numbers. Does not tell the listener."""
        now = time.perf_counter()
        started = now if self.started is None else self.started
        joined = started if self.joined is None else self.joined
        return Finish(
            reason=reason, stats=self.row.stats, seed=self.row.seed, lossless=self.lossless, drafter=self.drafter,
            reproducible=self.reproducible, stop_reason=self.row.stop_reason,
            queued_s=started - self.submitted, prefill_s=joined - started, prompt_tokens=self.row.num_prompt,
            cached_tokens=self.cached_tokens, preemptions=self.preemptions, error=error,
        )  # fmt: skip
