"""A replacement for the n-gram table of SGLang's n-gram worker: the same calls, answered by one of
our drafters.

The worker asks with the ends of all texts and their lengths, and gets for each text a fixed number
of tokens to verify: the last one of the text, then the draft. Texts have names (request ids).
Drafts follow from the calls alone, so all ranks get the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.errors import CapabilityError
from outrider.integrations.vllm.drafting import Ask, BatchDrafter

CORPORA = "Outrider takes its texts when SGLang starts: OUTRIDER_DRAFTER=retrieval, OUTRIDER_DRAFTER_OPTIONS=corpus=PATH"


class Lookups:
    """A drafter behind the interface of SGLang's `NgramCorpus` (0.5.19)."""

    def __init__(self, drafting: BatchDrafter, num_tokens: int, context_length: int) -> None:
        """`num_tokens`: to verify for each text, its last one included
        (--speculative-num-draft-tokens)."""
        self._drafting = drafting
        self._num_tokens = num_tokens
        self._context = context_length
        self._requests: Mapping[str, Any] = {}
        self._lengths: dict[str, int] = {}  # of the texts of the last step

    def see(self, requests: Sequence[Any]) -> None:
        """SGLang's requests of the step that is asked for next; each has `rid`, `origin_input_ids`
        and `output_ids`."""
        self._requests = {request.rid: request for request in requests}

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens to verify (B x n,) int64, and the attention mask (B x n x n,) int64 of 0 and 1,
        for chains.

        batch_tokens: the ends of the texts, longer than what a step can add. total_lens: their
        lengths. What a draft leaves free repeats the text's last token; such a token is verified
        like any other.
        """
        asks = [self._ask(*row) for row in zip(req_ids, batch_tokens, total_lens, strict=True)]
        drafts = self._drafting.step(asks)
        self._lengths = dict(zip(req_ids, total_lens, strict=True))
        tokens = np.empty((len(asks), self._num_tokens), dtype=np.int64)
        for row, end, draft in zip(tokens, batch_tokens, drafts, strict=True):
            row[:] = end[-1]
            row[1 : 1 + len(draft)] = draft
        sees = np.tri(self._num_tokens, dtype=np.int64)
        return tokens.reshape(-1), np.broadcast_to(sees, (len(asks), *sees.shape)).reshape(-1)

    def _ask(self, name: str, end: Sequence[int], length: int) -> Ask:
        # of an unknown text one, as of any that begins
        new = length - self._lengths.get(name, length - 1)
        emitted = list(end[-new:]) if 0 < new <= len(end) else list(end[-1:])
        room = min(self._num_tokens - 1, self._context - length - 1)
        return Ask(name, length, emitted, lambda: self._text(name, end, length), max(0, room))

    def _text(self, name: str, end: Sequence[int], length: int) -> list[int]:
        """All tokens. What the last step added may not be in the request yet, where SGLang overlaps
        steps: it is in `end`."""
        request = self._requests[name]
        tokens = [*request.origin_input_ids, *request.output_ids]
        missing = length - len(tokens)
        if missing > len(end):
            raise CapabilityError(
                f"SGLang shows {len(tokens)} tokens of request '{name}' and counts {length}"
            )
        return [*tokens, *end[len(end) - missing :]] if missing > 0 else tokens[:length]

    # ---------------------------------------------------------------- the rest of NgramCorpus

    def synchronize(self) -> None:
        """Do nothing: there is no background work."""

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: texts are learned from when drafts are requested."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """Texts that a step does not ask about are forgotten there."""

    def reset(self) -> None:
        """SGLang has emptied its caches and dropped its texts; what was learned from them stays
        valid."""
        self._drafting.step([])
        self._lengths = {}
        self._requests = {}

    @property
    def remaining_token_budget(self) -> int:
        """Room for further corpora."""
        return 0

    def load_external_corpus_named(self, corpus_id: str, chunks: Any) -> int:
        """Refuses a corpus. Raises CapabilityError: SGLang answers the request for it with that."""
        raise CapabilityError(CORPORA)

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Raises CapabilityError."""
        raise CapabilityError(CORPORA)

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Raises CapabilityError."""
        raise CapabilityError(CORPORA)

    def list_external_corpora(self) -> dict[str, int]:
        """There are none."""
        return {}
