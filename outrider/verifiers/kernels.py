"""Laws, noise and verdicts of sampled rows by the native kernels (`models/native`): fast paths beside `sampling/` and verifiers.

A pass of the target drives everything else out of the caches, so behind it some fifty operations of torch, of a few microseconds
each, take a tenth of a step of a small model; and torch's nucleus sorts what it cannot decide otherwise, 42 ms for six flat laws
over 152,000 tokens (here 1.2). Here each is one call. Coins, draws and noise are the same numbers, so is what is decided with
them, up to rounding: `tests/unit/verifiers/test_kernels.py` holds them to the verifiers.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from outrider.rows import RowVerifier
from outrider.sampling.rng import KeyedStreams, Purpose
from outrider.types import Draft, Verdict
from outrider.verifiers.base import path_verdict, prefix_verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.greedy import greedy_verdict
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier


class Kernels:
    """Of a target that runs on them. fp32 on the CPU only, as its passes give logits."""

    # rules of chains: whether they judge whole prefixes (on a chain traversal is the block rule)
    _is_block: ClassVar[dict[type, bool]] = {BlockVerifier: True, TraversalVerifier: True, TokenVerifier: False}

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def laws(self, scores: Tensor, options: Tensor, draft: Draft | None) -> Tensor | None:
        """A `LawKernel`: (B, M, V) of a whole pass over `draft`."""
        if draft is None or not _is_readable(scores):
            return None
        scores, lengths = scores.contiguous(), draft.lengths.contiguous()
        made = torch.empty_like(scores)
        whole = self._library.outrider_laws(
            scores.data_ptr(), lengths.data_ptr(), options.data_ptr(), _numbers(*scores.shape), made.data_ptr()
        )
        return made if whole else None

    def noise(self, seed: int, positions: list[int], vocab_size: int) -> list[Tensor]:
        """A `NoiseMaker`: the uniforms are `PhiloxNoise`'s to the bit, their logarithms up to rounding."""
        made, num = [torch.empty(vocab_size, dtype=torch.float64) for _ in positions], len(positions)
        pointers = (ctypes.c_void_p * num)(*(one.data_ptr() for one in made))
        self._library.outrider_noise(seed, int(Purpose.GUMBEL), _numbers(*positions), pointers, num, vocab_size)
        return made

    def serve(self, rule: RowVerifier, draft: Draft, target_probs: Tensor) -> bool:
        """Whether this rule's verdict on this draft can be had here."""
        if not _is_readable(target_probs) or target_probs.shape[:2] != (draft.num_rows, draft.num_nodes + 1):
            return False
        if type(rule) is CoupledVerifier:
            return True
        drawn = draft.probs is None or (_is_readable(draft.probs) and draft.probs.shape == target_probs.shape)
        return drawn and (type(rule) is TraversalVerifier or (type(rule) in self._is_block and draft.parents is None))

    def verdict(
        self, rule: RowVerifier, draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int]
    ) -> Verdict:
        """What `rule.verify` gives, for those it serves."""
        if type(rule) is CoupledVerifier:
            return self._coupled(draft, target_probs, rng, starts)
        if draft.parents is not None:
            return self._trees(draft, target_probs, rng, starts)
        return self._chains(draft, target_probs, rng, starts, is_block=self._is_block[type(rule)])

    def _coupled(self, draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int]) -> Verdict:
        """As `CoupledVerifier.verify`."""
        laws, num_outputs, vocab_size = target_probs.contiguous(), *target_probs.shape[1:]
        if draft.parents is None:
            places = [list(range(start, start + num_outputs)) for start in starts]
        else:
            places = [[start + level for level in levels] for start, levels in zip(starts, draft.levels, strict=True)]
        noise = rng.noise(places, vocab_size)
        pointers = (ctypes.c_void_p * len(noise))(*(one.data_ptr() for one in noise))
        winners = (ctypes.c_int64 * len(noise))()
        self._library.outrider_races(laws.data_ptr(), pointers, len(noise), vocab_size, winners)
        choice = [winners[start : start + num_outputs] for start in range(0, len(noise), num_outputs)]
        return greedy_verdict(draft, choice)

    def _chains(
        self, draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int], *, is_block: bool
    ) -> Verdict:
        """As the verifiers of chains."""
        laws, tokens, lengths = target_probs.contiguous(), draft.tokens.contiguous(), draft.lengths.contiguous()
        proposals, sampled = _whole(draft.probs), _whole(draft.sampled)
        found = (ctypes.c_int64 * (2 * draft.num_rows))()
        self._library.outrider_chain_verdicts(
            laws.data_ptr(), _address(proposals), tokens.data_ptr(), lengths.data_ptr(), _address(sampled),
            *_coins(draft, rng, starts), _numbers(draft.num_rows, draft.num_nodes, laws.shape[2], is_block), found,
        )  # fmt: skip
        return prefix_verdict(draft, found[::2], found[1::2])

    def _trees(self, draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int]) -> Verdict:
        """As `TraversalVerifier.verify`."""
        assert draft.parents is not None
        laws, tokens, lengths = target_probs.contiguous(), draft.tokens.contiguous(), draft.lengths.contiguous()
        parents, proposals, sampled = draft.parents.contiguous(), _whole(draft.probs), _whole(draft.sampled)
        found = (ctypes.c_int64 * (2 * draft.num_rows))()
        self._library.outrider_tree_verdicts(
            laws.data_ptr(), _address(proposals), tokens.data_ptr(), parents.data_ptr(), lengths.data_ptr(), _address(sampled),
            *_coins(draft, rng, starts), _numbers(draft.num_rows, draft.num_nodes, laws.shape[2], draft.replacement), found,
        )  # fmt: skip
        return path_verdict(draft, found[::2], found[1::2])


def _is_readable(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype == torch.float32


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _coins(draft: Draft, rng: KeyedStreams, starts: list[int]) -> tuple[ctypes.Array[ctypes.c_double], ...]:
    """Of every node, and of the token behind the draft."""
    draws = rng.uniforms(Purpose.RESAMPLE, starts, 1)
    coins = rng.uniforms(Purpose.ACCEPT, starts, draft.num_nodes) if draft.num_nodes else draws  # none is looked at
    return _doubles(coins), _doubles(draws)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _doubles(table: np.ndarray) -> ctypes.Array[ctypes.c_double]:
    """A copy: NumPy's own way to an address goes through Python, cold behind a pass."""
    return (ctypes.c_double * table.size)(*table.ravel().tolist())


def _numbers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
