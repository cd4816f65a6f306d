"""Every verifier emits exactly the target's joint distribution: verifier x kind of draft x filter,
without random numbers.

The oracle (tests/oracle.py) enumerates all outcomes of the real verifier on the real
`distribution`, penalties applied per draft path. A bound of 1e-12 leaves room for rounding only. A
new verifier enters by its line in the registry.
"""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.block import path_weights
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import Purpose
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from tests import oracle

EXACT = 1e-12

FILTERS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.2, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.6
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 2: -0.7}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=[0, 2]),
    "everything": SamplingParams(
        temperature=0.8, top_k=2, top_p=0.9, min_p=0.05, repetition_penalty=1.3, logit_bias={1: 0.5}
    ),
    "greedy": SamplingParams(),
    "greedy_penalties": SamplingParams(
        repetition_penalty=3.0, presence_penalty=1.5, frequency_penalty=1.5
    ),
}


def stop_after_unlikely(drafter: oracle.TableModel) -> oracle.Stop:
    """Stop AFTER keeping a token whose q was low: depends on drafted tokens and q only, so it must
    be harmless.
    """
    return lambda path: bool(path) and float(drafter.probs(path[:-1])[path[-1]]) < 0.4


def stop_before_uncertain(drafter: oracle.TableModel) -> oracle.Stop:
    """Stop before a draw whose distribution is flat."""
    return lambda path: float(drafter.probs(path).max()) < 0.5


def one_of_each_length(drafter: oracle.TableModel, gamma: int) -> oracle.Proposals:
    """Deterministic drafts of 0 .. gamma tokens, several rows of one batch, some of them bad
    guesses."""
    paths = [tuple((n + i) % drafter.vocab_size for i in range(n)) for n in range(gamma + 1)]
    return oracle.fixed_drafts(paths, gamma)


DRAFTS = {
    "sampled": oracle.sampled_drafts,
    "greedy": oracle.greedy_draft,
    "mixed_lengths": one_of_each_length,
    "mixed_kinds": lambda drafter, gamma: oracle.sampled_drafts(
        drafter, gamma, kinds="sds"[:gamma]
    ),
    "stop_after": lambda drafter, gamma: oracle.sampled_drafts(
        drafter, gamma, stop_after_unlikely(drafter)
    ),
    "stop_before": lambda drafter, gamma: oracle.sampled_drafts(
        drafter, gamma, stop_before_uncertain(drafter)
    ),
    "none": lambda drafter, gamma: oracle.fixed_drafts([()], 0),
}


def pair(
    seed: int, vocab_size: int, gamma: int, target: SamplingParams, drafter: SamplingParams
) -> tuple[oracle.TableModel, oracle.TableModel]:
    generator = torch.Generator().manual_seed(seed)
    prompt = [0, vocab_size - 1]
    return (
        oracle.TableModel.random(generator, vocab_size, gamma + 1, target, prompt),
        oracle.TableModel.random(generator, vocab_size, gamma + 1, drafter, prompt),
    )


def verifier_named(name: str) -> oracle.Verify:
    return VERIFIERS.load(name)().verify


