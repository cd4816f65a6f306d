"""Best-first trees grown in one call, against the same model growing them level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.heads.eagle import EagleDrafter
from outrider.drafters.model.draft_tree import TreeModelDrafter
from outrider.errors import NumericalError
from outrider.models.heads.head_lm import HeadLM
from outrider.rows import Rows
from outrider.runtime import library
from outrider.runtime.fed import FedRun, FedTrees
from outrider.runtime.growing import GrownTrees, ModelTrees, TreeLimits
from outrider.runtime.top_tokens import TopTokens
from outrider.sampling.params import SamplingParams
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.traversal import TraversalVerifier
from tests.helpers import make_row
from tests.unit.runtime.beside import HEADS, VOCAB, Beside, join_one_by_one, models
from tests.unit.runtime.test_run import on_executor

DEEP = TreeSettings(tree="best-first", top_k=3, max_depth=4, min_gain=0.0)
SHAPES = {
    "deep": DEEP,
    "wide": replace(DEEP, top_k=8, max_depth=2),
    "ends where little is gained": replace(DEEP, max_depth=8, min_gain=0.3),
    "a single child": replace(DEEP, top_k=1, max_depth=6),
}
COLD = SamplingParams(max_tokens=30, ignore_eos=True)
WARM = replace(COLD, temperature=0.4)
HOT = replace(COLD, temperature=1.2)
PROMPTS = ([5, 6, 7, 8, 9, 10], [3, 4, 5] * 4, [11], [8, 9])
NODES = 9


def test_how_many_nodes_a_tree_feeds_at_most() -> None:
    """The best of every level but the last: catches a cache with too little room."""
    asked = {
        (4, 8, 1): 0,
        (4, 8, 2): 2,
        (4, 8, 3): 6,
        (4, 3, 10): 8,
        (1, 8, 5): 4,
        (4, 1, 9): 0,
        (16, 4, 5): 15,
    }
    assert {sizes: TreeLimits(*sizes[:2], 0.0).max_fed(sizes[2]) for sizes in asked} == asked


class Counted:
    """Trees that may not give up, and count their calls."""

    def __init__(self, trees: FedTrees | ModelTrees) -> None:
        self.trees = trees
        self.calls = 0

    def grow(
        self, rows: Rows, pending: Sequence[list[int]], limits: TreeLimits, budgets: Sequence[int]
    ) -> GrownTrees:
        self.calls += 1
        found = self.trees.grow(rows, pending, limits, budgets)
        assert found is not None
        return found


class Ragged(FixedLength):
    """Another number of nodes for every row and step, 0 among them."""

    def choose(self, rows: Rows) -> list[int]:
        return [
            row.clamp_draft((len(row.tokens) * 3 + index) % (NODES + 1))
            for index, row in enumerate(rows)
        ]


class Priced(Ragged):
    """As in a mixture of experts: nodes that are seldom kept do not pay, and other steps' do."""

    def choose(self, rows: Rows) -> list[int]:
        prices = [0.0, 0.3, 0.4, 0.5, 0.55, *(0.6 + 0.1 * more for more in range(NODES))]
        rows.prices = prices if len(rows[0].tokens) % 4 else ()
        return super().choose(rows)


def decode(
    target: Any,
    both: Beside,
    params: Sequence[SamplingParams],
    racing: Sequence[int] = (),
    control: Ragged | None = None,
) -> None:
    """To the end of rows that join one by one, those of `racing` with the target's own noise."""
    rows = [
        make_row(list(PROMPTS[number]), one, seed=number, number=number)
        for number, one in enumerate(params)
    ]
    for number in racing:
        rows[number].verifier = CoupledVerifier()
    control = control or Ragged(NODES)
    join_one_by_one(Decoder(target, both, TraversalVerifier(), control), rows)


