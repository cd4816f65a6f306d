"""What a caller asks of the engine, and what comes back while it runs.

    Request   prompt tokens, sampling, speculation, priority          -> Engine.submit(request, listener)
    Update    what one step added to the answer                       <- listener(update), from the engine's thread
    Finish    why it ended and what it cost; carried by the last Update

A request is refused before anything runs (RequestError, ConfigError, CapabilityError, QueueFullError, UnavailableError); once
accepted, it ends with exactly one `Finish`, whatever happens.

A request may begin in the middle of its answer: `committed` are output tokens that another engine emitted for the same prompt,
parameters and seed. Text, stop strings, grammar, penalties and limits go on as if this engine had emitted them, and updates
start behind them; `stats` count this engine's part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from outrider.errors import ConfigError, OutriderError
from outrider.sampling.constraint import Constraint
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

Mode = Literal["auto", "fixed", "off"]
MODES: tuple[Mode, ...] = ("auto", "fixed", "off")
FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How one request is drafted for, in whatever batch it runs. Raises ConfigError when the fields contradict each other."""

    mode: Mode = "auto"  # auto: the server's control decides each step; fixed: max_draft_tokens every step; off: none
    drafter: str | None = None  # one of the engine's; None: its first
    max_draft_tokens: int | None = None  # auto: an upper bound; fixed: the number
    invariant: bool | None = None  # drafter-invariant sampling: same seed, same text, under any load. None: when seeded
    lossy: str | None = None  # a lossy verifier by name, where the operator allowed it

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"speculation.mode must be one of {', '.join(MODES)}, got '{self.mode}'")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 1:
            raise ConfigError(f"speculation.max_draft_tokens must be at least 1, got {self.max_draft_tokens} (mode 'off': none)")
        if self.mode == "fixed" and self.max_draft_tokens is None:
            raise ConfigError("speculation.mode 'fixed' needs max_draft_tokens")
        if self.mode == "off" and (self.drafter or self.max_draft_tokens or self.lossy):
            raise ConfigError("speculation.mode 'off' drafts nothing: leave out drafter, max_draft_tokens and lossy")
        if self.lossy and self.invariant:
            raise ConfigError("speculation.lossy and speculation.invariant contradict each other: invariant text is lossless")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued once; a caller that wants n answers submits n requests."""

    id: str  # unique among the requests that are alive
    prompt: list[int]
    params: SamplingParams
    speculation: Speculation = field(default_factory=Speculation)
    constraint: Constraint | None = None  # a grammar, fresh for this request
    prediction: list[int] | None = None  # tokens that the answer is expected to have: then drafter 'prediction' drafts
    priority: int = 0  # smaller runs first, as in vLLM
    timeout_s: float | None = None  # from submission; then it finishes as "timeout" with what there is
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: none wanted
    committed: list[int] = field(default_factory=list)  # output tokens emitted elsewhere; the answer goes on behind them

    @property
    def is_predicted(self) -> bool:
        """Whether it is drafted for from its prediction. An empty one says nothing."""
        return bool(self.prediction) and self.speculation.mode != "off"

    @property
    def is_invariant(self) -> bool:
        """Whether its text must not depend on drafter, length or load."""
        wanted = self.speculation.invariant
        return self.params.seed is not None and self.speculation.lossy is None if wanted is None else wanted


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a request."""

    reason: FinishReason
    stats: DecodeStats  # ttft_s counts from submission, waiting included
    seed: int
    lossless: bool
    drafter: str
    stop_reason: int | str | None = None  # with reason "stop": the stop string or stop_token_ids entry that ended it
    reproducible: bool = True  # the text follows from prompt, parameters and seed, whatever ran beside it
    queued_s: float = 0.0  # from submission to the first prompt chunk
    prefill_s: float = 0.0  # of reading the prompt
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were there already
    preemptions: int = 0
    error: OutriderError | None = None  # with reason "error"


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one step added. The last one carries `finish`, and may add nothing."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # per token: accepted, correction, bonus, plain
    pieces: list[str] = field(default_factory=list)  # text released by each token
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per token, where asked for
    prompt_logprobs: list[dict[int, float] | None] | None = None  # once, with the first update; None for the first token
    finish: Finish | None = None
    drafted: int = 0  # draft tokens that the steps behind `token_ids` submitted


Listener = Callable[[Update], None]  # called in the engine's thread: hand over and return
