"""Expected tau: chains over texts by hand, weighting, sums over batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.train.block import BlockRecipe
from outrider.train.eagle import Eagle3Recipe
from outrider.train.expected import Expectation, chain_means, chain_windows
from outrider.train.medusa import MedusaRecipe
from outrider.train.recipe import LossReport
from tests.unit.train.head_material import PROMPT, build_recipe, features, own_texts, target_module


def test_chains_over_a_text_by_hand() -> None:
    """Positions 1..3 count; chains of two start at 1 and 2."""
    accept = torch.tensor([[9.0, 0.5, 0.8, 0.4, 9.0]])
    mask = torch.tensor([[False, True, True, True, False]])
    per_position, survival, count = chain_windows(accept, mask, 2)
    assert count == 2
    assert survival == pytest.approx([0.65, (0.4 + 0.32) / 2])
    assert per_position == pytest.approx([0.65, 0.36 / 0.65])


def test_products_of_positions_are_the_survival() -> None:
    """Otherwise tau from `per_position` and tau from `survival` would differ."""
    steps = [torch.rand(50), torch.rand(50), torch.rand(50)]
    per_position, survival, _ = chain_means(steps, [torch.ones(50, dtype=torch.bool)] * 3)
    product = 1.0
    for one, reached in zip(per_position, survival, strict=True):
        product *= one
        assert product == pytest.approx(reached)


def test_short_texts_give_short_chains() -> None:
    """A response shorter than the depth must not give no number at all; nothing that counts gives
    none."""
    mask = torch.tensor([[True, True, False, False]])
    assert len(chain_windows(torch.full((1, 4), 0.5), mask, 5)[1]) == 2
    assert chain_windows(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), 5) == ([], [], 0)


@pytest.mark.parametrize("kind", [Eagle3Recipe, MedusaRecipe, BlockRecipe])
def test_short_responses_are_measured(kind: Any) -> None:
    """Catches texts that all end before a whole draft: without a number the untrained head would be
    kept as the best."""
    module = target_module()
    recipe = build_recipe(kind, module, **({"num_layers": 1} if kind is BlockRecipe else {}))
    recipe.module.eval()
    with torch.no_grad():
        report = recipe.loss(features(module, recipe.signals, own_texts(module, 2, PROMPT + 2)))
    assert len(report.survival) == 2
    assert report.survival[0] > 0


def test_batches_are_weighted_by_their_chains() -> None:
    """A mean of means would let a short batch count as much as a long one."""
    sums = Expectation()
    sums.add(LossReport(torch.tensor(1.0), [], {"x": 1.0}, [0.5], 1))
    sums.add(LossReport(torch.tensor(4.0), [], {"x": 4.0}, [0.8, 0.4], 3))
    assert sums.mean_loss() == pytest.approx(3.25)
    assert sums.mean_parts() == {"x": pytest.approx(3.25)}
    assert sums.mean_survival() == pytest.approx([(0.5 + 2.4) / 4, 1.2 / 4])
    assert sums.tau() == pytest.approx(1 + 2.9 / 4 + 0.3)


def test_positions_alone_are_multiplied() -> None:
    """A recipe without chains reports positions only."""
    sums = Expectation()
    sums.add(LossReport(torch.tensor(0.0), [0.5, 0.5]))
    assert sums.tau() == pytest.approx(1.75)
