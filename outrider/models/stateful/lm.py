"""A causal language model on transformers' own cache: `LM` for what our cache cannot hold, one row
at a time.

A pass over a row is [backlog + pending token + draft]: after a rejection the row's state goes back
to what it was before the pass, and the tokens that were accepted are fed again as the beginning of
the next pass (`kv/states.py`). So drafts are chains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.kv import LayerShape
from outrider.kv.states import StateCache
from outrider.models.lm import LM, LMShape, PassOutput, module_run
from outrider.models.stateful.run import OwnCacheRun
from outrider.models.stateful.state import OwnState

CHAINS_ONLY = "a model on transformers' own cache does not take: its states cannot branch"
MAX_BACKLOG = 32  # tokens fed again as part of the next pass; more of them get a pass of their own
# in the shape of a model whose layers are transformers' to know
UNKNOWN_LAYER = LayerShape(0, 0, 0)


class StateLM(LM):
    """A model on transformers' own cache, with the interface of `LM`. `why`: what our cache cannot
    do for this model."""

    def __init__(
        self,
        own_run: OwnCacheRun,
        shape: LMShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        name: str,
        why: str,
    ) -> None:
        self.states: StateCache[OwnState] = StateCache(shape.layers, dtype, device)
        super().__init__(module_run(own_run.module), shape, dtype, device, kv=self.states)
        self.own_run = own_run
        self.name = name
        self.why_own_cache = why

    def count_as(self, bytes_per_token: int) -> None:
        """Count this many bytes of memory for each token."""
        self.states.bytes_per_token = bytes_per_token

    def twin(self) -> StateLM:
        """This model with no rows."""
        twin = StateLM(
            self.own_run,
            self.shape,
            self.dtype,
            self.device,
            name=self.name,
            why=self.why_own_cache or "",
        )
        twin.count_as(self.states.bytes_per_token)
        twin.limits = self.limits
        twin.kernels = self.kernels
        return twin

    def note(self, label: str) -> str:
        """A note for the user about how the model runs."""
        return f"{label} runs on transformers' own cache, which is slower: {self.why_own_cache}"

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor | None = None,
        columns: Tensor | None = None,
        first_row: int = 0,
        capture: tuple[int, ...] = (),
    ) -> PassOutput:
        """One pass over each of rows first_row .. first_row + B, as `LM.forward` makes them.

        Raises CapabilityError for a tree.
        """
        if parents is not None:
            raise CapabilityError(f"a pass over a tree of tokens, which {CHAINS_ONLY}")
        if columns is None:
            columns = self._first_columns(tokens.shape[1])
        lines = tokens.clamp(max=self.shape.vocab_size - 1).tolist()
        passes = [
            self._pass(first_row + index, line, columns, capture)
            for index, line in enumerate(lines)
        ]
        hidden = {
            layer: torch.cat([states[at] for _, states in passes])
            for at, layer in enumerate(capture)
        }
        return PassOutput(torch.cat([logits for logits, _ in passes]), hidden)

    def _pass(
        self, row: int, tokens: list[int], columns: Tensor, capture: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (1, K, V) and captured states (1, T, H) of one row's pass."""
        backlog = self.states.backlog(row)
        if len(backlog) > MAX_BACKLOG:
            self._feed(row, backlog, columns[:0], ())
            backlog = []
        fed_again = len(backlog)
        logits, hidden = self._feed(row, backlog + tokens, columns + fed_again, capture)
        return logits, [states[:, fed_again:] for states in hidden]

    def _feed(
        self, row: int, tokens: list[int], columns: Tensor, capture: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Feed a row's state."""
        state = self.states.open(row)
        start = self.states.reached(row)
        logits, hidden, state = self.own_run.feed(state, start, tokens, columns, capture)
        self.states.close(row, state, tokens)
        return logits, hidden
