"""Laws and verdicts on chains by the native kernels (`models/native`): the fast path beside `sampling/` and the verifiers.

A pass of the target drives everything else out of the caches, so behind it some fifty operations of torch, of a few microseconds
each, take a tenth of a step of a small model; and torch's nucleus sorts what it cannot decide otherwise, 45 ms for six outputs of
152,000 tokens. Here each is one call. Coins and draws are the same numbers, so is what is decided with them, up to rounding:
`tests/unit/verifiers/test_kernels.py` holds them to the verifiers.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from outrider.rows import RowVerifier
from outrider.sampling.rng import KeyedStreams, Purpose
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier


class Kernels:
    """Of a target that runs on them. fp32 on the CPU only, as its passes give logits."""

    _is_block: ClassVar[dict[type, bool]] = {BlockVerifier: True, TokenVerifier: False}

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

    def serve(self, rule: RowVerifier, draft: Draft, target_probs: Tensor) -> bool:
        """Whether this rule's verdict on this draft can be had here."""
        drawn = draft.probs is None or (_is_readable(draft.probs) and draft.probs.shape == target_probs.shape)
        fits = target_probs.shape[:2] == (draft.num_rows, draft.num_nodes + 1)
        return type(rule) in self._is_block and draft.parents is None and _is_readable(target_probs) and drawn and fits

    def verdict(
        self, rule: RowVerifier, draft: Draft, target_probs: Tensor, rng: KeyedStreams, positions: Tensor
    ) -> Verdict:
        """What `rule.verify` gives, for those it serves."""
        num_rows, num_nodes, vocab_size = draft.num_rows, draft.num_nodes, target_probs.shape[2]
        laws, tokens, lengths = target_probs.contiguous(), draft.tokens.contiguous(), draft.lengths.contiguous()
        proposals = None if draft.probs is None else draft.probs.contiguous()
        sampled = None if draft.sampled is None else draft.sampled.contiguous()
        coins, draws = rng.uniforms(Purpose.ACCEPT, positions, num_nodes), rng.uniforms(Purpose.RESAMPLE, positions, 1)
        found = (ctypes.c_int64 * (2 * num_rows))()
        self._library.outrider_chain_verdicts(
            laws.data_ptr(), _address(proposals), tokens.data_ptr(), lengths.data_ptr(), _address(sampled),
            coins.ctypes.data, draws.ctypes.data, _numbers(num_rows, num_nodes, vocab_size, self._is_block[type(rule)]), found,
        )  # fmt: skip
        counts = found[::2]
        lists = VerdictLists(
            path=[[*range(count), *[-1] * (num_nodes - count)] for count in counts],
            num_accepted=counts,
            next_token=found[1::2],
            all_accepted=[count == length for count, length in zip(counts, draft.lists[1], strict=True)],
        )
        return Verdict.of_lists(lists, num_nodes, tokens.device)


def _is_readable(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype == torch.float32


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _numbers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
