"""The share of a node's distribution that its children carry: against brute force, linear programming and the project's own
rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from outrider.lab.explain.transport import bound_share
from outrider.sampling import kept
from outrider.sampling.kept import Children, child_weight, kept_share, race_agreement, race_share
from outrider.sampling.traversal import traverse_batched
from outrider.sampling.tree import multi_round_batched
from outrider.types import Draft

V = 5
SETS = {
    "one drawn": Children((-1,), (True,)),
    "one placed": Children((2,), (False,)),
    "two placed": Children((2, 0), (False, False)),
    "placed, drawn": Children((1, -1), (False, True)),
    "drawn, placed": Children((-1, 3), (True, False)),
    "two drawn": Children((-1, -1), (True, True)),
    "three drawn": Children((-1, -1, -1), (True, True, True)),
    "placed, two drawn": Children((4, -1, -1), (False, True, True)),
    "two with replacement": Children((-1, -1), (True, True), replacement=True),
    "three with replacement": Children((-1, -1, -1), (True, True, True), replacement=True),
}


def probs(seed: int, size: int = V, sharpness: float = 1.5) -> np.ndarray:
    found = np.exp(sharpness * np.random.default_rng(seed).normal(size=size))
    return found / found.sum()


def sibling_sets(q: np.ndarray, children: Children) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way the children can turn out, with its probability."""

    def grow(tokens: tuple[int, ...], prob: float, rest: np.ndarray) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(tokens) == len(children.tokens):
            yield tokens, prob
            return
        rank = len(tokens)
        if not children.drawn[rank]:
            yield from grow((*tokens, children.tokens[rank]), prob, _without(rest, children.tokens[rank], children))
            return
        for token in np.flatnonzero(rest):
            yield from grow((*tokens, int(token)), prob * rest[token], _without(rest, int(token), children))

    yield from grow((), 1.0, q)


def _without(rest: np.ndarray, token: int, children: Children) -> np.ndarray:
    if children.replacement:
        return rest
    rest = rest.copy()
    rest[token] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest


def project_coins(p: np.ndarray, q: np.ndarray, children: Children, tokens: tuple[int, ...], weight: float) -> np.ndarray:
    """The coins that the project's own tree rules toss for these siblings, below a node of this weight."""
    if weight == 1:
        draft, offset = _star(q, children, tokens), 0
        rule = multi_round_batched
    else:  # a placed first node gives its children the weight it has itself
        draft, offset = _star(q, children, tokens, below=True), 1
        rule = traverse_batched
    probs = torch.tensor(np.stack([p] * (draft.num_nodes + 1)))
    if weight < 1:
        probs[:1] = 0
        probs[0, 0], probs[0, 1] = weight, 1 - weight  # the first node's token is 0
    keep, _ = rule(probs[None], draft)
    return keep[0, offset:].numpy()


