"""One row on the client's side: its chain of drafts, what was sent to the service, and how long a
step waits for it.

A step waits only while the draft can be expected to arrive before it would come too late: within
one pass of the target (what a plain step takes, so that a wait can never do more than double a
step), or the setting `max_wait_ms` where that is less. What passes and replies take is their
running median.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from outrider.errors import ConfigError
from outrider.remote.draft.chain import DraftChain, ReceivedNode
from outrider.remote.protocol import messages
from outrider.rows import Row
from outrider.sampling.params import SamplingParams

MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, where a top-k does nothing


def sampling_of(row: Row, vocab_size: int, *, coupled: bool, with_probs: bool) -> messages.Sampling:
    """The sampling options for drafts of this row. `coupled`: target and draft share their noise.

    Only such a row sends its seed. A service that knew another row's seed would know the coins of
    the verifier, and could choose drafts that bias the text. So it gets a number derived from the
    seed, and its draws repeat, too.
    """
    params = row.params
    sampling = messages.Sampling(
        temperature=params.temperature,
        top_k=min(max(params.top_k, 0), MAX_TOP_K),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        allowed_token_ids=params.allowed_token_ids or (),
        num_prompt=row.num_prompt,
        seed=row.seed % 2**64 if coupled else other_seed(row.seed),
        coupled=coupled and not params.is_greedy,
        deterministic=not with_probs,
        vocab_size=vocab_size,
    )
    for token, bias in (params.logit_bias or {}).items():
        sampling.logit_bias[token] = bias
    return sampling


def other_seed(seed: int) -> int:
    """A seed that follows from `seed` and does not tell it."""
    return int.from_bytes(hashlib.blake2b(f"draft {seed}".encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class RowOptions:
    """The fields of `Sampling` in the library's form."""

    # of the draft's distribution, which is cut to its likeliest tokens by top_k
    params: SamplingParams
    seed: int
    coupled: bool
    num_prompt: int


def row_options(
    sampling: messages.Sampling, vocab_size: int, distribution_tokens: int
) -> RowOptions:
    """The options of one row; top_p and repetition_penalty may be left out (0: off). Raises
    ConfigError for a value out of range.

    A drawn row's distribution is cut to `distribution_tokens` by its top-k, before anything is
    drawn. A deterministic row gets no distributions and is drafted greedily, because a one-hot
    draft is kept most often at the likeliest token.
    """
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias={
            token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size
        }
        or None,
        allowed_token_ids=_allowed(sampling, vocab_size),
    )
    if sampling.deterministic and not sampling.coupled:
        params = replace(params, temperature=0.0)
    elif not sampling.coupled and not params.is_greedy:
        params = replace(
            params,
            top_k=min(distribution_tokens, params.top_k)
            if params.top_k > 0
            else distribution_tokens,
        )
    return RowOptions(params, sampling.seed, sampling.coupled, sampling.num_prompt)


def _allowed(sampling: messages.Sampling, vocab_size: int) -> list[int] | None:
    """Allowed tokens within the draft's vocabulary; None: all. A target's padded vocabulary may be
    wider."""
    asked = list(sampling.allowed_token_ids)
    known = [token for token in asked if token < vocab_size]
    if asked and not known:
        raise ConfigError(
            f"no allowed token is below {vocab_size}, the width of the draft's vocabulary: "
            "nothing can be drafted"
        )
    return known or None


LATEST = 16  # times that a median is over
FIRST_S = 0.05  # a pass is taken to last, before one was seen
OVERDUE = 3.0  # times the usual reply, and a pass: then it is no longer expected
# steps in a row without a draft before a rest, and between two rests
MAX_MISSED = 24
ATTEMPT = 3
# steps
FIRST_REST = 8
LONGEST_REST = 128


