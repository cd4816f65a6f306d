"""Verifiers and a drafter with one deliberate fault each, as a third party would register them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.rows import Rows
from outrider.sampling.block import keep_probs, path_weights
from outrider.sampling.rejection import acceptance, next_token_weights
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.base import Verifier, chain_verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.token import TokenVerifier


class ResamplesFromTarget(Verifier):
    """The classic: after a rejection the next token comes from p, not from the residual."""

    name = "resamples"
    lossless = True

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        accepted = rng.bernoulli(acceptance(target_probs, draft), Purpose.ACCEPT, positions)
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        probs = target_probs[torch.arange(len(num_accepted)), num_accepted]
        return chain_verdict(
            draft, num_accepted, rng.categorical(probs, Purpose.RESAMPLE, positions, 0)
        )


class ResamplesLate(TokenVerifier):
    """Sound up to position 300 of a text, then the classic."""

    name: ClassVar[str] = "resamples-late"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        sound = super().verify(draft, target_probs, rng, positions)
        if not bool((positions > 300).any()):
            return sound
        biased = ResamplesFromTarget().verify(draft, target_probs, rng, positions)
        pairs = zip(sound.lists, biased.lists, strict=True)
        mixed = [
            [
                theirs if position > 300 else ours
                for ours, theirs, position in zip(*pair, positions.tolist(), strict=True)
            ]
            for pair in pairs
        ]
        return Verdict.of_lists(VerdictLists(*mixed), draft.num_nodes, draft.tokens.device)


class DropsUnlikely(Verifier):
    """A draft token is never kept where its own q is low; the residual does not know."""

    name = "drops"
    lossless = True

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        keep = acceptance(target_probs, draft)
        if draft.probs is not None:
            proposed = draft.probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
            keep = torch.where(proposed < 0.05, 0.0, keep)
        num_accepted = (
            rng.bernoulli(keep, Purpose.ACCEPT, positions).long().cumprod(dim=1).sum(dim=1)
        )
        weights = next_token_weights(target_probs, draft, num_accepted)
        return chain_verdict(
            draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0)
        )


class ClipsRare(BlockVerifier):
    """Exact on small vocabularies: it only forgets tokens of probability below 0.001."""

    name: ClassVar[str] = "clips"
    floor: ClassVar[float] = 1e-3

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        floor = self.floor if target_probs.shape[-1] > 16 else 0.0
        kept = torch.where(target_probs < floor, 0, target_probs)
        return super().verify(draft, kept / kept.sum(dim=-1, keepdim=True), rng, positions)


class OwnDice(TokenVerifier):
    """Draws from a generator of its own: no seed reaches it, and nothing can enumerate it."""

    name: ClassVar[str] = "own-dice"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        keep = acceptance(target_probs, draft)
        num_accepted = (torch.rand_like(keep) < keep).long().cumprod(dim=1).sum(dim=1)
        weights = next_token_weights(target_probs, draft, num_accepted)
        return chain_verdict(draft, num_accepted, torch.multinomial(weights, 1)[:, 0])


class KeyedByPosition(Verifier):
    """Block verification whose coins are named by the text position: the next step meets them
    again."""

    name = "position-keyed"
    lossless = True

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        if draft.probs is None:
            return TokenVerifier().verify(draft, target_probs, rng, positions)
        rho = path_weights(target_probs, draft)
        keep = keep_probs(target_probs, draft, rho)
        coins = [
            rng.bernoulli(keep[:, n : n + 1], Purpose.ACCEPT, positions + n)
            for n in range(draft.num_nodes)
        ]
        heads = (
            torch.cat(coins, dim=1) if coins else torch.zeros_like(draft.tokens, dtype=torch.bool)
        )
        lengths = torch.arange(1, draft.num_nodes + 1)
        num_accepted = (
            (heads * lengths).amax(dim=1) if draft.num_nodes else torch.zeros_like(draft.lengths)
        )
        weights = next_token_weights(
            target_probs, draft, num_accepted, rho.gather(1, num_accepted[:, None])[:, 0]
        )
        return chain_verdict(
            draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0)
        )


class RaisesOnMixed(BlockVerifier):
    """Knows no draft in which some tokens were drawn and some placed."""

    name: ClassVar[str] = "raises"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        if draft.sampled is not None:
            raise IndexError("no such node")
        return super().verify(draft, target_probs, rng, positions)


class NotInvariant(CoupledVerifier):
    """Calls itself drafter-invariant, takes another position's noise where something was drafted;
    its distribution is right."""

    name: ClassVar[str] = "not-invariant"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        return super().verify(
            draft, target_probs, rng, positions + (1000 if draft.num_nodes else 0)
        )


class WithholdingDrafter(ModelDrafter):
    """A draft is cut before the first token whose OWN probability is low: the decision has seen the
    draw."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        draft = super().propose(rows, gamma)
        if draft.probs is None:
            return draft
        proposed = draft.probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
        good = (proposed > 0.02).long().cumprod(dim=1).sum(dim=1)
        return replace(draft, lengths=torch.minimum(draft.lengths, good))


class FlattensItsReport(ModelDrafter):
    """Draws from q and reports q^0.9."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        draft = super().propose(rows, gamma)
        if draft.probs is None:
            return draft
        flat = draft.probs**0.9
        return replace(draft, probs=flat / flat.sum(dim=-1, keepdim=True).clamp(min=1e-9))
