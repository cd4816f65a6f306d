"""Block heads on the native runtime, against their modules: passes, whole chains, trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.heads.block import BlockDrafter, BlockSettings
from outrider.kv import KVCache, LayerShape
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_files import save_block
from outrider.models.heads.block_pass import BlockPasses, Guessed, ModulePasses, Pending, Unread
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.runtime.block import BlockRun, Drafted
from outrider.runtime.blocks import NotLoweredError
from outrider.verifiers.traversal import TraversalVerifier
from tests.heads import DFLASH2, random_block
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama
from tests.unit.runtime.beside import (
    FILTERED,
    GREEDY,
    MIXED,
    NODES,
    PENALISED,
    VOCAB,
    Beside,
    Ragged,
    draft_side_by_side,
)

CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "dspark": {"markov_gated": False},
    "gated": {"draft_vocab": 25},
    "rnn": {"markov_gated": False, "markov_recurrent": True},
    "dflash": {"markov_rank": 0, "confidence": False, "confidence_with_markov": False, "sample_from_anchor": False},
    "sliding": {
        "markov_rank": 0, "confidence_with_markov": False, "window": 30, "window_layers": (1,), "causal_windows": True,
        "sample_from_anchor": False,
    },
    "wide": {"markov_rank": 0, "confidence_with_markov": False, "window": 200, "window_layers": (0, 1)},
    "other": {
        "markov_rank": 0, "confidence_with_markov": False, "causal": True, "own_embedding": True, "qk_norm": False,
        "attention_bias": True, "embedding_scale": 2.0, "logit_scale": 0.5, "softcap": 9.0, "target_layers": (2,),
    },
}  # fmt: skip


def models(head: str, dtype: torch.dtype, **changes: Any) -> tuple[LM, BlockHead]:
    module = tiny_llama(VOCAB, sharpness=2.0).requires_grad_(False).to(dtype)
    made = random_block(module, **HEADS[head], **changes).to(dtype)
    return build_lm(module, "tiny", dtype, CPU), made


def drafter(head: BlockHead, passes: BlockPasses, **settings: Any) -> BlockDrafter:
    return BlockDrafter(head, BlockSettings(**settings), passes, head.dtype, CPU)


class Watched(BlockRun):
    """Counts whole chains, which it may not give up."""

    calls = 0

    def draft(self, *args: Any) -> Drafted:
        self.calls += 1
        found = super().draft(*args)
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("head", "which", "racing"),
    [
        ("dspark", MIXED, ()),
        ("gated", PENALISED, ()),
        ("dflash", FILTERED, ()),
        ("other", FILTERED, (0, 4)),
        ("gated", FILTERED, (0, 1, 4, 5)),
        ("dspark", GREEDY, ()),
        ("sliding", FILTERED, ()),
    ],
    ids=str,
)
def test_whole_chains_are_those_of_the_module(
    head: str, which: tuple[int, ...], racing: tuple[int, ...], library_path: Path
) -> None:
    """Catches states at a wrong slot or position, a slot that does not see the block, a level's
    logits or states taken for another's, a correction by another token than the one before,
    distributions of another vocabulary."""
    target, made = models(head, torch.float32)
    run = Watched(made, library_path)
    both = Beside(drafter(made, run), drafter(made, ModulePasses(made)), tolerance=2e-4)
    draft_side_by_side(target, both, Ragged(NODES), which, racing)
    assert both.compared > 30
    assert both.drawn > 5 or len(racing) == len(which) or which == GREEDY
    assert run.calls > 10


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": "confidence", "stop_below": 0.4},
        {"stop": "entropy", "stop_below": 0.2},
        {"tree": "best-first"},
        {"tree": "2x2x1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", ["dspark", "gated", "rnn"])
def test_chains_that_stop_and_trees_are_those_of_the_module(
    head: str, settings: dict[str, Any], library_path: Path
) -> None:
    """Catches a chain cut elsewhere, children behind another parent, logits of another level."""
    target, made = models(head, torch.float32)
    both = Beside(
        drafter(made, BlockRun(made, library_path), **settings),
        drafter(made, ModulePasses(made), **settings),
        2e-4,
    )
    if "stop" in settings:
        draft_side_by_side(target, both, Ragged(NODES), FILTERED)
        assert len(set(both.lengths)) > 2, "chains are cut everywhere or nowhere"
    else:
        decoder = Decoder(target, both, TraversalVerifier(), FixedLength(6))
        for number, prompt in enumerate(([5, 6, 7, 8], [9])):
            decoder.add(make_row(prompt, SamplingParams(max_tokens=30), seed=number, number=number))
        run_to_end(decoder)
    assert both.compared > 30


class Filled:
    """A cache of three rows whose states came in parts, and what a pass over it says."""

    def __init__(
        self, head: BlockHead, passes: BlockPasses, rows: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        config = head.config
        self.passes = passes
        self.rows = rows
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        self.kv = KVCache([shape] * config.num_layers, head.dtype, CPU)
        generator = torch.Generator().manual_seed(2)
        size = config.target_hidden_size
        texts = [
            [
                torch.randn(700, size, generator=generator).to(head.dtype)
                for _ in config.target_layers
            ]
            for _ in range(3)
        ]
        self.texts = [texts[row] for row in rows]
        for _ in rows:
            self.kv.add_row()

    def read(self, ends: tuple[int, ...]) -> None:
        """The first states of each row, one row after the other."""
        for index, end in enumerate(ends[row] for row in self.rows):
            start = self.kv.lengths[index]
            self.kv.reserve(len(self.rows), end)
            part = Unread(
                [states[None, start:end] for states in self.texts[index]], [end - start], [end]
            )
            self.passes.read(self.kv, index, part)
            self.kv.advance(index, end - start)

    def guess(self, counts: tuple[int, ...], anchors: tuple[int, ...] = (3, 4, 5)) -> Guessed:
        """One pass, which takes along so many states of each row, with more behind them that are
        none of the row's."""
        counts = tuple(counts[row] for row in self.rows)
        width = max(max(counts), 1) + 1
        lengths = self.kv.lengths
        self.kv.reserve(len(self.rows), max(lengths) + width + 8)
        hidden = [
            torch.stack(
                [
                    own[layer][length : length + width]
                    for own, length in zip(self.texts, lengths, strict=True)
                ]
            )
            for layer in range(len(self.texts[0]))
        ]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        unread = Unread(hidden, list(counts), ends) if any(counts) else None
        found = self.passes.guess(
            self.kv, Pending([anchors[row] for row in self.rows], ends), unread
        )
        for index, count in enumerate(counts):
            self.kv.advance(index, count)
        return found


