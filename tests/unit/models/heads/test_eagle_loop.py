"""The whole-draft program of EAGLE heads, against drafting token by token. The program runs here as it is, uncompiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.control import FixedLength
from outrider.decode import Decoder
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleChain, ProgramChains
from outrider.models.compile import cannot_compile
from outrider.models.heads.eagle_lm import EagleLM
from outrider.models.heads.eagle_loop import EagleLoop, EagleLoopProgram, eagle_loop, example
from outrider.models.lm import LM
from outrider.models.load import build_lm
from outrider.models.workshop import Workshop
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, TargetOutput, Verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from tests.heads import random_eagle
from tests.helpers import copies_a_cache, drawn, greedy_draws, make_row, tiny_llama

VOCAB, NODES = 60, 4
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "num_layers": 2, "fc_bias": True},
    "eagle3": {"kind": "eagle3", "draft_vocab": 25},
    "eagle3.1": {"kind": "eagle3", "norm_before_residual": True, "fc_norm": True, "norm_output": True, "qk_norm": True},
}


def models(head: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[LM, EagleLM]:
    """A target and a random head for it, in fp64: some processors make fp32 products of bf16's, too coarse to compare."""
    module = tiny_llama(VOCAB, sharpness=2.0).requires_grad_(False).to(dtype)
    lm = build_lm(module, "tiny", dtype, torch.device("cpu"))
    made = random_eagle(target=module.config, **HEADS[head], **changes).to(dtype)
    made.bind(module.get_input_embeddings().weight, module.get_output_embeddings())
    return lm, EagleLM(made, VOCAB, lm.shape.context_length)


def loop_of(lm: EagleLM, num_tokens: int, *, any_length: bool = False, narrow: bool = False) -> EagleLoop:
    """The loop, uncompiled. `narrow`: passes of a single pair, as on native kernels."""
    programs = [EagleLoopProgram(lm, 1 if any_length else num_tokens), EagleLoopProgram(lm, 1, goes_on=True)]
    loop = EagleLoop(lm, programs[0].num_tokens, programs[0], programs[1] if any_length else None)
    if narrow:
        programs[0].width = programs[1].width = loop._narrowest = 1
    return loop


class Beside(Drafter):
    """Two drafters that must propose the same, step by step. `tolerance`: of laws and caches, relative."""

    def __init__(self, one: EagleChain, other: EagleChain, tolerance: float = 1e-6) -> None:
        self.both = one, other
        self.tolerance = tolerance
        self.compared = self.drawn = self.raced = self.filtered = 0

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
        for index, length in enumerate(one.lists[1]):
            assert one.lists[0][index][:length] == other.lists[0][index][:length]
            self.compared += length
            if rows[index].params.is_greedy or not length:
                continue
            if _races(rows, index):
                assert not one.is_sampled()[index].any(), "placed, not drawn"
                self.raced += length
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
        one, other = (drafter.lm.kv for drafter in self.both)
        assert one.lengths == other.lengths
        for ours, theirs in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
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
        return [row.wish((len(row.tokens) + index) % (NODES + 1)) for index, row in enumerate(rows)]


PARAMS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0),
    SamplingParams(max_tokens=30, temperature=0.6),
    SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=0.3),  # while it is there, no program serves
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=4, min_p=0.1),
)
PROMPTS = ([5, 6, 7, 8, 9, 10], [3, 4, 5, 3, 4, 5, 3, 4], [11], [8, 9], [5, 6], [7, 7, 7])


def draft_side_by_side(
    target: LM, both: Beside, control: FixedLength, which: tuple[int, ...], racing: tuple[int, ...] = ()
) -> None:
    """To the end of rows that join one by one, those of `racing` with the target's own noise."""
    decoder = Decoder(target, both, BlockVerifier(), control)
    for number in which:
        row = make_row(PROMPTS[number], PARAMS[number], seed=number)
        row.verifier = CoupledVerifier() if number in racing else None
        decoder.add(row)
        decoder.step()
    while len(decoder.rows):
        decoder.step()
        for index in reversed(range(len(decoder.rows))):
            if decoder.rows[index].finish_reason:
                decoder.remove(index)


GREEDY, MIXED, PENALISED, FILTERED = (0,), (0, 2), (0, 1, 2, 3), (0, 1, 4, 5)


@pytest.mark.parametrize(("head", "how", "which"), [
    ("eagle", {}, MIXED), ("eagle3", {"narrow": True}, GREEDY), ("eagle3", {"any_length": True}, PENALISED),
    ("eagle3.1", {}, PENALISED), ("eagle", {}, FILTERED),
    ("eagle3.1", {"any_length": True, "narrow": True}, MIXED),
], ids=str)  # fmt: skip
def test_drafts_are_those_drafted_token_by_token(head: str, how: dict[str, Any], which: tuple[int, ...]) -> None:
    """Catches a pair at the wrong place, a state that is not the last pair's, a law that is not the one drawn from, a token in
    the head's own numbering, a pair kept after a rejection: rows join one by one and wait for pairs of unequal number."""
    target, lm = models(head)
    plain = EagleChain(EagleLM(lm.head, VOCAB, lm.shape.context_length))
    both = Beside(EagleChain(lm, ProgramChains(loop_of(lm, NODES, **how))), plain)
    control = Ragged(NODES) if "any_length" in how or len(which) > 2 else FixedLength(NODES)
    draft_side_by_side(target, both, control, which)
    assert both.compared > 40
    assert both.drawn > 30 or which == GREEDY
    assert both.filtered > 5 or which != FILTERED


