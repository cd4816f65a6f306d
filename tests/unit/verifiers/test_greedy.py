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
def cases(draw: st.DrawFn) -> tuple[Draft, torch.Tensor]:
    num_rows, num_nodes = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    choice = [[draw(tokens) for _ in range(num_nodes + 1)] for _ in range(num_rows)]
    # half of the draft tokens are right, so that every length of agreement occurs
    drafted = [[draw(st.sampled_from([row[node], draw(tokens)])) for node in range(num_nodes)] for row in choice]
    lengths = [draw(st.integers(0, num_nodes)) for _ in range(num_rows)]
    ids = torch.tensor(drafted, dtype=torch.int64).view(num_rows, num_nodes)
    draft = Draft(ids, torch.tensor(lengths))
    if draw(st.booleans()):  # drawn from some law that gives every token mass
        seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        draft.probs = torch.rand(num_rows, num_nodes + 1, VOCAB, generator=seed).softmax(-1)
    return draft, torch.tensor(choice)


@pytest.mark.parametrize("name", VERIFIERS.names())
@given(case=cases(), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_greedy_verdict_is_every_verifiers(name: str, case: tuple[Draft, torch.Tensor], seed: int) -> None:
    """Catches an off-by-one in the kept prefix, a padding node that counts, a wrong bonus token."""
    draft, choice = case
    law = torch.nn.functional.one_hot(choice, VOCAB).float()
    rng, start = KeyedStreams([seed + row for row in range(draft.num_rows)]), torch.full((draft.num_rows,), 5)
    expected = VERIFIERS.load(name)().verify(draft, law, rng, start)
    found = greedy_verdict(draft, choice)
    for field in ("path", "num_accepted", "next_token", "all_accepted"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