def of_a_model(
    family: str, path: Path, settings: TreeSettings, dtype: torch.dtype
) -> tuple[Any, Counted, Beside]:
    """The target's own passes on another cache draft."""
    target, _ = on_executor(family, dtype, path)
    lm = target.twin()
    counted = Counted(ModelTrees(lm, lm.run))  # type: ignore[arg-type]
    one = TreeModelDrafter(lm, TreePlan(settings), None, counted)
    # of equals the lowest id
    other = TreeModelDrafter(target.twin(), TreePlan(settings), TopTokens(library.load(path)))
    return target, counted, Beside(one, other, are_placed=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v32"])
def test_a_model_grows_the_trees_that_it_grows_level_by_level(
    shape: str, family: str, library_path: Path
) -> None:
    """Catches a node beside another's parent, a wrong position, a node that sees what is not on its
    path, a choice among other nodes or at another budget, a kept node whose keys lie elsewhere;
    windows."""
    target, counted, both = of_a_model(family, library_path, SHAPES[shape], torch.float32)
    decode(target, both, [COLD, WARM, COLD, WARM])
    assert both.compared > 60
    assert counted.calls > 10


def test_nodes_that_do_not_pay_are_left_out_in_one_call_too(library_path: Path) -> None:
    """Catches other nodes left out, parents in the old numbering, and keys of another node kept."""
    target, counted, both = of_a_model("llama", library_path, DEEP, torch.float32)
    decode(target, both, [COLD, WARM, COLD, WARM], control=Priced(NODES))
    assert both.compared > 20
    assert counted.calls > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_race_with_their_own_noise(dtype: torch.dtype, library_path: Path) -> None:
    """Catches noise of another row, depth or token, and scores that keep it."""
    target, counted, both = of_a_model("llama", library_path, DEEP, dtype)
    decode(target, both, [HOT, COLD, WARM, replace(HOT, temperature=0.9)], racing=(0, 2, 3))
    assert both.raced > 30
    assert counted.calls > 10


@pytest.mark.parametrize(
    "params",
    [HOT, replace(COLD, frequency_penalty=0.5), replace(WARM, top_k=5)],
    ids=["drawn", "penalty", "filter"],
)
def test_rows_of_other_kinds_grow_level_by_level(
    params: SamplingParams, library_path: Path
) -> None:
    """Beside one that could grow in one call: drawn nodes have a shape of their own, and penalties
    change from node to node."""
    target, counted, both = of_a_model("llama", library_path, DEEP, torch.float32)
    rows = Rows(target.shape.vocab_size, torch.device("cpu"))
    for number, one in enumerate((COLD, params)):
        rows.add(make_row([5, 6, 7], one, seed=number, number=number))
        both.start(rows[number])
    with torch.inference_mode():
        assert both.both[0].propose(rows, [5, 5]).lists[1] == [5, 5]
    assert not counted.calls


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("racing", [(), (1, 3)], ids=str)
def test_a_head_grows_the_trees_that_it_grows_level_by_level(
    head: str, racing: tuple[int, ...], library_path: Path
) -> None:
    """Catches the state of another node or pass, a token in the head's own numbering, features kept
    after a rejection."""
    target, lm = models(head, torch.float32)
    levels = HeadLM(lm.head, VOCAB, lm.shape.context_length)
    lm.run = FedRun(lm, library_path)
    levels.run = FedRun(levels, library_path)
    counted = Counted(FedTrees(lm, lm.run))
    one = EagleDrafter(lm, TreePlan(DEEP), None, counted)
    other = EagleDrafter(levels, TreePlan(DEEP))
    both = Beside(one, other, tolerance=1e-9, are_placed=True)
    decode(target, both, [COLD, HOT if racing else WARM, WARM, HOT if racing else COLD], racing)
    assert both.compared > 60
    assert both.raced > 20 or not racing
    assert counted.calls > 10


def test_near_the_end_of_the_context(library_path: Path) -> None:
    """Positions beyond the last one are cut off, and a tree has no more nodes than fit."""
    target, counted, both = of_a_model("gpt2", library_path, DEEP, torch.float32)
    for drafter in both.both:
        drafter.lm.shape = replace(target.shape, context_length=20)
    decode(target, both, [COLD, WARM])
    assert both.compared > 20
    assert counted.calls > 3


def test_scores_that_are_no_numbers_are_left_to_the_general_path(library_path: Path) -> None:
    """It names the row; the call leaves the caches as they were."""
    lm, plain = on_executor("llama", torch.float32, library_path)
    drafter = TreeModelDrafter(lm, TreePlan(DEEP), None, ModelTrees(lm, lm.run))  # type: ignore[arg-type]
    rows = Rows(lm.shape.vocab_size, torch.device("cpu"))
    rows.add(make_row([5, 6, 7], COLD))
    drafter.start(rows[0])
    plain.run.module.model.norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    with torch.inference_mode(), pytest.raises(NumericalError, match="row 0"):
        drafter.propose(rows, [4])


def test_noise_ranks_nothing_of_greedy_rows(library_path: Path) -> None:
    """Their target takes the likeliest token, whatever verifies them."""
    drafts = []
    for coupled in (False, True):
        for whole in (False, True):
            target, counted, both = of_a_model("llama", library_path, DEEP, torch.float32)
            drafter = both.both[0 if whole else 1]
            rows = Rows(target.shape.vocab_size, torch.device("cpu"), coupled=coupled)
            rows.add(make_row([5, 6, 7], COLD, seed=3))
            drafter.start(rows[0])
            with torch.inference_mode():
                drafts.append(drafter.propose(rows, [8]))
            assert bool(counted.calls) is whole
    assert all(
        draft.lists == drafts[0].lists and draft.parent_lists == drafts[0].parent_lists
        for draft in drafts
    )
