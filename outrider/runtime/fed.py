"""Heads that are fed hidden states (EAGLE's, MTP's) on the native runtime: their passes, whole
chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.head_lm import FedHead, HeadLM
from outrider.models.heads.mtp import MtpHead
from outrider.models.pass_plan import PassPlan
from outrider.models.signals import AFTER_NORM
from outrider.rows import Rows
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.drafting import (
    Picks,
    Vocabulary,
    draft_chains,
    draft_masked,
    first_pass,
    with_masks,
)
from outrider.runtime.growing import GrownTrees, TreeLimits, grow_trees
from outrider.runtime.lower import program_of
from outrider.runtime.record import Part, RecordedCache, record_part
from outrider.runtime.run import Bound, bind
from outrider.runtime.windows import within

CARRIED = -2  # the key of what the pair that follows is given


class FedRun:
    """A head's passes: a `HeadRun` (`models/heads/head_lm.py`)."""

    def __init__(self, lm: HeadLM, path: Path) -> None:
        """The head is bound to its target, its linear layers plain. Raises NotLoweredError where it
        cannot run there."""
        head = lm.head
        self.kv = lm.kv
        parts = _parts_of(head)

        def states(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            found = parts.states(ids, inputs[0], positions, cache)
            return {CARRIED: head.carry(found), AFTER_NORM: found}, head.logits(found)

        def fused(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            features = head.fuse(inputs[0])
            return {AFTER_NORM: features}, features

        config = head.config
        dtype = lm.dtype

        def lowered(size: int, part: Part) -> Bound:
            try:
                recording = record_part(parts, lm.shape.vocab_size, [(size, dtype)], part)
            except CapabilityError as error:
                raise NotLoweredError(str(error)) from error
            program = within(program_of(parts, recording), lm.window)
            return bind(program, parts, lm.kv.layers, dtype, path)

        self.bound = lowered(config.hidden_size if parts.fuses else config.feature_size, states)
        self._fuse = lowered(config.feature_size, fused).executor if parts.fuses else None

    def fuse(self, joined: Tensor) -> Tensor:
        """`FedHead.fuse` of (N, F)."""
        return joined if self._fuse is None else self._fuse.map(joined.contiguous())

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The carried features (B, T, H) and the logits (B, K, Vd), fp32."""
        tables = self.bound.rotary.up_to(int(positions.max()))
        logits, (carried,) = self.bound.executor.run(
            tokens, positions, plan, columns, (CARRIED,), tables, (features.contiguous(),)
        )
        return carried, logits


class FedChains:
    """Whole chains of a head: what `drafters/heads/feature_fed.py` does token by token."""

    def __init__(self, lm: HeadLM, run: FedRun, mask_token: int | None = None) -> None:
        """`mask_token`: of a head that drafts a chain in one pass."""
        self._lm = lm
        self._run = run
        self._mask_token = mask_token
        self._vocabulary = Vocabulary.of(lm.shape.vocab_size, lm.head.draft_ids)

    def draft(
        self, rows: Rows, pairs: Sequence[tuple[list[int], Tensor]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens and distributions as of `draft_chains`, after rows whose caches lack these pairs:
        tokens, and the target's hidden states (k, F) alongside them. Commits nothing: the pairs are in
        the caches' scratch."""
        lm = self._lm
        kv = self._lm.kv
        last = self._lm.shape.context_length - 1
        features = lm.fused([joined for _, joined in pairs])
        if self._mask_token is not None:
            return self._draft_masked(rows, [tokens for tokens, _ in pairs], features, num_tokens)
        first = first_pass(
            kv,
            [tokens for tokens, _ in pairs],
            num_tokens,
            last,
            lm.shape.vocab_size,
            _side_by_side(features),
        )
        return draft_chains(
            self._run.bound,
            kv,
            Picks.of(rows, num_tokens),
            first,
            num_tokens,
            self._vocabulary,
            last,
        )

    def _draft_masked(
        self, rows: Rows, pending: list[list[int]], features: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """A draft as of `draft`, from one pass with a mask for every token after the first."""
        lm = self._lm
        assert self._mask_token is not None
        assert lm.mask_feature is not None
        tokens = with_masks(pending, self._mask_token, num_tokens)
        width = max(map(len, tokens))
        masks = lm.mask_feature.expand(width, -1)
        padded = torch.stack([torch.cat([known, masks[len(known) :]]) for known in features])
        last = lm.shape.context_length - 1
        first = first_pass(lm.kv, tokens, 0, last, lm.shape.vocab_size, padded)
        picks = Picks.of(rows, num_tokens)
        return draft_masked(self._run.bound, lm.kv, picks, first, num_tokens, self._vocabulary)


class FedTrees:
    """Whole trees of a head: what `drafters/heads/feature_fed.py` does level by level."""

    def __init__(self, lm: HeadLM, run: FedRun) -> None:
        self._lm = lm
        self._run = run

    def grow(
        self, rows: Rows, pending: Sequence[list[int]], limits: TreeLimits, budgets: Sequence[int]
    ) -> GrownTrees | None:
        """See `grow_trees`: after rows whose caches lack these tokens, alongside which are the
        features that the head was given."""
        lm = self._lm
        features = _side_by_side(self._lm.given)
        last = lm.shape.context_length - 1
        num_behind = limits.max_fed(max(budgets))
        first = first_pass(lm.kv, pending, num_behind, last, lm.shape.vocab_size, features)
        return grow_trees(
            self._run.bound, lm.kv, rows, first, limits, budgets, last, lm.head.draft_ids
        )


def _side_by_side(features: Sequence[Tensor]) -> Tensor:
    """(B, T, H) of each row's (k, H), zero after."""
    if len(features) == 1:
        return features[0][None]
    return nn.utils.rnn.pad_sequence(list(features), batch_first=True)


class _EagleParts(nn.Module):
    """A head with what it shares with its target, so that every tensor has a name."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        if not isinstance(head.output, nn.Module):
            raise NotLoweredError("an output head that is no module")
        self.head = head
        self.output = head.output
        self.fuses = head.config.kind == "eagle3"
        if isinstance(head.embedding, nn.Parameter):
            self.embedding = head.embedding
        else:
            self.register_buffer("embedding", head.embedding)

    def states(
        self, ids: Tensor, features: Tensor, positions: Tensor, cache: RecordedCache
    ) -> Tensor:
        return self.head.states(
            F.embedding(ids, self.head.embedding), features, positions, cache.attend
        )


class _MtpParts(nn.Module):
    """An MTP head with what it shares with its target; its layer attends by transformers'
    interface."""

    fuses = False

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        if len(head.layers) > 1:
            raise NotLoweredError("it has several layers, which are run in turn")
        self.head, self.embedding, self.output = head, *head.shared

    def states(
        self, ids: Tensor, features: Tensor, positions: Tensor, cache: RecordedCache
    ) -> Tensor:
        with cache.attending(self.head.layer(0).body):
            return self.head.states(ids, features, positions)


def _parts_of(head: FedHead) -> _EagleParts | _MtpParts:
    if isinstance(head, MtpHead):
        return _MtpParts(head)
    assert isinstance(head, EagleHead)
    return _EagleParts(head)
