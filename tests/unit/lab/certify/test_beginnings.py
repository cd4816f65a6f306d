"""Two samples of texts against each other: cells by first characters, false alarms, and the power
that is stated."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.lab.certify.beginnings import Stratum, detectable_between, homogeneity
from outrider.lab.certify.ranks import MIN_EXPECTED

WORDS = ["the cat", "the dog", "the", "a cat sat", "a cat ran", "no", "é", "", "zebra"]
PROBS = np.array([0.25, 0.2, 0.1, 0.15, 0.1, 0.08, 0.06, 0.05, 0.01])


def stratum(rng: np.random.Generator, num: int, probs: np.ndarray = PROBS) -> Stratum:
    return Stratum(
        rng.choice(WORDS, num, p=PROBS).tolist(), rng.choice(WORDS, num, p=probs).tolist()
    )


def shifted(total_variation: float) -> np.ndarray:
    """Probability moved from two texts to one that begins like another."""
    moved = PROBS.copy()
    moved[[0, 4]] -= np.array([0.7, 0.3]) * total_variation
    moved[5] += total_variation
    return moved


def test_cells_are_told_apart_by_first_characters() -> None:
    table = Stratum(["the cat"] * 60 + ["no"] * 30, ["the dog"] * 60 + ["no"] * 30).table()
    assert sorted(table.T.tolist()) == [[0, 60], [30, 30], [60, 0]], "split after 'the '"
    assert Stratum(["one"] * 50, ["one"] * 50).table().tolist() == [[50], [50]]
    ends = Stratum(["the"] * 50, ["the end"] * 50).table()
    assert sorted(ends.T.tolist()) == [[0, 50], [50, 0]], "a text that ends is its own cell"


def test_parts_that_are_too_small_share_cells() -> None:
    """Texts that all begin differently are still compared, in the order of characters."""
    early, late = list("abcdefghijkl"), list("nopqrstuvwxy")
    table = Stratum([*early, *late], early * 2).table()
    assert table.tolist() == [[4, 4, 4, 12], [8, 8, 8, 0]]
    nearly = Stratum(["yes"] * 100, ["yes"] * 97 + ["no"] * 3).table()
    assert nearly.tolist() == [[100], [100]], "too few to tell"


def test_few_texts_that_begin_otherwise_do_not_end_a_cell() -> None:
    """They go with the part that most texts are in, which is split all the same."""
    usual = ["the cat"] * 45 + ["the dog"] * 45
    table = Stratum([*usual, *["no"] * 5], [*usual, *["a"] * 5]).table()
    assert sorted(table.T.tolist()) == [[45, 45], [50, 50]]


def test_texts_that_only_end_differently() -> None:
    """A first token is drawn without drafts: a fault comes later."""
    firsts = [chr(97 + number % 26) for number in range(120)]
    plain = [f"{first} so it is" for first in firsts]
    other = [
        f"{first} so it be" if number % 2 else f"{first} so it is"
        for number, first in enumerate(firsts)
    ]
    strata = [Stratum(plain, other)]
    assert homogeneity(strata).p_value > 0.9
    assert homogeneity(strata, "end").p_value < 1e-9


def test_every_text_is_in_one_large_cell() -> None:
    rng = np.random.default_rng(1)
    letters = list("abcdefgh")
    for num in (3, 20, 77, 400):
        texts = ["".join(rng.choice(letters, rng.integers(0, 5))) for _ in range(2 * num)]
        table = Stratum(texts[:num], texts[num:]).table()
        assert table.sum(axis=1).tolist() == [num, num]
        assert table.shape[1] == 1 or (table.sum(axis=0) >= 2 * MIN_EXPECTED).all()


def test_nothing_to_test() -> None:
    alike = homogeneity([Stratum(["one"] * 50, ["one"] * 50)])
    assert (alike.df, alike.p_value, detectable_between(alike, 1e-3, 0.9)) == (0, 1.0, None)
    assert homogeneity([Stratum()]).num_draws == 0
    one_sided = homogeneity([Stratum(["one"] * 50, [])])
    assert (one_sided.num_draws, one_sided.df) == (0, 0)


def test_texts_of_one_distribution_fail_as_seldom_as_stated() -> None:
    rng = np.random.default_rng(2)
    runs = 400
    p_values = [homogeneity([stratum(rng, 100), stratum(rng, 300)]).p_value for _ in range(runs)]
    for level in (0.05, 0.2, 0.5):
        rejected = sum(p <= level for p in p_values) / runs
        assert rejected == pytest.approx(level, abs=4 * (level * (1 - level) / runs) ** 0.5)


def test_the_stated_power_is_reached() -> None:
    """A fault of just the size that a test claims to find is found in at least so many cases."""
    rng = np.random.default_rng(3)
    level, power, runs = 0.01, 0.9, 100
    sample = [stratum(rng, 500), stratum(rng, 500)]
    finds = detectable_between(homogeneity(sample), level, power)
    assert finds is not None
    assert 0.05 < finds < 0.2
    found = sum(
        homogeneity([stratum(rng, 500, shifted(finds)) for _ in range(2)]).p_value <= level
        for _ in range(runs)
    )
    assert found >= power * runs - 3 * (power * (1 - power) * runs) ** 0.5
