"""Known bugs, injected: the oracle must see every one of them, or its silence about our code means
nothing.

Rows marked BUG of the shared algorithms page, section 2, as far as they apply to chains, and bugs
found in other engines (litgpt, DeepSpec, section 5). Each mutation states a floor for its total
variation distance, the largest over a few random model pairs; our code stays below 1e-12 on the
same pairs (test_exact_distribution.py), a gap of ten orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.sampling import block as block_rule
from outrider.sampling import rejection
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import Purpose, Randomness, gumbel_choice
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import chain_verdict
from tests import oracle

PLAIN = SamplingParams(temperature=1.0)
GAMMA = 2
VOCAB = 3
SEEDS = range(4)


def pair(
    seed: int, target: SamplingParams = PLAIN, drafter: SamplingParams = PLAIN
) -> list[oracle.TableModel]:
    generator = torch.Generator().manual_seed(seed)
    return [
        oracle.TableModel.random(generator, VOCAB, GAMMA + 1, params, [0])
        for params in (target, drafter)
    ]


def worst_bias(measure: Callable[[int], float]) -> float:
    return max(measure(seed) for seed in SEEDS)


def verifier_named(name: str) -> oracle.Verify:
    return VERIFIERS.load(name)().verify


# ------------------------------------------------ bugs of the drafting side


def drop_unlikely(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: a sampled token is withheld because ITS OWN q is low (the draw is seen before the
    decision)."""
    complete = oracle.sampled_drafts(drafter, GAMMA)
    shortened: dict[oracle.Path, float] = {}
    for path, weight in zip(complete.paths, complete.weights, strict=True):
        low = [n for n in range(len(path)) if float(drafter.probs(path[:n])[path[n]]) < 0.4]
        kept = path[: low[0]] if low else path
        shortened[kept] = shortened.get(kept, 0.0) + weight
    paths = list(shortened)
    draft = oracle.chain(paths, GAMMA)
    draft.probs = drafter.probs_along(paths, GAMMA)
    return oracle.Proposals(paths, list(shortened.values()), draft)


def report_probs_of(proposals: oracle.Proposals, model: oracle.TableModel) -> oracle.Proposals:
    """Replace the distributions a drafter reports; the drafts and their true weights stay."""
    draft = replace(proposals.draft, probs=model.probs_along(proposals.paths, GAMMA))
    return replace(proposals, draft=draft)


