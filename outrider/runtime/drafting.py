"""Chains of draft tokens on the executor: catch-up, passes and picks of a whole batch in one call;
of a model with a mask token, one pass for the whole chain.

Tokens are picked as `drafters/choice.py` picks them: greedy rows take the likeliest token, rows
that draw invert their distribution's cumulative sum at their own uniform, rows that share the
verifier's noise take its winner. Drafting token by token is the reference:
`tests/unit/runtime/test_drafting.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.kv import KVCache
from outrider.kv.state_slots import HELD_BACK, StatePass, StateSlots
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import OUTSIDE
from outrider.rows import Rows
from outrider.runtime.run import Bound, FirstPass, NativeRun, PassInputs, addresses
from outrider.runtime.structures import DraftingStruct, LevelsStruct
from outrider.sampling.rng import KeyedStreams, Purpose


def noise_tables(rows: Rows, num_positions: int) -> list[Tensor | None]:
    """B * n tables (V,) fp64: of each row that races, the noise of its next n positions; None of
    others."""
    tables: list[Tensor | None] = [None] * (len(rows) * num_positions)
    if racing := rows.racing_rows:
        starts = rows.starts
        positions = [list(range(starts[row], starts[row] + num_positions)) for row in racing]
        noise = rows.rng.select(racing).noise(positions, rows.vocab_size)
        for index, row in enumerate(racing):
            tables[row * num_positions : (row + 1) * num_positions] = noise[
                index * num_positions : (index + 1) * num_positions
            ]
    return tables


class Picks(NamedTuple):
    """The inputs for picking the next n tokens of each row."""

    options: Tensor  # (B, 4) fp64: temperature (0: the likeliest token), top-k, top-p, min-p
    uniforms: np.ndarray  # (B, n) fp64, of rows that draw
    noise: list[Tensor | None]  # B * n tables (V,) fp64 of rows that race, None of others
    drawn: list[int]  # rows that draw

    @classmethod
    def of(cls, rows: Rows, num_tokens: int) -> Picks:
        """The numbers that `choice.choose` would pick with."""
        options = rows.sampling.options
        rng = rows.rng
        drawn = rows.sampling.sampled_rows.tolist()
        if not drawn:
            return cls(
                options, np.empty((len(rows), num_tokens)), [None] * (len(rows) * num_tokens), drawn
            )
        assert isinstance(rng, KeyedStreams)
        racing = set(rows.racing_rows)
        drawn = [row for row in drawn if row not in racing]
        tables = noise_tables(rows, num_tokens)
        starts = rows.starts
        return cls(
            options,
            np.ascontiguousarray(rng.uniforms(Purpose.DRAFT, starts, num_tokens)),
            tables,
            drawn,
        )

    @classmethod
    def likeliest(cls, num_rows: int, num_tokens: int) -> Picks:
        """The likeliest token everywhere, whatever rows ask for."""
        options = torch.tensor([[0.0, 0.0, 1.0, 0.0]] * num_rows, dtype=torch.float64)
        return cls(options, np.empty((num_rows, num_tokens)), [None] * (num_rows * num_tokens), [])


class Vocabulary(NamedTuple):
    """The draft, from the positions for which a program has logits."""

    size: int  # of tokens and distributions
    # (V,) int64: where a token's logit stands, -1: nowhere; None: at its own index
    sources: Tensor | None = None
    outside: float = OUTSIDE  # the logit of tokens that have none
    # the program has other ids than the tokens: those where their logits stand
    feeds_sources: bool = False

    @classmethod
    def of(cls, size: int, known: Tensor | None) -> Vocabulary:
        """`known` (Vd,): the tokens that there are logits of, in their order; None: all."""
        if known is None:
            return cls(size)
        sources = torch.full((size,), -1)
        sources[known] = torch.arange(len(known))
        return cls(size, sources)


class ChainRequest(NamedTuple):
    """A batch's drafting request as the library reads it, and the place of its results."""

    struct: DraftingStruct
    tokens: Tensor  # (B, n)
    probs: Tensor  # (R, n + 1, V) of rows that draw, the last ones 0
    kept: tuple[object, ...]  # what `struct` points to

    @classmethod
    def of(
        cls,
        picks: Picks,
        num_tokens: int,
        vocabulary: Vocabulary,
        last_position: int = 0,
        carried: Tensor | None = None,
    ) -> ChainRequest:
        """`carried` (B, T, H): where passes leave a hidden state of each token that another pass is
        given."""
        num_rows = len(picks.options)
        probs = torch.empty(len(picks.drawn), num_tokens + 1, vocabulary.size)
        probs[:, num_tokens] = 0
        scratch = torch.empty(num_rows, num_tokens, dtype=torch.int64)
        by_row: list[Tensor | None] = [None] * num_rows
        for table, row in zip(probs, picks.drawn, strict=True):
            by_row[row] = table
        tables = {"noise": addresses(picks.noise), "laws": addresses(by_row)}
        struct = DraftingStruct(
            nodes=num_tokens,
            vocab=vocabulary.size,
            last_position=last_position,
            outside=vocabulary.outside,
            feeds_sources=vocabulary.feeds_sources,
            sources=None if vocabulary.sources is None else vocabulary.sources.data_ptr(),
            options=picks.options.data_ptr(),
            uniforms=picks.uniforms.ctypes.data,
            found=scratch.data_ptr(),
            carried=None if carried is None else carried.data_ptr(),
            carried_bytes=0 if carried is None else carried.shape[2] * carried.itemsize,
            **{name: ctypes.addressof(table) for name, table in tables.items()},
        )
        return cls(struct, scratch, probs, (picks, tables, vocabulary, carried))