def _star(q: np.ndarray, children: Children, tokens: tuple[int, ...], *, below: bool = False) -> Draft:
    nodes = [0, *tokens] if below else list(tokens)
    parents = [-1, *[0] * len(tokens)] if below else [-1] * len(tokens)
    drawn = [False, *children.drawn] if below else list(children.drawn)
    probs = torch.tensor(np.stack([q] * (len(nodes) + 1)))
    return Draft(
        torch.tensor([nodes]), torch.tensor([len(nodes)]), torch.tensor([parents]), probs[None], torch.tensor([drawn]),
        replacement=children.replacement,
    )  # fmt: skip


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.2])
@pytest.mark.parametrize("name", SETS)
def test_kept_share_is_what_the_rules_keep_on_average(name: str, weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average over all sibling sets of 1 - product(1 - coin), with the coins of multi_round and traverse themselves."""
    monkeypatch.setattr(kept, "DRAWS", 4000)
    children = SETS[name]
    for seed in range(3):
        p, q = probs(seed), probs(100 + seed)
        fails = sum(
            prob * np.prod(1 - project_coins(p, q, children, tokens, weight)) for tokens, prob in sibling_sets(q, children)
        )
        simulated = children.num_drawn > 1 and not children.replacement
        assert kept_share(p, q, children, weight, seed) == pytest.approx(
            (1 - fails) / weight, abs=0.01 if simulated else 1e-9
        )


@pytest.mark.parametrize("weight", [1.0, 0.6])
@pytest.mark.parametrize("name", SETS)
def test_bound_share_is_the_optimum_of_the_linear_programme(name: str, weight: float) -> None:
    """Max flow from tokens (a p) to sibling sets (their probabilities), an edge where the token is in the set."""
    children = SETS[name]
    for seed in range(4):
        p, q = probs(seed), probs(200 + seed)
        sets = list(sibling_sets(q, children))
        edges = [(v, s) for s, (tokens, _) in enumerate(sets) for v in set(tokens)]
        limits = np.zeros((V + len(sets), len(edges)))
        for number, (v, s) in enumerate(edges):
            limits[v, number] = limits[V + s, number] = 1
        best = linprog(-np.ones(len(edges)), A_ub=limits, b_ub=np.concatenate([weight * p, [prob for _, prob in sets]]))
        exact = children.num_drawn < 3 or children.replacement
        assert bound_share(p, q, children, weight, seed) == pytest.approx(
            -best.fun / weight, abs=1e-8 if exact else 0.03
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(SETS)), st.floats(0.05, 1.0))
def test_no_rule_beats_the_bound(seed: int, name: str, weight: float) -> None:
    p, q = probs(seed), probs(seed + 1)
    tolerance = 0.05 if SETS[name].num_drawn > 1 and not SETS[name].replacement else 1e-9
    assert kept_share(p, q, SETS[name], weight, seed) <= bound_share(p, q, SETS[name], weight, seed) + tolerance


def test_one_drawn_child_is_worth_the_overlap_of_the_distributions() -> None:
    p, q = probs(1), probs(2)
    one = Children.one(drawn=True)
    assert kept_share(p, q, one, 1.0, 0) == pytest.approx(np.minimum(p, q).sum())
    assert bound_share(p, q, one, 0.5, 0) == pytest.approx(np.minimum(p, q / 0.5).sum())


@pytest.mark.parametrize("name", ["one drawn", "two drawn", "three drawn", "placed, two drawn", "drawn, placed"])
def test_child_weight_is_the_path_weight_of_traversal(name: str) -> None:
    """Every coin of leaves is its path weight."""
    children = SETS[name]
    p, q = probs(3), probs(4)
    for weight in (1.0, 0.6):
        for tokens, _ in itertools.islice(sibling_sets(q, children), 20):
            coins = project_coins(p, q, children, tokens, weight)
            actual = Children(tokens, children.drawn, children.replacement)
            for rank in range(len(tokens)):
                assert child_weight(p, q, actual, weight, rank) == pytest.approx(coins[rank], abs=1e-9)


def test_races_agree_as_often_as_simulated() -> None:
    p, q = probs(5, 8), probs(6, 8)
    noise = np.random.default_rng(0).gumbel(size=(200_000, 8))
    ours, theirs = (np.log(p) + noise).argmax(1), (np.log(q) + noise).argmax(1)
    for v in range(8):
        assert race_agreement(p, q)[v] == pytest.approx(((ours == theirs) & (ours == v)).mean(), abs=0.005)
    assert race_share(p, q, 1, 0) == pytest.approx((ours == theirs).mean(), abs=0.005)


def test_races_never_agree_on_a_token_the_draft_cannot_say() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    assert race_agreement(p, q)[0] == 0
    assert race_agreement(p, q)[2] == 0


def test_a_certain_first_draw_leaves_nothing_for_the_second() -> None:
    p, q = np.array([0.25, 0.75]), np.array([1.0, 0.0])
    two = SETS["two drawn"]
    assert bound_share(p, q, two, 1.0, 0) == pytest.approx(0.25)
    assert kept_share(p, q, two, 1.0, 0) == pytest.approx(0.25)
