"""A causal language model on transformers' own cache: `LM` for what our cache cannot hold, one row at a time.

A pass over a row is [backlog + pending token + draft]: after a rejection the row's state goes back to what it was before the
pass, and the tokens that were accepted are fed again as the beginning of the next pass (`kv/states.py`). How a model may be fed,
`Feeding`, is found by trying when it is loaded (`check.py`): some take any number of tokens behind a state, some one at a time,
some compute another thing for a single token than for several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.kv.states import StateCache
from outrider.models.lm import LM, LMShape, PassOutput, module_run
from outrider.models.stateful.run import AnewRun, OwnCacheRun
from outrider.models.stateful.state import OwnState

CHAINS_ONLY = "a model on transformers' own cache does not take: its states cannot branch"
MAX_BACKLOG = 32  # tokens fed again as part of the next pass; more of them get a pass of their own


@dataclass(frozen=True)
class Feeding:
    """How many tokens a pass behind a state may have."""

    min_tokens: int = 1
    max_tokens: int | None = None  # None: any number

    def __str__(self) -> str:
        if self.max_tokens == 1:
            return "one token at a time"
        return "passes of any length" if self.min_tokens == 1 else f"passes of {self.min_tokens} tokens and more"


class StateLM(LM):
    """A model on transformers' own cache, with the interface of `LM`. `why`: what our cache cannot do for this model."""

    def __init__(
        self, own_run: OwnCacheRun, shape: LMShape, dtype: torch.dtype, device: torch.device, *,
        feeding: Feeding, bytes_per_token: int, why: str,
    ) -> None:  # fmt: skip
        self.states: StateCache[OwnState] = StateCache(shape.layers, dtype, device, bytes_per_token)
        super().__init__(module_run(own_run.module), shape, dtype, device, kv=self.states)
        self.own_run, self.feeding, self.why_own_cache = own_run, feeding, why

    def twin(self) -> StateLM:
        """This model with no rows."""
        twin = StateLM(
            self.own_run, self.shape, self.dtype, self.device,
            feeding=self.feeding, bytes_per_token=self.kv.bytes_per_token, why=self.why_own_cache or "",
        )  # fmt: skip
        twin.limits, twin.kernels = self.limits, self.kernels
        return twin

    def note(self, label: str) -> str:
        """What a person should know of how it runs."""
        if isinstance(self.own_run, AnewRun):
            how = "reads its whole text anew for each token, as transformers does without a cache, which is much slower"
            return f"{label} {how}: {self.why_own_cache}. Drafts save no passes: use --drafter none"
        if not self.own_run.keeps_state:
            return f"{label} reads its whole text anew in each pass, which is slower: {self.why_own_cache}"
        note = f"{label} runs on transformers' own cache, which is slower: {self.why_own_cache}"
        if self.feeding.max_tokens == 1:
            note += ". Its code there takes one token at a time, so drafts save no passes: use --drafter none"
        return note

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None, first_row: int = 0,
        capture: tuple[int, ...] = (),
    ) -> PassOutput:  # fmt: skip
        """One pass over each of rows first_row .. first_row + B, as `LM.forward` makes them.

        Raises CapabilityError for a tree. A pass with `columns` reads a text: at its beginning also a model that else takes one
        token at a time is fed all of them at once.
        """
        if parents is not None:
            raise CapabilityError(f"a pass over a tree of tokens, which {CHAINS_ONLY}")
        reads = columns is not None
        if columns is None:
            columns = self._first_columns(tokens.shape[1])
        lines = tokens.clamp(max=self.shape.vocab_size - 1).tolist()
        passes = [self._pass(first_row + index, line, columns, capture, reads=reads) for index, line in enumerate(lines)]
        hidden = {layer: torch.cat([states[at] for _, states in passes]) for at, layer in enumerate(capture)}
        return PassOutput(torch.cat([logits for logits, _ in passes]), hidden)

    def _pass(
        self, row: int, tokens: list[int], columns: Tensor, capture: tuple[int, ...], *, reads: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (1, K, V) and captured states (1, T, H) of one row's pass."""
        back = max(0, self.feeding.min_tokens - len(tokens))  # so many that were fed before make the pass long enough
        backlog = self.states.backlog(row, back)
        if len(backlog) > MAX_BACKLOG + back and self.own_run.keeps_state:
            self._feed(row, backlog[: len(backlog) - back], columns[:0], (), reads=reads)
            backlog = backlog[len(backlog) - back :]
        behind = len(backlog)
        logits, hidden = self._feed(row, backlog + tokens, columns + behind, capture, reads=reads)
        return logits, [states[:, behind:] for states in hidden]

    def _feed(
        self, row: int, tokens: list[int], columns: Tensor, capture: tuple[int, ...], *, reads: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Feed a row's state, in as many passes as the model must have them."""
        state, start = self.states.open(row), self.states.reached(row)
        is_whole = not self.own_run.keeps_state or (state is None and reads)
        max_tokens = len(tokens) if is_whole or self.feeding.max_tokens is None else self.feeding.max_tokens
        parts: list[tuple[Tensor, list[Tensor]]] = []
        for begin in range(0, len(tokens), max_tokens):
            piece = tokens[begin : begin + max_tokens]
            own = columns[(columns >= begin) & (columns < begin + len(piece))] - begin
            logits, hidden, state = self.own_run.feed(state, start + begin, piece, own, capture)
            parts.append((logits, hidden))
        self.states.close(row, state, tokens)
        return torch.cat([logits for logits, _ in parts], dim=1), [
            torch.cat(states, dim=1) for states in zip(*(hidden for _, hidden in parts), strict=True)
        ]
