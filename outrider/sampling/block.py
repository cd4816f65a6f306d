"""Block verification of a chain: the most accepted tokens any lossless rule for one chain can have.

Source: Sun et al. 2403.10444 (ICLR 2025), Algorithm 2. With rho_0 = 1 and rho_i = min(1, rho_{i-1}
p_i(x_i)/q_i(x_i)), the prefix x_1..x_i is kept when a coin of probability h_i shows heads, and the
LONGEST such prefix wins:

    S_i = sum_v [rho_i p_{i+1}(v) - q_{i+1}(v)]+     h_i = S_i / (S_i + 1 - rho_i) for i < k     h_k = rho_k

then the next token comes from [rho_T p_{T+1} - q_{T+1}]+, or from p_{k+1} when T = k. All coins are
tossed, no early exit. Lossless for every draft length decided from x_1..x_i and q. When nothing was
sampled it has the law of the token-level rule (then S_i = rho_i (1 - p_{i+1}(x_{i+1}))), so
deterministic drafts take that cheaper road. docs/algorithms/block-verification.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling.rejection import ratios
from outrider.types import Draft


def path_weights(target_probs: Tensor, draft: Draft) -> Tensor:
    """rho_0 .. rho_N of every row: (B, N+1), rho_0 = 1."""
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in ratios(target_probs, draft).unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    return torch.stack(weights, dim=1)


def keep_probs(target_probs: Tensor, draft: Draft, weights: Tensor) -> Tensor:
    """h_1 .. h_N, the probability that the coin of prefix i shows heads: (B, N), 0 beyond a row's
    length."""
    rho = weights[:, 1:]  # (B, N)
    surplus = torch.zeros_like(rho)
    if draft.num_nodes > 1:
        excess = rho[:, :-1, None] * target_probs[:, 1:-1]
        # S_1 .. S_{N-1}
        surplus[:, :-1] = excess.sub_(_proposals(draft)[:, 1:]).clamp_(min=0).sum(dim=-1)
    # so grouped never below the surplus: h <= 1 in floating point too
    denominator = surplus + (1 - rho)
    # 0/0: rho = 1 and p = q at the next node, so stopping or continuing are the same; 1 as in the
    # paper
    keep = torch.where(denominator > 0, surplus / denominator, 1)
    length = torch.arange(1, draft.num_nodes + 1, device=rho.device)
    keep = torch.where(length == draft.lengths[:, None], rho, keep)
    return keep.masked_fill(length > draft.lengths[:, None], 0)


def _proposals(draft: Draft) -> Tensor:
    # (B, N, V): law of each node's token, a point mass where it was placed deterministically
    assert draft.probs is not None, "block verification of a draft in which nothing was sampled"
    laws = draft.probs[:, :-1]
    if draft.sampled is None:
        return laws
    point = torch.zeros_like(laws).scatter_(-1, draft.tokens[..., None], 1.0)
    return torch.where(draft.sampled[..., None], laws, point)
