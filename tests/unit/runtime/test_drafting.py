"""Chains drafted in one call, against the same model drafting token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.models.lm import LM
from outrider.rows import Rows
from outrider.runtime.drafting import ChainLoop, MaskLoop
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import inverse_cdf
from outrider.types import Draft
from outrider.verifiers.coupled import CoupledVerifier
from tests.helpers import make_row
from tests.unit.runtime.test_run import on_executor

VOCAB = 97
GREEDY = SamplingParams(max_tokens=90)
KINDS = {
    "greedy": GREEDY,
    "warm": replace(GREEDY, temperature=0.7),
    "hot": replace(GREEDY, temperature=1.3),
    "top-k": replace(GREEDY, temperature=0.9, top_k=5),
    "top-p": replace(GREEDY, temperature=1.0, top_p=0.8),
    "min-p": replace(GREEDY, temperature=1.0, min_p=0.1),
    "all filters": replace(GREEDY, temperature=1.1, top_k=40, top_p=0.9, min_p=0.02),
}
TEXTS = [
    [5, 6, 7],
    [8] * 21,
    [9, 3],
    [11, 12, 13, 14, 15],
    [30, 31],
    list(range(40, 60)),
    [70, 4, 4],
]


class Watched(ChainLoop):
    """A loop that may not give up, and counts its calls."""

    calls = 0

    def draft(
        self, rows: Rows, pending: Sequence[list[int]], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        found = super().draft(rows, pending, num_tokens)
        assert found is not None
        return found


def drafters(
    family: str, path: Path, vocab_size: int, dtype: torch.dtype = torch.float32
) -> tuple[ModelDrafter, ModelDrafter]:
    """One that drafts in one call, and the same model token by token."""
    lm, _ = on_executor(family, dtype, path)
    return ModelDrafter(lm, Watched(lm, lm.run, vocab_size)), ModelDrafter(lm.twin())  # type: ignore[arg-type]


def batch(
    params: Sequence[SamplingParams], racing: Sequence[int] = (), vocab_size: int = VOCAB
) -> Rows:
    rows = Rows(vocab_size, torch.device("cpu"))
    for number, (text, one) in enumerate(zip(TEXTS, params, strict=False)):
        row = make_row(text, one, seed=number + 3, number=number)
        if number in racing:
            row.verifier = CoupledVerifier()
        rows.add(row)
    return rows


def compare(rows: Rows, found: Draft, expected: Draft) -> None:
    """The same tokens, and the same distributions of rows that draw."""
    assert found.lists == expected.lists
    drawing = [not row.params.is_greedy and row.verifier is None for row in rows]
    if not any(drawing):
        assert found.probs is None
        return
    assert found.probs is not None
    assert expected.probs is not None
    assert found.sampled is None or torch.equal(found.sampled, expected.sampled)
    ours = found.probs[drawing, :-1]
    theirs = expected.probs[drawing, :-1]
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)
    assert not found.probs[:, -1].any()


@torch.inference_mode()
def step_by_step(
    pair: tuple[ModelDrafter, ModelDrafter], rows: Rows, lengths: Sequence[int]
) -> None:
    """Steps of both over the same rows, each row going on with some of what was drafted; equal
    drafts and caches every time."""
    fast, slow = pair
    for drafter in pair:
        for row in rows:
            drafter.start(row)
    for number, length in enumerate(lengths):
        gamma = [max(0, length - index % 2) for index in range(len(rows))]
        found = fast.propose(rows, gamma)
        expected = slow.propose(rows, gamma)
        compare(rows, found, expected)
        assert fast.lm.kv.lengths == slow.lm.kv.lengths
        for index, (row, tokens, count) in enumerate(zip(rows, *expected.lists, strict=True)):
            kept = (number + index) % (count + 1)  # none, some, or all of them
            row.tokens += [
                *tokens[:kept],
                (tokens[kept] if kept < count else 2) + (0 if kept == count else 1),
            ]
            row.tokens[-1] %= VOCAB
            for drafter in pair:
                drafter.lm.kv.truncate(index, len(row.tokens) - 1)
    for ours, theirs in zip(fast.lm.kv.keys, slow.lm.kv.keys, strict=True):
        for index, size in enumerate(fast.lm.kv.lengths):
            assert torch.equal(ours[index, :size], theirs[index, :size])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_drafted_as_token_by_token(
    kind: str, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches a distribution that is filtered otherwise, another uniform, a wrong slot or position
    after the first token, a row that catches up two tokens."""
    pair = drafters("llama", library_path, VOCAB, dtype)
    step_by_step(pair, batch([KINDS[kind]]), [4, 1, 5, 3, 8, 2])
    assert pair[0]._loop.calls == 6  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("racing", [(), (1, 3), (1, 2, 3, 4, 5, 6)], ids=str)
