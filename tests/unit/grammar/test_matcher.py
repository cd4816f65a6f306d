"""Masks along draft paths, and the distribution they give: constrained speculative decoding is
constrained plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from outrider.errors import NumericalError
from outrider.grammar.matcher import Matcher
from outrider.sampling.distribution import BatchSampling, History, distribution, greedy_choice
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.oracle_trees import shape, tree_bias, tree_drafts
from tests.unit.grammar.vocabularies import END, matcher

EXACT = 1e-12
A = 1
B = 2
AB = 3
PATTERN = "(ab)*a?b?b"  # what may follow depends on the whole path, and "ab" is one token or two


def fresh() -> Matcher:
    return matcher(PATTERN, "a", "b", "ab")


def names(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def test_masks_along_paths() -> None:
    """Catches a matcher that stays where the last path ended, or that forgets to come back after a
    wrong one."""
    constraint = fresh()
    paths = [
        [],
        [A],
        [A, B],
        [A, B, B],
        [A, A],
        [B],
        [AB, AB],
        [A, B, B, END],
        [END],
        [B, END, A],
        [],
    ]
    masks = constraint.allowed(paths)
    expected = [
        {A, B, AB},
        {B},
        {A, B, AB, END},
        {END, B},
        {END, A, B, AB},
        {END, B},
        {A, B, AB, END},
        {END, A, B, AB},
        {END, A, B, AB},
        {END, A, B, AB},
        {A, B, AB},
    ]
    assert [names(mask) for mask in masks] == expected
    constraint.commit([A, B])
    assert names(constraint.allowed([[]])[0]) == expected[2]
    assert torch.equal(constraint.allowed([[B], []]), torch.stack([masks[3], masks[2]]))


def test_asking_changes_nothing_and_committing_does() -> None:
    constraint = fresh()
    for _ in range(3):
        assert names(constraint.allowed([[A, B, A], [A]])[1]) == {B}
        assert not constraint.is_over
    constraint.commit([A, B])
    assert not constraint.is_over, "the text may end here, but need not"
    constraint.commit([B])
    assert not constraint.is_over
    constraint.commit([B])
    assert constraint.is_over, "nothing may follow"


def test_the_end_token_ends() -> None:
    constraint = fresh()
    constraint.commit([AB, END])
    assert constraint.is_over
    assert constraint.allowed([[]]).all(), "nobody reads what follows an end; it must be no error"


def test_a_forbidden_token_is_refused() -> None:
    """Catches a verifier that does not look at the mask: without this, the text would silently
    break its grammar."""
    with pytest.raises(
        NumericalError, match="token 1 was emitted, which the grammar does not allow here"
    ):
        fresh().commit([A, A])


# ---------------------------------------------------------------- the distribution


@dataclass
class Constrained(oracle.TableModel):
    """A table model under the grammar; `probs` commits, `probs_on` asks along the draft, both
    through `distribution`."""

    asked: dict[oracle.Path, Tensor] = field(default_factory=dict)

    def probs(self, path: oracle.Path) -> Tensor:
        if path not in self.asked:
            constraint = fresh()
            constraint.commit(path)
            history = History.start([self.prompt], [list(path)], self.vocab_size)
            sampling = BatchSampling.of([self.params], self.vocab_size, constraints=[constraint])
            self.asked[path] = distribution(
                self.logits[path][None, None], sampling, history, dtype=torch.float64
            )[0, 0]
        return self.asked[path]

    def probs_on(self, draft: Draft) -> Tensor:
        # plain logits would do; these have penalties and NaN padding as they come
        free = super().probs_on(draft).log()
        num = draft.num_rows
        soft = SamplingParams(temperature=1.0)
        sampling = BatchSampling.of(
            [soft] * num, self.vocab_size, constraints=[fresh() for _ in range(num)]
        )
        return distribution(free, sampling, None, draft, dtype=torch.float64)


def pair(seed: int, gamma: int) -> tuple[Constrained, Constrained, oracle.TableModel]:
    """Target, a drafter under the same grammar, and one that knows of none."""
    generator = torch.Generator().manual_seed(seed)
    soft = SamplingParams(temperature=1.0)
    prompt = [1, 2]
    target, drafter = (Constrained.random(generator, 4, gamma + 1, soft, prompt) for _ in range(2))
    return target, drafter, oracle.TableModel.random(generator, 4, gamma + 1, soft, prompt)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "verifier", [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
)
@pytest.mark.parametrize("seed", range(2))
def test_the_distribution_is_that_of_constrained_plain_decoding(verifier: str, seed: int) -> None:
    """Catches a mask of the wrong node, one side without a mask, a distribution renormalised twice,
    an end that is no end."""
    target, drafter, free = pair(seed, 2)
    verify = VERIFIERS.load(verifier)().verify
    assert sum(len(names(target.probs(path))) for path in [(), (A,), (A, B)]) == 8, (
        "the grammar bites, by path"
    )
    for proposals in (
        oracle.sampled_drafts(drafter, 2),
        oracle.sampled_drafts(free, 2),
        oracle.greedy_draft(free, 2),
    ):
        assert oracle.bias(verify, target, proposals) < EXACT


@pytest.mark.parametrize("verifier", ["traversal", "multi-round"])
def test_the_distribution_on_trees(verifier: str) -> None:
    """Catches masks taken along a chain where the draft branches."""
    target, drafter, _ = pair(5, 2)
    verify = VERIFIERS.load(verifier)().verify
    assert tree_bias(verify, target, tree_drafts(drafter, shape([-1, -1, 0], "sss"))) < EXACT


def test_greedy_is_the_largest_allowed() -> None:
    """Catches the fast path of greedy rows leaving the grammar aside, and the draft distribution of
    another node."""
    draft = Draft(torch.tensor([[A, B]]), torch.tensor([2]))
    logits = torch.tensor([[[9.0, 1, 2, 0], [9, 8, 1, 2], [0, 1, 9, 2]]])
    sampling = BatchSampling.of([SamplingParams()], 4, constraints=[fresh()])
    assert not sampling.is_plain_greedy
    assert greedy_choice(logits, sampling, None, draft) == [[B, B, B]]
    one = distribution(logits[:, 1:2], sampling, None, draft, first_node=1)
    assert one.argmax(-1).tolist() == [[B]]
    other = distribution(
        logits.expand(2, -1, -1),
        BatchSampling.of([SamplingParams()] * 2, 4, constraints=[None, fresh()]),
    )
    assert other.argmax(-1).tolist() == [[END, END, B], [B, A, B]], (
        "a neighbour without a grammar is left alone"
    )
