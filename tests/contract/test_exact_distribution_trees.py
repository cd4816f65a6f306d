"""Every tree verifier emits exactly the target's joint distribution, whichever way siblings are
chosen and trees are grown."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.contract.test_exact_distribution import EXACT, FILTERS, pair, verifier_named
from tests.enumeration.bank import follow_the_likely
from tests.oracle_trees import probs_on, shape, tree_accepted, tree_bias, tree_drafts

TREE_VERIFIERS = [
    name
    for name in VERIFIERS.names()
    if VERIFIERS.load(name).lossless and VERIFIERS.load(name).shape == "tree"
]
every_verifier = pytest.mark.parametrize("verifier", TREE_VERIFIERS)

FORK = [-1, -1, 0, 0, 1]  # two children, of which one has two and the other one
SHAPES: dict[str, tuple[list[int], str]] = {
    "without replacement": (FORK, "sssss"),
    "deterministic": (FORK, "ddddd"),
    "hybrid": (FORK, "dsdss"),
    "foreign branch first": (FORK, "fsfss"),
    # may repeat a drawn token: then it can never be kept
    "foreign branch last": ([-1, 0, -1, 0], "ssff"),
    # V = 3: the last sibling is certain, top-k leaves nothing for it
    "three siblings": ([-1, -1, -1, 0], "ssss"),
    "chain": ([-1, 0], "ss"),
    "late sibling": ([-1, 0, -1, 2], "ssss"),  # depth first instead of level by level
}


@every_verifier
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("filters", FILTERS)
def test_distribution_is_the_targets(verifier: str, name: str, filters: str) -> None:
    """Any bias at all: wrong residual, wrong sibling distribution, penalties of another branch,
    padding looked at."""
    target, drafter = pair(11, 3, 2, FILTERS[filters], FILTERS[filters])
    proposals = tree_drafts(drafter, shape(*SHAPES[name]))
    assert tree_bias(verifier_named(verifier), target, proposals) < EXACT


@every_verifier
@pytest.mark.parametrize("seed", range(3))
def test_siblings_drawn_with_replacement(verifier: str, seed: int) -> None:
    """SpecInfer's trees and several parallel drafts: the same token may come twice."""
    target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["top_k"])
    for parents in (FORK, [-1, -1, 0, 1]):
        proposals = tree_drafts(drafter, shape(parents, "s" * len(parents)), replacement=True)
        assert tree_bias(verifier_named(verifier), target, proposals) < EXACT


@every_verifier
@pytest.mark.parametrize("seed", range(3))
def test_trees_that_follow_what_was_drawn(verifier: str, seed: int) -> None:
    """Growth under kept tokens is no anticipation; rows of one batch have different trees."""
    target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, follow_the_likely(drafter))
    assert len(set(proposals.draft.lengths.tolist())) > 1
    assert tree_bias(verifier_named(verifier), target, proposals) < EXACT


@every_verifier
@pytest.mark.parametrize("seed", range(3))
def test_foreign_distributions_and_depth(verifier: str, seed: int) -> None:
    """Depth 3, a drafter whose distribution lacks tokens that the target has."""
    target, drafter = pair(seed, 3, 3, FILTERS["plain"], FILTERS["top_k"])
    for parents, kinds in (([-1, 0, 0, 1], "ssss"), ([-1, -1, 1, 2], "dsss")):
        assert (
            tree_bias(verifier_named(verifier), target, tree_drafts(drafter, shape(parents, kinds)))
            < EXACT
        )


@every_verifier
def test_greedy_target(verifier: str) -> None:
    """T = 0 must hold whatever the drafter's distribution is."""
    target, drafter = pair(3, 3, 2, FILTERS["greedy"], FILTERS["plain"])
    for kinds in ("sssss", "ddddd"):
        assert (
            tree_bias(verifier_named(verifier), target, tree_drafts(drafter, shape(FORK, kinds)))
            < EXACT
        )


# ------------------------------------------------ how many tokens are accepted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_traversal_accepts_at_least_as_much_as_top_down(seed: int, name: str) -> None:
    """What the default is for; equal where nothing was sampled."""
    target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, shape(*SHAPES[name]))
    traversal, top_down = (
        tree_accepted(verifier_named(v), target, proposals) for v in ("traversal", "multi-round")
    )
    assert traversal > top_down - EXACT
    if proposals.draft.probs is None:
        assert traversal == pytest.approx(top_down, abs=EXACT)


def test_drawing_without_replacement_accepts_more() -> None:
    """Over several pairs at temperature 1: no token is tried twice, and p is covered better than by
    the likeliest ones."""

    def mean(kinds: str, *, replacement: bool = False) -> float:
        total = 0.0
        for seed in range(8):
            target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["plain"])
            proposals = tree_drafts(drafter, shape([-1, -1], kinds), replacement=replacement)
            total += tree_accepted(verifier_named("traversal"), target, proposals)
        return total / 8

    assert mean("ss") > mean("ss", replacement=True)
    assert mean("ss") > mean("dd")


