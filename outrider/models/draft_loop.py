"""A whole drafting loop, gamma tokens of a draft model, as ONE compiled program.

A tiny draft is all overhead: each token costs a trip through Python, a dispatch per operation, a mask, a softmax, a draw.
Unrolled into one program, only the arithmetic is left. The program feeds what the draft's cache lacks (one token, or two
after a full acceptance), then picks each next token inside: the argmax for greedy rows, else the inverse CDF of
softmax(logits / temperature) at the row's own uniforms, and returns those laws. Other filters need the general path,
token by token (`drafters/draft_model.py`), which is also the reference: `tests/unit/models/test_compile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider.kv.cache import BLOCK
from outrider.models.attention import PassPlan
from outrider.models.compile import ONE_THREAD, compile_program
from outrider.models.layout import attention_mask
from outrider.models.lm import LM, Run
from outrider.models.picking import inverse_cdf
from outrider.models.program import Program
from outrider.models.vocabulary import fit_width

MAX_SMALL_PARAMETERS = 8_000_000  # below this, a second thread costs the fused kernels more than it does
WIDTH = 2  # tokens of the first pass: up to two catch up


class DraftLoopProgram(nn.Module):
    """What is compiled. Also runs eagerly, for the equality test."""

    def __init__(self, lm: LM, module: nn.Module, num_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.module = module  # registered, so that its parameters become constants of the program
        self._run: Run = lm.run
        self.num_tokens, self.vocab_size, self.native = num_tokens, vocab_size, lm.native
        self.later_width = 1 if lm.native else WIDTH  # oneDNN takes other kernels for a single row, so it is padded
        self.window, self.context_length = lm.shape.sliding_window, lm.shape.context_length

    def forward(
        self,
        ids: Tensor,  # (B, 2) int64: what the cache lacks, padded
        last: Tensor,  # (B,) int64: index of the last real token in ids
        starts: Tensor,  # (B,) int64: committed positions
        slot_starts: Tensor,  # (B,) int64: first cache place of each row's slot
        key_positions: Tensor,  # (S,) int64, only its length counts
        keys: list[Tensor],  # the layers' stores, once for each token: `each_token`
        values: list[Tensor],
        greedy: Tensor,  # (B,) bool
        temperature: Tensor,  # (B,) fp32, 1 for greedy rows
        uniforms: Tensor,  # (B, gamma) fp64
    ) -> tuple[Tensor, Tensor]:
        """(tokens (B, gamma) int64, the laws they were drawn from (B, gamma, V) fp32, one-hot for greedy rows)."""
        tokens, laws, num_layers = [], [], len(keys) // self.num_tokens
        for node in range(self.num_tokens):
            width, layers = self.later_width if node else WIDTH, slice(node * num_layers, (node + 1) * num_layers)
            offsets = torch.arange(width, device=starts.device)
            masks = [
                attention_mask(starts, width, key_positions.shape[0], keys[0].dtype, window)
                for window in ((None,) if self.window is None else (None, self.window))
            ]
            places = (slot_starts + starts)[:, None] + offsets
            near = masks[-1] if self.window is not None else None
            plan = PassPlan(keys[layers], values[layers], places.flatten(), masks[0], near, self.native)
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
    """The compiled or recorded loop with the host's part: inputs from the cache, commits to it.

    `num_tokens` is the length of the program. A fixed draft length is one call; with a program of one token any length is
    drafted, at some 30 microseconds more per token (what `--num-draft-tokens auto` uses).
    """

    def __init__(self, lm: LM, program: Program, num_tokens: int) -> None:
        self.lm = lm
        self.num_tokens = num_tokens
        self._program = program

    def __call__(
        self, pending: list[list[int]], greedy: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft behind rows whose caches lack `pending` (1 or 2 tokens each); their caches then hold all but the last.

        As many tokens as `uniforms` (B, n) has columns, n a multiple of `num_tokens`: (B, n) and their laws (B, n, V).
        """
        kv, device, num_tokens = self.lm.kv, self.lm.device, uniforms.shape[1]
        ids, last, starts, slot_starts, key_positions = self._places(pending, max(kv.lengths) + num_tokens + 2 * WIDTH)
        keys, values = each_token(kv.keys, self.num_tokens), each_token(kv.values, self.num_tokens)
        greedy, temperature, parts = greedy.to(device), temperature.to(device), []
        for numbers in uniforms.to(device).split(self.num_tokens, dim=1):
            numbers = numbers.contiguous()  # inputs are read by the strides of the example
            tokens, laws = self._program(
                ids, last, starts, slot_starts, key_positions, keys, values, greedy, temperature, numbers
            )
            parts.append((tokens, laws))
            # the host looks at no token between two calls
            ids, starts, last = tokens[:, -1:].repeat(1, WIDTH), starts + last + self.num_tokens, torch.zeros_like(last)
        for row, missing in enumerate(pending):
            kv.advance(row, len(missing) + num_tokens - 1)
        tokens, laws = zip(*parts, strict=True)
        return (tokens[0], laws[0]) if len(parts) == 1 else (torch.cat(tokens, dim=1), torch.cat(laws, dim=1))

    def _places(self, pending: list[list[int]], end: int) -> tuple[Tensor, ...]:
        """The first five inputs of the program; the caches have room for `end` positions a row."""
        kv, device = self.lm.kv, self.lm.device
        kv.reserve(len(pending), end)
        return (
            torch.tensor([p + [0] * (WIDTH - len(p)) for p in pending], device=device).clamp(max=self.lm.shape.vocab_size - 1),
            torch.tensor([len(p) - 1 for p in pending], device=device),
            torch.tensor(kv.lengths, device=device),
            torch.arange(len(pending), device=device) * kv.capacity,
            torch.arange(min(-(-end // BLOCK) * BLOCK, kv.capacity), device=device),
        )


def each_token(stores: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
    """A cache as a loop of so many tokens takes it: the same stores again for each token.

    A program that writes to one input twice is compiled to copy all of it, every slot to its end, before and behind; so each
    input is written once. That they are one memory does no harm, though the compiler does not know: all that a token writes and
    reads depends on the token before it, hence on all that was written for that one.
    """
    return [*stores] * num_tokens


def example_stores(stores: Sequence[Tensor], num_slots: int, num_tokens: int) -> list[Tensor]:
    """What `each_token` gives, as torch.export must see it: each input a memory of its own."""
    return [
        torch.zeros(num_slots, 3 * BLOCK, *store.shape[2:], dtype=store.dtype, device=store.device)
        for store in each_token(stores, num_tokens)
    ]


def compile_draft_loop(lm: LM, module: nn.Module, num_tokens: int, vocab_size: int, path: Path) -> None:
    """Make the program of a drafting loop and store it at `path`."""
    inputs, dynamic = example(lm, num_tokens)
    is_small = lm.shape.num_parameters <= MAX_SMALL_PARAMETERS
    program = DraftLoopProgram(lm, module, num_tokens, vocab_size)
    compile_program(program, inputs, dynamic, path, ONE_THREAD if is_small else {})


def example(lm: LM, num_tokens: int) -> tuple[tuple, tuple]:
    """Example inputs for two rows, and which dimensions stay symbolic."""
    num_rows = 2
    keys, values = (example_stores(stores, num_rows + 1, num_tokens) for stores in (lm.kv.keys, lm.kv.values))
    row = torch.zeros(num_rows, dtype=torch.int64, device=lm.device)
    inputs = (
        torch.zeros(num_rows, WIDTH, dtype=torch.int64, device=lm.device), row, row + 3,
        torch.arange(num_rows, device=lm.device) * keys[0].shape[1], torch.arange(2 * BLOCK, device=lm.device),
        keys, values, row == 0, torch.ones(num_rows, device=lm.device),
        torch.rand(num_rows, num_tokens, dtype=torch.float64, device=lm.device),
    )  # fmt: skip
    rows = {0: Dim("rows", min=1, max=4096)}
    store = {0: Dim("slots", min=1, max=4096), 1: Dim("capacity", min=BLOCK, max=1 << 24)}
    dynamic = (
        rows, rows, rows, rows, {0: Dim("keys", min=BLOCK, max=1 << 24)},
        [store] * len(keys), [store] * len(values), rows, rows, rows,
    )  # fmt: skip
    return inputs, dynamic


def _pick(logits: Tensor, greedy: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token (B,) and its law (B, V) per row, from logits (B, V)."""
    scores = logits.float()
    best = scores.argmax(dim=-1)
    law = torch.softmax(scores / temperature[:, None], dim=-1)
    drawn = inverse_cdf(law, uniforms)
    point = torch.zeros_like(law).scatter(-1, best[:, None], 1.0)
    return torch.where(greedy, best, drawn), torch.where(greedy[:, None], point, law)
