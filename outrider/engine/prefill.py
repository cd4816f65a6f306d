"""Reading prompts, a chunk at a time, alongside the batch that is being decoded.

Prompts are read in rows of a cache of their own: several in turns, one chunk of one prompt between
two steps of the batch, so that a long prompt delays nobody's next token by more than a chunk. What
is known of the prompt's beginning comes from the page pool. A prompt that is read moves into the
batch as keys and values; nothing is computed twice.

Pages hold whole chunks of prompts only, unless this model's keys have the same bits however a text
is cut into passes (`reads_any_way`, measured): then they may also hold what decoding wrote, in
small pages.

A text may have an answer's beginning after its prompt: of a request that continues elsewhere, or
that lost its keys. That part is read as decoding would have, in passes no wider than those whose
bits were compared, so that the text continues as it would have.

A prompt that is read sparsely (`outrider/prefill.py`) neither takes pages nor gives any: its keys
are not those of the same text read whole.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.engine.request import ActiveRequest
from outrider.kv.draft_pages import DraftPages, shortest
from outrider.kv.pages import PagePool
from outrider.kv.state_pool import StatePool
from outrider.models.lm import LM, PREFILL_CHUNK, PassLimits
from outrider.models.probes.probe import probe_tokens
from outrider.prefill import SparsePrefill

SMALL_PAGE = 32  # tokens, where bits do not depend on how a text is cut
# tokens of an answer that are read in one pass: a width that `find_pass_limits` compares with
# decoding's
ANSWER_CHUNK = 24
Pool: TypeAlias = PagePool | StatePool  # of what texts begin with

# of the 300 tokens that are read in several ways
CUTS = ((256, 44), (1, 8, 3, 64, 100, 5, 119), (7, 256, 37))


class Prefiller:
    """Reads prompts in chunks between steps. Lives in the engine's thread."""

    def __init__(
        self,
        target: LM,
        pool: Pool,
        drafts: DraftPages,
        signals: tuple[int, ...],
        sparse: SparsePrefill | None = None,
    ) -> None:
        self.lm = target.twin()
        self._signals = signals
        self._pool = pool
        self._drafts = drafts
        self._sparse = sparse
        self._lanes: list[ActiveRequest] = []  # by row of the cache
        self._turns: deque[ActiveRequest] = deque()

    def __len__(self) -> int:
        return len(self._lanes)

    def __contains__(self, active: ActiveRequest) -> bool:
        return active in self._lanes

    def begin(self, active: ActiveRequest) -> None:
        """Queues a request's prompt for reading.

        Known keys and values are loaded at once, unless the caller wants more of every prompt
        token. A drafter that reads hidden states gets none for tokens from pages. If it keeps pages
        of its own, the target's are used as far as those; otherwise it starts after them.
        """
        row = self.lm.kv.add_row()
        self._lanes.append(active)
        self._turns.append(active)
        active.signals = []
        active.draft_parts = []
        active.sparse = None
        if active.request.prompt_logprobs is not None:
            active.prompt_logprobs = [None]  # nothing predicts the first token
        else:
            known = active.row.tokens[:-1]
            active.draft_parts = self._drafts.copy(known)
            if self._sparse is not None and self._sparse.takes(active.row.num_prompt):
                prompt = active.row.tokens[: active.row.num_prompt]
                active.sparse = self._sparse.reading(prompt)
                return
            max_length = shortest(active.draft_parts) if self._signals else None
            pages = self._pool.load(known[: self._shared(active)], self.lm.kv, row, max_length)
            active.cached_tokens = min(pages, active.row.num_prompt)

    def drop(self, active: ActiveRequest) -> None:
        """It is not to be read any further."""
        row = self._lanes.index(active)
        self.lm.kv.swap_remove(row)
        self._lanes[row] = self._lanes[-1]
        self._lanes.pop()
        self._turns.remove(active)

    @torch.inference_mode()
    def advance(self) -> ActiveRequest | None:
        """One chunk of whose turn it is; returns it when its prompt is read (it stays here until it
        is taken)."""
        active = self._turns[0]
        self._turns.rotate(-1)
        row = self._lanes.index(active)
        tokens = active.row.tokens
        done = self.lm.kv.text_length(row)
        if active.sparse is not None:
            if not active.sparse.advance(self.lm, row):
                return None
            active.row.prompt_share = active.sparse.share
            active.sparse = None
            return active if self.lm.kv.text_length(row) >= len(tokens) - 1 else None
        chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
        prompt = active.row.num_prompt - 1  # what is read as a prompt
        chunk = chunk[
            : prompt - done
            if done < prompt
            else min(ANSWER_CHUNK, self.lm.limits.max_tokens_per_pass)
        ]
        if chunk:
            wanted = active.request.prompt_logprobs if done < prompt else None
            as_prompt = torch.arange(len(chunk) if wanted is not None else 1, device=self.lm.device)
            columns = as_prompt if done < prompt else None  # an answer is read as decoding would
            ids = torch.tensor([chunk], device=self.lm.device)
            output = self.lm.forward(ids, columns=columns, first_row=row, capture=self._signals)
            self.lm.kv.advance(row, len(chunk))
            self._save(active, row)
            if self._signals:
                active.signals.append(
                    (
                        done,
                        {layer: states[0, : len(chunk)] for layer, states in output.hidden.items()},
                    )
                )
            if wanted is not None and active.prompt_logprobs is not None:
                active.prompt_logprobs += _logprobs(
                    output.logits[0], tokens[done + 1 : done + len(chunk) + 1], wanted
                )
        return active if self.lm.kv.text_length(row) >= len(tokens) - 1 else None

    def take(self, active: ActiveRequest) -> Any:
        """The cache entries of a prompt that is read (`KVCache.pack`)."""
        packed = self.lm.kv.pack(self._lanes.index(active))
        self.drop(active)
        return packed

    def _save(self, active: ActiveRequest, row: int) -> None:
        """Keep the part of a prompt that was read so far in the pool, whatever becomes of the
        request."""
        length = self.lm.kv.lengths[row]
        if length == self.lm.kv.text_length(row):
            self._pool.save(active.row.tokens, self.lm.kv, row, min(length, self._shared(active)))

    def _shared(self, active: ActiveRequest) -> int:
        """Tokens of its text whose keys other texts may have: an answer's only where bits do not
        tell how they were written."""
        return (
            len(active.row.tokens) if self._pool.page < PREFILL_CHUNK else active.row.num_prompt - 1
        )

    def reset(self) -> list[ActiveRequest]:
        """Forget what was read, after an error; returns who was being read, whose turn it was
        first."""
        turns = [*self._turns][-1:] + [*self._turns][:-1]
        self._lanes.clear()
        self._turns.clear()
        self.lm.kv.clear()
        return turns


