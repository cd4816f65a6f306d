"""EAGLE heads (`models/heads/eagle.py`) on the native runtime: their passes, and their whole chains in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models.attention import PassPlan
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle_lm import EagleLM
from outrider.models.signals import AFTER_NORM
from outrider.rows import Rows
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.drafting import Picks, Vocabulary, draft_chains
from outrider.runtime.lower import Lowering
from outrider.runtime.record import Part, RecordedCache, record_part
from outrider.runtime.run import Bound, FirstPass, bind

CARRIED = -2  # the key of what the pair that follows is given


class EagleRun:
    """A head's passes: a `HeadRun` (`models/heads/eagle_lm.py`)."""

    def __init__(self, lm: EagleLM, path: Path) -> None:
        """The head is bound to its target, its linear layers plain. Raises NotLoweredError where it cannot run there."""
        head, self.kv = lm.head, lm.kv
        if not isinstance(head.output, nn.Module):
            raise NotLoweredError("an output head that is no module")
        parts = _Parts(head)

        def states(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            found = head.states(F.embedding(ids, head.embedding), inputs[0], positions, cache.attend)
            return {CARRIED: head.carry(found), AFTER_NORM: found}, head.logits(found)

        def fused(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            found = head.fuse(inputs[0])
            return {AFTER_NORM: found}, found

        config, dtype = head.config, lm.dtype

        def lowered(size: int, part: Part) -> Bound:
            try:
                recording = record_part(parts, config.vocab_size, [(size, dtype)], part)
            except CapabilityError as error:
                raise NotLoweredError(str(error)) from error
            return bind(Lowering(parts, recording).program(), parts, lm.kv.layers, dtype, path)

        self.bound = lowered(config.hidden_size if config.kind == "eagle3" else config.feature_size, states)
        self._fuse = lowered(config.feature_size, fused).executor if config.kind == "eagle3" else None

    def fuse(self, joined: Tensor) -> Tensor:
        """`EagleHead.fuse` of (N, F)."""
        return joined if self._fuse is None else self._fuse.map(joined.contiguous())

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What is carried (B, T, H), and logits (B, K, Vd), fp32."""
        tables = self.bound.rotary.up_to(int(positions.max()))
        logits, (carried,) = self.bound.executor.run(
            tokens, positions, plan, columns, (CARRIED,), tables, (features.contiguous(),)
        )
        return carried, logits


class EagleChains:
    """Whole chains of a head: what `drafters/eagle.py` does token by token."""

    def __init__(self, lm: EagleLM, run: EagleRun) -> None:
        self._lm, self._run = lm, run
        self._vocabulary = Vocabulary.of(lm.shape.vocab_size, lm.head.draft_ids)

    def draft(
        self, rows: Rows, pairs: Sequence[tuple[list[int], Tensor]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens and laws as of `draft_chains`, behind rows whose caches lack these pairs: tokens, and the target's hidden states
        (k, F) beside them. Commits nothing: the pairs are in the caches' scratch."""
        lm, kv, last = self._lm, self._lm.kv, self._lm.shape.context_length - 1
        width, starts = max(len(tokens) for tokens, _ in pairs), np.array(kv.lengths)
        kv.reserve(kv.num_rows, int(starts.max()) + width + num_tokens)
        features = torch.zeros(len(pairs), width, lm.head.config.hidden_size, dtype=lm.dtype)
        for row, fused in enumerate(lm.fused([joined for _, joined in pairs])):
            features[row, : len(fused)] = fused
        ids = torch.tensor([tokens + tokens[-1:] * (width - len(tokens)) for tokens, _ in pairs])
        positions = np.minimum(starts[:, None] + np.arange(width), last)
        columns = np.array([len(tokens) - 1 for tokens, _ in pairs])
        first = FirstPass(ids, positions, starts, columns, (features,))
        return draft_chains(self._run.bound, kv, Picks.of(rows, num_tokens), first, num_tokens, self._vocabulary, last)


class _Parts(nn.Module):
    """A head with what it shares with its target, so that every tensor has a name."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head, self.output = head, head.output
        if isinstance(head.embedding, nn.Parameter):
            self.embedding = head.embedding
        else:
            self.register_buffer("embedding", head.embedding)
