"""How often placed nodes were kept, and trees that follow it."""

from __future__ import annotations

import pytest
import torch

from outrider.trees.growth import BestFirstGrowth, Child
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.trees.worth import TRUST, NodeWorth, choices
from outrider.types import Draft, Verdict


def test_before_anything_was_seen_a_node_is_worth_what_the_draft_says() -> None:
    worth = NodeWorth()
    assert [worth(rank, prob) for rank, prob in ((0, 0.0), (0, 0.4), (1, 0.3), (3, 1.0))] == [
        0.0,
        0.4,
        0.3,
        1.0,
    ]


def test_counts_come_to_outweigh_what_the_draft_says() -> None:
    """First children and later ones of one class apart, and no other class with them."""
    worth = NodeWorth()
    for number in range(100):
        worth.count(0, 0.55, kept=number % 10 > 0)
        worth.count(2, 0.55, kept=False)
    assert worth(0, 0.6) == pytest.approx((90 + TRUST * 0.6) / (100 + TRUST))
    assert worth(1, 0.6) == pytest.approx(TRUST * 0.6 / (100 + TRUST))
    assert worth(0, 0.3) == 0.3


def test_every_node_of_a_kept_path_chose_among_its_children() -> None:
    children = [[0, 1], [], [2, 3], [], [4], []]
    assert choices(children, [1, 3]) == [([0, 1], 1), ([2, 3], 3), ([4], None)]
    assert choices(children, []) == [([0, 1], None)]


def grown(plan: TreePlan, num_nodes: int = 6) -> BestFirstGrowth:
    """A tree of a draft that everywhere gives its first guess 0.5 and its second 0.4."""
    growth = plan.growth(num_nodes, sampled=False)
    assert isinstance(growth, BestFirstGrowth)
    while wanted := growth.wanted():
        growth.add([[Child(1, 0.5), Child(2, 0.4)][:count] for _, count in wanted])
    return growth


def depth(growth: BestFirstGrowth) -> int:
    depths: list[int] = []
    for node in growth.finish():  # parents stand before their children
        parent = growth.parents[node]
        depths.append(1 if parent < 0 else depths[growth.finish().index(parent)] + 1)
    return max(depths)


def keep_first_guesses(plan: TreePlan, steps: int) -> None:
    """Steps whose trees keep the deepest path of first guesses."""
    for _ in range(steps):
        growth = grown(plan)
        nodes = growth.finish()
        number = {-1: -1} | {node: new for new, node in enumerate(nodes)}
        parents = [number[growth.parents[node]] for node in nodes]
        path = []
        at = -1
        while (
            first := next((n for n, parent in enumerate(parents) if parent == at), None)
        ) is not None:
            path.append(first)
            at = first
        draft = Draft(
            torch.tensor([[growth.tokens[n] for n in nodes]]),
            torch.tensor([len(nodes)]),
            torch.tensor([parents]),
        )
        padded = torch.tensor([path + [-1] * (len(nodes) - len(path))])
        verdict = Verdict(
            padded, torch.tensor([len(path)]), torch.tensor([9]), torch.tensor([True])
        )
        plan.observe(draft, verdict, [growth])


@pytest.mark.parametrize("adapt", [False, True])
def test_trees_go_deeper_where_first_guesses_stand_if_asked_to(adapt: bool) -> None:
    """Catches counts of the wrong nodes, `adapt` ignored, and drafts that follow other texts
    unasked."""
    plan = TreePlan(TreeSettings(tree="best-first", adapt=adapt))
    before = depth(grown(plan))
    keep_first_guesses(plan, 60)
    assert before <= 3
    assert depth(grown(plan)) == (6 if adapt else before)


def test_a_token_the_draft_excludes_is_never_drafted() -> None:
    """However well nodes of small probability did."""
    plan = TreePlan(TreeSettings(tree="best-first", adapt=True))
    for _ in range(50):
        plan.worth.count(1, 0.0, kept=True)
    growth = plan.growth(4, sampled=False)
    growth.add([[Child(1, 1.0), Child(2, 0.0)]])
    assert growth.finish() == [0]
