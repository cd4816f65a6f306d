"""A whole drafting loop, gamma tokens of a draft model, as ONE compiled program.

A tiny draft is all overhead: each token costs a trip through Python, a dispatch per operation, a mask, a softmax, a draw.
Unrolled into one program, only the arithmetic is left. The program feeds what the draft's cache lacks (one token, or two
after a full acceptance), then picks each next token inside: the argmax for greedy rows, else the inverse CDF of
softmax(logits / temperature) at the row's own uniforms, and returns those laws. Other filters need the general path,
token by token (`drafters/draft_model.py`), which is also the reference: `tests/unit/models/test_compile.py`.

Two variants: for any number of rows, on packed linears; and, when an engine serves one row at a time and the draft is
small, for exactly one row, on linears that the compiler fuses with the rest (`small.py`), on one thread. Which one an
engine uses is fixed when it is built, so that a row's draft does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider.kv.cache import BLOCK
from outrider.models.attention import PassPlan
from outrider.models.compile import ONE_THREAD, PACKED, compile_program
from outrider.models.layout import attention_mask
from outrider.models.lm import LM, Run
from outrider.models.small import MAX_SMALL_PARAMETERS, dot_linears
from outrider.models.vocabulary import fit_width

WIDTH = 2  # tokens of the first pass: up to two catch up. On packed linears the later passes are padded to it as well,
# since single rows take other kernels there.


class DraftLoopProgram(nn.Module):
    """What is compiled. Also runs eagerly, for the equality test."""

    def __init__(self, lm: LM, module: nn.Module, num_tokens: int, vocab_size: int, later_width: int = WIDTH) -> None:
        super().__init__()
        self.module = module  # registered, so that its parameters become constants of the program
        self._run: Run = lm.run
        self.num_tokens, self.vocab_size, self.later_width = num_tokens, vocab_size, later_width
        self.window, self.context_length = lm.shape.sliding_window, lm.shape.context_length

    def forward(
        self,
        ids: Tensor,  # (B, 2) int64: what the cache lacks, padded
        last: Tensor,  # (B,) int64: index of the last real token in ids
        starts: Tensor,  # (B,) int64: committed positions
        slot_starts: Tensor,  # (B,) int64: first cache place of each row's slot
        key_positions: Tensor,  # (S,) int64, only its length counts
        keys: list[Tensor],
        values: list[Tensor],
        greedy: Tensor,  # (B,) bool
        temperature: Tensor,  # (B,) fp32, 1 for greedy rows
        uniforms: Tensor,  # (B, gamma) fp64
    ) -> tuple[Tensor, Tensor]:
        """(tokens (B, gamma) int64, the laws they were drawn from (B, gamma, V) fp32, one-hot for greedy rows)."""
        tokens, laws = [], []
        for node in range(self.num_tokens):
            width = self.later_width if node else WIDTH
            offsets = torch.arange(width)
            masks = [
                attention_mask(starts, width, key_positions.shape[0], keys[0].dtype, window)
                for window in ((None,) if self.window is None else (None, self.window))
            ]
            places = (slot_starts + starts)[:, None] + offsets
            plan = PassPlan(keys, values, places.flatten(), masks[0], masks[-1] if self.window is not None else None)
            positions = (starts[:, None] + offsets).clamp(max=self.context_length - 1)  # past the end: cut off later
            logits = self._run(ids, positions, plan, offsets)
            logits = logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]
            token, law = _pick(fit_width(logits, self.vocab_size), greedy, temperature, uniforms[:, node])
            tokens.append(token)
            laws.append(law)
            ids = token[:, None].expand(-1, self.later_width)
            starts, last = starts + last + 1, torch.zeros_like(last)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1)


class DraftLoop:
    """The compiled loop with the host's part: inputs from the cache, commits to it."""

    def __init__(self, lm: LM, program: Callable[..., Any], num_tokens: int, *, one_row: bool = False) -> None:
        self.lm = lm
        self.num_tokens = num_tokens
        self._program = program
        self._one_row = one_row

    def __call__(
        self, pending: list[list[int]], greedy: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft behind rows whose caches lack `pending` (1 or 2 tokens each); their caches then hold all but the last."""
        kv, device = self.lm.kv, self.lm.device
        end = max(kv.lengths) + self.num_tokens + 2 * WIDTH
        kv.reserve(len(pending), end)
        num_keys = min(-(-end // BLOCK) * BLOCK, kv.capacity)
        tokens, laws = self._program(
            torch.tensor([p + [0] * (WIDTH - len(p)) for p in pending], device=device).clamp(max=self.lm.shape.vocab_size - 1),
            torch.tensor([len(p) - 1 for p in pending], device=device),
            torch.tensor(kv.lengths, device=device),
            torch.arange(len(pending), device=device) * kv.capacity,
            torch.arange(num_keys, device=device),
            _stores(kv.keys, self._one_row), _stores(kv.values, self._one_row), greedy, temperature, uniforms,
        )  # fmt: skip
        for row, missing in enumerate(pending):
            kv.advance(row, len(missing) + self.num_tokens - 1)
        return tokens, laws


def compile_draft_loop(lm: LM, module: nn.Module, num_tokens: int, vocab_size: int, one_row: bool, path: Path) -> None:
    """Make the program of a drafting loop and store it at `path`."""
    inputs, dynamic = example(lm, num_tokens, one_row)
    if not one_row:
        compile_program(DraftLoopProgram(lm, module, num_tokens, vocab_size), inputs, dynamic, path, PACKED)
        return
    with dot_linears(module):
        program = DraftLoopProgram(lm, module, num_tokens, vocab_size, later_width=1)
        compile_program(program, inputs, dynamic, path, ONE_THREAD)


def can_draft_one_row(lm: LM, max_num_rows: int) -> bool:
    """Whether the variant for a single row is the faster one."""
    return max_num_rows == 1 and lm.shape.num_parameters <= MAX_SMALL_PARAMETERS


def example(lm: LM, num_tokens: int, one_row: bool = False) -> tuple[tuple, tuple]:
    """Example inputs, and which of their dimensions stay symbolic. Two rows stand for any number."""
    kv, num_rows = lm.kv, 1 if one_row else 2
    kv.reserve(num_rows + 1, 3 * BLOCK)
    row = torch.zeros(num_rows, dtype=torch.int64, device=lm.device)
    inputs = (
        torch.zeros(num_rows, WIDTH, dtype=torch.int64, device=lm.device), row, row + 3,
        torch.arange(num_rows, device=lm.device) * kv.capacity, torch.arange(2 * BLOCK, device=lm.device),
        _stores(kv.keys, one_row), _stores(kv.values, one_row), row == 0, torch.ones(num_rows, device=lm.device),
        torch.rand(num_rows, num_tokens, dtype=torch.float64, device=lm.device),
    )  # fmt: skip
    rows = {} if one_row else {0: Dim("rows", min=1, max=4096)}
    store = {1: Dim("capacity", min=BLOCK, max=1 << 24)}
    if not one_row:
        store[0] = Dim("slots", min=1, max=4096)
    dynamic = (
        rows, rows, rows, rows, {0: Dim("keys", min=BLOCK, max=1 << 24)},
        [store] * len(kv.keys), [store] * len(kv.values), rows, rows, rows,
    )  # fmt: skip
    return inputs, dynamic


def _stores(stores: list[Tensor], one_row: bool) -> list[Tensor]:
    """The cache as the program takes it: whole, or the first row's slot."""
    return [store[:1] for store in stores] if one_row else stores


def _pick(logits: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token (B,) and its law (B, V) per row, from logits (B, V). The CDF is summed in fp64, as in `rng.inverse_cdf`."""
    scores = logits.float()
    best = scores.argmax(dim=-1)
    law = torch.softmax(scores / temperature[:, None], dim=-1)
    cumulative = law.double().cumsum(dim=-1)
    drawn = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(dim=-1)
    point = torch.zeros_like(law).scatter(-1, best[:, None], 1.0)
    return torch.where(greedy, best, drawn), torch.where(greedy[:, None], point, law)
