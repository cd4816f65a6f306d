"""A causal language model on our own cache: what both the target and a draft model are.

`LM.forward` runs one pass of T tokens per row behind each row's committed prefix and returns logits; it commits nothing.
The caller then commits what it keeps (`kv.keep`, `kv.advance`). Feeding a row up to its last token is `catch_up`: it
feeds `tokens[kv.length:]`, so a fresh prompt, a fully accepted draft and a row that moved here from elsewhere are one
case. The last token of a row is never fed by `catch_up`: it is the pending token, first of the next pass.

`run` is the model itself: transformers' module, or a compiled package of the same module (`compile.py`). Passes are
padded and split as `granularity` and `max_tokens_per_pass` ask, which `probe.py` measures so that a row's bits do not
depend on the pass it is in.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import KVCache, LayerShape
from outrider.kv.cache import BLOCK
from outrider.models.attention import PassPlan
from outrider.models.layout import attention_mask, tree_depths_and_ancestors

PREFILL_CHUNK = 256  # tokens; bounds activation memory, and keeps a prompt's arithmetic the same however it is batched


class Run(Protocol):
    """The model's arithmetic: (ids (B,T), positions (B,T), plan, logit columns (K,)) -> logits (B, K, V)."""

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PassLimits:
    """How passes must be shaped for row-invariant bits."""

    granularity: int = 2  # tokens of a pass are rounded up to a multiple of this
    max_tokens_per_pass: int = 1 << 30  # rows times tokens
    exact_trees: bool = True  # a tree's path has the bits it has alone; else its sums run in another order (by rounding)


@dataclass(frozen=True)
class LMShape:
    """What the rest of the system must know about the model."""

    vocab_size: int  # width of the logits
    context_length: int
    layers: tuple[LayerShape, ...]
    sliding_window: int | None
    num_parameters: int


class LM:
    """See the module docstring. One instance owns one model and one cache."""

    def __init__(self, run: Run, shape: LMShape, dtype: torch.dtype, device: torch.device) -> None:
        self.run = run
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.kv = KVCache(shape.layers, dtype, device)
        self.limits = PassLimits()
        self.native = False  # attention on the native kernel

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """Logits (B, T, V), or (B, K, V) for the K given `columns`, of one pass over rows first_row .. first_row + B.

        `tokens` (B, T) int64, the first one the pending token; `parents` (B, T-1) as in `Draft`, None for a chain.
        """
        num_rows, num_tokens = tokens.shape
        width = self._padded_width(num_rows, num_tokens)
        self.kv.reserve(self.kv.num_rows, max(self.kv.lengths[first_row : first_row + num_rows]) + width)
        per_pass = max(1, self.limits.max_tokens_per_pass // width)
        if columns is None:  # where passes are padded for their bits, the output layer must be as wide, too
            columns = torch.arange(num_tokens if self.limits.granularity == 2 else width, device=self.device)
        tokens = tokens.clamp(max=self.shape.vocab_size - 1)  # a target's padded vocabulary may be wider than a draft's
        tokens = F.pad(tokens, (0, width - num_tokens))
        if parents is not None:
            parents = F.pad(parents, (0, width - num_tokens), value=-1)
        parts = []
        for start in range(0, num_rows, per_pass):
            rows = slice(start, start + per_pass)
            plan, positions = self._plan(tokens[rows], None if parents is None else parents[rows], first_row + start)
            parts.append(self.run(tokens[rows], positions, plan, columns))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, :num_tokens]

    def catch_up(self, rows: Sequence[Sequence[int]]) -> None:
        """Feed and commit `tokens[kv.length : -1]` of every row, in chunks; afterwards only the last token is pending."""
        longest = max((len(tokens) for tokens in rows), default=0)
        self.kv.reserve(len(rows), longest + PREFILL_CHUNK)
        for row, tokens in enumerate(rows):
            while (done := self.kv.lengths[row]) < len(tokens) - 1:
                chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
                ids = torch.tensor([chunk], device=self.device)
                self.forward(ids, columns=torch.zeros(1, dtype=torch.int64, device=self.device), first_row=row)
                self.kv.advance(row, len(chunk))

    def _padded_width(self, num_rows: int, num_tokens: int) -> int:
        """Tokens per row after padding. A pass of one token in all is padded too: single rows take other kernels."""
        unit = self.limits.granularity
        if unit == 2:
            return num_tokens if num_rows * num_tokens > 1 else 2
        return -(-num_tokens // unit) * unit

    def _plan(self, tokens: Tensor, parents: Tensor | None, first_row: int) -> tuple[PassPlan, Tensor]:
        """Cache places, masks and position ids of a pass over tokens (B, T), already padded."""
        kv, (num_rows, width) = self.kv, tokens.shape
        lengths = kv.lengths[first_row : first_row + num_rows]
        num_keys = min(-(-(max(lengths) + width) // BLOCK) * BLOCK, kv.capacity)
        starts = torch.tensor(lengths, device=self.device)
        offsets = torch.arange(width, device=self.device)
        depths, sees = (None, None) if parents is None else tree_depths_and_ancestors(parents)
        # Padding tokens may stand behind the last position the model knows; what they compute is never read.
        positions = (starts[:, None] + (offsets if depths is None else depths)).clamp(max=self.shape.context_length - 1)
        slots = torch.arange(num_rows, device=self.device) * kv.capacity
        window = self.shape.sliding_window
        full = attention_mask(starts, width, num_keys, self.dtype, None, depths, sees)
        near = None if window is None else attention_mask(starts, width, num_keys, self.dtype, window, depths, sees)
        plan = PassPlan(
            keys=[store[first_row:] for store in kv.keys] if first_row else kv.keys,
            values=[store[first_row:] for store in kv.values] if first_row else kv.values,
            places=((slots + starts)[:, None] + offsets).flatten(),
            mask=full,
            window_mask=near,
            native=self.native,
        )
        return plan, positions


def module_run(module: nn.Module) -> Run:
    """The plain, uncompiled run: transformers' forward with our plan passed through its keyword arguments."""
    keeps_columns = "logits_to_keep" in inspect.signature(module.forward).parameters

    def run(ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, "outrider_plan": plan}
        if keeps_columns:
            return module(**inputs, logits_to_keep=columns).logits
        return module(**inputs).logits[:, columns]

    return run
