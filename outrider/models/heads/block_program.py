"""A block head's pass over its cache, and a whole draft of it as ONE compiled program.

The pass takes the target's states of the tokens that were committed since the last one, puts their keys and values behind what
the cache holds, the block's own behind these, and attends from the block to all of them:

    slot of a row   [ cached ][ waiting: count ][ block ][ padding of shorter rows ]

What waits becomes context; the block and the padding are overwritten by the next pass. The program goes on to pick the chain,
token by token where there is a Markov head, so a draft is entered once from Python. No penalties, biases or grammars;
the general path is `drafters/parallel.py` on the same pass, and the test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider.kv.cache import BLOCK, KVCache
from outrider.models.attention import PassPlan, attention
from outrider.models.compile import ONE_THREAD, compile_program
from outrider.models.draft_loop import MAX_SMALL_PARAMETERS
from outrider.models.heads.block import BlockHead
from outrider.models.picking import Draws, example_draws, pick
from outrider.models.vocabulary import fit_width
from outrider.models.workshop import Workshop

CHANGING_ROPES = ("dynamic", "longrope")  # their tables are made anew as texts grow, which a program cannot do


@dataclass(frozen=True)
class _Layer:
    """What our attention reads of a layer."""

    layer_idx: int


def block_pass(
    head: BlockHead,
    numbers: Tensor,  # (B, 4) int64 per row: pending token, states that wait, cached positions, text index of the pending token
    hidden: list[Tensor],  # per target layer of the head (B, W, target H), each row's waiting states first
    num_keys: int,  # of the cache to look at, a multiple of its block
    keys: list[Tensor],
    values: list[Tensor],
    native: bool,
) -> Tensor:
    """States (B, block size, H) of one block behind every row. The cache must have room for W + block size more positions."""
    config = head.config
    anchors, counts, cached, ends = numbers.unbind(1)
    waiting = torch.arange(hidden[0].shape[1], device=numbers.device)
    block = torch.arange(config.block_size, device=numbers.device)
    last = config.max_positions - 1
    positions = ((ends - counts)[:, None] + waiting).clamp(min=0, max=last)  # of padding: any
    context = head.context_keys(head.context(hidden), positions)
    behind = torch.where(waiting < counts[:, None], waiting, waiting + config.block_size)  # padding goes behind the block
    slots = torch.arange(numbers.shape[0], device=numbers.device) * keys[0].shape[1]
    places = (slots + cached)[:, None] + torch.cat([behind, counts[:, None] + block], dim=1)
    mask = config.mask(cached + counts, num_keys, keys[0].dtype)
    plan = PassPlan(keys, values, places.flatten(), mask, None, native)

    def attend(layer: int, queries: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        all_keys = torch.cat([context[layer][0], own_keys], dim=2)
        all_values = torch.cat([context[layer][1], own_values], dim=2)
        return attention(_Layer(layer), queries, all_keys, all_values, None, outrider_plan=plan)[0].transpose(1, 2)

    return head(head.block_tokens(anchors), (ends[:, None] + block).clamp(max=last), attend)


class BlockProgram(nn.Module):
    """What is compiled. Also runs eagerly, for the equality test."""

    def __init__(self, head: BlockHead, num_tokens: int, vocab_size: int, native: bool) -> None:
        super().__init__()
        self.head = head
        self.tables = nn.ModuleList(head.tables())  # registered, so that all weights become constants of the program
        self.num_tokens, self.vocab_size, self.native = num_tokens, vocab_size, native

    def forward(
        self,
        numbers: Tensor,  # as in `block_pass`, and so are:
        hidden: list[Tensor],
        key_positions: Tensor,  # (S,), only its length counts
        keys: list[Tensor],
        values: list[Tensor],
        draws: list[Tensor],  # `Draws`
    ) -> tuple[Tensor, Tensor]:
        """(tokens (B, n) int64, laws (R, n + 1, V) fp32 of the rows that draw; the last is zero: nothing is drawn after it)."""
        head = self.head
        states = head.guessing(block_pass(head, numbers, hidden, key_positions.shape[0], keys, values, self.native))
        states = states[:, : self.num_tokens].contiguous()  # as native linears want it
        logits = head.logits(states)
        before, tokens, laws = numbers[:, 0], [], []
        for level in range(self.num_tokens):
            scores = head.in_full(head.corrected(logits[:, level], states[:, level], before))
            before, law = pick(fit_width(scores, self.vocab_size), Draws(*draws), level)
            tokens.append(before)
            laws.append(law)
        laws.append(torch.zeros_like(laws[0]))
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1)


def block_program(
    workshop: Workshop, head: BlockHead, kv: KVCache, num_tokens: int, vocab_size: int, *, native: bool
) -> Callable[..., Any] | None:
    """The compiled `BlockProgram` of a head bound to its target; None where there is none. Call it before linears are packed
    for oneDNN, which compilation does by itself."""
    if (kind := head.config.rope.get("rope_type", "default")) in CHANGING_ROPES:
        workshop.note(f"the block head runs uncompiled: its rotary embedding '{kind}' changes as texts grow, no program does")
        return None
    program = BlockProgram(head, num_tokens, vocab_size, native)
    facts = (head.config, num_tokens, vocab_size, native, head.dtype)
    tensors = dict(program.named_parameters()) | dict(program.named_buffers())
    return workshop.program("block", facts, tensors, "the block head", lambda path: _compile(program, kv, path))


def _compile(program: BlockProgram, kv: KVCache, path: Path) -> None:
    inputs, dynamic = example(program, kv)
    is_small = sum(weight.numel() for weight in program.parameters()) <= MAX_SMALL_PARAMETERS
    compile_program(program, inputs, dynamic, path, ONE_THREAD if is_small else {})


def example(program: BlockProgram, kv: KVCache) -> tuple[tuple, tuple]:
    """Example inputs for three rows, and which dimensions stay symbolic."""
    config, num_rows, width = program.head.config, 3, 2
    kv.reserve(num_rows + 1, 3 * BLOCK)
    draws, dynamic_draws = example_draws(program.num_tokens, program.vocab_size, kv.device)
    states = torch.zeros(num_rows, width, config.target_hidden_size, dtype=kv.dtype)
    inputs = (
        torch.tensor([[1, width, 3, 7]] * num_rows), [states.clone() for _ in config.target_layers],
        torch.arange(2 * BLOCK), kv.keys, kv.values, draws,
    )  # fmt: skip
    rows = {0: Dim("rows", min=1, max=4096)}
    store = {0: Dim("slots", min=1, max=4096), 1: Dim("capacity", min=BLOCK, max=1 << 24)}
    per_state = {**rows, 1: Dim("width", min=1, max=1 << 16)}
    dynamic = (
        rows, [per_state] * len(config.target_layers), {0: Dim("keys", min=BLOCK, max=1 << 24)},
        [store] * len(kv.keys), [store] * len(kv.values), dynamic_draws,
    )  # fmt: skip
    return inputs, dynamic
