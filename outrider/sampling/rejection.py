"""Token-level rejection sampling of a chain: accept x w.p. min(1, p(x)/q(x)), correct from norm([p
- q]+).

Source: Leviathan et al. 2211.17192 (Algorithm 1) and Chen et al. 2302.01318. A token placed
deterministically is the case q = point mass: accepted w.p. p(x), corrected from p without x. Greedy
is the case p = point mass. Nothing here is random: these functions give acceptance probabilities
and weights; the verifier tosses the coins. Accepting one token too few is as invisible to a
losslessness test as one too many is fatal, so both are tested: docs/algorithms/rejection.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.types import Draft


def ratios(target_probs: Tensor, draft: Draft) -> Tensor:
    """p(x_i)/q(x_i) of every token of a chain: target_probs (B, N+1, V) -> (B, N), 0 where p(x_i) =
    0."""
    index = draft.tokens[..., None]
    target = target_probs[:, :-1].gather(-1, index)[..., 0]  # (B, N)
    if draft.probs is None:
        return target
    proposed = draft.probs[:, :-1].gather(-1, index)[..., 0].to(target.dtype)
    if draft.sampled is not None:
        proposed = proposed.masked_fill(~draft.sampled, 1)
    # the floor only keeps 0/0 and overflow away: a token drawn from q has q > 0
    return target / proposed.clamp(min=torch.finfo(target.dtype).tiny)


def acceptance(target_probs: Tensor, draft: Draft) -> Tensor:
    """Probability of accepting each tested token: (B, N) in [0, 1], 0 beyond a row's length."""
    node = torch.arange(draft.num_nodes, device=draft.tokens.device)
    return ratios(target_probs, draft).clamp(max=1).masked_fill(node >= draft.lengths[:, None], 0)


def next_token_weights(
    target_probs: Tensor, draft: Draft, num_accepted: Tensor, scale: Tensor | None = None
) -> Tensor:  # (B, V), unnormalised
    """Weights of the token after the kept prefix: p if all of the draft was kept, else the
    residual.

    The residual is [scale p - q]+. `scale` (B,) is block verification's rho (1 = token-level). A
    residual without mass means p = q there, which is only reached by rounding: then p itself.
    """
    p = _row(target_probs, num_accepted)
    if draft.num_nodes == 0:
        return p
    # (B, 1)
    rejected = draft.tokens.gather(1, num_accepted.clamp(max=draft.num_nodes - 1)[:, None])
    if draft.probs is None:
        residual = p.scatter(-1, rejected, 0)  # [p - point mass]+, whatever the scale
    else:
        residual = (p if scale is None else p * scale[:, None]) - _proposal(
            draft, num_accepted, rejected, p
        )
        residual = residual.clamp_(min=0)
    use_residual = (num_accepted < draft.lengths) & (residual.sum(dim=-1) > 0)
    return torch.where(use_residual[:, None], residual, p)


def _proposal(draft: Draft, num_accepted: Tensor, rejected: Tensor, like: Tensor) -> Tensor:
    # (B, V): the law that the first rejected token was drawn from
    assert draft.probs is not None
    law = _row(draft.probs, num_accepted).to(like.dtype)
    if draft.sampled is None:
        return law
    point = torch.zeros_like(like).scatter_(-1, rejected, 1.0)
    drawn = draft.sampled.gather(1, num_accepted.clamp(max=draft.num_nodes - 1)[:, None])
    return torch.where(drawn, law, point)


def _row(table: Tensor, index: Tensor) -> Tensor:
    # table (B, M, V), index (B,) -> (B, V)
    return table[torch.arange(table.shape[0], device=table.device), index]
