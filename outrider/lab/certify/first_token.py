"""The distribution of one emitted token, computed exactly on the pair's own distributions: whole vocabulary, precision of real
runs.

At every position the target's distribution p and the draft's distribution q are what a real step saw there. The verifier then
runs on every draft of one token with the coin that decides it shown both ways, and what it would draw after a rejection is read
off its weights instead of being drawn. Added up over q, that is the distribution of the next token. Where the vocabulary is too
large for all draft tokens, the likeliest are taken; what they put on a token beyond p can be taken back by none of the others,
so the sum of that excess is a total variation that is proved, however much was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.lab.certify.certify_result import FirstToken, FirstTokenDistribution, Status
from outrider.lab.certify.points import Spot, first_draft
from outrider.lab.certify.subject import Seen, Subject
from outrider.lab.journal import Units
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import Purpose
from outrider.types import Draft
from outrider.verifiers.base import Verifier

LIMIT = 1e-4  # total variation; fp32 distributions over 152k tokens were seen to miss a sum of 1 by 1.2e-5
COVERED = 1 - 1e-9  # enough
MAX_WORK = 1 << 26  # draft tokens enumerated at a test point, times the vocabulary
MAX_NUMBERS = 1 << 22  # of one batch of distributions


class UnfamiliarError(OutriderError):
    """The verifier draws in another order than one coin and then one token, or one race."""


@dataclass
class _Prescribed:
    """A Randomness for drafts of one token: coins and winners as prescribed, weights of the next token as they come."""

    heads: Tensor  # (R,) bool
    winners: Tensor  # (R,) int64, at the first output
    probs: Tensor = field(default_factory=lambda: torch.ones(0))  # (R,) of the prescribed coin
    weights: Tensor | None = None  # (R, V) of the next token
    token: Tensor | None = None  # (R,) that was given for them

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        if probs.shape[1] != 1 or self.probs.numel() or self.weights is not None:
            raise UnfamiliarError("it does not toss one coin for a draft of one token")
        self.probs = torch.where(self.heads, probs[:, 0].double(), 1 - probs[:, 0].double())
        return self.heads[:, None]

    def categorical(self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]) -> Tensor:
        if self.weights is not None:
            raise UnfamiliarError("it draws more than one token")
        self.weights, self.token = weights, weights.argmax(dim=1)
        return self.token

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        noise = torch.full((*positions.shape, vocab_size), -torch.inf, dtype=torch.float64)
        return noise.scatter_(2, self.winners[:, None, None].expand(-1, positions.shape[1], 1), 0.0)


def first_token(subject: Subject, spots: Sequence[Spot], params: SamplingParams, units: Units) -> FirstTokenDistribution:
    """Every test point where something is drafted."""
    units.progress.stage("exact distribution of the first token", len(spots))
    found: list[FirstToken] = []
    unfamiliar = ""
    for number, spot in enumerate(spots):
        try:
            one = units.get(f"first/{number}", _at, subject, number, spot, params)
        except UnfamiliarError as error:
            unfamiliar = str(error)
            break
        found += [FirstToken.model_validate(one)] if one else []
    worst = max((one.total_variation for one in found), default=None)
    status, why = _judgement(found, unfamiliar)
    places = [] if unfamiliar else found
    return FirstTokenDistribution(status=status, why=why, limit=LIMIT, max_total_variation=worst, places=places)


def _at(subject: Subject, number: int, spot: Spot, params: SamplingParams) -> dict | None:
    seen = first_draft(subject, spot, params)
    if seen is None:
        return None
    p, q, token = roots(seen)
    verifier = subject.speculative.verifier
    covered, probs = emitted_probs(verifier, p, q, token, as_tree=seen.draft.parents is not None)
    excess = float((probs - p.double() / p.sum(dtype=torch.float64)).clamp(min=0).sum())
    found = FirstToken(place=number, draft="placed" if q is None else "drawn", covered=covered, total_variation=excess)
    return found.model_dump()


def roots(seen: Seen) -> tuple[Tensor, Tensor | None, int]:
    """The start of a one-row step on the host: the target's distribution (V,), the first draft token's distribution, and that
    token."""
    draft = seen.draft
    first = draft.children[0][0][0]
    drawn = draft.probs is not None and bool(draft.is_sampled()[0, first])
    q = draft.probs[0, 0].cpu() if drawn and draft.probs is not None else None
    return seen.probs[0, 0].cpu(), q, int(draft.tokens[0, first])


@torch.inference_mode()
def emitted_probs(verifier: Verifier, p: Tensor, q: Tensor | None, token: int, *, as_tree: bool) -> tuple[float, Tensor]:
    """How much probability was enumerated, and the distribution (V,) fp64 of the first token that it gives, which sums to that.

    q: the distribution of the draft token; None: `token` was placed. Raises UnfamiliarError.
    """
    size = p.shape[0]
    if verifier.coupled:
        q = None  # its drafts share the noise: they are no draws from q, and any token may be the draft
    if q is None:
        drafts, chances = torch.tensor([token]), torch.ones(1, dtype=torch.float64)
    else:
        drafts, chances = _likeliest(q)
    winners, shares = _likeliest(p) if verifier.coupled else (torch.zeros(2, dtype=torch.int64), torch.ones(2).double())
    # one row for each pair of a draft token and a way the dice fall: heads or tails, or who wins the race
    rows = torch.cartesian_prod(torch.arange(len(drafts)), torch.arange(len(winners)))
    probs = torch.zeros(size, dtype=torch.float64)
    for part in rows.split(max(1, MAX_NUMBERS // (2 * size))):
        which, dice = part.unbind(1)
        weight = chances[which] * shares[dice]
        probs += _emitted(verifier, p, q, drafts[which], dice, winners[dice], weight, as_tree)
    return float(probs.sum()), probs


def _likeliest(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities, likeliest first, until nearly all is covered."""
    exact = probs.double() / probs.sum(dtype=torch.float64)
    probs, tokens = exact.topk(min(len(exact), max(2, MAX_WORK // len(exact))))
    needed = int((probs.cumsum(0) < COVERED).sum()) + 1
    keep = probs[:needed] > 0
    return tokens[:needed][keep], probs[:needed][keep]


def _emitted(
    verifier: Verifier, p: Tensor, q: Tensor | None, tokens: Tensor, dice: Tensor, winners: Tensor, weight: Tensor, as_tree: bool
) -> Tensor:
    """What these rows add to the distribution: (V,) fp64."""
    count, size = len(tokens), len(p)
    draft = Draft(
        tokens[:, None], torch.ones(count, dtype=torch.int64), torch.full((count, 1), -1) if as_tree else None,
        None if q is None else q.expand(count, 2, size).clone(),
    )  # fmt: skip
    rng = _Prescribed(heads=dice == 0, winners=winners)
    verdict = verifier.verify(draft, p.expand(count, 2, size).clone(), rng, torch.full((count,), 7))
    if rng.probs.numel():
        weight = weight * rng.probs
    elif not verifier.coupled:
        raise UnfamiliarError("it tosses no coin")
    accepted = verdict.num_accepted > 0
    probs = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens[accepted], weight[accepted])
    if rng.weights is None or rng.token is None:
        return probs.index_add_(0, verdict.next_token[~accepted], weight[~accepted])
    if not torch.equal(verdict.next_token[~accepted], rng.token[~accepted]):
        raise UnfamiliarError("the token it emits is not the one it drew")
    drawn = rng.weights[~accepted].double()
    return probs + (drawn * (weight[~accepted] / drawn.sum(dim=1))[:, None]).sum(dim=0)


def _judgement(found: Sequence[FirstToken], unfamiliar: str) -> tuple[Status, str]:
    if unfamiliar:
        return "not claimed", f"this verifier cannot be enumerated over a whole vocabulary: {unfamiliar}"
    if not found:
        return "not claimed", "nothing was drafted at any position"
    worst = max(found, key=lambda one: one.total_variation)
    if worst.total_variation > LIMIT:
        return "failed", (
            f"over the whole vocabulary the first token is {worst.total_variation:.2g} in total variation from the target's "
            "distribution"
        )
    left_out = max(0.0, 1 - min(one.covered for one in found))
    return "passed", (
        f"at {len(found)} positions the first token has the target's distribution to {worst.total_variation:.0e} total variation"
        + (f" (draft tokens of probability {left_out:.0e} were left out)" if left_out > LIMIT else "")
    )
