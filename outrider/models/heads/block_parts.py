"""Parts that some block heads have: Markov heads (DSpark), convolutions and a candidate selector
(DFlash2).

    convolution   y_t = sum over taps i of (base_i + delta_i(x_t)) * x_{t-i}, per channel, deltas shared by a group of channels;
                  around attention and MLP, on their input and, with deltas of the same x, on their
                  output; a block begins with 0
    selector      the top k tokens of a position's logits get <P[token before] * (W h), S[token]> added; all others get none

DSpark: 2607.05147. DFlash2 is published in speculators and vLLM (2026), as `attention_conv`,
`mlp_conv` and `candidate_selector`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.models.heads.block_config import BlockConfig
from outrider.models.tokens.vocabulary import OUTSIDE


class BlockConvolution(nn.Module):
    """Two causal convolutions of a block's tokens, whose kernels depend on the token."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size = config.hidden_size
        taps = config.conv_taps
        self._block_size = config.block_size
        self._taps = taps
        self._groups = size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self._groups, bias=False)

    def enter(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Normed states (B, S, H) of whole blocks -> the input of the layer's part, and the kernels
        for its output."""
        kernels = self.kernel_projection(states).unflatten(-1, (2, self._taps, self._groups))
        return self._convolved(states, kernels[..., 0, :, :], self.base_kernel[0]), kernels[
            ..., 1, :, :
        ]

    def leave(self, states: Tensor, kernels: Tensor) -> Tensor:
        """The output of the layer's part (B, S, H), convolved."""
        return self._convolved(states, kernels, self.base_kernel[1])

    def _convolved(self, states: Tensor, deltas: Tensor, base: Tensor) -> Tensor:
        blocks = states.unflatten(1, (-1, self._block_size))
        # (B, S, taps, groups, channels of one)
        kernels = base.unflatten(-1, (self._groups, -1)) + deltas[..., None]
        kernels = kernels.flatten(-2).unflatten(1, (-1, self._block_size))
        mixed = kernels[..., 0, :] * blocks
        for tap in range(1, self._taps):
            earlier = nn.functional.pad(blocks[:, :, :-tap], (0, 0, tap, 0))
            mixed = mixed + kernels[..., tap, :] * earlier
        return mixed.flatten(1, 2)


class CandidateSelector(nn.Module):
    """Scores of a position's likeliest tokens after the token before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self._top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(
            torch.zeros(config.vocab_size, config.selector_rank)
        )
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits: Tensor, states: Tensor, before: Tensor) -> Tensor:
        """Logits (..., V) of positions with states (..., H), after tokens (...) -> (..., V),
        OUTSIDE but for the candidates."""
        values, candidates = logits.topk(self._top_k, dim=-1)
        asked = self.predecessor_codebook[before] * self.hidden_projection(states)
        scores = values + (self.successor_codebook[candidates] @ asked[..., None])[..., 0].to(
            values.dtype
        )
        return torch.full_like(logits, OUTSIDE).scatter(-1, candidates, scores)


class MarkovHead(nn.Module):
    """The correction of a distribution by the tokens before it.

    The last token: W2 W1[x], or W2 (gate * W1[x]) with a gate made of the hidden state and W1[x].
    All tokens of the draft so far (`joint_proj`): W2 of what a gated recurrence over their W1[x]
    and the hidden states says.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank) if config.markov_gated else None
        self.joint_proj = (
            nn.Linear(2 * rank + config.hidden_size, 3 * rank) if config.markov_recurrent else None
        )

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """States (..., H) of positions, tokens before them (...) -> (..., V)."""
        latent = self.markov_w1(before)
        if self.gate_proj is not None:
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([states, latent], dim=-1)))
        return self.markov_w2(latent)

    def step(self, states: Tensor, before: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Corrections (..., V) of the recurrent kind, and what it remembers (..., rank) of these
        tokens and those before.

        `memory`: of those before them; None: there are none.
        """
        assert self.joint_proj is not None, "a Markov head without memory"
        latent = self.markov_w1(before)
        memory = torch.zeros_like(latent) if memory is None else memory
        gate, candidate, output = self.joint_proj(
            torch.cat([memory, latent, states], dim=-1)
        ).chunk(3, dim=-1)
        share = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(output)), share * memory + (1 - share) * torch.tanh(
            candidate
        )