def top_k_draw_raw_q(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: tokens drawn from top-2 of q, ratio and residual use the unfiltered q."""
    filtered = oracle.TableModel(
        drafter.logits, SamplingParams(temperature=1.0, top_k=2), drafter.prompt
    )
    return report_probs_of(oracle.sampled_drafts(filtered, GAMMA), drafter)


def cold_draw_warm_q(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: tokens drawn at temperature 0.5, the reported q is at temperature 1."""
    cold = oracle.TableModel(drafter.logits, SamplingParams(temperature=0.5), drafter.prompt)
    return report_probs_of(oracle.sampled_drafts(cold, GAMMA), drafter)


def greedy_draft_soft_q(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: argmax drafts reported as if they had been drawn from the soft q. Looks FASTER."""
    return report_probs_of(oracle.greedy_draft(drafter, GAMMA), drafter)


DRAFT_BUGS = [
    ("token", drop_unlikely, 0.1),
    ("block", drop_unlikely, 0.1),
    ("token", top_k_draw_raw_q, 0.05),
    ("block", top_k_draw_raw_q, 0.05),
    ("token", cold_draw_warm_q, 0.03),
    ("block", cold_draw_warm_q, 0.03),
    ("token", greedy_draft_soft_q, 0.2),
    ("block", greedy_draft_soft_q, 0.2),
]


@pytest.mark.parametrize(("verifier", "propose", "floor"), DRAFT_BUGS)
def test_drafting_bug_is_seen(
    verifier: str, propose: Callable[[oracle.TableModel], oracle.Proposals], floor: float
) -> None:
    def measure(seed: int) -> float:
        target, drafter = pair(seed)
        return oracle.bias(verifier_named(verifier), target, propose(drafter))

    assert worst_bias(measure) > floor


def test_greedy_drafts_with_soft_q_look_faster() -> None:
    """Why that bug survives in the wild: it raises the acceptance it is judged by."""
    target, drafter = pair(0)
    honest = oracle.greedy_draft(drafter, GAMMA)
    wrong = greedy_draft_soft_q(drafter)
    verify = verifier_named("token")
    assert oracle.expected_accepted(verify, target, wrong) > oracle.expected_accepted(
        verify, target, honest
    )


# ------------------------------------------------ bugs of the verifying side


def token_rule(
    draft: Draft,
    target_probs: Tensor,
    rng: Randomness,
    positions: Tensor,
    accept: Callable[[Tensor, Draft], Tensor] = rejection.acceptance,
    weights: Callable[[Tensor, Draft, Tensor], Tensor] = rejection.next_token_weights,
) -> Verdict:
    """The token-level rule with exchangeable parts."""
    accepted = rng.bernoulli(accept(target_probs, draft), Purpose.ACCEPT, positions)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
    token = rng.categorical(
        weights(target_probs, draft, num_accepted), Purpose.RESAMPLE, positions, 0
    )
    return chain_verdict(draft, num_accepted, token)


def resample_from_target(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: the correction comes from p instead of the residual."""
    return token_rule(
        draft, target_probs, rng, positions, weights=lambda p, d, n: p[torch.arange(len(n)), n]
    )


def residual_of_absolute_difference(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: |p - q| instead of [p - q]+."""

    def weights(p: Tensor, d: Draft, n: Tensor) -> Tensor:
        rows = torch.arange(len(n))
        return torch.where(
            (n < d.lengths)[:, None], (p[rows, n] - d.probs[rows, n]).abs() + 1e-30, p[rows, n]
        )

    return token_rule(draft, target_probs, rng, positions, weights=weights)


def residual_also_for_the_bonus(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: the bonus token is drawn from a residual too."""

    def weights(p: Tensor, d: Draft, n: Tensor) -> Tensor:
        rows = torch.arange(len(n))
        return (p[rows, n] - d.probs[rows, n]).clamp(min=1e-30)

    return token_rule(draft, target_probs, rng, positions, weights=weights)


def accept_with_target_probability(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: a SAMPLED token accepted with p(x), as if it were deterministic."""
    return token_rule(
        draft,
        target_probs,
        rng,
        positions,
        accept=lambda p, d: rejection.acceptance(p, replace(d, probs=None)),
    )


def accept_when_likelier(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: accept exactly when p(x) >= q(x)."""
    return token_rule(
        draft,
        target_probs,
        rng,
        positions,
        accept=lambda p, d: (rejection.acceptance(p, d) >= 1).to(p.dtype),
    )


def shifted_by_one(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: the draft's distributions belong to the neighbouring node."""
    shifted = replace(draft, probs=draft.probs.roll(1, dims=1))
    return token_rule(shifted, target_probs, rng, positions)


def block_rule_with(
    draft: Draft,
    target_probs: Tensor,
    rng: Randomness,
    positions: Tensor,
    early_exit: bool = False,
    scaled_residual: bool = True,
    last_is_weight: bool = True,
) -> Verdict:
    """Block verification with one part broken."""
    rho = block_rule.path_weights(target_probs, draft)
    keep = block_rule.keep_probs(target_probs, draft, rho)
    if not last_is_weight:
        keep = torch.where(keep == rho[:, 1:], rejection.acceptance(target_probs, draft), keep)
    heads = rng.bernoulli(keep, Purpose.ACCEPT, positions)
    if early_exit:
        num_accepted = heads.long().cumprod(dim=1).sum(dim=1)
    else:
        num_accepted = (heads * torch.arange(1, draft.num_nodes + 1)).amax(dim=1)
    scale = (
        rho.gather(1, num_accepted[:, None])[:, 0]
        if scaled_residual
        else torch.ones_like(rho[:, 0])
    )
    weights = rejection.next_token_weights(target_probs, draft, num_accepted, scale)
    return chain_verdict(
        draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0)
    )


def block_with_early_exit(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: stop at the first tails instead of taking the longest heads."""
    return block_rule_with(draft, target_probs, rng, positions, early_exit=True)


def block_with_token_residual(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: the residual forgets the path weight rho."""
    return block_rule_with(draft, target_probs, rng, positions, scaled_residual=False)


def block_with_token_ratio_last(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: the last node uses its own ratio instead of the path weight."""
    return block_rule_with(draft, target_probs, rng, positions, last_is_weight=False)


def coupled_with_fresh_correction(
    draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
) -> Verdict:
    """BUG: on a mismatch the correction is drawn afresh from p instead of being the target's own
    choice."""
    output = torch.arange(draft.num_nodes + 1)
    choice = gumbel_choice(
        target_probs, rng.gumbel(positions[:, None] + output, target_probs.shape[2])
    )
    num_accepted = (choice[:, :-1] == draft.tokens).long().cumprod(dim=1).sum(dim=1)
    fresh = target_probs[torch.arange(len(num_accepted)), num_accepted]
    return chain_verdict(
        draft, num_accepted, rng.categorical(fresh, Purpose.RESAMPLE, positions, 0)
    )


VERIFY_BUGS = [
    (resample_from_target, 0.05),
    (residual_of_absolute_difference, 0.05),
    (residual_also_for_the_bonus, 0.05),
    (accept_with_target_probability, 0.05),
    (accept_when_likelier, 0.05),
    (shifted_by_one, 0.05),
    (block_with_early_exit, 0.01),
    (block_with_token_residual, 0.01),
    (block_with_token_ratio_last, 0.01),
    (coupled_with_fresh_correction, 0.05),
]


@pytest.mark.parametrize(("verify", "floor"), VERIFY_BUGS)
def test_verifying_bug_is_seen(verify: oracle.Verify, floor: float) -> None:
    def measure(seed: int) -> float:
        target, drafter = pair(seed)
        return oracle.bias(verify, target, oracle.sampled_drafts(drafter, GAMMA))

    assert worst_bias(measure) > floor


def test_the_rules_with_exchangeable_parts_are_sound_when_nothing_is_broken() -> None:
    """Otherwise the tests above would prove nothing about the injected bug."""
    for rule in (token_rule, block_rule_with):
        target, drafter = pair(0)
        assert oracle.bias(rule, target, oracle.sampled_drafts(drafter, GAMMA)) < 1e-12


# ------------------------------------------------ bugs of the distribution


class PenaltiesOncePerPass(oracle.TableModel):
    """BUG: every node is penalised for the committed history only, not for the path that leads to
    it."""

    def probs_along(self, drafts: list[oracle.Path], width: int) -> Tensor:
        probs = super().probs_along(drafts, width)
        for row, draft in enumerate(drafts):
            for output in range(len(draft) + 1):
                bare = oracle.TableModel(
                    {(): self.logits[draft[:output]]}, self.params, self.prompt
                )
                probs[row, output] = bare.probs(())
        return probs


class SoftGreedy(oracle.TableModel):
    """BUG: at temperature 0 acceptance is tested on softmax(T = 1) instead of the point mass
    (litgpt)."""

    def probs_along(self, drafts: list[oracle.Path], width: int) -> Tensor:
        return oracle.TableModel(self.logits, PLAIN, self.prompt).probs_along(drafts, width)


PENALTIES = SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.8)


@pytest.mark.parametrize(
    "verifier", [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]
)
@pytest.mark.parametrize(
    ("broken", "params", "floor"),
    [(PenaltiesOncePerPass, PENALTIES, 0.05), (SoftGreedy, SamplingParams(), 0.2)],
)
def test_distribution_bug_is_seen(
    verifier: str, broken: type[oracle.TableModel], params: SamplingParams, floor: float
) -> None:
    def measure(seed: int) -> float:
        target, drafter = pair(seed, params)
        wrong = broken(target.logits, target.params, target.prompt)
        return oracle.bias(verifier_named(verifier), wrong, oracle.sampled_drafts(drafter, GAMMA))

    assert worst_bias(measure) > floor


# ------------------------------------------------ bugs of the random streams


def keyed_by_position(purpose: Purpose, start: int, offset: int) -> tuple:
    """BUG: a coin is named by the text position it is about, so the next step may meet it again."""
    return (purpose, start + offset)


def test_block_verification_with_position_keyed_coins_is_biased() -> None:
    """All coins and draft tokens of a step shape its outcome, those beyond the cut too: reuse
    conditions them.
    """
    target, drafter = small_pair()
    joint = oracle.interval_joint(
        verifier_named("block"), target, drafter, 2, keyed_by_position, num_steps=2
    )
    assert oracle.total_variation(joint, target.joint(3)) > 0.003


def test_token_level_rule_survives_position_keyed_coins() -> None:
    """Token-level verification ignores everything after the first rejection, so keying coins by
    position is safe there, and only there.
    """
    target, drafter = small_pair()
    joint = oracle.interval_joint(
        verifier_named("token"), target, drafter, 2, keyed_by_position, num_steps=2
    )
    assert oracle.total_variation(joint, target.joint(3)) < 1e-12


def small_pair() -> list[oracle.TableModel]:
    generator = torch.Generator().manual_seed(2)
    return [oracle.TableModel.random(generator, 2, 3, PLAIN, [0]) for _ in range(2)]
