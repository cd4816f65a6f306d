"""Markov heads of block heads (DSpark, 2607.05147): what the tokens before a position do to its distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.models.heads.block_config import BlockConfig


class MarkovHead(nn.Module):
    """What the tokens before do to a distribution.

    The last token: W2 W1[x], or W2 (gate * W1[x]) with a gate made of the hidden state and W1[x]. All tokens of the draft so far
    (`joint_proj`): W2 of what a gated recurrence over their W1[x] and the hidden states says.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank) if config.markov_gated else None
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank) if config.markov_recurrent else None

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """States (..., H) of positions, tokens before them (...) -> (..., V)."""
        latent = self.markov_w1(before)
        if self.gate_proj is not None:
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([states, latent], dim=-1)))
        return self.markov_w2(latent)

    def step(self, states: Tensor, before: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Corrections (..., V) of the recurrent kind, and what it remembers (..., rank) of these tokens and those before.

        `memory`: of those before them; None: there are none.
        """
        assert self.joint_proj is not None, "a Markov head without memory"
        latent = self.markov_w1(before)
        memory = torch.zeros_like(latent) if memory is None else memory
        gate, candidate, output = self.joint_proj(torch.cat([memory, latent, states], dim=-1)).chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(output)), kept * memory + (1 - kept) * torch.tanh(candidate)