@torch.inference_mode()
def reads_any_way(target: LM) -> bool:
    """Whether keys and values have the same bits however a text is cut into passes.

    Measured on one text, except where loading found that no pass has limits.
    """
    if target.limits == PassLimits(granularity=1):
        return True
    if target.limits.granularity > 2:
        return False
    total = sum(CUTS[0])
    if target.shape.context_length < total + 1:
        return False
    tokens = probe_tokens(target.shape.vocab_size, total, target.device)
    read = []
    for cut in CUTS:
        lm = target.twin()
        lm.kv.add_row()
        for width in cut:
            start = lm.kv.lengths[0]
            lm.forward(tokens[:, start : start + width])
            lm.kv.advance(0, width)
        read.append(lm.kv.read(0, 0, total))
    return all(torch.equal(a, b) for other in read[1:] for a, b in zip(read[0], other, strict=True))


def make_pool(target: LM, positions: int) -> Pool:
    """Pages for this many positions; large ones where only whole chunks may be shared."""
    if not target.kv.by_position:
        page = 1 if target.limits.exact_rows else PREFILL_CHUNK
        return StatePool(page=page, num_pages=positions // page)
    page = SMALL_PAGE if reads_any_way(target) else PREFILL_CHUNK
    return PagePool(
        target.shape.layers, target.dtype, target.device, page=page, num_pages=positions // page
    )


def _logprobs(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, float] | None]:
    """Per output the log-probability of the token that follows it, and of the `count` likeliest
    ones."""
    logprobs = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    top = torch.topk(logprobs, count)
    chosen = logprobs[
        torch.arange(len(tokens)), torch.tensor(tokens, device=logprobs.device)
    ].tolist()
    tops: list[dict[int, float] | None] = []
    for token, mass, ids, values in zip(
        tokens, chosen, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        tops.append({**dict(zip(ids, values, strict=True)), token: mass})
    return tops
