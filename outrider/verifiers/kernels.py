"""Distributions, coins, noise and verdicts by the native kernels (`runtime/native`): fast paths
alongside `sampling/` and verifiers.

A pass of the target evicts all other code from the processor's caches. Some fifty torch operations
after it take a tenth of a small model's step, and torch sorts whole rows for a flat nucleus. Here
one call serves the whole batch. Coins, draws and noise are the reference's numbers, so the verdicts
are the same up to rounding; `tests/unit/verifiers/test_kernels.py` compares them.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import ClassVar

import torch
from torch import Tensor

from outrider.rows import RowVerifier
from outrider.sampling.rng import KeyedStreams, Purpose
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier

_HEAD = 3  # numbers of a row's verdict before its path
_OF_CHAINS = (TokenVerifier, BlockVerifier)


class Kernels:
    """The verifier kernels of a target that runs natively. fp32 on the CPU only, as its passes give
    logits."""

    # as `Rule` in runtime/native/verdicts.cpp numbers them (on a chain traversal is the block rule)
    _rules: ClassVar[dict[type, int]] = {
        TokenVerifier: 0,
        BlockVerifier: 1,
        TraversalVerifier: 2,
        CoupledVerifier: 3,
    }

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def probs(self, scores: Tensor, options: Tensor, draft: Draft | None) -> Tensor | None:
        """A `LawKernel`: (B, M, V) of a whole pass over `draft`."""
        if draft is None or not _is_readable(scores):
            return None
        scores = scores.contiguous()
        lengths = draft.lengths.contiguous()
        result = torch.empty_like(scores)
        shape = array("q", scores.shape)
        whole = self._library.outrider_laws(
            scores.data_ptr(),
            lengths.data_ptr(),
            options.data_ptr(),
            shape.buffer_info()[0],
            result.data_ptr(),
        )
        return result if whole else None

    def noise(self, seed: int, positions: list[int], vocab_size: int) -> list[Tensor]:
        """A `NoiseMaker`: the uniforms are `PhiloxNoise`'s to the bit, their logarithms up to
        rounding."""
        numbers = [torch.empty(vocab_size, dtype=torch.float64) for _ in positions]
        num = len(positions)
        indices = array("q", positions)
        tables = array("Q", [one.data_ptr() for one in numbers])
        addresses = indices.buffer_info()[0], tables.buffer_info()[0]
        self._library.outrider_noise(seed, int(Purpose.GUMBEL), *addresses, num, vocab_size)
        return numbers

    def serve(self, rule: RowVerifier, draft: Draft, table: Tensor) -> bool:
        """Whether the kernels can give this rule's verdict on this draft, from scores or
        distributions (B, N+1, V)."""
        if type(rule) not in self._rules or not _is_readable(table):
            return False
        if table.shape[:2] != (draft.num_rows, draft.num_nodes + 1) or (
            draft.parents is not None and type(rule) in _OF_CHAINS
        ):
            return False
        return draft.probs is None or (
            _is_readable(draft.probs) and draft.probs.shape == table.shape
        )

    def verdict(
        self,
        rule: RowVerifier,
        draft: Draft,
        table: Tensor,
        rng: KeyedStreams,
        starts: list[int],
        options: Tensor | None = None,
    ) -> Verdict | None:
        """The verdict of `rule.verify`, for the rules that `serve` accepts. table (B, N+1, V) has
        the target's distributions, or scores if `options` (`BatchSampling.options`) turn them into
        distributions. None where the scores are invalid.
        """
        num_rows, num_nodes = draft.tokens.shape
        tensors = (
            table,
            options,
            draft.probs,
            draft.tokens,
            draft.parents,
            draft.lengths,
            draft.sampled,
        )
        # kept alive to the end of the call
        whole = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        call = [0 if tensor is None else tensor.data_ptr() for tensor in whole]
        call += (
            num_rows,
            num_nodes,
            table.shape[2],
            self._rules[type(rule)],
            draft.replacement,
            *rng.seeds,
            *starts,
        )
        if type(rule) is CoupledVerifier:
            call += _remembered(draft, rng, starts, table.shape[2])
        width = _HEAD + num_nodes
        numbers = array("Q", call)
        buffer = array("q", bytes(8 * num_rows * width))
        if not self._library.outrider_verdicts(numbers.buffer_info()[0], buffer.buffer_info()[0]):
            return None
        lines = [
            buffer[start : start + width].tolist() for start in range(0, num_rows * width, width)
        ]
        lists = VerdictLists(
            path=[line[_HEAD:] for line in lines],
            num_accepted=[line[0] for line in lines],
            next_token=[line[1] for line in lines],
            all_accepted=[line[2] == 1 for line in lines],
        )
        return Verdict.of_lists(lists, num_nodes, draft.tokens.device)


def _is_readable(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype == torch.float32


def _remembered(draft: Draft, rng: KeyedStreams, starts: list[int], vocab_size: int) -> list[int]:
    """Addresses of the noise that a drafter asked for, by output; 0 for what the kernel still
    makes."""
    if draft.parents is None:
        positions = [list(range(start, start + draft.num_nodes + 1)) for start in starts]
    else:
        positions = [
            [start + level for level in levels]
            for start, levels in zip(starts, draft.levels, strict=True)
        ]
    return [
        0 if noise is None else noise.data_ptr() for noise in rng.remembered(positions, vocab_size)
    ]
