"""Positions, cache slots and visibility of the tokens of one pass.

A pass feeds every row the same number of tokens T, written after its committed prefix. In a chain
token t follows token t-1. In a tree `parents` says which token it follows: its position is the
prefix length plus its depth, and it sees the prefix, its ancestors and itself, whatever order the
nodes are stored in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.models.pass_plan import QUERY_BLOCK


def tree_depths_and_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Depth (B, N+1) and ancestor-or-self mask (B, N+1, N+1) of [pending token] + N nodes.

    `parents` (B, N) counts nodes from 0 and calls the pending token -1; parents stand before their
    children.
    """
    depths, sees = ancestors_on_host(parents)
    return torch.from_numpy(depths).to(parents.device), torch.from_numpy(sees).to(parents.device)


def ancestors_on_host(parents: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`tree_depths_and_ancestors` as NumPy has them: trees are made on the host anyway."""
    num_rows, num_nodes = parents.shape
    depths = [[0] for _ in range(num_rows)]
    sees = [[[True] + [False] * num_nodes] for _ in range(num_rows)]
    for own_depths, own_sees, line in zip(depths, sees, parents.tolist(), strict=True):  # sync
        for node, parent in enumerate(line, start=1):
            own_depths.append(own_depths[parent + 1] + 1)
            own_sees.append(own_sees[parent + 1].copy())
            own_sees[node][node] = True
    return np.array(depths, dtype=np.int64), np.array(sees, dtype=bool)


def attention_mask(
    starts: Tensor,  # (B,) int64: committed positions per row
    num_tokens: int,
    num_keys: int,
    dtype: torch.dtype,
    window: int | None = None,
    depths: Tensor | None = None,  # (B, T), None for a chain
    sees: Tensor | None = None,  # (B, T, T) bool, None for a chain
) -> Tensor:
    """Additive mask (B, 1, T rounded up to QUERY_BLOCK, S): 0 where a query may look, -inf
    elsewhere.

    `window` limits the distance looked back, in positions (its own position counts as one).
    """
    padded = -(-num_tokens // QUERY_BLOCK) * QUERY_BLOCK
    slots = torch.arange(num_keys, device=starts.device)  # (S,)
    offsets = torch.arange(padded, device=starts.device)  # (T',)
    if sees is None or depths is None:
        positions = starts[:, None] + offsets  # (B, T')
        allowed = slots <= positions[:, :, None]  # (B, T', S)
        key_positions = slots.expand(starts.shape[0], -1)
    else:
        inside = slots - starts[:, None]  # (B, S): index within the pass, negative in the prefix
        in_pass = (inside >= 0) & (inside < num_tokens)
        index = inside.clamp(0, num_tokens - 1)
        seen = sees.gather(2, index[:, None].expand(-1, num_tokens, -1))  # (B, T, S)
        allowed = torch.where(in_pass[:, None], seen, (inside < 0)[:, None])
        # padding queries see one key: no 0/0
        filler = (slots == 0).expand(starts.shape[0], padded - num_tokens, -1)
        allowed = torch.cat([allowed, filler], dim=1)
        key_positions = torch.where(in_pass, starts[:, None] + depths.gather(1, index), slots)
        positions = starts[:, None] + torch.nn.functional.pad(depths, (0, padded - num_tokens))
    if window is not None:
        near = key_positions[:, None] > positions[:, :, None] - window
        near[:, num_tokens:] = True
        allowed = allowed & near
    mask = torch.zeros(allowed.shape, dtype=dtype, device=starts.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]


def chain_mask(
    start: int, num_tokens: int, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`attention_mask` of one row's chain without a window: query t sees positions 0 .. start + t.

    Not by `triu_`, which wakes torch's threads for a table of any size: on a busy processor that
    takes longer than the pass.
    """
    padded = -(-num_tokens // QUERY_BLOCK) * QUERY_BLOCK
    mask = torch.full((1, 1, padded, num_keys), float("-inf"), dtype=dtype, device=device)
    mask[..., :start] = 0
    queries = torch.arange(padded, device=device)
    corner = mask[0, 0, :, start : start + padded]
    corner.masked_fill_(queries[: corner.shape[1]] <= queries[:, None], 0)
    return mask


def tree_mask(starts: Sequence[int], sees: np.ndarray, num_keys: int, dtype: torch.dtype) -> Tensor:
    """`attention_mask` of trees without a window, on the CPU: a few blocks are filled instead of
    every position being asked where it stands. `sees` (B, T, T) as `ancestors_on_host` has it."""
    num_rows, num_tokens, _ = sees.shape
    padded = -(-num_tokens // QUERY_BLOCK) * QUERY_BLOCK
    mask = np.full((num_rows, 1, padded, num_keys), -np.inf, dtype=np.float32)
    for (queries,), start, seen in zip(mask, starts, sees, strict=True):
        queries[:num_tokens, :start] = 0
        queries[:num_tokens, start : start + num_tokens][seen] = 0
        queries[num_tokens:, 0] = 0  # padding queries see one key: no 0/0
    return torch.from_numpy(mask).to(dtype)
