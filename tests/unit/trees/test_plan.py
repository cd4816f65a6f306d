"""Which tree a row gets."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from outrider.settings import parse_settings
from outrider.trees.growth import BestFirstGrowth, Child, Growth
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.trees.siblings import REFRESH
from outrider.types import Draft, Verdict

KINDS = ("best-first", "sequoia", "parallel:3", "2x2x1", "4")


def parents(growth: Growth) -> list[int]:
    """The tree, after giving it all it wants."""
    while wanted := growth.wanted():
        growth.add([[Child(token, 0.9 / count) for token in range(count)] for _, count in wanted])
    return [growth.parents[node] for node in growth.finish()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tree": "bushy"},
            "tree must be chain, best-first, sequoia, parallel:3 or widths like 4x2x1; got 'bushy'",
        ),
        ({"tree": ""}, "tree must be"),
        ({"tree": "parallel"}, "number of chains M >= 1, got 'parallel'"),
        ({"tree": "parallel:0"}, "number of chains M >= 1"),
        ({"tree": "parallel:two"}, "number of chains M >= 1"),
        ({"tree": "4x0"}, "widths like 4x2x1, got '4x0'"),
        ({"tree": "sequoia:3"}, "tree must be"),
        ({"top_k": "0"}, r"top_k must be at least 1 \(best-first: .*, got 0"),
        ({"max_depth": "0"}, r"max_depth must be at least 1 \(.*, got 0"),
        ({"sibling_acceptance": "0.5;0.2"}, "must be numbers like 0.7,0.1; got '0.5;0.2'"),
        ({"sibling_acceptance": "0.9,0.2"}, "sum of at most 1"),
        ({"sibling_acceptance": "0.5,-0.1"}, "probabilities"),
        ({"sibling_acceptance": "nan"}, "probabilities"),
        ({"tree": "2x2", "adapt": "true"}, "adapt plans shapes anew, which tree '2x2' has none of"),
        ({"tree": "parallel:2", "adapt": "true"}, "adapt"),
        ({"trees": "2x2"}, "Did you mean 'tree'"),
    ],
)
def test_bad_settings_are_refused_with_a_reason(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(TreeSettings, given, "drafter 'draft-model'")


@pytest.mark.parametrize(
    ("tree", "num_nodes"),
    [("2x2x1", 10), ("4", 4), ("parallel:3", 12), ("sequoia", 15), ("best-first", 15)],
)
def test_nodes_when_the_user_names_no_number(tree: str, num_nodes: int) -> None:
    assert TreeSettings(tree=tree).default_num_nodes() == num_nodes


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("tree", KINDS)
def test_a_tree_keeps_to_its_budget(tree: str, sampled: bool) -> None:
    """A row near its end may draft less than the others, down to nothing. Catches a shape that is
    not cut."""
    plan = TreePlan(TreeSettings(tree=tree, min_gain=0.0))
    whole = TreeSettings(tree=tree).default_num_nodes()
    for budget in range(whole + 8):
        nodes = len(parents(plan.growth(budget, sampled=sampled)))
        is_fixed = tree[0].isdigit()  # its own size is the most it ever has
        assert nodes == (min(budget, whole) if is_fixed else budget)


@pytest.mark.parametrize("tree", KINDS)
def test_sampled_rows_get_a_shape_fixed_beforehand(tree: str) -> None:
    """Choosing among drawn nodes by their own scores would bias the text."""
    plan = TreePlan(TreeSettings(tree=tree))
    for budget in (0, 1, 5, 16, 40):
        assert not isinstance(plan.growth(budget, sampled=True), BestFirstGrowth)
    assert isinstance(plan.growth(5, sampled=False), BestFirstGrowth) == (tree == "best-first")


def test_the_temperature_decides_whether_nodes_are_drawn() -> None:
    """Greedy rows and cold ones take the likeliest tokens."""
    plan = TreePlan(TreeSettings(tree="sequoia", sample_from=0.5))
    drawn = {
        t: plan.samples(SamplingParams(temperature=t)) for t in (0.0, 0.3, 0.49, 0.5, 1.0, 2.0)
    }
    assert drawn == {0.0: False, 0.3: False, 0.49: False, 0.5: True, 1.0: True, 2.0: True}
    assert not TreePlan(TreeSettings(tree="sequoia", sample_from=0.0)).samples(
        SamplingParams(temperature=0.0)
    )


@pytest.mark.parametrize("tree", KINDS)
def test_only_parallel_chains_repeat_tokens(tree: str) -> None:
    """Catches a rule of verification that is not that of the drawing."""
    assert TreePlan(TreeSettings(tree=tree)).replacement == tree.startswith("parallel")


def watch_the_second_child_win(plan: TreePlan, times: int) -> None:
    draft = Draft(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[-1, -1, -1]]))
    verdict = Verdict(
        torch.tensor([[1, -1, -1]]), torch.tensor([1]), torch.tensor([9]), torch.tensor([True])
    )
    for _ in range(times):
        plan.observe(draft, verdict)


@pytest.mark.parametrize("adapt", [True, False])
def test_shapes_follow_what_is_measured_if_asked_to(adapt: bool) -> None:
    """Catches `adapt` ignored, and plans that change although nobody asked."""
    plan = TreePlan(TreeSettings(tree="sequoia", adapt=adapt))
    before = parents(plan.growth(4, sampled=True))
    assert before == [-1, 0, 1, 2]  # 0.7 against 0.12: a chain
    watch_the_second_child_win(plan, REFRESH)
    # two children, two of the second one: all else is below a child that is never kept
    assert parents(plan.growth(4, sampled=True)) == ([-1, -1, 1, 1] if adapt else before)
