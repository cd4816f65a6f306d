"""Ranks of drawn tokens: uniform when their distributions are right, siblings of trees included, and
tests of them as powerful as stated when they are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.lab.certify.certify import DETECTED, CertifyPlan
from outrider.lab.certify.certify_result import FALSE_ALARMS, POWER, GStatistic
from outrider.lab.certify.ranks import Ranks, detectable, holm, merged, noncentrality
from outrider.types import Draft

V = 60


def distributions(seed: int, count: int = 25, spread: float = 1.5) -> Tensor:
    """(count, V) random distributions."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(count, V, generator=generator, dtype=torch.float64)).softmax(-1)


def statistic(num: int, df: int) -> GStatistic:
    return GStatistic(
        num_draws=num, num_uncertain=num, num_cells=df + 1, g=0.0, df=df, p_value=1.0, impossible=0
    )


def drawn_from(seed: int, true: Tensor, num: int) -> Tensor:
    """(n, num) tokens."""
    return torch.multinomial(
        true, num, replacement=True, generator=torch.Generator().manual_seed(seed)
    )


def statistics_from(
    seed: int, true: Tensor, claimed: Tensor, draft: Tensor, num: int
) -> dict[str, GStatistic]:
    """Of `num` draws from each of these distributions."""
    ranks = Ranks(seed)
    tokens = drawn_from(seed, true, num)
    for column in range(num):
        ranks.add(claimed, tokens[:, column], draft)
    return dict(ranks.tests())


@pytest.mark.slow
def test_p_values_are_uniform_under_the_right_distribution() -> None:
    """Catches a wrong number of degrees of freedom, and ranks that are not uniform."""
    probs = distributions(1, 8)
    found = [statistics_from(seed, probs, probs, distributions(2, 8), 60) for seed in range(600)]
    for view in ("likeliest first", "by id", "preference"):
        p_values = np.array([one[view].p_value for one in found])
        assert stats.kstest(p_values, "uniform").pvalue > 1e-2
        for level in (0.05, 0.01):
            assert (p_values < level).sum() <= stats.binom.ppf(0.999, len(p_values), level)