def first_pass(
    kv: KVCache,
    pending: Sequence[list[int]],
    num_behind: int,
    last_position: int,
    vocab_size: int,
    *inputs: Tensor,
) -> FirstPass:
    """The pass that feeds what each row's cache lacks, one token at least; the cache gets room for
    it and `num_behind` tokens more. `inputs` (B, T, size): of these tokens."""
    width = max(map(len, pending))
    lengths = kv.lengths
    kv.reserve(len(pending), max(lengths) + width + num_behind)
    kv.make_room(0, len(pending), width + num_behind)
    # Lists: every small operation of torch or NumPy is slow where a pass has driven its code and
    # data out of the caches.
    known = [[min(token, vocab_size - 1) for token in tokens] for tokens in pending]
    ids = torch.tensor([tokens + tokens[-1:] * (width - len(tokens)) for tokens in known])
    positions = np.array(
        [[min(place, last_position) for place in range(start, start + width)] for start in lengths]
    )
    return FirstPass(
        ids, positions, np.array(lengths), np.array([len(tokens) - 1 for tokens in pending]), inputs
    )


def draft_chains(
    bound: Bound,
    kv: KVCache,
    picks: Picks,
    first: FirstPass,
    num_tokens: int,
    vocabulary: Vocabulary,
    last_position: int,
    states: StatePass | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Draft tokens (B, n) and the distributions (R, n + 1, V) of rows that draw; None where a row's
    scores are not numbers.

    The cache has room for all that is written. A program with an input is given, for the next
    token, its own first signal.
    """
    carried = (
        torch.empty(*first.ids.shape, bound.executor.program.hidden_size, dtype=kv.dtype)
        if first.inputs
        else None
    )
    asked = ChainRequest.of(picks, num_tokens, vocabulary, last_position, carried)
    rotary = bound.rotary.up_to(int(first.positions.max()) + num_tokens)
    bases = torch.tensor(kv.bases) if kv.is_short else None
    drafted = bound.executor.draft(
        first, kv.keys, kv.values, rotary, carried, asked.struct, states, bases
    )
    return (asked.tokens, asked.probs) if drafted else None


def with_masks(pending: Sequence[list[int]], mask_token: int, num_tokens: int) -> list[list[int]]:
    """The tokens that each row's cache lacks, and a mask for every token that is drafted but the
    first."""
    return [[*tokens, *[mask_token] * (num_tokens - 1)] for tokens in pending]


def draft_masked(
    bound: Bound,
    kv: KVCache,
    picks: Picks,
    first: FirstPass,
    num_tokens: int,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor] | None:
    """Draft tokens and distributions as of `draft_chains`, from one pass over tokens `with_masks`:
    each is picked at the token before it."""
    executor = bound.executor
    num_rows, width = first.ids.shape
    asked = ChainRequest.of(picks, num_tokens, vocabulary)
    call = executor.call(
        PassInputs(
            num_rows,
            width,
            num_tokens,
            keys=kv.keys,
            values=kv.values,
            tables=bound.rotary.up_to(int(first.positions.max())),
            inputs=first.inputs,
            ids=first.ids,
            positions=first.positions,
            starts=first.starts,
            columns=np.add.outer(first.columns, np.arange(1 - num_tokens, 1)),
            rows_differ=True,
            logits=executor.logits(num_rows, num_tokens),
            bases=torch.tensor(kv.bases) if kv.is_short else None,
        )
    )
    levels = LevelsStruct(
        block=ctypes.addressof(executor.struct),
        pass_=ctypes.addressof(call),
        drafting=ctypes.addressof(asked.struct),
    )
    found = executor.library.outrider_runtime_levels(ctypes.addressof(levels), executor.workers)
    return (asked.tokens, asked.probs) if found else None


def chains_behind(
    lm: LM,
    run: NativeRun,
    picks: Picks,
    pending: Sequence[list[int]],
    num_tokens: int,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor] | None:
    """`draft_chains` after rows whose caches lack `pending`, one token at least. Commits nothing:
    what was fed, all but the last token drafted, lies after what the caches hold. None, too, for
    chains that a running state could not be taken back from."""
    kv = lm.kv
    last = lm.shape.context_length - 1
    if isinstance(kv, StateSlots) and max(map(len, pending)) + num_tokens > HELD_BACK:
        return None
    first = first_pass(kv, pending, num_tokens, last, lm.shape.vocab_size)
    states = (
        kv.begin_chain([len(tokens) for tokens in pending], num_tokens)
        if isinstance(kv, StateSlots)
        else None
    )
    return draft_chains(run.bound, kv, picks, first, num_tokens, vocabulary, last, states)


class ChainLoop:
    """The whole chain of a draft model: what `draft_model.py` does token by token, for every
    length."""

    def __init__(self, lm: LM, run: NativeRun, vocab_size: int) -> None:
        """`run` makes the passes of `lm`; `vocab_size`: of the tokens that are drafted, the
        target's."""
        self.lm = lm
        self._run = run
        self._vocabulary = Vocabulary(vocab_size)

    def draft(
        self, rows: Rows, pending: Sequence[list[int]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draft after rows whose caches lack `pending`; their caches then hold all but the last
        token.

        See `draft_chains`. Where that finds nothing, nothing is held, and the path token by token
        says more.
        """
        drafted = chains_behind(
            self.lm, self._run, Picks.of(rows, num_tokens), pending, num_tokens, self._vocabulary
        )
        if drafted is not None:
            for row, tokens in enumerate(pending):
                self.lm.kv.advance(row, len(tokens) + num_tokens - 1)
        return drafted


class MaskLoop:
    """The chain of a draft model with a mask token: one pass, whatever its length."""

    def __init__(self, lm: LM, run: NativeRun, vocab_size: int, mask_token: int) -> None:
        """`run` makes the passes of `lm`; `vocab_size`: of the tokens that are drafted, the
        target's."""
        self.lm = lm
        self._run = run
        self._vocabulary = Vocabulary(vocab_size)
        self._mask_token = mask_token

    def draft(
        self, rows: Rows, pending: Sequence[list[int]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draft after rows whose caches lack `pending`, which they then hold. None where scores
        are none to pick from."""
        shape = self.lm.shape
        tokens = with_masks(pending, self._mask_token, num_tokens)
        first = first_pass(self.lm.kv, tokens, 0, shape.context_length - 1, shape.vocab_size)
        picks = Picks.of(rows, num_tokens)
        drafted = draft_masked(
            self._run.bound, self.lm.kv, picks, first, num_tokens, self._vocabulary
        )
        if drafted is not None:
            for row, lacking in enumerate(pending):
                self.lm.kv.advance(row, len(lacking))
        return drafted
