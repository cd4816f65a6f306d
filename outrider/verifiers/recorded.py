"""Verdicts on chains as one replay of a CUDA graph, alongside the verifiers, whose own code is what is
recorded.

A sampled step's verdict is some forty small operations with a wait here and there: a fifth of a
step of a small model. Recorded, it is one launch; the coins are drawn on the host before, and all
that is decided comes back in one copy. Rows with filters, penalties or trees are verified as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from outrider.models.graphs import Graphs
from outrider.rows import RowVerifier
from outrider.sampling.rng import KeyedStreams, PhiloxNoise, Purpose, inverse_cdf
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier


class GivenCoins:
    """The `Randomness` of numbers that are known: uniforms (B, N) to accept with, and (B,) to draw
    the next token with."""

    def __init__(self, accept: Tensor, draw: Tensor) -> None:
        self._accept = accept
        self._draw = draw

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        assert purpose == Purpose.ACCEPT
        return self._accept < probs

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        assert purpose == Purpose.RESAMPLE
        return inverse_cdf(weights, self._draw)

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        raise AssertionError("no rule for chains that is recorded asks for noise")


class RecordedVerdicts(PhiloxNoise):
    """The counterpart of `Kernels` for a target whose passes are CUDA graphs."""

    # the last is `block` on a chain
    _rules: ClassVar[tuple[type, ...]] = (TokenVerifier, BlockVerifier, TraversalVerifier)

    def __init__(self) -> None:
        self.graphs = Graphs()

    def probs(self, scores: Tensor, options: Tensor, draft: Draft | None) -> Tensor | None:
        """No `LawKernel`, because the reference computes distributions."""
        return None

    def serve(self, rule: RowVerifier, draft: Draft, table: Tensor) -> bool:
        """Whether this rule's verdict on this draft is recorded."""
        return type(rule) in self._rules and draft.parents is None and table.device.type == "cuda"

    def verdict(
        self,
        rule: RowVerifier,
        draft: Draft,
        table: Tensor,
        rng: KeyedStreams,
        starts: list[int],
        options: Tensor | None = None,
    ) -> Verdict | None:
        """The verdict of `rule.verify` on scores (B, N+1, V) that `options`
        (`BatchSampling.options`) turn into distributions. None where nothing is recorded:
        distributions instead of scores, greedy rows, filters, invalid scores.
        """
        if options is None or not _is_plainly_sampled(options):
            return None
        assert isinstance(rule, Verifier)
        given = [
            table,
            _numbers(options, rng, starts, draft.num_nodes).to(table.device),
            draft.tokens,
            draft.lengths,
        ]
        given += [tensor for tensor in (draft.probs, draft.sampled) if tensor is not None]
        key = (type(rule), draft.probs is not None, draft.sampled is not None)
        (packed,) = self.graphs.run(
            key, partial(_decided, rule, has_probs=draft.probs is not None), given
        )
        lines = packed.tolist()  # sync: all that was decided
        if not all(line[-1] for line in lines):
            return None
        num = draft.num_nodes
        lists = VerdictLists(
            path=[line[:num] for line in lines],
            num_accepted=[line[num] for line in lines],
            next_token=[line[num + 1] for line in lines],
            all_accepted=[line[num + 2] == 1 for line in lines],
        )
        return Verdict.of_lists(lists, num, draft.tokens.device)


def _is_plainly_sampled(options: Tensor) -> bool:
    temperature, top_k, top_p, min_p = options.unbind(1)
    return bool(
        (temperature > 0).all() and (top_k == 0).all() and (top_p == 1).all() and (min_p == 0).all()
    )


def _numbers(options: Tensor, rng: KeyedStreams, starts: list[int], num_nodes: int) -> Tensor:
    """(B, N + 2) fp64: temperature, coins, and the draw of the next token: one copy to the device."""
    coins = (
        rng.uniforms(Purpose.ACCEPT, starts, num_nodes),
        rng.uniforms(Purpose.RESAMPLE, starts, 1),
    )
    return torch.from_numpy(np.concatenate([options[:, :1].numpy(), *coins], axis=1))


def _decided(
    rule: Verifier,
    scores: Tensor,
    numbers: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *drawn: Tensor,
    has_probs: bool,
) -> Sequence[Tensor]:
    """[(B, N + 4) int64]: path, accepted nodes, next token, whether all were accepted, whether the
    distributions are valid."""
    probs = drawn[0] if has_probs else None
    sampled = drawn[-1] if len(drawn) > int(has_probs) else None
    scores = scores.float() / numbers[:, :1, None].float()
    target_probs = scores.softmax(dim=-1)
    verdict = rule.verify(
        Draft(tokens, lengths, probs=probs, sampled=sampled),
        target_probs,
        GivenCoins(numbers[:, 1:-1], numbers[:, -1]),
        lengths,
    )
    counted = torch.arange(target_probs.shape[1], device=target_probs.device) <= lengths[:, None]
    are_valid = (torch.isfinite(target_probs[..., 0]) | ~counted).all(dim=1)
    parts = [
        verdict.num_accepted,
        verdict.next_token,
        verdict.all_accepted.long(),
        are_valid.long(),
    ]
    return [torch.cat([verdict.path, torch.stack(parts, dim=1)], dim=1)]