def test_a_program_of_one_token_drafts_what_a_longer_one_does() -> None:
    """Catches a state that is carried differently between programs than within one."""
    _, lm = models("eagle3.1")
    lm.kv.add_row()
    generator = torch.Generator().manual_seed(0)
    pairs = [([3, 4, 5], torch.randn(3, lm.head.config.feature_size, dtype=torch.float64, generator=generator))]
    uniforms = torch.rand(1, 5, dtype=torch.float64, generator=generator)
    draws = drawn([0], [0.8], uniforms, VOCAB)
    with torch.inference_mode():
        tokens, laws = loop_of(lm, 5)(pairs, draws, 5)
        again, same = loop_of(lm, 5, any_length=True)(pairs, draws, 5)
    assert tokens.tolist() == again.tolist()
    torch.testing.assert_close(laws, same, rtol=1e-6, atol=1e-9)
    assert laws.shape == (1, 6, VOCAB)
    assert float(laws[0, 5].abs().max()) == 0
    assert lm.kv.lengths == [0]


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_example_inputs_fit_the_program(head: str, goes_on: bool) -> None:
    """The example is what torch.export traces: it must run, and leave no row behind."""
    _, lm = models(head)
    program = EagleLoopProgram(lm, 2, goes_on=goes_on)
    inputs, dynamic = example(lm, program)
    with torch.inference_mode():
        tokens, laws, states = program(*inputs)
    assert tokens.shape == (4, 2)
    assert laws.shape == (2, 3, VOCAB)
    assert states.shape == (4, 1, lm.head.config.hidden_size)
    assert len(inputs) == len(dynamic)
    assert lm.kv.num_rows == 0


@pytest.mark.parametrize(("head", "racing"), [("eagle3", (0, 1, 4, 5)), ("eagle3.1", (5,)), ("eagle", (0, 1))], ids=str)
def test_rows_that_share_noise_are_drafted_token_by_token_alike(head: str, racing: tuple[int, ...]) -> None:
    """All of a batch, or some beside rows that draw: catches another row's noise or temperature, the noise of another place, and
    noise over the target's vocabulary beside scores over the head's own."""
    target, lm = models(head)
    plain = EagleChain(EagleLM(lm.head, VOCAB, lm.shape.context_length))
    both = Beside(EagleChain(lm, ProgramChains(loop_of(lm, NODES, any_length=True, narrow=head == "eagle3"))), plain)
    draft_side_by_side(target, both, Ragged(NODES), FILTERED, racing)
    assert both.raced > 30
    assert (both.drawn > 0) == (len(racing) < len(FILTERED))


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile() is not None, reason=str(cannot_compile()))
@pytest.mark.parametrize(("head", "any_length"), [
    pytest.param("eagle", False, marks=pytest.mark.nightly), ("eagle3.1", False), ("eagle3", True),
])  # fmt: skip
def test_compiled_drafts_are_those_drafted_token_by_token(
    head: str, any_length: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through export and compiler. Catches a dimension that is not symbolic, 0 rows that draw and 1 row among them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    target, lm = models(head)
    loop = eagle_loop(lm, Workshop("on", print, []), NODES, any_length=any_length, label=head)
    assert loop is not None
    plain = EagleChain(EagleLM(lm.head, VOCAB, lm.shape.context_length))
    for which, racing in ((GREEDY, ()), (PENALISED, ()), (FILTERED, (4,)), (FILTERED, (0, 1, 4, 5))):
        # norms and softmax stay fp32, added up in another order
        both = Beside(EagleChain(lm, ProgramChains(loop)), plain, tolerance=1e-4)
        draft_side_by_side(target, both, Ragged(NODES), which, racing)
        assert both.compared > 30
    lm.kv.add_row()
    pairs = [([3, 4, 5], torch.zeros(3, lm.head.config.feature_size, dtype=torch.float64))]
    draws = greedy_draws(NODES, VOCAB)
    with torch.inference_mode():
        assert not copies_a_cache(lm.kv, lambda: loop(pairs, draws, NODES))


def test_without_a_program_the_loop_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--compile auto takes what was made before, and says what it lacks."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    notes: list[str] = []
    assert eagle_loop(models("eagle3")[1], Workshop("auto", print, notes), 4, any_length=True, label="the eagle3 head") is None
    assert notes == ["the eagle3 head runs uncompiled; --compile on is faster (compiles once, a minute or so)"]