lossless = pytest.mark.parametrize(
    "verifier", [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
)


@lossless
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("filters", FILTERS)
def test_distribution_is_the_targets(verifier: str, drafts: str, filters: str) -> None:
    """Any bias at all: wrong residual, wrong ratio, filters on one side only, padding looked at,
    stop rule leaks.
    """
    target, drafter = pair(11, 3, 2, FILTERS[filters], FILTERS[filters])
    assert oracle.bias(verifier_named(verifier), target, DRAFTS[drafts](drafter, 2)) < EXACT


@lossless
@pytest.mark.parametrize("drafts", ["sampled", "mixed_kinds", "stop_after"])
@pytest.mark.parametrize("seed", range(3))
def test_longer_drafts_and_foreign_distributions(verifier: str, drafts: str, seed: int) -> None:
    """gamma = 3, V = 3, and a drafter with another distribution than the filtered target's (also q
    = 0 where p > 0)."""
    target, drafter = pair(seed, 3, 3, FILTERS["plain"], FILTERS["top_k"])
    assert oracle.bias(verifier_named(verifier), target, DRAFTS[drafts](drafter, 3)) < EXACT


@lossless
def test_largest_case(verifier: str) -> None:
    """V = 4, gamma = 3, every draft, coin vector and token."""
    target, drafter = pair(5, 4, 3, FILTERS["penalties"], FILTERS["plain"])
    assert oracle.bias(verifier_named(verifier), target, DRAFTS["sampled"](drafter, 3)) < EXACT


@lossless
@pytest.mark.parametrize("filters", ["greedy", "greedy_penalties"])
def test_greedy_target_with_a_sampling_drafter(verifier: str, filters: str) -> None:
    """T = 0 must hold whatever the drafter's distribution is."""
    target, drafter = pair(3, 3, 2, FILTERS[filters], FILTERS["plain"])
    assert oracle.bias(verifier_named(verifier), target, DRAFTS["sampled"](drafter, 2)) < EXACT


@lossless
def test_drafter_that_equals_the_target(verifier: str) -> None:
    """p = q: residual mass 0 everywhere; rejection rules must keep every token (the coupled one has
    its own noise).
    """
    target, _ = pair(3, 3, 3, FILTERS["plain"], FILTERS["plain"])
    proposals = oracle.sampled_drafts(target, 3)
    assert oracle.bias(verifier_named(verifier), target, proposals) < EXACT
    if verifier != "gumbel":
        assert oracle.expected_accepted(
            verifier_named(verifier), target, proposals
        ) == pytest.approx(3, abs=1e-9)


# ------------------------------------------------ how many tokens are accepted


def accepted_at_least(
    verifier: str, target: oracle.TableModel, proposals: oracle.Proposals, num: int
) -> float:
    width = proposals.draft.num_nodes
    probs = target.probs_along(proposals.paths, width)
    outcomes = oracle.enumerate_step(verifier_named(verifier), proposals, probs)
    return float(outcomes.weights[outcomes.verdict.num_accepted >= num].sum())


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_identity_token_level(seed: int) -> None:
    """P(first i accepted) = E prod sum_v min(p, q): catches accepting too rarely, which no
    losslessness test can see.
    """
    target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = oracle.sampled_drafts(drafter, 2)
    kept = torch.minimum(target.probs(()), drafter.probs(()))
    both = sum(
        float(kept[x] * torch.minimum(target.probs((x,)), drafter.probs((x,))).sum())
        for x in range(3)
    )
    assert accepted_at_least("token", target, proposals, 1) == pytest.approx(
        float(kept.sum()), abs=EXACT
    )
    assert accepted_at_least("token", target, proposals, 2) == pytest.approx(both, abs=EXACT)


@lossless
@pytest.mark.parametrize("seed", range(3))
def test_acceptance_identity_deterministic(verifier: str, seed: int) -> None:
    """A deterministic token d is accepted with probability p(d), by every rule."""
    target, drafter = pair(seed, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = oracle.greedy_draft(drafter, 2)
    first, second = proposals.paths[0]
    prob = float(target.probs(())[first])
    assert accepted_at_least(verifier, target, proposals, 1) == pytest.approx(prob, abs=EXACT)
    prob *= float(target.probs((first,))[second])
    assert accepted_at_least(verifier, target, proposals, 2) == pytest.approx(prob, abs=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_what_the_paper_says_and_never_less_than_token(seed: int) -> None:
    """P(at least i kept) = E_q[rho_i] for block verification (docs/algorithms), and never less than
    token-level.
    """
    target, drafter = pair(seed, 3, 3, FILTERS["plain"], FILTERS["temperature"])
    proposals = oracle.sampled_drafts(drafter, 3)
    rho = path_weights(target.probs_along(proposals.paths, 3), proposals.draft)
    weights = torch.tensor(proposals.weights, dtype=torch.float64)
    block, token = (
        oracle.expected_accepted(verifier_named(name), target, proposals)
        for name in ("block", "token")
    )
    for num in (1, 2, 3):
        expected = float((weights * rho[:, num]).sum())
        assert accepted_at_least("block", target, proposals, num) == pytest.approx(
            expected, abs=EXACT
        )
    assert block > token - EXACT


def test_toy_of_the_block_verification_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3) at every position, gamma = 2: 10/9 accepted tokens become
    11/9."""
    params = SamplingParams(temperature=1.0)
    paths: list[oracle.Path] = [
        (),
        *[(a,) for a in (0, 1)],
        *[(a, b) for a in (0, 1) for b in (0, 1)],
    ]
    p, q = (
        torch.tensor(probs, dtype=torch.float64).log() for probs in ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    )
    target, drafter = (
        oracle.TableModel(dict.fromkeys(paths, logits), params, [0]) for logits in (p, q)
    )
    proposals = oracle.sampled_drafts(drafter, 2)
    assert oracle.expected_accepted(verifier_named("token"), target, proposals) == pytest.approx(
        10 / 9, abs=EXACT
    )
    assert oracle.expected_accepted(verifier_named("block"), target, proposals) == pytest.approx(
        11 / 9, abs=EXACT
    )


# ------------------------------------------------ several steps, one set of keyed numbers


def keyed_by_step(purpose: Purpose, start: int, offset: int) -> tuple:
    """What KeyedStreams does."""
    return (purpose, start, offset)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_steps_in_a_row_with_keyed_numbers(verifier: str) -> None:
    """Numbers met again by a later step would be conditioned by the earlier one; see test_mutations
    for the bias.
    """
    target, drafter = pair(2, 2, 2, FILTERS["plain"], FILTERS["plain"])
    joint = oracle.interval_joint(
        verifier_named(verifier), target, drafter, 2, keyed_by_step, num_steps=2
    )
    assert oracle.total_variation(joint, target.joint(3)) < EXACT


# ------------------------------------------------ the coupled verifier does not see the drafter


class FixedNoise:
    """A Randomness that has Gumbel noise only: a table per position."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table  # (positions, V)

    def gumbel(self, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return self._table[positions]


def test_coupled_text_is_a_function_of_noise_and_target_only() -> None:
    """For EVERY noise table over 3 levels and every draft (so also drafts chosen by looking at the
    noise) one text.
    """
    target, _ = pair(4, 2, 2, FILTERS["plain"], FILTERS["plain"])
    levels = torch.tensor([-1.0, 0.1, 1.3], dtype=torch.float64)
    tables = torch.cartesian_prod(*[levels] * 6).view(-1, 3, 2)
    drafts: list[oracle.Path] = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    verify = verifier_named("gumbel")
    for table in tables[::7]:  # 105 of the 729, a step coprime to 3
        texts = {decode_with_noise(verify, target, FixedNoise(table), draft) for draft in drafts}
        assert len(texts) == 1, f"noise {table.tolist()} gave {texts}"


def decode_with_noise(
    verify: oracle.Verify, target: oracle.TableModel, rng: FixedNoise, guess: oracle.Path
) -> oracle.Path:
    """Three tokens; every step drafts what `guess` has for the coming positions."""
    text: oracle.Path = ()
    while len(text) < 3:
        drafted = guess[len(text) : 2]
        draft = Draft(
            torch.tensor([drafted], dtype=torch.int64).view(1, -1), torch.tensor([len(drafted)])
        )
        probs = torch.stack([target.probs(text + drafted[:n]) for n in range(len(drafted) + 1)])[
            None
        ]
        verdict: Verdict = verify(draft, probs, rng, torch.tensor([len(text)]))
        text = (*text, *drafted[: int(verdict.num_accepted)], int(verdict.next_token))
    return text
