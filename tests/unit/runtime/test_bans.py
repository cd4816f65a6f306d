"""Rows with `min_tokens` or `bad_words` and whole chains: what these draft is what the general path
drafts, whether a ban bites or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.heads.feature_fed import FedChain
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.programs import bans_bite, programs_serve
from outrider.grammar import Grammars, choice
from outrider.models.heads.head_lm import HeadLM
from outrider.models.lm import LM, PassLimits
from outrider.models.loading.load import build_lm
from outrider.rows import Row, Rows
from outrider.runtime.drafting import ChainLoop
from outrider.runtime.fed import FedChains, FedRun
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from outrider.sampling.bans import Bans
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from tests.helpers import EOS, bad_words, byte_tokenizer, disturbed, make_row, tiny_llama
from tests.unit.runtime.beside import NODES, VOCAB, Beside, models

GREEDY = SamplingParams(max_tokens=90)
WARM = SamplingParams(max_tokens=90, temperature=0.8)
# half of what may follow a ninth of all
WORDS = [[begin, last] for begin in range(0, VOCAB, 9) for last in range(VOCAB // 2)]


def bound_rows() -> list[Row]:
    """Two that draw, two that are greedy and two with shared noise, of each one that is free."""
    kinds = [GREEDY, WARM, WARM] * 2
    made = [
        make_row([5 + seed, 6, 7], params, seed=seed, number=seed)
        for seed, params in enumerate(kinds)
    ]
    made[0].constraint = Bans(VOCAB, min_tokens=60, ends=range(0, VOCAB, 5))
    made[1].constraint = Bans(VOCAB, words=bad_words(WORDS, VOCAB))
    made[2].constraint = Bans(VOCAB, min_tokens=60, ends=range(0, VOCAB, 5))
    made[2].verifier = made[5].verifier = CoupledVerifier()
    return made


class Counted:
    """Whole chains, and how often they were asked for."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.asked = 0

    def draft(self, *arguments: Any) -> Any:
        self.asked += 1
        return self._loop.draft(*arguments)


class Stepwise:
    """How often a drafter goes token by token."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.asked = 0
        self._real = drafter._propose_stepwise
        drafter._propose_stepwise = self._counted  # type: ignore[method-assign]

    def _counted(self, *arguments: Any) -> Draft:
        self.asked += 1
        return self._real(*arguments)


def draft_models(path: Path) -> tuple[LM, ModelDrafter, ModelDrafter, Counted]:
    """A target; its draft model with whole chains on the runtime, and token by token."""
    cpu = torch.device("cpu")
    module = tiny_llama(VOCAB, sharpness=2.0).requires_grad_(False)
    draft = disturbed(module, 0.2).requires_grad_(False)
    target = build_lm(module, "target", torch.float32, cpu)
    lm = build_lm(draft, "draft", torch.float32, cpu)
    lm.run = run = NativeRun(lm, draft, lower(draft), path)
    lm.limits = PassLimits(granularity=1)
    program = Counted(ChainLoop(lm, run, VOCAB))
    return target, ModelDrafter(lm, program), ModelDrafter(lm.twin()), program


def eagles(path: Path) -> tuple[LM, ModelDrafter, ModelDrafter, Counted]:
    """The same of an EAGLE-3 head."""
    target, lm = models("eagle3", torch.float32)
    stepwise = HeadLM(lm.head, VOCAB, lm.shape.context_length)
    lm.run = run = FedRun(lm, path)
    stepwise.run = FedRun(stepwise, path)
    program = Counted(FedChains(lm, run))
    return target, FedChain(lm, program), FedChain(stepwise), program


@pytest.mark.slow
@pytest.mark.parametrize("parts", [draft_models, eagles])
def test_drafts_are_those_of_the_general_path(parts: Any, library_path: Path) -> None:
    """Catches a ban that a program's draft is kept in spite of, a cache that the program's draft is
    left in, other random numbers when it is drafted anew, and a ban that keeps the batch off the
    program although it does not bite."""
    target, served, general, program = parts(library_path)
    stepwise = Stepwise(served)
    both = Beside(served, general, tolerance=2e-5)
    decoder = Decoder(target, both, BlockVerifier(), FixedLength(NODES))
    for row in bound_rows():
        decoder.add(row)
    steps = 0
    while not any(row.finish_reason for row in decoder.rows):
        decoder.step()
        steps += 1
    assert both.compared > 100
    assert both.drawn > 50
    assert both.raced > 50
    assert program.asked + stepwise.asked > steps, "some draft was made anew"
    assert stepwise.asked < steps - 3, "some draft of the program was kept"


def batch(*rows: Row, coupled: bool = False) -> Rows:
    made = Rows(257, torch.device("cpu"), coupled=coupled)
    for row in rows:
        made.add(row)
    return made


def bound(params: SamplingParams, bans: Any) -> Row:
    row = make_row([5], params)
    row.constraint = bans
    return row


def test_which_bans_a_program_may_wait_for() -> None:
    """A grammar never; of rows that draw, only bans that leave the first distribution whole."""
    word = {"words": bad_words([[3]], 257)}
    pair = {"words": bad_words([[3, 4]], 257)}
    grammar = Grammars(byte_tokenizer(), 257, [EOS]).constraint(choice(["yes", "no"]))
    cases: list[tuple[SamplingParams, dict[str, Any], bool]] = [
        (GREEDY, word, True),
        (WARM, word, False),
        (WARM, pair, True),
        (GREEDY, {"min_tokens": 3, "ends": [0]}, True),
        (WARM, {"min_tokens": 3, "ends": [0]}, False),
        (GREEDY, {**word, "inner": grammar}, False),
    ]
    for params, how, expected in cases:
        assert (
            programs_serve(batch(make_row([7], WARM), bound(params, Bans(257, **how)))) is expected
        ), how
    bans = Bans(257, min_tokens=3, ends=[0])
    bans.commit([9, 9, 9])
    assert programs_serve(batch(bound(WARM, bans))), "long enough by now"


def test_bans_of_rows_that_share_noise_may_wait() -> None:
    """Their tokens are placed: each may be looked at, as a greedy row's."""
    word = Bans(257, words=bad_words([[3]], 257))
    assert programs_serve(batch(bound(WARM, word), coupled=True))
    assert not programs_serve(batch(bound(WARM, word)))
    assert bans_bite(
        batch(bound(WARM, word), coupled=True), Draft(torch.tensor([[4, 3]]), torch.tensor([2]))
    )
    assert not bans_bite(
        batch(bound(WARM, word), coupled=True), Draft(torch.tensor([[4, 3]]), torch.tensor([1]))
    )


def test_where_bans_bite() -> None:
    """A greedy row: where its own token is forbidden. One that draws: wherever anything is, but not
    behind the chain's end."""
    pair = Bans(257, words=bad_words([[3, 4]], 257))
    draft = Draft(torch.tensor([[3, 5, 3]]), torch.tensor([3]))
    assert not bans_bite(batch(bound(GREEDY, pair)), draft)
    assert bans_bite(batch(bound(WARM, pair)), draft), "after 3 it may not draw 4"
    short = Draft(torch.tensor([[5, 3, 4]]), torch.tensor([2]))
    assert not bans_bite(batch(bound(WARM, pair)), short)
    assert not bans_bite(batch(bound(GREEDY, pair)), short)
    assert bans_bite(batch(bound(GREEDY, pair)), Draft(short.tokens, torch.tensor([3])))
    assert not bans_bite(batch(make_row([5], WARM)), draft)