def test_rows_of_all_kinds_in_one_batch(
    family: str, racing: tuple[int, ...], library_path: Path
) -> None:
    """Catches rows that take one another's options, uniforms, noise, distributions or slots;
    windows, and learnt positions."""
    step_by_step(
        drafters(family, library_path, VOCAB), batch(list(KINDS.values()), racing), [3, 6, 1, 4, 5]
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_one_pass_of_masks_in_one_call(family: str, library_path: Path) -> None:
    """Against the same pass by `LM.forward`: catches a mask too many or too few, a token picked at
    another position, masks that stay in the cache."""
    lm, _ = on_executor(family, torch.float32, library_path)
    assert isinstance(lm.run, NativeRun)
    loop = MaskLoop(lm, lm.run, VOCAB, 4)
    pair = ModelDrafter(lm, loop, None, 4), ModelDrafter(lm.twin(), None, None, 4)
    step_by_step(pair, batch(list(KINDS.values()), (1, 3)), [3, 6, 1, 4, 5])


@torch.inference_mode()
def test_masks_are_read_after_the_text(library_path: Path) -> None:
    """The guesses are those of the model over the whole text and the masks, after any number of
    kept tokens."""
    lm, plain = on_executor("llama", torch.float32, library_path)
    assert isinstance(lm.run, NativeRun)
    drafter = ModelDrafter(lm, MaskLoop(lm, lm.run, VOCAB, 4), None, 4)
    rows = batch([GREEDY])
    drafter.start(rows[0])
    for length, kept in ((5, 5), (6, 0), (1, 1), (7, 3)):
        draft = drafter.propose(rows, [length])
        text = [*rows[0].tokens, *[4] * (length - 1)]
        fresh = plain.twin()
        fresh.kv.add_row()
        logits = fresh.forward(torch.tensor([text])).logits
        assert draft.tokens[0].tolist() == logits[0, -length:, :].argmax(-1).tolist()
        rows[0].tokens += [*draft.tokens[0, :kept].tolist(), 9]
        drafter.lm.kv.truncate(0, len(rows[0].tokens) - 1)


@pytest.mark.parametrize("vocab_size", [90, 104])
def test_vocabularies_of_another_size(vocab_size: int, library_path: Path) -> None:
    """A target's may be padded, or cut: what the draft lacks is not drafted, nor what the target
    lacks."""
    rows = batch([GREEDY, KINDS["hot"], KINDS["top-p"]], (), vocab_size)
    step_by_step(drafters("llama", library_path, vocab_size), rows, [5, 5, 5])
    assert max(max(row.tokens) for row in rows) < min(vocab_size, VOCAB)


@torch.inference_mode()
def test_a_row_is_drafted_alike_in_any_company(library_path: Path) -> None:
    """Catches a pick, or a pass, that depends on the neighbours."""
    (fast, _) = drafters("llama", library_path, VOCAB)
    params = list(KINDS.values())
    rows = batch(params, (1,))
    for row in rows:
        fast.start(row)
    together = fast.propose(rows, [6] * len(rows))
    for index, row in enumerate(rows):
        alone, _ = drafters("llama", library_path, VOCAB)
        own = Rows(VOCAB, torch.device("cpu"))
        own.add(row)
        alone.start(row)
        found = alone.propose(own, [6])
        assert torch.equal(found.tokens[0], together.tokens[index])
        if found.probs is not None:
            assert together.probs is not None
            assert torch.equal(found.probs[0], together.probs[index])


@torch.inference_mode()
def test_tokens_are_drawn_from_the_distribution_that_travels(library_path: Path) -> None:
    fast, _ = drafters("llama", library_path, VOCAB)
    rows = batch(list(KINDS.values())[1:])
    for row in rows:
        fast.start(row)
    draft = fast.propose(rows, [7] * len(rows))
    assert draft.probs is not None
    uniforms = rows.rng.draft_uniforms(rows.positions, 7)  # type: ignore[attr-defined]
    assert torch.equal(inverse_cdf(draft.probs[:, :-1], uniforms), draft.tokens)
    torch.testing.assert_close(
        draft.probs[:, :-1].sum(-1), torch.ones(len(rows), 7), rtol=1e-5, atol=0
    )


@torch.inference_mode()
def test_scores_that_are_no_numbers_are_left_to_the_general_path(library_path: Path) -> None:
    """It names the row; the loop leaves the caches as they were."""
    lm, plain = on_executor("llama", torch.float32, library_path)
    loop = ChainLoop(lm, lm.run, VOCAB)  # type: ignore[arg-type]
    rows = batch([GREEDY, KINDS["warm"]])
    for _ in rows:
        lm.kv.add_row()
    lm.catch_up([row.tokens for row in rows])
    before = list(lm.kv.lengths)
    plain.run.module.model.norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    assert loop.draft(rows, [row.tokens[-1:] for row in rows], 3) is None
    assert lm.kv.lengths == before


def test_near_the_end_of_the_context(library_path: Path) -> None:
    """Positions beyond the last one are cut off later, and stand nowhere else meanwhile."""
    lm, _ = on_executor("gpt2", torch.float32, library_path)
    lm.shape = replace(lm.shape, context_length=24)
    pair = ModelDrafter(lm, Watched(lm, lm.run, VOCAB)), ModelDrafter(_short(lm.twin(), lm))  # type: ignore[arg-type]
    step_by_step(pair, batch([GREEDY, KINDS["warm"]]), [2, 3, 2, 3])


def _short(lm: LM, like: LM) -> LM:
    lm.shape = like.shape
    return lm
