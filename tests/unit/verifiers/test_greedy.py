"""The greedy fast path against every lossless verifier on the point masses it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from outrider.verifiers.greedy import greedy_verdict

VOCAB = 4
tokens = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn, trees: bool) -> tuple[Draft, torch.Tensor]:
    num_rows = draw(st.integers(1, 3))
    num_nodes = draw(st.integers(0, 4))
    choice = [[draw(tokens) for _ in range(num_nodes + 1)] for _ in range(num_rows)]
    # half of the draft tokens are right, so that every length of agreement occurs
    drafted = [
        [draw(st.sampled_from([row[node], draw(tokens)])) for node in range(num_nodes)]
        for row in choice
    ]
    lengths = [draw(st.integers(0, num_nodes)) for _ in range(num_rows)]
    ids = torch.tensor(drafted, dtype=torch.int64).view(num_rows, num_nodes)
    draft = Draft(ids, torch.tensor(lengths))
    if trees:
        parents = [[draw(st.integers(-1, node - 1)) for node in range(num_nodes)] for _ in choice]
        draft.parents = torch.tensor(parents, dtype=torch.int64).view(num_rows, num_nodes)
    if draw(st.booleans()):  # drawn from some distribution that gives every token mass
        seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        draft.probs = torch.rand(num_rows, num_nodes + 1, VOCAB, generator=seed).softmax(-1)
    return draft, torch.tensor(choice)


def check(name: str, case: tuple[Draft, torch.Tensor], seed: int) -> None:
    draft, choice = case
    probs = torch.nn.functional.one_hot(choice, VOCAB).float()
    rng = KeyedStreams([seed + row for row in range(draft.num_rows)])
    start = torch.full((draft.num_rows,), 5)
    expected = VERIFIERS.load(name)().verify(draft, probs, rng, start)
    found = greedy_verdict(draft, choice.tolist())
    for field in ("path", "num_accepted", "next_token", "all_accepted"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field


LOSSLESS = [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]


@pytest.mark.parametrize("name", LOSSLESS)
@given(case=cases(trees=False), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_greedy_verdict_is_every_verifiers(
    name: str, case: tuple[Draft, torch.Tensor], seed: int
) -> None:
    """Catches an off-by-one in the kept prefix, a padding node that counts, a wrong bonus token."""
    check(name, case, seed)


@pytest.mark.parametrize(
    "name", [name for name in LOSSLESS if VERIFIERS.load(name).shape == "tree"]
)
@given(case=cases(trees=True), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_greedy_verdict_on_trees(name: str, case: tuple[Draft, torch.Tensor], seed: int) -> None:
    """On any tree, also with siblings that repeat a token, one path follows the target's choices."""
    draft, _ = case
    repeats = any(
        len({draft.lists[0][row][node] for node in nodes}) < len(nodes)
        for row, tree in enumerate(draft.children)
        for nodes in tree
    )
    if not repeats:
        check(name, case, seed)
