"""Requests as callers make them, the events that come back, and the settings of an operator.

    Request         prompt tokens, sampling, speculation, priority    -> Engine.submit(request, listener)
    Update          what one step added to the answer                 <- listener(update), from the engine's thread
    Finish          why it ended and what it cost; carried by the last Update
    ActiveRequest   the engine's own record of a request, from submission to its one `Finish`
    EngineSettings  limits and memory

A request is refused before anything runs (RequestError, ConfigError, CapabilityError,
QueueFullError, UnavailableError); once accepted, it ends with exactly one `Finish`, whatever
happens.

A request may begin in the middle of its answer: `committed` are output tokens that another engine
emitted for the same prompt, parameters and seed. Text, stop strings, grammar, penalties and limits
continue as if this engine had emitted them, and updates start after them; `stats` count this engine's
part alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from outrider.errors import ConfigError, OutriderError
from outrider.kv.draft_pages import Parts
from outrider.prefill import SparseReading
from outrider.rows import Row
from outrider.sampling.constraint import Constraint
from outrider.sampling.params import SamplingParams
from outrider.settings import checked, setting
from outrider.stats import DecodeStats

Mode = Literal["auto", "fixed", "off"]
FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@checked("speculation.")
@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How one request is drafted for, in whatever batch it runs. Raises ConfigError when the fields
    contradict each other."""

    # auto: the server's control decides each step; fixed: max_draft_tokens every step; off: none
    mode: Mode = "auto"
    drafter: str | None = None  # one of the engine's; None: its first
    max_draft_tokens: int | None = setting(
        None, "auto: an upper bound; fixed: the number", at_least=1
    )
    # drafter-invariant sampling: same seed, same text, under any load. None: when seeded
    invariant: bool | None = None
    lossy: str | None = None  # a lossy verifier by name, where the operator allowed it

    def __post_init__(self) -> None:
        if self.mode == "fixed" and self.max_draft_tokens is None:
            raise ConfigError("speculation.mode 'fixed' needs max_draft_tokens")
        if self.mode == "off" and (self.drafter or self.max_draft_tokens or self.lossy):
            raise ConfigError(
                "speculation.mode 'off' drafts nothing: leave out drafter, max_draft_tokens and "
                "lossy"
            )
        if self.lossy and self.invariant:
            raise ConfigError(
                "speculation.lossy and speculation.invariant contradict each other: invariant "
                "text is lossless"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued once; a caller that wants n answers submits n requests."""

    id: str  # unique among the requests that are alive
    prompt: list[int]
    params: SamplingParams
    speculation: Speculation = field(default_factory=Speculation)
    constraint: Constraint | None = None  # a grammar, fresh for this request
    # tokens that the answer is expected to have: then drafter 'prediction' drafts
    prediction: list[int] | None = None
    priority: int = 0  # smaller runs first, as in vLLM
    # from submission; then it finishes as "timeout" with what there is
    timeout_s: float | None = None
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: none wanted
    # output tokens emitted elsewhere; the answer continues after them
    committed: list[int] = field(default_factory=list)

    @property
    def is_predicted(self) -> bool:
        """Whether it is drafted for from its prediction. An empty one says nothing."""
        return bool(self.prediction) and self.speculation.mode != "off"

    @property
    def is_invariant(self) -> bool:
        """Whether its text must not depend on drafter, length or load."""
        wanted = self.speculation.invariant
        return (
            self.params.seed is not None and self.speculation.lossy is None
            if wanted is None
            else wanted
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a request."""

    reason: FinishReason
    stats: DecodeStats  # ttft_s counts from submission, waiting included
    seed: int
    lossless: bool
    drafter: str
    # with reason "stop": the stop string or stop_token_ids entry that ended it
    stop_reason: int | str | None = None
    # the text follows from prompt, parameters and seed, whatever ran alongside it
    reproducible: bool = True
    queued_s: float = 0.0  # from submission to the first prompt chunk
    prefill_s: float = 0.0  # of reading the prompt
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were there already
    prompt_share: float = 1.0  # of the prompt that was read; below 1 where it was read sparsely
    preemptions: int = 0
    error: OutriderError | None = None  # with reason "error"


@dataclass(frozen=True, kw_only=True)
class Update:
    """The output of one step. The last one carries `finish`, and may add nothing."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # per token: accepted, correction, bonus, plain
    origins: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text released by each token
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per token, where asked for
    # once, with the first update; None for the first token
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish: Finish | None = None
    drafted: int = 0  # draft tokens that the steps after `token_ids` submitted

    @classmethod
    def joined(cls, updates: Sequence[Update]) -> Update:
        """Several updates of one answer, in their order, as one."""
        return cls(
            text="".join(update.text for update in updates),
            token_ids=list(chain.from_iterable(update.token_ids for update in updates)),
            origins=list(chain.from_iterable(update.origins for update in updates)),
            pieces=list(chain.from_iterable(update.pieces for update in updates)),
            logprobs=list(chain.from_iterable(update.logprobs for update in updates)),
            prompt_logprobs=next(
                (
                    update.prompt_logprobs
                    for update in updates
                    if update.prompt_logprobs is not None
                ),
                None,
            ),
            finish=next((update.finish for update in updates if update.finish is not None), None),
            drafted=sum(update.drafted for update in updates),
        )


Listener = Callable[[Update], None]  # called in the engine's thread: hand over and return


@dataclass(eq=False)
class ActiveRequest:
    """A request that is waiting, being read or decoded. Belongs to the engine's thread once it is
    queued."""

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
    has_shown: bool = False  # whether anything was handed over
    drafted: int = 0  # draft tokens that were reported
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    parked: Any = None  # its keys and values while it is out of the batch (`KVCache.pack`)
    draft_state: Any = None  # what its drafter knew then (`Drafter.pack`)
    # what drafters' pages know of its prompt, until it joins the batch
    draft_parts: Parts = field(default_factory=list)
    sparse: SparseReading | None = None  # while its prompt is read sparsely
    # (start, layer -> (T, H)) for its drafter
    signals: list[tuple[int, dict[int, Tensor]]] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller runs first."""
        return self.request.priority, self.number

    def __lt__(self, other: ActiveRequest) -> bool:
        return self.rank < other.rank

    def is_late(self, now: float) -> bool:
        timeout = self.request.timeout_s
        return timeout is not None and now - self.submitted > timeout

    def show(self, finish: Finish | None = None) -> None:
        """Hand over what is new."""
        row = self.row
        new = slice(self.shown, len(self.row.origins))
        now = time.perf_counter()
        is_more = len(row.origins) > self.shown
        if is_more and self.first_token is None:
            self.first_token = now
        if self.first_token is not None and is_more:
            row.stats.ttft_s = self.first_token - self.submitted
            row.stats.decode_s = now - self.first_token
        pieces = row.pieces[new]
        # a time limit may end a row while text is held back
        rest = row.release() if finish is not None else ""
        self.listener(
            Update(
                text="".join(pieces) + rest,
                token_ids=row.output[new],
                origins=row.origins[new],
                pieces=pieces,
                logprobs=row.logprobs[new],
                prompt_logprobs=None if self.has_shown else self.prompt_logprobs,
                finish=finish,
                drafted=row.stats.drafted - self.drafted,
            )
        )
        self.shown = len(row.origins)
        self.has_shown = True
        self.drafted = row.stats.drafted

    def finish(self, reason: FinishReason, error: OutriderError | None = None) -> Finish:
        """The end, as numbers. Does not tell the listener."""
        now = time.perf_counter()
        started = now if self.started is None else self.started
        joined = started if self.joined is None else self.joined
        return Finish(
            reason=reason,
            stats=self.row.stats,
            seed=self.row.seed,
            lossless=self.lossless,
            drafter=self.drafter,
            reproducible=self.reproducible,
            stop_reason=self.row.stop_reason,
            queued_s=started - self.submitted,
            prefill_s=joined - started,
            prompt_tokens=self.row.num_prompt,
            cached_tokens=self.cached_tokens,
            prompt_share=self.row.prompt_share,
            preemptions=self.preemptions,
            error=error,
        )


GIB = 1 << 30


@checked()
@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Raises ConfigError for values that cannot be."""

    max_num_seqs: int = setting(32, "rows of a step", at_least=1)
    max_queue: int = setting(256, "requests that may wait; more are turned away", at_least=1)
    kv_memory: int | None = setting(
        None,
        "bytes for keys and values, drafts' included; None: half of what is free, 8 GiB at most",
        at_least=1 << 20,
    )
    prefix_share: float = setting(
        0.25,
        "of kv_memory, for keys and values of texts that may come again; 0: none are kept",
        at_least=0,
        below=1,
    )
    max_prefills: int = setting(
        4, "prompts read in turns, so that a short one need not wait for a long one", at_least=1
    )

    def kv_bytes(self, available: int) -> int:
        """Bytes for keys and values where `available` are free after loading."""
        return self.kv_memory or min(available // 2, 8 * GIB)