@pytest.mark.parametrize("seed", range(4))
def test_on_a_chain_traversal_is_block_and_multi_round_is_token(seed: int) -> None:
    """A chain written as a tree has equal probabilities of every outcome."""
    target, drafter = pair(seed, 3, 3, FILTERS["plain"], FILTERS["temperature"])
    chain = oracle.sampled_drafts(drafter, 3)
    tree = tree_drafts(drafter, shape([-1, 0, 1], "sss"))
    for ours, theirs in (("traversal", "block"), ("multi-round", "token")):
        expected = oracle.expected_accepted(verifier_named(theirs), target, chain)
        assert tree_accepted(verifier_named(ours), target, tree) == pytest.approx(
            expected, abs=EXACT
        )


@pytest.mark.parametrize(("ours", "theirs"), [("traversal", "block"), ("multi-round", "token")])
def test_the_same_coins_give_the_same_verdict_on_a_chain(ours: str, theirs: str) -> None:
    """Not only the distribution: with the same streams the very same tokens, so a tree of one
    branch changes no seeded text."""
    generator = torch.Generator().manual_seed(1)
    p, q = (
        torch.randn(200, 5, 30, generator=generator, dtype=torch.float64).softmax(-1)
        for _ in range(2)
    )
    rng = KeyedStreams(list(range(200)))
    start = torch.arange(200) + 3
    tokens = torch.multinomial(q[:, :4].flatten(0, 1), 1, generator=generator).view(200, 4)
    chain = Draft(tokens, torch.randint(0, 5, (200,), generator=generator), probs=q)
    tree = Draft(tokens, chain.lengths, parents=chain.parent_nodes().clone(), probs=q)
    one = verifier_named(ours)(tree, p, rng, start)
    other = verifier_named(theirs)(chain, p, rng, start)
    assert one.lists == other.lists


@every_verifier
def test_a_row_is_verified_alike_alone_and_beside_other_trees(verifier: str) -> None:
    """Different shapes in one batch: padding, order and neighbours must not reach a row."""
    target, drafter = pair(2, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, follow_the_likely(drafter))
    draft = proposals.draft
    p = probs_on(target, proposals.draft)
    rng = KeyedStreams(list(range(draft.num_rows)))
    start = torch.arange(draft.num_rows)
    together = verifier_named(verifier)(draft, p, rng, start).lists
    for row, length in enumerate(draft.lengths.tolist()):
        one = Draft(
            draft.tokens[row : row + 1, :length],
            draft.lengths[row : row + 1],
            draft.parents[row : row + 1, :length],
            draft.probs[row : row + 1, : length + 1],
            draft.sampled[row : row + 1, :length],
        )
        alone = verifier_named(verifier)(
            one, p[row : row + 1, : length + 1], KeyedStreams([row]), start[row : row + 1]
        )
        assert alone.lists.next_token[0] == together.next_token[row]
        assert alone.lists.path[0] == together.path[row][:length]


def test_gumbel_walks_the_tree_that_holds_its_choice() -> None:
    """Acceptance of a deterministic tree = the probability that the target's next tokens are in it."""
    target, drafter = pair(6, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, shape(FORK, "ddddd"))
    tokens = proposals.draft.tokens[0].tolist()
    first = sum(float(target.probs(())[tokens[n]]) for n in (0, 1))
    second = sum(
        float(target.probs(())[tokens[a]] * target.probs((tokens[a],))[tokens[b]])
        for a, b in ((0, 2), (0, 3), (1, 4))
    )
    assert tree_accepted(verifier_named("gumbel"), target, proposals) == pytest.approx(
        first + second, abs=EXACT
    )


GREEDY = SamplingParams()


@every_verifier
def test_all_accepted_means_a_leaf_was_reached(verifier: str) -> None:
    """A token after a leaf is a bonus; one after an inner node corrects its children."""
    target, _ = pair(1, 3, 2, GREEDY, FILTERS["plain"])
    best = int(target.probs(()).argmax())
    next_best = int(target.probs((best,)).argmax())
    p = target.probs_along([(best, next_best)], 2)[:, [0, 1, 0, 2]]
    tokens = torch.tensor([[best, (best + 1) % 3, next_best]])
    parents = torch.tensor([[-1, -1, 0]])
    verdict = verifier_named(verifier)(
        Draft(tokens, torch.tensor([3]), parents), p, KeyedStreams([0]), torch.tensor([4])
    )
    assert (verdict.lists.path, verdict.lists.all_accepted) == ([[0, 2, -1]], [True])
    tokens = torch.tensor([[best, (best + 1) % 3, (next_best + 1) % 3]])
    verdict = verifier_named(verifier)(
        Draft(tokens, torch.tensor([3]), parents), p, KeyedStreams([0]), torch.tensor([4])
    )
    assert (verdict.lists.path, verdict.lists.all_accepted) == ([[0, -1, -1]], [False])
    assert verdict.lists.next_token == [next_best]
