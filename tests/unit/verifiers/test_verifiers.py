"""What the oracle does not look at: real streams, fp32, shapes, ragged batches, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.errors import CapabilityError, ConfigError
from outrider.sampling.rejection import next_token_weights
from outrider.sampling.rng import KeyedStreams, Purpose
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS

LOSSLESS = [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
every_verifier = pytest.mark.parametrize("name", VERIFIERS.names())
every_lossless = pytest.mark.parametrize("name", LOSSLESS)


def random_probs(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def sampled_draft(q: Tensor, rng: KeyedStreams, start: Tensor) -> Draft:
    num_nodes = q.shape[1] - 1
    tokens = [rng.categorical(q[:, node], Purpose.DRAFT, start, node) for node in range(num_nodes)]
    return Draft(torch.stack(tokens, 1), torch.full((len(q),), num_nodes), probs=q)


def verify(name: str, draft: Draft, p: Tensor, rng: KeyedStreams, start: Tensor) -> Verdict:
    return VERIFIERS.load(name)().verify(draft, p, rng, start)


@every_verifier
def test_names_and_promises(name: str) -> None:
    verifier = VERIFIERS.load(name)()
    assert verifier.name == name
    assert verifier.lossless == (name not in ("typical", "top-k"))


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'block'"):
        VERIFIERS.load("blok")


@every_lossless
def test_real_streams_and_fp32_give_the_targets_distribution(name: str) -> None:
    """First two tokens of 6000 one-row steps, chi-square on the joint distribution; seeded, false
    alarm 1e-6.

    With n = 6000 a TV distance of 0.05 is seen with certainty, 0.02 about half the time; the oracle
    sees the rest.
    """
    num = 6000
    vocab = 4
    # distributions that ignore the path
    p = random_probs(1, 3, vocab, seed=1, scale=1.0)
    q = random_probs(1, 3, vocab, seed=2, scale=1.0)
    rng = KeyedStreams(list(range(num)))
    start = torch.full((num,), 9)
    draft = sampled_draft(q.expand(num, -1, -1), rng, start)
    verdict = verify(name, draft, p.expand(num, -1, -1), rng, start)
    text = torch.cat([draft.tokens, torch.zeros(num, 1, dtype=torch.int64)], 1)
    text.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    first = torch.bincount(text[:, 0], minlength=vocab).numpy()
    assert stats.chisquare(first, num * normalised(p[0, 0])).pvalue > 1e-6
    both = text[verdict.num_accepted >= 1]
    second = torch.bincount(both[:, 1], minlength=vocab).numpy()
    if (
        name not in ("block", "traversal")
    ):  # given that the first was kept, the second has distribution p; block keeps prefixes by their future
        assert stats.chisquare(second, len(both) * normalised(p[0, 1])).pvalue > 1e-6


def normalised(probs: Tensor) -> np.ndarray:
    return (probs.double() / probs.double().sum()).numpy()


@every_verifier
def test_a_row_is_verified_alike_alone_and_in_a_ragged_batch(name: str) -> None:
    """Padding, neighbours and row order must not reach a row; neither must garbage distributions
    beyond its length."""
    lengths = [3, 0, 2, 1]
    p = random_probs(4, 4, 300, seed=3)
    q = random_probs(4, 4, 300, seed=4)
    start = torch.tensor([20, 5, 90, 63])
    rng = KeyedStreams([1, 2, 3, 4])
    draft = sampled_draft(q, rng, start)
    draft.lengths = torch.tensor(lengths)
    together = verify(name, draft, p, rng, start)
    for row, length in enumerate(lengths):
        one = Draft(
            draft.tokens[row : row + 1, :length],
            torch.tensor([length]),
            probs=q[row : row + 1, : length + 1],
        )
        alone = verify(
            name, one, p[row : row + 1, : length + 1], KeyedStreams([row + 1]), start[row : row + 1]
        )
        assert int(alone.num_accepted) == int(together.num_accepted[row]) <= length
        assert int(alone.next_token) == int(together.next_token[row])
        assert bool(alone.all_accepted) == bool(together.all_accepted[row])
        kept = together.path[row][together.path[row] >= 0].tolist()
        assert kept == list(range(int(together.num_accepted[row])))


@every_verifier
def test_no_draft_is_plain_decoding(name: str) -> None:
    p = torch.nn.functional.one_hot(torch.tensor([[2], [0]]), 5).float()
    verdict = verify(name, Draft.empty(2), p, KeyedStreams([0, 1]), torch.tensor([4, 8]))
    assert verdict.path.shape == (2, 0)
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [2, 0]
    assert verdict.all_accepted.tolist() == [True, True]


@every_lossless
@pytest.mark.parametrize("is_sampled", [False, True])
def test_greedy_keeps_the_matching_prefix_and_corrects_it(name: str, is_sampled: bool) -> None:
    """One-hot p: accepted exactly up to the first difference, then the target's token, whatever the
    coins."""
    best = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    p = torch.nn.functional.one_hot(best, 6).float()
    tokens = torch.tensor([[1, 2, 3], [1, 0, 3], [5, 2, 3]])
    probs = random_probs(3, 4, 6, seed=7) if is_sampled else None
    draft = Draft(tokens, torch.tensor([3, 3, 3]), probs=probs)
    for start in range(0, 300, 7):
        verdict = verify(name, draft, p, KeyedStreams([0, 1, 2]), torch.full((3,), start))
        assert verdict.num_accepted.tolist() == [3, 1, 0]
        assert verdict.next_token.tolist() == [4, 2, 1]
        assert verdict.path.tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]]
        assert verdict.all_accepted.tolist() == [True, False, False]


def test_coupled_text_does_not_depend_on_the_draft() -> None:
    """Real noise: 200 tokens with no draft, with random drafts, with drafts that know the answer:
    the same text.
    """
    p = random_probs(1, 240, 50, seed=6)  # the distribution of position t, whatever came before

    def decode(guess: list[int], num_nodes: int) -> list[int]:
        text: list[int] = []
        while len(text) < 200:
            drafted = guess[len(text) : len(text) + num_nodes]
            draft = Draft(
                torch.tensor([drafted], dtype=torch.int64).view(1, -1), torch.tensor([len(drafted)])
            )
            window = p[:, len(text) : len(text) + len(drafted) + 1]
            verdict = verify("gumbel", draft, window, KeyedStreams([77]), torch.tensor([len(text)]))
            text += [*drafted[: int(verdict.num_accepted)], int(verdict.next_token)]
        return text[:200]

    plain = decode([], 0)
    assert decode(torch.randint(50, (240,)).tolist(), 3) == plain
    assert decode(plain, 5) == plain


def test_block_keeps_no_fewer_tokens_than_token_level() -> None:
    """Same pairs, 4000 rows: the mean differs by what the oracle computes; here only its sign, fp32
    and real coins.
    """
    num = 4000
    p = random_probs(1, 4, 8, seed=1).expand(num, -1, -1)
    q = random_probs(1, 4, 8, seed=5).expand(num, -1, -1)
    rng = KeyedStreams(list(range(num)))
    start = torch.zeros(num, dtype=torch.int64)
    draft = sampled_draft(q, rng, start)
    kept = {
        name: float(verify(name, draft, p, rng, start).num_accepted.float().mean())
        for name in ("token", "block")
    }
    assert kept["block"] > kept["token"] - 5 * 1.5 / num**0.5


def test_residual_without_mass_falls_back_to_the_target() -> None:
    """p = q up to rounding: dividing by a zero mass gives NaN in other engines."""
    p = random_probs(1, 2, 9)
    draft = Draft(torch.tensor([[4]]), torch.tensor([1]), probs=p.clone())
    weights = next_token_weights(p, draft, torch.tensor([0]))
    assert torch.equal(weights, p[:, 0])


def test_reduced_draft_vocabulary() -> None:
    """q = 0 where p > 0: such tokens must still come out, through the residual."""
    num = 3000
    p = torch.tensor([0.2, 0.3, 0.5]).expand(num, 2, 3)
    q = torch.tensor([0.5, 0.5, 0.0]).expand(num, 2, 3)
    for name in ("token", "block"):
        rng = KeyedStreams(list(range(num)))
        start = torch.zeros(num, dtype=torch.int64)
        draft = sampled_draft(q, rng, start)
        verdict = verify(name, draft, p, rng, start)
        first = torch.where(verdict.num_accepted >= 1, draft.tokens[:, 0], verdict.next_token)
        assert (
            stats.chisquare(
                torch.bincount(first, minlength=3).numpy(), num * normalised(p[0, 0])
            ).pvalue
            > 1e-6
        )


@every_verifier
def test_trees_and_wrong_shapes_are_refused(name: str) -> None:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    lengths = torch.tensor([2])
    rng = KeyedStreams([0])
    start = torch.tensor([0])
    tree = Draft(tokens, lengths, parents=torch.tensor([[-1, -1]]))
    if VERIFIERS.load(name).shape == "tree":
        assert verify(name, tree, random_probs(1, 3, 4), rng, start).num_accepted.tolist() in (
            [0],
            [1],
        )
    else:
        with pytest.raises(CapabilityError, match=f"verifier '{name}' takes chains"):
            verify(name, tree, random_probs(1, 3, 4), rng, start)
    with pytest.raises(ValueError, match=r"must begin with \(1, 3\)"):
        verify(name, Draft(tokens, lengths), random_probs(1, 2, 4), rng, start)
    with pytest.raises(ValueError, match=r"draft\.probs"):
        verify(
            name,
            Draft(tokens, lengths, probs=random_probs(1, 3, 5)),
            random_probs(1, 3, 4),
            rng,
            start,
        )


def test_an_empty_draft_is_its_owners_alone() -> None:
    """Empty drafts share tensors, but what one drafter sets on its draft must not appear on
    another's."""
    mine = Draft.empty(2)
    other = Draft.empty(2)
    mine.budgets = [[], []]
    mine.replacement = True
    assert mine.tokens is other.tokens
    assert (other.budgets, other.replacement, other.probs) == (None, False, None)
    assert other.tokens.shape == (2, 0)
    assert other.lengths.tolist() == [0, 0]
