"""The native distributions and verdicts against `sampling/` and the verifiers, which are their
reference."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from outrider.errors import NumericalError
from outrider.rows import RowVerifier
from outrider.sampling.distribution import BatchSampling, distribution
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import KeyedStreams, PhiloxNoise
from outrider.types import Draft
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.kernels import Kernels
from outrider.verifiers.multi_round import MultiRoundVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier
from outrider.verifiers.typical import TypicalVerifier
from tests.unit.verifiers.kernel_cases import cases, needs_kernels, trees

pytestmark = needs_kernels
OPTIONS = [
    {}, {"temperature": 0.3}, {"temperature": 0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 5000}, {"top_p": 0.01}, {"top_p": 0.6},
    {"top_p": 0.999}, {"min_p": 0.1}, {"min_p": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.5, "min_p": 0.3},
]  # fmt: skip
TOLERANCE = 3e-6  # fp32, of probabilities


@pytest.fixture(scope="module")
def kernels(native_library: ctypes.CDLL) -> Kernels:
    return Kernels(native_library)


def _no_draft(num_rows: int, num_nodes: int) -> Draft:
    return Draft(
        torch.zeros(num_rows, num_nodes, dtype=torch.int64), torch.full((num_rows,), num_nodes)
    )


def _probs(
    logits: Tensor,
    params: list[SamplingParams],
    kernels: Kernels | None = None,
    draft: Draft | None = None,
) -> Tensor:
    sampling = BatchSampling.of(params, logits.shape[2])
    draft = draft or _no_draft(logits.shape[0], logits.shape[1] - 1)
    return distribution(logits, sampling, None, draft, kernel=kernels and kernels.probs)


@pytest.mark.parametrize("vocab_size", [3, 16, 33, 500, 5000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distributions_are_those_of_the_reference(
    kernels: Kernels, options: dict, vocab_size: int
) -> None:
    """Catches a wrong edge of a filter, a lost tail of the vocabulary, a bucket too many or too
    few."""
    torch.manual_seed(vocab_size)
    for scale in (0.01, 1.0, 8.0):  # flat: all in a bucket or two; steep: most in the last one
        logits = torch.randn(2, 3, vocab_size) * scale
        params = [SamplingParams(**{"temperature": 1.0, **options})] * 2
        expected = _probs(logits, params)
        found = _probs(logits, params, kernels)
        assert found.sum(-1).allclose(torch.ones(2, 3))
        # an edge may lie within rounding of a probability: then one token more or less, of the
        # least likely ones
        assert (found - expected).abs().sum(-1).max() < TOLERANCE or (found > 0).ne(
            expected > 0
        ).sum(-1).max() <= 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ties_and_masked_tokens(kernels: Kernels, options: dict) -> None:
    """Equals at the edge of top-k all stay, of a nucleus those of the lowest ids; masked tokens
    never come back."""
    torch.manual_seed(1)
    logits = torch.randint(0, 4, (1, 4, 300)).float()
    logits[0, 1, ::2] = -torch.inf
    logits[0, 2, 10:] = -torch.inf
    logits[0, 3, 1:] = -torch.inf
    params = [SamplingParams(**{"temperature": 1.0, **options})]
    expected = _probs(logits, params)
    found = _probs(logits, params, kernels)
    assert (found > 0).ne(expected > 0).sum(-1).max() <= 1
    assert found.masked_select(logits == -torch.inf).eq(0).all()
    if "top_p" not in options:  # the mass of equals may meet top-p to the last bit
        assert found.allclose(expected, atol=TOLERANCE)


def test_a_distribution_has_the_same_bits_beside_any_other(kernels: Kernels) -> None:
    """Rows with other options, more outputs, two threads: a seeded text must not depend on its
    neighbours."""
    torch.manual_seed(2)
    logits = torch.randn(len(OPTIONS), 6, 3000) * 3
    params = [SamplingParams(**{"temperature": 1.0, **options}) for options in OPTIONS]
    together = _probs(logits, params, kernels)
    for row, own in enumerate(params):
        assert together[row].equal(_probs(logits[row : row + 1], [own], kernels)[0])
        assert together[row, :2].equal(_probs(logits[row : row + 1, :2], [own], kernels)[0])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_scores_are_refused_by_name(kernels: Kernels, broken: float) -> None:
    """Broken scores are refused where they count; after a row's draft some valid distribution
    replaces them."""
    logits = torch.zeros(2, 3, 40)
    logits[1, 2, 7] = broken
    params = [SamplingParams(temperature=1), SamplingParams(temperature=1, top_k=3)]
    with pytest.raises(NumericalError, match="row 1, output 2"):
        _probs(logits, params, kernels)
    short = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 1]))
    assert _probs(logits, params, kernels, short).sum(-1).allclose(torch.ones(2, 3))
    logits[0, 0] = -torch.inf
    with pytest.raises(NumericalError, match="row 0, output 0"):
        _probs(logits, params, kernels, short)


@pytest.mark.parametrize("vocab_size", [2, 40, 700])
@pytest.mark.parametrize("rule", [BlockVerifier(), TokenVerifier()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "kind", ["drawn", "some placed", "placed", "equal distributions", "point masses"]
)
def test_verdicts_are_those_of_the_reference(
    kernels: Kernels, rule: RowVerifier, kind: str, vocab_size: int
) -> None:
    """Equal coins give equal verdicts, row by row: catches a wrong weight, residual, coin or cut."""
    torch.manual_seed(vocab_size)
    draft, probs = cases(vocab_size, kind, num_rows=400, num_nodes=5)
    rng = KeyedStreams(list(range(400)))
    positions = torch.arange(400) + 3
    assert kernels.serve(rule, draft, probs)
    found = kernels.verdict(rule, draft, probs, rng, positions.tolist())
    expected = rule.verify(draft, probs, rng, positions)
    mine, theirs = (list(zip(*verdict.lists, strict=True)) for verdict in (found, expected))
    assert sum(map(tuple.__ne__, mine, theirs)) <= 1, "one row may lie within rounding of a coin"
    assert expected.num_accepted.float().std() > 0.5, "hardly any branch was taken"
    assert found.next_token.dtype == torch.int64
    rows = torch.arange(400)
    assert (probs[rows, found.num_accepted, found.next_token] > 0).all()


@pytest.mark.parametrize("vocab_size", [9, 40, 700])
@pytest.mark.parametrize(
    "kind", ["drawn", "replaced", "some placed", "placed", "equal distributions", "point masses"]
)
def test_verdicts_on_trees_are_those_of_the_reference(
    kernels: Kernels, kind: str, vocab_size: int
) -> None:
    """Equal coins give equal verdicts, row by row: catches a sibling tried too early, a
    distribution not renewed, a lost weight."""
    torch.manual_seed(vocab_size)
    draft, probs = trees(vocab_size, kind, num_rows=400, num_nodes=7)
    rng = KeyedStreams(list(range(400)))
    positions = torch.arange(400) + 3
    rule = TraversalVerifier()
    assert kernels.serve(rule, draft, probs)
    before = probs.clone()
    found = kernels.verdict(rule, draft, probs, rng, positions.tolist())
    expected = rule.verify(draft, probs, rng, positions)
    mine, theirs = (list(zip(*verdict.lists, strict=True)) for verdict in (found, expected))
    assert sum(map(tuple.__ne__, mine, theirs)) <= 1, "one row may lie within rounding of a coin"
    assert expected.num_accepted.float().std() > 0.5, "hardly any branch was taken"
    assert probs.equal(before)
    for row in range(0, 400, 7):
        one = slice(row, row + 1)
        parts = (
            None if table is None else table[one]
            for table in (draft.parents, draft.probs, draft.sampled)
        )
        alone = Draft(draft.tokens[one], draft.lengths[one], *parts, replacement=draft.replacement)
        verdict = kernels.verdict(rule, alone, probs[one], KeyedStreams([row]), [row + 3])
        assert [line[0] for line in verdict.lists] == [line[row] for line in found.lists]


def test_a_tail_that_fp32_hardly_holds_is_still_a_distribution(kernels: Kernels) -> None:
    """Once its likeliest token is out, a sibling is drawn from a tail whose scale overflows:
    catches shares that are none."""
    proposals = torch.tensor([1.0, 3e-40, 1e-40, 0.0]).expand(200, 3, 4)
    probs = torch.tensor([0.1, 0.5, 0.2, 0.2]).repeat(200, 3, 1)
    tokens = torch.tensor([[0, 1]]).repeat(200, 1)
    parents = torch.tensor([[-1, -1]]).repeat(200, 1)
    draft = Draft(tokens, torch.full((200,), 2), parents, proposals)
    rng = KeyedStreams(list(range(200)))
    positions = torch.arange(200) + 3
    rule = TraversalVerifier()
    found = kernels.verdict(rule, draft, probs, rng, positions.tolist())
    expected = rule.verify(draft, probs, rng, positions)
    assert found.lists == expected.lists
    assert len(set(found.lists.next_token)) > 2
    assert 0.05 < sum(found.lists.num_accepted) / 200 < 0.95


def test_traversal_on_a_chain_is_the_block_rule(kernels: Kernels) -> None:
    torch.manual_seed(4)
    draft, probs = cases(50, "drawn", num_rows=100, num_nodes=4)
    assert kernels.serve(TraversalVerifier(), draft, probs)
    rules = (TraversalVerifier(), BlockVerifier())
    one, other = (
        kernels.verdict(rule, draft, probs, KeyedStreams(list(range(100))), list(range(100)))
        for rule in rules
    )
    assert one.lists == other.lists


def test_a_token_outside_the_vocabulary_is_rejected(kernels: Kernels) -> None:
    """A token outside the vocabulary has no mass; reading past the distribution would be worse than
    an error."""
    probs = torch.full((2, 2, 5), 0.2)
    tokens = torch.tensor([[5], [-1]])
    lengths = torch.tensor([1, 1])
    for parents, proposals in itertools.product((None, torch.tensor([[-1], [-1]])), (None, probs)):
        draft = Draft(tokens, lengths, parents, proposals)
        verdict = kernels.verdict(TraversalVerifier(), draft, probs, KeyedStreams([1, 2]), [3, 3])
        assert verdict.lists.num_accepted == [0, 0]
        assert all(0 <= token < 5 for token in verdict.lists.next_token)


def test_a_verdict_is_the_same_alone(kernels: Kernels) -> None:
    torch.manual_seed(3)
    draft, probs = cases(60, "drawn", num_rows=12, num_nodes=4)
    assert draft.probs is not None
    together = kernels.verdict(
        BlockVerifier(), draft, probs, KeyedStreams(list(range(12))), list(range(12))
    )
    for row in range(12):
        one = slice(row, row + 1)
        alone = Draft(draft.tokens[one], draft.lengths[one], probs=draft.probs[one])
        verdict = kernels.verdict(BlockVerifier(), alone, probs[one], KeyedStreams([row]), [row])
        assert [line[row] for line in together.lists] == [line[0] for line in verdict.lists]


@pytest.mark.parametrize("vocab_size", [2, 17, 700])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_races_are_won_by_the_same(kernels: Kernels, is_tree: bool, vocab_size: int) -> None:
    """Equal noise gives equal winners on chains and trees: catches noise of another position, a
    lost tail, a wrong logarithm."""
    torch.manual_seed(vocab_size)
    draft, probs = cases(vocab_size, "placed", num_rows=200, num_nodes=4)
    probs[::3] = probs[::3].where(torch.rand_like(probs[::3]) < 0.5, 0.0).clamp(min=0)  # filtered
    probs[..., 0] += 1e-30
    probs /= probs.sum(-1, keepdim=True)
    if is_tree:
        draft = Draft(
            draft.tokens, draft.lengths, parents=torch.tensor([-1, -1, 0, 1]).expand(200, -1)
        )
    rng = KeyedStreams(list(range(200)))
    positions = torch.arange(200) + 3
    rule = CoupledVerifier()
    assert kernels.serve(rule, draft, probs)
    found = kernels.verdict(rule, draft, probs, rng, positions.tolist())
    expected = rule.verify(draft, probs, rng, positions)
    mine, theirs = (list(zip(*verdict.lists, strict=True)) for verdict in (found, expected))
    assert sum(map(tuple.__ne__, mine, theirs)) <= 1, "one race may be that close"
    assert expected.num_accepted.float().std() > 0.3, "hardly any branch was taken"


@pytest.mark.parametrize("vocab_size", [1, 3, 8, 13, 1023, 1025, 5000])
@pytest.mark.parametrize("seed", [0, 5, 2**63 + 17, 2**64 - 1])
def test_noise_is_that_of_the_reference(kernels: Kernels, seed: int, vocab_size: int) -> None:
    """Equal uniforms give equal noise up to rounding: catches a wrong counter, key or part of a
    position."""
    positions = [0, 7, 8, 100_000]
    found = kernels.noise(seed, positions, vocab_size)
    expected = PhiloxNoise().noise(seed, positions, vocab_size)
    assert torch.stack(found).allclose(torch.stack(expected), rtol=1e-13, atol=1e-14)
    (alone,) = kernels.noise(seed, [8], vocab_size)
    assert alone.equal(found[2])  # whatever is made beside it, by whichever thread


def test_what_they_do_not_serve(kernels: Kernels) -> None:
    """Other rules, trees of most and other numbers keep the general path; a draft of nothing does
    not."""
    draft, probs = cases(9, "drawn", num_rows=2, num_nodes=3)
    tree = Draft(
        draft.tokens, draft.lengths, parents=torch.tensor([[-1, -1, 0]] * 2), probs=draft.probs
    )
    assert not kernels.serve(TypicalVerifier.build(TypicalVerifier.Settings()), draft, probs)
    assert not kernels.serve(BlockVerifier(), tree, probs)
    assert not kernels.serve(MultiRoundVerifier(), tree, probs)
    assert not kernels.serve(TraversalVerifier(), tree, probs.double())
    assert not kernels.serve(CoupledVerifier(), draft, probs.double())
    assert not kernels.serve(BlockVerifier(), draft, probs.double())
    assert not kernels.serve(BlockVerifier(), draft, probs[:, :2])
    assert kernels.probs(probs.double(), torch.zeros(2, 4, dtype=torch.float64), draft) is None
    nothing = Draft.empty(2)
    assert kernels.serve(BlockVerifier(), nothing, probs[:, :1].contiguous())
    verdict = kernels.verdict(BlockVerifier(), nothing, probs[:, :1], KeyedStreams([1, 2]), [5, 6])
    assert verdict.lists.num_accepted == [0, 0]
    assert verdict.lists.path == [[], []]