@pytest.mark.slow
def test_power_is_as_stated() -> None:
    """A distribution at the stated total variation, all of it against the order, is found at least
    as often as promised."""
    probs = distributions(1, 1, 0.5)
    draft = distributions(2, 1, 0.5)
    level = 1e-3
    power = 0.9
    num = 2000
    disliked = (draft / probs)[0].argsort()[: V // 2]
    wrong = probs.clone()
    wrong[0, disliked] *= 0.835  # what these lose, the others gain
    others = torch.ones(V, dtype=torch.bool)
    others[disliked] = False
    wrong[0, others] *= (1 - wrong[0, disliked].sum()) / wrong[0, others].sum()
    promised = detectable(statistic(num, 9), level, power)
    assert promised is not None
    assert promised <= 0.5 * float((wrong - probs).abs().sum())
    found = [
        statistics_from(seed, wrong, probs, draft, num)["preference"].p_value < level
        for seed in range(30)
    ]
    assert np.mean(found) >= power - 0.1


def test_a_bias_towards_the_draft_shows_in_the_order_of_its_preference() -> None:
    """The reason for this view: resampling from p, spread over a flat distribution, hides in the
    order of ids."""
    p = distributions(1, spread=0.3)
    q = distributions(2, spread=0.3)
    kept = torch.minimum(p, q)
    emitted = kept + (1 - kept.sum(dim=1, keepdim=True)) * p  # the classic bug, one token
    found = statistics_from(0, emitted, p, q, 400)
    assert found["preference"].p_value < 1e-9 * found["by id"].p_value


@pytest.mark.parametrize("power", [0.9, 1.1])
def test_another_temperature_shows_in_the_order_of_likelihood(power: float) -> None:
    p = distributions(1)
    other = p**power / (p**power).sum(dim=1, keepdim=True)
    assert statistics_from(0, other, p, p, 400)["likeliest first"].p_value < 1e-6


def test_tokens_of_probability_zero_end_the_matter() -> None:
    """But for a few where passes differ by rounding: top-p may keep a token in one of them and not
    in the other."""
    ranks = Ranks()
    probs = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    for token, times in ((0, 500), (1, 498), (2, 2)):
        ranks.add(probs.expand(times, 3), torch.full((times,), token))
    assert ranks.impossible == 2
    assert all(one.p_value == 0 for _, one in ranks.tests())
    assert all(one.p_value > 0.01 for _, one in ranks.tests(0.01))


def test_a_certain_distribution_has_nothing_to_test() -> None:
    ranks = Ranks()
    ranks.add(torch.tensor([[1.0, 0.0]]).expand(50, 2), torch.zeros(50, dtype=torch.int64))
    found = dict(ranks.tests())["by id"]
    assert (found.df, found.p_value, found.num_draws, found.num_uncertain) == (0, 1.0, 50, 0)
    # one wrong token is enough
    finds = detectable(found, 1e-3, 0.9)
    assert finds is not None
    assert (1 - finds) ** 50 == pytest.approx(0.1)
    assert list(Ranks().tests()) == []


def test_a_nearly_certain_distribution_is_tested() -> None:
    """0.98 and 0.02: a sampler that is wrong every tenth time must be seen all the same."""
    ranks = Ranks()
    probs = torch.tensor([[0.98, 0.02]])
    for token, times in ((0, 360), (1, 40)):
        ranks.add(probs.expand(times, 2), torch.full((times,), token))
    assert dict(ranks.tests())["likeliest first"].p_value < 1e-6


def test_counts_of_two_runs_add_up() -> None:
    probs = distributions(3)
    parts = [Ranks(seed) for seed in range(2)]
    whole = Ranks()
    for seed, part in enumerate(parts):
        part.add(probs, drawn_from(seed, probs, 1)[:, 0], probs)
        whole.merge(part.as_json())
    assert whole.num_draws == 50
    assert {view for view, _ in whole.tests()} == {"likeliest first", "by id", "preference"}


def test_holm_steps_down() -> None:
    """0.004 passes 0.05 / 4, 0.016 passes 0.05 / 3, 0.03 misses 0.05 / 2, and 0.04 after it is not
    asked."""
    assert holm([0.03, 0.004, 0.04, 0.016], 0.05) == [False, True, False, True]
    assert holm([], 0.05) == []


def test_more_samples_find_less() -> None:
    found = [detectable(statistic(num, 20), 1e-4, 0.9) for num in (100, 400, 1600)]
    assert found[0] > found[1] > found[2]  # type: ignore[operator]
    assert found[1] == pytest.approx(2 * found[2])  # type: ignore[operator]


def test_the_default_number_of_samples_keeps_the_promise() -> None:
    """With some to spare, for the draws that leave no choice."""
    needed = math.ceil(noncentrality(17, FALSE_ALARMS / 17, POWER) / (4 * DETECTED**2))
    assert 0.6 * CertifyPlan().samples < needed <= CertifyPlan().samples


def test_a_noncentrality_has_the_power_that_was_asked_for() -> None:
    for df in (1, 9, 17):
        threshold = stats.chi2.isf(1e-4, df)
        found = noncentrality(df, 1e-4, 0.9)
        assert stats.ncx2.sf(threshold, df, found) == pytest.approx(0.9, abs=1e-6)


def test_certain_draws_dilute_what_must_be_found_elsewhere() -> None:
    """A deviation of 0.2 in a tenth of the draws is one of 0.02 on average."""
    few = detectable(statistic(400, 20), 1e-4, 0.9)
    assert few is not None
    among_many = statistic(400, 20).model_copy(update={"num_draws": 4000})
    assert detectable(among_many, 1e-4, 0.9) == pytest.approx(few / 10)


def test_cells_are_merged_until_they_are_expected_often_enough() -> None:
    observed, expected = merged(np.array([1, 2, 3, 4, 5]), np.array([6.0, 2.0, 3.0, 6.0, 4.0]))
    assert observed.tolist() == [1, 5, 9]
    assert expected.tolist() == [6.0, 5.0, 10.0]


# ------------------------------------------------ of drafts


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


def observed(*drafts: Draft, seed: int = 0) -> dict[str, Any]:
    ranks = Ranks(seed)
    for draft in drafts:
        ranks.observe(SimpleNamespace(draft=draft))  # type: ignore[arg-type]
    return dict(ranks.tests())


def _many(replacement: bool) -> Iterator[dict[str, Any]]:
    for seed in range(150):
        yield observed(drawn_tree(seed, 200, replacement=replacement), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [False, True])
def test_p_values_are_uniform_where_the_report_is_right(replacement: bool) -> None:
    """Siblings included, which are drawn without their elder ones."""
    found = list(_many(replacement))
    for view in ("likeliest first", "by id"):
        p_values = [one[view].p_value for one in found]
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3
        assert found[0][view].num_draws == 600


def test_a_flatter_report_is_seen() -> None:
    found = observed(*(drawn_tree(seed, 1000, 0.9) for seed in range(5)))
    assert found["likeliest first"].p_value < 1e-6


def test_a_draw_that_favours_low_ids_is_seen() -> None:
    """What a sum that saturates does: the last tokens of the vocabulary are never drawn."""
    probs = torch.full((3000, 2, V), 1 / V)
    tokens = torch.randint(0, V - 3, (3000, 1), generator=torch.Generator().manual_seed(0))
    found = observed(Draft(tokens, torch.ones(3000, dtype=torch.int64), probs=probs))
    assert found["by id"].p_value < 1e-6


def test_a_token_that_the_report_excludes_ends_the_matter() -> None:
    draft = drawn_tree(0, 200)
    draft.probs[7, 1, draft.tokens[7, 2]] = 0  # type: ignore[index]
    found = observed(draft)["by id"]
    assert (found.impossible, found.p_value) == (1, 0)


def test_placed_and_padding_nodes_are_left_out() -> None:
    draft = drawn_tree(0, 50)
    draft.sampled = torch.tensor([[True, False, True]] * 50)
    draft.lengths = torch.tensor([2, 3] * 25)
    assert observed(draft)["by id"].num_draws == 75
    assert observed(Draft(draft.tokens, draft.lengths, draft.parents)) == {}