LENGTHS = (640, 9, 130)  # states read before: beyond a span of attention, within one, of two ranges


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.08)], ids=str
)
def test_a_pass_is_the_modules(
    head: str, dtype: torch.dtype, tolerance: float, library_path: Path
) -> None:
    """Catches a key left out at the end of a range or span, padding that is seen, an anchor that
    guesses where it should not."""
    _, made = models(head, dtype)
    ours = Filled(made, BlockRun(made, library_path))
    theirs = Filled(made, ModulePasses(made))
    for counts in ((3, 1, 0), (0, 0, 0), (1, 5, 2)):
        if counts[0] == 3:
            ours.read(LENGTHS)
            theirs.read(LENGTHS)
        found = ours.guess(counts)
        expected = theirs.guess(counts)
        for one, other in zip(found, expected, strict=True):
            assert (
                float((one.float() - other.float()).abs().max() / other.float().abs().max())
                < tolerance
            )
        before = torch.tensor([[5, 6], [7, 8], [9, 9]])
        corrected = ours.passes.corrected(
            expected.logits[:, 1].float(), expected.states[:, 1], before, None
        ).logits.float()
        reference = theirs.passes.corrected(
            expected.logits[:, 1], expected.states[:, 1], before, None
        ).logits.float()
        torch.testing.assert_close(corrected, reference, rtol=tolerance, atol=tolerance)


def test_what_does_not_run_there_is_refused(library_path: Path) -> None:
    """Not a head without its convolutions."""
    module = tiny_llama(VOCAB).requires_grad_(False)
    with pytest.raises(NotLoweredError, match="DFlash2"):
        BlockRun(random_block(module, **DFLASH2), library_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, library_path: Path) -> None:
    """Whatever its neighbours, in however many parts its states came, and whether they came with
    the pass."""
    _, made = models("gated", dtype)
    run = BlockRun(made, library_path)
    together = Filled(made, run)
    together.read(LENGTHS)
    whole = together.guess((3, 1, 4))
    for row in range(3):
        alone = Filled(made, run, (row,))
        for ends in (
            (5, 5, 5),
            (600, 6, 64),
            tuple(sum(pair) for pair in zip(LENGTHS, (3, 1, 4), strict=True)),
        ):
            alone.read(ends)
        for one, other in zip(alone.guess((0, 0, 0)), whole, strict=True):
            assert torch.equal(one[0], other[row])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"tree": "best-first"}, {"stop": "confidence"}], ids=str)
def test_greedy_text_is_that_of_plain_decoding(
    settings: dict[str, Any], tmp_path: Path, library_path: Path
) -> None:
    """To the bit, in bfloat16, alone and in a batch."""
    module = tiny_llama(257, sharpness=2.0)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    folder = tmp_path / "head"
    save_block(random_block(module, markov_gated=False), folder)
    prompts = [[5, 6, 7], [9] * 40, [80, 33]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    same: dict[str, Any] = {"dtype": "bfloat16", "runtime": "native", "threads": 2}
    plain = LLM(target, drafter="none", **same).generate(prompts, params)
    llm = LLM(target, draft=folder, drafter="block", drafter_options=settings, **same)
    drafter: Any = llm._built.decoder.drafter
    assert isinstance(drafter._run, BlockRun)
    assert not any("without the native runtime" in note for note in llm._built.notes)
    assert [one.token_ids for one in llm.generate(prompts, params)] == [
        one.token_ids for one in plain
    ]
    assert llm.generate(prompts[:1], params)[0].token_ids == plain[0].token_ids


@pytest.mark.slow
def test_what_cannot_run_there_runs_eagerly_and_says_so(tmp_path: Path, library_path: Path) -> None:
    module = tiny_llama(257)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    folder = tmp_path / "head"
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save_block(random_block(module, rope=rope), folder)
    llm = LLM(target, draft=folder, drafter="block", dtype="float32", runtime="native", threads=1)
    drafter: Any = llm._built.decoder.drafter
    assert isinstance(drafter._passes, ModulePasses)
    assert any(
        "the block head runs without the native runtime: rotary" in note
        for note in llm._built.notes
    )
    assert (
        len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids)
        == 9
    )
