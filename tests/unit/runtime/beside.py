"""Two drafters side by side that must propose the same, and EAGLE heads for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.heads.block import BlockDrafter
from outrider.models.heads.head_lm import HeadLM
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, TargetOutput, Verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from tests.heads import random_eagle
from tests.helpers import make_row, tiny_llama

VOCAB = 60
NODES = 4
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "num_layers": 2, "fc_bias": True},
    "eagle3": {"kind": "eagle3", "draft_vocab": 25},
    "eagle3.1": {
        "kind": "eagle3",
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "qk_norm": True,
    },
}


def models(head: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[LM, HeadLM]:
    """A target and a random head for it, in fp64: some processors make fp32 products of bf16's, too
    coarse to compare."""
    module = tiny_llama(VOCAB, sharpness=2.0).requires_grad_(False).to(dtype)
    lm = build_lm(module, "tiny", dtype, torch.device("cpu"))
    made = random_eagle(target=module.config, **HEADS[head], **changes).to(dtype)
    made.bind(module.get_input_embeddings().weight, module.get_output_embeddings())
    return lm, HeadLM(made, VOCAB, lm.shape.context_length)


class Beside(Drafter):
    """Two drafters that must propose the same, step by step.

    `tolerance`: of distributions and caches, relative. `are_placed`: nodes of rows that draw are
    the likeliest, too.
    """

    def __init__(
        self, one: Any, other: Any, tolerance: float = 1e-6, *, are_placed: bool = False
    ) -> None:
        self.both = (one, other)
        self.are_placed = are_placed
        self.tolerance = tolerance
        self.compared = self.drawn = self.raced = self.filtered = 0
        self.lengths: list[int] = []

    @property
    def signals(self) -> tuple[int, ...]:
        return self.both[0].signals

    def start(self, row: Row) -> None:
        for drafter in self.both:
            drafter.start(row)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        for drafter in self.both:
            drafter.read(index, start, hidden)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        one, other = (drafter.propose(rows, gamma) for drafter in self.both)
        assert one.lists[1] == other.lists[1]
        self.lengths += one.lists[1]
        for index, length in enumerate(one.lists[1]):
            assert one.lists[0][index][:length] == other.lists[0][index][:length]
            assert one.parent_lists[index][:length] == other.parent_lists[index][:length]
            self.compared += length
            if rows[index].params.is_greedy or not length:
                continue
            if _races(rows, index):
                assert not one.is_sampled()[index].any(), "placed, not drawn"
                self.raced += length
                continue
            if self.are_placed:
                assert (one.sampled, other.sampled, one.probs) == (None, None, None)
                continue
            assert one.probs is not None
            assert other.probs is not None
            assert one.probs.shape == (len(rows), one.num_nodes + 1, VOCAB)
            assert one.is_sampled()[index].all()
            self._assert_close(one.probs[index, :length], other.probs[index, :length])
            self.drawn += length
            self.filtered += int(bool((one.probs[index, :length] == 0).any()))
        return one

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for drafter in self.both:
            drafter.commit(rows, draft, verdict, output)
        one, other = (
            drafter.kv if isinstance(drafter, BlockDrafter) else drafter.lm.kv
            for drafter in self.both
        )
        assert one.lengths == other.lengths
        for ours, theirs in zip(
            (*one.keys, *one.values), (*other.keys, *other.values), strict=True
        ):
            for row, length in enumerate(one.lengths):
                self._assert_close(ours[row, :length], theirs[row, :length])

    def _assert_close(self, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance / 10)

    def stop(self, index: int) -> None:
        for drafter in self.both:
            drafter.stop(index)


def _races(rows: Rows, index: int) -> bool:
    return rows.coupled_rows is not None and bool(rows.coupled_rows[index])


class Ragged(FixedLength):
    """Another length for every row and step, 0 among them."""

    def choose(self, rows: Rows) -> list[int]:
        return [
            row.clamp_draft((len(row.tokens) + index) % (NODES + 1))
            for index, row in enumerate(rows)
        ]


PARAMS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0),
    SamplingParams(max_tokens=30, temperature=0.6),
    # while it is there, no program serves
    SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=0.3),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=4, min_p=0.1),
)
PROMPTS = ([5, 6, 7, 8, 9, 10], [3, 4, 5, 3, 4, 5, 3, 4], [11], [8, 9], [5, 6], [7, 7, 7])


def draft_side_by_side(
    target: LM,
    both: Beside,
    control: FixedLength,
    which: tuple[int, ...],
    racing: tuple[int, ...] = (),
) -> None:
    """To the end of rows that join one by one, those of `racing` with the target's own noise."""
    rows = [make_row(PROMPTS[number], PARAMS[number], seed=number) for number in which]
    for number, row in zip(which, rows, strict=True):
        row.verifier = CoupledVerifier() if number in racing else None
    join_one_by_one(Decoder(target, both, BlockVerifier(), control), rows)


def join_one_by_one(decoder: Decoder, rows: Sequence[Row]) -> None:
    """A step after each row that joins, then to the end of all; rows leave when they are finished."""
    for row in rows:
        decoder.add(row)
        decoder.step()
    while len(decoder.rows):
        decoder.step()
        for index in reversed(range(len(decoder.rows))):
            if decoder.rows[index].finish_reason:
                decoder.remove(index)


GREEDY = (0,)
MIXED = (0, 2)
PENALISED = (0, 1, 2, 3)
FILTERED = (0, 1, 4, 5)
