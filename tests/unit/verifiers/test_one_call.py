"""From a pass's logits to the verdict by one call of the kernels, against the same step on torch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import NumericalError
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from outrider.verifiers.batch import batch_verdict
from outrider.verifiers.kernels import Kernels
from tests.helpers import make_row
from tests.unit.verifiers.kernel_cases import cases, needs_kernels, trees

pytestmark = needs_kernels
MANY = 240
SAMPLING = [
    {}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 0}, {"min_p": 0.1}, {"temperature": 0.3, "top_p": 0.95},
]  # fmt: skip


class Counted(Kernels):
    """Notes who was asked for what."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self.asked: list[str] = []

    def probs(self, *arguments: Any) -> Tensor | None:
        self.asked.append("probs")
        return super().probs(*arguments)

    def noise(self, *arguments: Any) -> list[Tensor]:
        self.asked.append("noise")
        return super().noise(*arguments)

    def verdict(self, *arguments: Any) -> Verdict | None:
        self.asked.append("verdict")
        return super().verdict(*arguments)


@pytest.fixture
def kernels(native_library: ctypes.CDLL) -> Counted:
    return Counted(native_library)


def rule(name: str) -> Verifier:
    return VERIFIERS.load(name)()


def rows_of(options: list[dict[str, Any]], vocab_size: int, kernels: Kernels | None) -> Rows:
    rows = Rows(vocab_size, torch.device("cpu"), noise=kernels)
    for number, own in enumerate(options):
        rows.add(
            make_row(
                [1] * (number % 90 + 1), SamplingParams(**{"temperature": 1.0, **own}), seed=number
            )
        )
    return rows


def both(
    logits: Tensor, draft: Draft, options: list[dict[str, Any]], name: str, kernels: Kernels
) -> tuple[list[tuple], list[tuple]]:
    """Every row's verdict by the kernels and by torch."""
    verdicts = (
        batch_verdict(logits, draft, rows_of(options, logits.shape[2], own), rule(name), own)
        for own in (kernels, None)
    )
    one, other = (list(zip(*verdict.lists, strict=True)) for verdict in verdicts)
    return one, other


@pytest.mark.parametrize("vocab_size", [9, 700])
@pytest.mark.parametrize("kind", ["drawn", "some placed", "placed"])
@pytest.mark.parametrize(
    "name", ["token", "block", "traversal", "gumbel", "traversal of trees", "gumbel of trees"]
)
def test_the_same_verdict_from_scores(
    kernels: Counted, name: str, kind: str, vocab_size: int
) -> None:
    """Catches another coin or noise than the row's own, a greedy row that is drawn, a distribution
    of another row's options."""
    name, _, is_tree = name.partition(" of ")
    torch.manual_seed(vocab_size)
    draft, probs = (trees if is_tree else cases)(vocab_size, kind, MANY, 5)
    options = [SAMPLING[row % len(SAMPLING)] for row in range(MANY)]
    mine, theirs = both(probs.log(), draft, options, name, kernels)
    assert sum(map(tuple.__ne__, mine, theirs)) <= 3, "few lie within rounding of a coin or an edge"
    assert len({accepted for _, accepted, *_ in theirs}) > 2, "hardly any branch was taken"


