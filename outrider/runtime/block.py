"""Block heads (`models/heads/block.py`) on the native runtime: what was not read yet, the block's
pass, and picks, in one call.

The head is three programs. One reads states of the target: keys and values go into the cache,
nothing attends. One makes a block's states and logits, each token seeing the whole block. With a
Markov head a third corrects a level's logits by the token before it, once that is picked; one that
remembers all tokens of a draft runs on its modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.kv import KVCache, LayerShape
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_pass import Corrected, Guessed, Pending, Unread, corrected_by
from outrider.models.heads.eagle import STEADY_ROPE
from outrider.models.signals import AFTER_NORM
from outrider.rows import Rows
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.drafting import ChainRequest, Picks, Vocabulary
from outrider.runtime.lower import program_of
from outrider.runtime.record import Part, RecordedCache, record_part
from outrider.runtime.run import Bound, PassInputs, bind
from outrider.runtime.structures import DraftingStruct, LevelsStruct, PassStruct

FIRST = torch.zeros(1, dtype=torch.int64)


class Drafted(NamedTuple):
    """Whole chains of a batch."""

    tokens: Tensor  # (B, n)
    probs: Tensor  # (R, n + 1, V) of rows that draw, the last ones 0
    states: Tensor  # (B, n, H)


class BlockRun:
    """A head's passes: `BlockPasses`, and whole chains."""

    def __init__(self, head: BlockHead, path: Path) -> None:
        """The head is bound to its target, its linear layers plain. Raises NotLoweredError where it
        cannot run there."""
        self._head = head
        self._config = head.config
        config = head.config
        # whole chains; else level by level, corrected by the head's modules
        self.drafts_whole = not config.markov_recurrent
        if config.conv_taps or config.selector_rank:
            raise NotLoweredError("convolutions and a candidate selector (DFlash2)")
        if type(head) is not BlockHead:
            raise NotLoweredError("layers of another model's kind")
        parts = _Parts(head)
        layers = [
            LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        ] * config.num_layers

        def lowered(inputs: Sequence[tuple[int, torch.dtype]], part: Part) -> Bound:
            try:
                recording = record_part(parts, config.vocab_size, inputs, part)
            except CapabilityError as error:
                raise NotLoweredError(str(error)) from error
            return bind(program_of(parts, recording), parts, layers, head.dtype, path)

        def read(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            entries = head.context(inputs)
            for layer, (keys, values) in enumerate(head.context_keys(entries, positions)):
                cache.store(layer, keys, values)
            return {AFTER_NORM: entries}, entries

        def block(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                sight = config.sight(layer)
                attended = cache.attend(
                    layer, queries, keys, values, sees_all=not sight.causal, window=sight.window
                )
                return attended.transpose(1, 2)

            states = head(ids, positions, attend)
            return {AFTER_NORM: states}, head.logits(states)

        def corrected(
            ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
        ) -> tuple[dict[int, Tensor], Tensor]:
            logits = head.corrected(inputs[0].to(head.dtype), inputs[-1], ids)
            return {AFTER_NORM: logits}, logits

        self._read = lowered(
            [(config.target_hidden_size, head.dtype)] * len(config.target_layers), read
        )
        self._block = lowered([], block)
        self._states_matter = config.markov_gated
        state = [(config.hidden_size, head.dtype)] if self._states_matter else []
        num_tokens = config.draft_vocab_size or config.vocab_size
        lowers = config.markov_rank and self.drafts_whole
        self._correction = (
            lowered([(num_tokens, torch.float32), *state], corrected) if lowers else None
        )
        self._vocabulary = Vocabulary.of(config.vocab_size, head.token_ids)
        self._columns = torch.arange(config.block_size - config.num_guesses, config.block_size)

    def read(self, kv: KVCache, first_row: int, unread: Unread) -> None:
        """See `BlockPasses`."""
        self._read.executor.make(self._reading(kv, first_row, unread))

    def guess(self, kv: KVCache, pending: Pending, unread: Unread | None) -> Guessed:
        """See `BlockPasses`."""
        states = self._room(len(pending.tokens))
        logits = self._levels(kv, pending, unread, self._config.num_guesses, states, None)
        assert logits is not None
        return Guessed(self._guessing(states, self._config.num_guesses), logits)

    def corrected(
        self, logits: Tensor, states: Tensor, before: Tensor, memory: Tensor | None
    ) -> Corrected:
        """See `BlockPasses`."""
        if self._correction is None:
            return corrected_by(self._head, logits, states, before, memory)
        given = (logits, states) if self._states_matter else (logits,)
        inputs = [item[:, None].expand(-1, before.shape[1], -1).contiguous() for item in given]
        executor = self._correction.executor
        (num_rows, width) = before.shape
        corrected = executor.logits(num_rows, width)
        columns = torch.arange(width)
        executor.make(
            executor.call(
                PassInputs(
                    num_rows,
                    width,
                    width,
                    inputs=inputs,
                    ids=before.contiguous(),
                    columns=columns,
                    logits=corrected,
                )
            )
        )
        return Corrected(corrected, None)

    def draft(
        self, kv: KVCache, rows: Rows, pending: Pending, unread: Unread | None, num_tokens: int
    ) -> Drafted | None:
        """Chains of `num_tokens`, as many as there are guesses at most. None where a row's scores
        are not numbers."""
        states = self._room(len(rows))
        picks = Picks.of(rows, num_tokens)
        asked = ChainRequest.of(
            picks, num_tokens, self._vocabulary, carried=states if self._states_matter else None
        )
        if self._levels(kv, pending, unread, num_tokens, states, asked.struct) is None:
            return None
        return Drafted(asked.tokens, asked.probs, self._guessing(states, num_tokens))

    def _room(self, num_rows: int) -> Tensor:
        """For the states of blocks (B, block size, H)."""
        config = self._config
        return torch.empty(
            num_rows, config.block_size, config.hidden_size, dtype=self._block.executor.dtype
        )

    def _guessing(self, states: Tensor, num_levels: int) -> Tensor:
        first = self._config.block_size - self._config.num_guesses
        return states[:, first : first + num_levels]

    def _levels(
        self,
        kv: KVCache,
        pending: Pending,
        unread: Unread | None,
        num_levels: int,
        states: Tensor,
        drafting: DraftingStruct | None,
    ) -> Tensor | None:
        """One call of the library: logits (B, n, Vd) of the first n levels; None where scores are
        none to draft from."""
        config = self._config
        executor = self._block.executor
        num_rows = len(pending.tokens)
        ids = np.full((num_rows, config.block_size), config.mask_token_id)
        ids[:, 0] = pending.tokens
        positions = np.add.outer(np.array(pending.positions), np.arange(config.block_size)).clip(
            max=config.max_positions - 1
        )
        counts = 0 if unread is None else np.array(unread.counts)
        logits = executor.logits(num_rows, num_levels)
        block = executor.call(
            PassInputs(
                num_rows,
                config.block_size,
                num_levels,
                keys=kv.keys,
                values=kv.values,
                tables=self._block.rotary.up_to(int(positions.max())),
                signals=[states],
                ids=ids,
                positions=positions,
                starts=np.array(kv.lengths) + counts,
                columns=self._columns[:num_levels],
                logits=logits,
            )
        )
        struct = LevelsStruct(
            block=ctypes.addressof(executor.struct), pass_=ctypes.addressof(block)
        )
        if unread is not None:
            reading = self._reading(kv, 0, unread)
            struct.context = ctypes.addressof(self._read.executor.struct)
            struct.unread = ctypes.addressof(reading)
        if drafting is not None:
            struct.drafting = ctypes.addressof(drafting)
        if drafting is not None and self._correction is not None:
            own = self._correction.executor
            correcting = own.call(
                PassInputs(
                    num_rows, 1, 1, columns=FIRST, logits=own.logits(num_rows, 1), signals=[None]
                )
            )
            struct.correction = ctypes.addressof(own.struct)
            struct.corrected = ctypes.addressof(correcting)
        return (
            logits
            if executor.library.outrider_runtime_levels(ctypes.addressof(struct), executor.workers)
            else None
        )

    def _reading(self, kv: KVCache, first_row: int, unread: Unread) -> PassStruct:
        positions = unread.positions(self._config.max_positions - 1)
        count = len(unread.counts)
        return self._read.executor.call(
            PassInputs(
                count,
                unread.width,
                keys=[store[first_row:] for store in kv.keys],
                values=[store[first_row:] for store in kv.values],
                tables=self._read.rotary.up_to(int(positions.max())),
                inputs=[states.contiguous() for states in unread.hidden],
                positions=positions,
                starts=np.array(kv.lengths[first_row : first_row + count]),
            )
        )


class _Parts(nn.Module):
    """A head with what it shares with its target, so that every tensor has a name."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        embedding, output = head.tables()
        rope = head.config.rope.get("rope_type", "default")
        if not isinstance(output, nn.Module):
            raise NotLoweredError("an output head that is no module")
        if rope not in STEADY_ROPE:
            raise NotLoweredError(
                f"rotary embeddings of type '{rope}', which change with a text's length"
            )
        self.head = head
        self.rotary = head.rotary
        self.embedding = embedding
        self.output = output
