"""Compiled drafting programs of heads against the general path, both run eagerly here: same tokens, same laws, same contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options, build
from outrider.control import FixedLength
from outrider.decode import Decoder
from outrider.drafters.block import BlockDrafter, Program
from outrider.drafters.medusa import MedusaDrafter, MedusaSettings
from outrider.drafters.medusa import Program as MedusaCall
from outrider.models.heads.block_files import save_block
from outrider.models.heads.block_program import BlockProgram, example
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads
from outrider.models.heads.medusa_program import MedusaProgram
from outrider.models.heads.medusa_program import example as medusa_example
from outrider.models.signals import AFTER_NORM
from outrider.models.workshop import Workshop
from outrider.rows import Row, Rows
from outrider.sampling.bans import Bans
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, TargetOutput, Verdict
from tests.helpers import bad_words, byte_tokenizer, make_row, save_checkpoint, tiny_llama
from tests.unit.drafters.test_block import tiny_head

V, SIZE = 257, 4
GREEDY, WARM, HOT = (SamplingParams(temperature=t, max_tokens=60) for t in (0.0, 0.8, 1.0))
SOME, FEW = SamplingParams(temperature=1.0, top_p=0.7, max_tokens=60), SamplingParams(temperature=0.9, top_k=3, max_tokens=60)
PROMPTS = [[5, 80, 33, 7], [9], list(range(40, 60)), [5, 80, 33]]
HEADS: dict[str, dict[str, Any]] = {
    "markov": {"num_layers": 2, "block_size": SIZE},
    "plain": {"block_size": SIZE, "markov_rank": 0, "confidence": False, "confidence_with_markov": False},
    "from_mask": {"block_size": SIZE, "sample_from_anchor": False, "causal": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    save_checkpoint(folder / "target", tiny_llama(V, sharpness=2.0), byte_tokenizer())
    for name, changes in HEADS.items():
        save_block(tiny_head(V, 64, **changes), folder / name)
    return folder


class Ragged(FixedLength):
    """A little more for every further row."""

    def choose(self, rows: Rows) -> list[int]:
        return [min(gamma + index, SIZE) if gamma else 0 for index, gamma in enumerate(super().choose(rows))]


class Watched:
    """A decoder, and every draft it made."""

    def __init__(self, root: Path, head: str, verifier: str = "block") -> None:
        options = Options(
            str(root / "target"), drafter="block", draft=str(root / head), dtype="float32", runtime="eager", threads=1,
            num_draft_tokens=SIZE, verifier=verifier,
        )  # fmt: skip
        self.decoder: Decoder = build(options).decoder
        drafter = self.decoder.drafter
        assert isinstance(drafter, BlockDrafter)
        self.drafter = drafter
        self.drafts: list[Draft] = []
        self._propose = drafter.propose
        drafter.propose = self._remembered  # type: ignore[method-assign]

    def use_program(self, num_tokens: int) -> None:
        """Only the program may draft from now on."""
        self.drafter.program = Program(BlockProgram(self.drafter.head, num_tokens, V, native=False), num_tokens)

    def _remembered(self, rows: Any, gamma: list[int]) -> Draft:
        self.drafts.append(self._propose(rows, gamma))
        return self.drafts[-1]

    def run(self, params: list[SamplingParams], bind: Callable[[Row], None] = lambda row: None) -> list[list[int]]:
        """Rows that join one after another, one that leaves early; a step without drafts, shorter ones, then all together."""
        lengths = [3, SIZE, 0, 0, 2, SIZE, 1, SIZE, SIZE]
        rows = [make_row(prompt, one, seed=seed) for seed, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True))]
        for row in rows:
            bind(row)
        for number, length in enumerate(lengths):
            if number < len(rows):
                self.decoder.add(rows[number])
            if number == 6:
                self.decoder.remove(0)
            self.decoder.control = Ragged(length)
            self.decoder.step()
        self.drafter.context.settle()
        return [row.tokens for row in rows]


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("verifier", ["block", "gumbel"])
@pytest.mark.parametrize(
    "params", [[GREEDY] * 4, [WARM, HOT, WARM, WARM], [GREEDY, WARM, GREEDY, HOT], [SOME, FEW, HOT, FEW]],
    ids=["greedy", "warm", "mixed", "filtered"],
)  # fmt: skip
def test_a_program_drafts_what_the_general_path_drafts(
    root: Path, head: str, verifier: str, params: list[SamplingParams]
) -> None:
    """Catches other positions, places or masks, padding of shorter rows that is read, other random numbers, a law that is not the
    one drawn from, states that wait and are lost or read twice."""
    general, compiled = Watched(root, head, verifier), Watched(root, head, verifier)
    compiled.use_program(SIZE if head != "from_mask" else SIZE - 1)
    assert compiled.run(params) == general.run(params)
    assert sum(draft.num_nodes for draft in compiled.drafts) > 10
    drawn = verifier == "block" and any(p is not GREEDY for p in params)
    assert any(draft.probs is not None for draft in compiled.drafts) == drawn
    for ours, theirs in zip(compiled.drafts, general.drafts, strict=True):
        assert ours.lists == theirs.lists
        assert (ours.probs is None) == (theirs.probs is None)
        if theirs.probs is not None:
            torch.testing.assert_close(ours.probs, theirs.probs, rtol=1e-4, atol=1e-5)
    kv, expected = compiled.drafter.kv, general.drafter.kv
    kv.check_integrity()
    assert kv.lengths == expected.lengths == [len(row.tokens) - 1 for row in compiled.decoder.rows]
    for left, right in zip((*kv.keys, *kv.values), (*expected.keys, *expected.values), strict=True):
        for index, length in enumerate(kv.lengths):
            torch.testing.assert_close(left[index, :length], right[index, :length], rtol=1e-4, atol=1e-4)


def test_bans_change_a_programs_draft_where_they_bite(root: Path) -> None:
    """Catches a ban that a program's draft is kept in spite of, and a pass that is not the same when it is made again."""
    general, compiled = Watched(root, "markov"), Watched(root, "markov")
    compiled.use_program(SIZE)
    asked: list[int] = []
    real = compiled.drafter.program.call

    def counted(*arguments: Any) -> Any:
        asked.append(len(compiled.drafts))
        return real(*arguments)

    compiled.drafter.program = Program(counted, SIZE)

    def bind(row: Row) -> None:
        words = bad_words([[begin, last] for begin in range(0, V, 9) for last in range(0, V, 2)], V)
        row.constraint = Bans(V, min_tokens=50, ends=range(0, V, 5)) if row.params.is_greedy else Bans(V, words=words)

    assert compiled.run([GREEDY, WARM, GREEDY, HOT], bind) == general.run([GREEDY, WARM, GREEDY, HOT], bind)
    for ours, theirs in zip(compiled.drafts, general.drafts, strict=True):
        assert ours.lists == theirs.lists
    assert len(asked) > 3
    for left, right in zip((*compiled.drafter.kv.keys,), (*general.drafter.kv.keys,), strict=True):
        for index, length in enumerate(general.drafter.kv.lengths):
            torch.testing.assert_close(left[index, :length], right[index, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize(("params", "coupled"), [(GREEDY, False), (WARM, False), (WARM, True), (SOME, False), (FEW, True)])
def test_a_medusa_program_says_what_the_heads_say(own_output: bool, params: SamplingParams, coupled: bool) -> None:
    """Catches the feature of another column or row, levels picked with each other's random numbers, a reduced vocabulary whose
    tokens are not translated."""
    torch.manual_seed(5)
    size, ids = 16, torch.randperm(50)[:30]
    config = MedusaConfig(size, 50, 4, own_output=own_output, draft_vocab_size=30 if own_output else None)
    heads = MedusaHeads(config, ids if own_output else None).requires_grad_(False)
    heads.bind(torch.nn.Linear(size, 50, bias=False))
    general, compiled = MedusaDrafter(heads, MedusaSettings()), MedusaDrafter(heads, MedusaSettings())
    compiled.program = MedusaCall(MedusaProgram(heads, 3, 50), 3)
    rows = Rows(50, torch.device("cpu"), coupled=coupled)
    for seed, prompt in enumerate([[3, 4, 5], [7, 8], [1, 9, 9]]):
        row = make_row(prompt, params if seed != 1 else GREEDY, seed=seed)
        rows.add(row)
        for drafter in (general, compiled):
            drafter.start(row)
    hidden = torch.randn(3, 4, size) * 3
    output = TargetOutput(torch.zeros(3, 4, 50), {AFTER_NORM: hidden}, [[0, 1, 2], [0], [0, 3]])
    verdict = Verdict(*(torch.zeros(3, dtype=torch.int64) for _ in range(4)))
    drafts = []
    with torch.inference_mode():
        for drafter in (general, compiled):
            drafter.commit(rows, Draft.empty(3), verdict, output)
            drafts.append([drafter.propose(rows, [3, 2, 3]), drafter.propose(rows, [2, 0, 1])])
    for theirs, ours in zip(*drafts, strict=True):
        assert ours.lists[1] == theirs.lists[1]
        for line, other, length in zip(*(draft.lists[0] for draft in (ours, theirs)), ours.lists[1], strict=True):
            assert line[:length] == other[:length]
        assert (ours.probs is None) == (theirs.probs is None) == (params is GREEDY or coupled)
        if ours.probs is not None and theirs.probs is not None:
            torch.testing.assert_close(ours.probs, theirs.probs)
    assert len({tuple(line) for line in drafts[1][0].lists[0]}) == 3, "rows must differ for this to say anything"
    inputs, dynamic = medusa_example(MedusaProgram(heads, 3, 50))
    assert len(inputs) == len(dynamic)
    assert compiled.program.call(*inputs)[1].shape == (2, 4, 50)


def test_what_a_program_does_not_know_takes_the_general_path(root: Path) -> None:
    """Catches a filter or a penalty that a program silently leaves out of the law it reports."""
    watched = Watched(root, "markov")

    def refuse(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the program was asked")

    watched.drafter.program = Program(refuse, SIZE)
    for params in ({"presence_penalty": 0.5}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 1.0}}):
        watched.run([SamplingParams(temperature=0.7, max_tokens=60, **params)] * 4)
        while len(watched.decoder.rows):
            watched.decoder.remove(0)
    with pytest.raises(AssertionError, match="was asked"):
        watched.run([WARM] * 4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_head_that_no_program_can_follow_says_so(root: Path, kind: str) -> None:
    """Once, however many decoders ask; and it drafts all the same."""
    watched, notes = Watched(root, "markov"), list[str]()
    shop, head = Workshop("on", print, notes), watched.drafter.head
    head.config = replace(head.config, rope={"rope_type": kind, "rope_theta": 1e4})
    for _ in range(2):
        assert Program.of(shop, head, watched.drafter.kv, SIZE, V, native=False) is None
    (note,) = notes
    assert note.startswith(f"the block head runs uncompiled: its rotary embedding '{kind}' changes as texts grow")


def test_example_inputs_fit_the_program(root: Path) -> None:
    """The example is what torch.export traces: it must run, and leave no row behind."""
    drafter = Watched(root, "markov").drafter
    program = BlockProgram(drafter.head, 3, V, native=False)
    inputs, dynamic = example(program, drafter.kv)
    assert len(inputs) == len(dynamic)
    with torch.inference_mode():
        tokens, laws = program(*inputs)
    assert tokens.shape == (3, 3)
    assert laws.shape == (2, 4, V)
    assert drafter.kv.num_rows == 0