@pytest.mark.parametrize("name", ["token", "block", "gumbel"])
def test_it_is_one_call(kernels: Counted, name: str) -> None:
    """Not one for distributions, one for noise and one to decide: behind a pass each costs more
    than what it does."""
    torch.manual_seed(1)
    draft, probs = cases(40, "drawn", 6, 3)
    for own in (draft, Draft.empty(6)):
        logits = probs.log()[:, : own.num_nodes + 1].contiguous()
        for options in (SAMPLING[:1] * 6, [SAMPLING[2]] * 6):
            kernels.asked.clear()
            batch_verdict(logits, own, rows_of(options, 40, kernels), rule(name), kernels)
            assert kernels.asked == ["verdict"]


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_greedy_rows_take_the_first_favourite_by_any_rule(kernels: Counted, is_tree: bool) -> None:
    """Ties of bf16 logits included, and rows whose rule differs."""
    torch.manual_seed(2)
    draft, probs = (trees if is_tree else cases)(6, "placed", MANY, 5)
    logits = (probs * 4).round()
    rows = rows_of([{"temperature": 0}] * MANY, 6, kernels)
    for number, row in enumerate(rows):
        row.verifier = rule("traversal" if number % 2 else "gumbel")
    found = batch_verdict(logits, draft, rows, rule("block"), kernels)
    expected = batch_verdict(logits, draft, rows, rule("block"), None)
    assert found.lists == expected.lists
    assert kernels.asked == ["verdict"]
    assert len(set(expected.lists.num_accepted)) > 2


def test_bans_and_penalties_come_first(kernels: Counted) -> None:
    torch.manual_seed(3)
    draft, probs = cases(50, "drawn", 60, 4)
    options = [
        {"allowed_token_ids": list(range(0, 50, 2))},
        {"logit_bias": {3: 4.0}, "repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"temperature": 0, "logit_bias": {7: 100.0}},
    ]
    mine, theirs = both(
        probs.log(), draft, [options[row % 4] for row in range(60)], "block", kernels
    )
    assert sum(map(tuple.__ne__, mine, theirs)) <= 1
    assert all(token % 2 == 0 for _, _, token, _ in mine[::4])
    assert all(token == 7 for _, _, token, _ in mine[3::4])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}], ids=["sampled", "greedy"])
def test_broken_scores_are_refused_where_they_count(
    kernels: Counted, options: dict[str, Any], broken: float
) -> None:
    logits = torch.zeros(2, 3, 40)
    logits[1, 2, 7] = broken
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]))
    with pytest.raises(NumericalError, match="row 1, output 2"):
        batch_verdict(logits, draft, rows_of([options] * 2, 40, kernels), rule("block"), kernels)
    short = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 1]))
    kernels.asked.clear()
    batch_verdict(logits, short, rows_of([options] * 2, 40, kernels), rule("block"), kernels)
    assert kernels.asked == ["verdict"]


@pytest.mark.parametrize("vocab_size", [700, 9000])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_noise_that_a_drafter_asked_for_is_taken(
    kernels: Counted, is_tree: bool, vocab_size: int
) -> None:
    """From memory or made now, by one thread or two, alone or beside others: the same verdict."""
    torch.manual_seed(4)
    draft, probs = (trees if is_tree else cases)(vocab_size, "placed", 12, 4)
    logits = 0.4 * probs.log()  # flat enough that noise decides
    rows = rows_of([{}] * 12, vocab_size, kernels)
    first = batch_verdict(logits, draft, rows, rule("gumbel"), kernels)
    assert not all(first.lists.all_accepted)
    rows.rng.noise([[start, start + 1, start + 2] for start in rows.starts], vocab_size)
    known = rows.rng.remembered([[start, start + 3] for start in rows.starts], vocab_size)
    assert [noise is None for noise in known] == [False, True] * 12
    assert batch_verdict(logits, draft, rows, rule("gumbel"), kernels).lists == first.lists
    for one in range(12):
        parents = None if draft.parents is None else draft.parents[one : one + 1]
        alone = Draft(draft.tokens[one : one + 1], draft.lengths[one : one + 1], parents)
        own = Rows(vocab_size, torch.device("cpu"), noise=kernels)
        own.add(rows[one])
        verdict = batch_verdict(logits[one : one + 1], alone, own, rule("gumbel"), kernels)
        assert [line[0] for line in verdict.lists] == [line[one] for line in first.lists]
    # of another vocabulary: not to be looked at
    rows.rng.noise([[start] for start in rows.starts], 3)
    assert not any(
        noise is not None
        for noise in rows.rng.remembered([[start] for start in rows.starts], vocab_size)
    )