class RunningMedian:
    """The median of the latest seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self.value: float | None = None  # None before the first

    def add(self, seconds: float) -> None:
        """Add one time."""
        self._latest.append(seconds)
        self.value = median(self._latest)


class DraftWait:
    """Decides how long a step waits for a draft."""

    def __init__(self, max_wait_s: float | None) -> None:
        """`max_wait_s`: the most a step waits; None: one pass."""
        self._max_wait_s = max_wait_s
        self.passes = RunningMedian()
        self.replies = RunningMedian()

    @property
    def budget_s(self) -> float:
        """Seconds that the present step may wait."""
        predicted = FIRST_S if self.passes.value is None else self.passes.value
        return predicted if self._max_wait_s is None else min(predicted, self._max_wait_s)

    def expects(
        self, asked_s: float, silent_since_s: float, now_s: float, deadline_s: float
    ) -> bool:
        """Whether a reply to what was asked at `asked_s` can be expected until the deadline.
        `silent_since_s`: when the first request was sent to which nothing has come yet: a service
        that is silent for longer than a pass beyond that is not waited for, so one that dies costs
        a single wait. All on one clock."""
        if now_s >= deadline_s:
            return False
        usual = self.replies.value
        if usual is None:
            return now_s - silent_since_s < self.budget_s
        return (
            asked_s + usual <= deadline_s
            and now_s - silent_since_s <= OVERDUE * usual + self.budget_s
        )


class Rests:
    """Steps in which a service is not asked, after many in a row for which it had nothing in time.

    Asking would cost its machine and the line, and bring nothing. The next attempt comes after a
    pause that doubles; one draft in time ends it.
    """

    def __init__(self) -> None:
        self._missed = 0  # attempts in a row
        # steps
        self._pause = 0
        self._left = 0

    @property
    def is_resting(self) -> bool:
        """Whether the present step asks for nothing."""
        return self._left > 0

    def observe(self, *, had_any: bool) -> None:
        """A step wanted drafts, and had one, or none at all."""
        if had_any:
            self._missed = self._pause = self._left = 0
        elif self._left:
            self._left -= 1
        else:
            self._missed += 1
            if self._missed >= MAX_MISSED:
                self._pause = min(2 * self._pause, LONGEST_REST) or FIRST_REST
                self._left = self._pause
                self._missed = MAX_MISSED - ATTEMPT


BUSY_S = 1.0  # that a busy service is left alone
# Requests that may be open at once: enough for a line that is several steps long; and few enough
# that a service which drops what is overtaken, and is slower than a step, gets to the end of one.
MAX_OPEN = 4
RETRY_S = 0.5  # after which another one is sent nevertheless
REMEMBERED = 64  # requests whose times are known


@dataclass(eq=False)
class RemoteText:
    """A row's text at the service. Of one drafter, in the engine's thread."""

    number: int  # what the row is called on the wire
    chain: DraftChain
    vocab_size: int  # of the target
    # tokens that were sent to the service; None: nothing yet, not even how to sample
    num_sent: int | None = None
    epoch: int = -1  # the stream on which that was
    asked: int | None = None  # base of the latest request for nodes
    # when requests were sent that nothing has come for, by base
    asked_s: dict[int, float] = field(default_factory=dict)
    rested: int = 0  # steps in a row that wanted no nodes
    wanted: int = 0  # nodes wanted in the present step
    latest_wanted: int = 0  # in the latest one that wanted any
    proposed: list[ReceivedNode] = field(default_factory=list)  # in the present step
    is_refused: bool = False  # the service drafts nothing for it
    busy_until_s: float = 0.0

    @property
    def silent_since_s(self) -> float | None:
        """When the first request was sent that may still be answered and is not; None: nothing is
        open."""
        return min(self.asked_s.values(), default=None)

    def answered(self, base: int) -> float | None:
        """Something came for this base: when it was first asked about; None where that is known
        already. Requests about shorter texts need no answer any more."""
        sent_s = self.asked_s.get(base)
        for asked in [asked for asked in self.asked_s if asked <= base]:
            del self.asked_s[asked]
        return sent_s

    def want(self, wanted: int) -> None:
        """The present step wants this many nodes."""
        self.wanted = wanted
        self.rested = 0 if wanted else self.rested + 1
        self.latest_wanted = wanted or self.latest_wanted

    def may_ask(self, epoch: int, now_s: float) -> bool:
        """Whether asking has a point."""
        if self.epoch != epoch:
            return True
        if self.is_refused or now_s < self.busy_until_s:
            return False
        return len(self.asked_s) < MAX_OPEN or now_s - max(self.asked_s.values()) > RETRY_S

    def request(
        self, row: Row, epoch: int, wanted: int, *, coupled: bool, with_probs: bool
    ) -> messages.RowRequest:
        """A request with the part of the text that the service lacks, for `wanted` nodes after it."""
        if self.epoch != epoch:
            self.num_sent = None
            self.epoch = epoch
            self.is_refused = False
            self.asked_s.clear()
        is_new = self.num_sent is None
        base = self.num_sent or 0
        sampling = (
            sampling_of(row, self.vocab_size, coupled=coupled, with_probs=with_probs)
            if is_new
            else None
        )
        self.num_sent = len(row.tokens)
        self.asked = len(row.tokens)
        self.asked_s.setdefault(self.asked, time.perf_counter())
        while len(self.asked_s) > REMEMBERED:
            # the oldest says how long the service has been silent
            self.asked_s.pop(sorted(self.asked_s)[1])
        return messages.RowRequest(
            row=self.number,
            base_length=base,
            tokens=row.tokens[base:],
            sampling=sampling,
            num_draft_tokens=wanted,
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """The text has grown to `tokens`."""
        self.chain.advance(tokens[self.chain.length :], self.proposed)
        self.proposed = []
