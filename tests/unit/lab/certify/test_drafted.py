"""Ranks of drafted tokens in the distributions that a drafter reports: uniform when they are right,
siblings included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.lab.certify.drafted import DraftedRanks, merged
from outrider.types import Draft

V = 40


def drawn_tree(seed: int, num_rows: int, power: float = 1.0, *, replacement: bool = False) -> Draft:
    """Two children of the pending token and one of the first; `power`: of the reported
    distributions."""
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(num_rows, 4, V, generator=generator)).softmax(-1)
    first = torch.multinomial(probs[:, 0], 2, replacement=replacement, generator=generator)
    under = torch.multinomial(probs[:, 1], 1, generator=generator)
    tokens = torch.cat([first, under], dim=1)
    parents = torch.tensor([[-1, -1, 0]] * num_rows)
    reported = probs**power
    reported = reported / reported.sum(dim=-1, keepdim=True)
    return Draft(tokens, torch.full((num_rows,), 3), parents, reported, replacement=replacement)


def statistics_of(*drafts: Draft, seed: int = 0) -> dict[str, Any]:
    table = DraftedRanks()
    for number, draft in enumerate(drafts):
        ranks = DraftedRanks(seed + number)
        ranks.observe(SimpleNamespace(draft=draft))  # type: ignore[arg-type]
        table.add(ranks.as_json())
    return dict(table.tests())


@pytest.mark.parametrize("replacement", [False, True])
def test_p_values_are_uniform_where_the_report_is_right(replacement: bool) -> None:
    """Siblings included, which are drawn without their elder ones."""
    found = [
        statistics_of(drawn_tree(seed, 200, replacement=replacement), seed=seed)
        for seed in range(150)
    ]
    for view in ("likeliest first", "by id"):
        p_values = [one[view].p_value for one in found]
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3
        assert found[0][view].num_draws == 600


def test_a_flatter_report_is_seen() -> None:
    found = statistics_of(*(drawn_tree(seed, 1000, 0.9) for seed in range(5)))
    assert found["likeliest first"].p_value < 1e-6


def test_a_draw_that_favours_low_ids_is_seen() -> None:
    """What a sum that saturates does: the last tokens of the vocabulary are never drawn."""
    probs = torch.full((3000, 2, V), 1 / V)
    tokens = torch.randint(0, V - 2, (3000, 1), generator=torch.Generator().manual_seed(0))
    found = statistics_of(Draft(tokens, torch.ones(3000, dtype=torch.int64), probs=probs))
    assert found["by id"].p_value < 1e-6


def test_a_token_that_the_report_excludes_ends_the_matter() -> None:
    draft = drawn_tree(0, 200)
    draft.probs[7, 1, draft.tokens[7, 2]] = 0  # type: ignore[index]
    found = statistics_of(draft)["by id"]
    assert (found.impossible, found.p_value) == (1, 0)


def test_placed_and_padding_nodes_are_left_out() -> None:
    draft = drawn_tree(0, 50)
    draft.sampled = torch.tensor([[True, False, True]] * 50)
    draft.lengths = torch.tensor([2, 3] * 25)
    assert statistics_of(draft)["by id"].num_draws == 75
    assert statistics_of(Draft(draft.tokens, draft.lengths, draft.parents)) == {}


def test_cells_are_merged_until_they_are_expected_often_enough() -> None:
    observed, expected = merged(np.array([1, 2, 3, 4, 5]), np.array([6.0, 2.0, 3.0, 6.0, 4.0]))
    assert observed.tolist() == [1, 5, 9]
    assert expected.tolist() == [6.0, 5.0, 10.0]
