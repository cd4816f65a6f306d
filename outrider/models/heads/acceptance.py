"""A small head that predicts acceptance from a draft model's probabilities, to stop drafting (after
SpecDec++, 2405.19715).

    before the draw   sigmoid(MLP(features of q))           ~  sum min(p, q), the chance that a token drawn from q is accepted
    after it         sigmoid(MLP(features of q and q(x)))  ~  min(1, p(x) / q(x)), the chance that the drawn x is

SpecDec++ reads the draft's hidden state after the drawn token, which costs the pass that drafting
was to be stopped before. Here features are those of the distribution that the next token WOULD be
drawn from: entropy, the likeliest tokens' probabilities, how likely the token before was; and which
tokens these are, by a small table of its own (`token_size` numbers for every token): the token
before, and the one that is drawn or, before the draw, the mean over q. All of that is
non-anticipating, needs no further pass, and fits any draft model. With few texts the table learns
them by heart: token_size=0 leaves it out.

A greedy row's token is accepted when both models' likeliest tokens agree, which is another
question: a feature says which one.

docs/results/heads.md says what it saves, with the table and without. The draft's last hidden state
alongside the distribution was tried and left out: it would help greedy rows only, and drafters would
have to hand it over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.models.heads.source import HeadSource, write_head

KIND = "acceptance"
NUM_TOP = 8  # likeliest tokens whose probabilities are features
NUM_FEATURES = NUM_TOP + 7
LEAST = 1e-6  # probabilities below this are as good as none


@dataclass(frozen=True)
class AcceptanceConfig:
    """Size, and what it was trained on."""

    hidden_size: int = 32
    num_layers: int = 2
    token_size: int = 0  # numbers kept for every token; 0: the head looks at probabilities alone
    vocab_size: int = 0  # tokens of that table, the width of the draft's logits; 0 without one
    target: str = ""
    draft: str = ""


@dataclass(frozen=True)
class DraftPositions:
    """The inputs of the head at each drafted position, of any leading shape (...)."""

    probs: Tensor  # (..., V) fp32, the draft's
    # (..., NUM_TOP + 2): the likeliest tokens' logarithms, the entropy, the rest's probability
    looks: Tensor
    previous: Tensor  # (...) int64: the token before
    before: Tensor  # (...) fp32: the probability it had in its own distribution
    first: Tensor  # (...) bool: it was not drafted, so that this probability says nothing

    @classmethod
    def of(cls, probs: Tensor, previous: Tensor, before: Tensor, first: Tensor) -> DraftPositions:
        probs = probs.float()
        top = probs.topk(min(NUM_TOP, probs.shape[-1]), dim=-1).values
        top = F.pad(top, (0, NUM_TOP - top.shape[-1]))
        single = torch.stack([torch.special.entr(probs).sum(dim=-1), 1 - top.sum(dim=-1)], dim=-1)
        looks = torch.cat([top.clamp(min=LEAST).log() / 4, single], dim=-1)
        return cls(probs, looks, previous, before.float(), first)


class AcceptanceHead(nn.Module):
    """Residual SiLU layers over the features of a distribution."""

    def __init__(self, config: AcceptanceConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = (
            nn.Embedding(config.vocab_size, config.token_size) if config.token_size else None
        )
        if self.tokens is not None:
            nn.init.zeros_(self.tokens.weight)  # a token never met says nothing
        self.enter = nn.Linear(NUM_FEATURES + 2 * config.token_size, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_layers)
        )
        self.leave = nn.Linear(config.hidden_size, 1)

    def forward(
        self, positions: DraftPositions, greedy: Tensor, drawn: Tensor | None = None
    ) -> Tensor:
        """Greedy rows (...) bool, tokens (...) int64 drawn there, None before the draw -> logits of
        acceptance (...)."""
        known = features(positions, greedy, drawn)
        if self.tokens is not None:
            known = torch.cat([known, _meanings(self.tokens.weight, positions, drawn)], dim=-1)
        states = F.silu(self.enter(known))
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return self.leave(states)[..., 0]

    def chance(
        self,
        probs: Tensor,
        previous: Tensor,
        before: Tensor | None,
        drawn: Tensor | None,
        *,
        greedy: Tensor,
    ) -> Tensor:
        """`sampling.confidence.Predict` for rows of which `greedy` (B,) bool says how they choose."""
        first = torch.full(probs.shape[:-1], before is None, device=probs.device)
        known = torch.ones_like(probs[..., 0]) if before is None else before
        return torch.sigmoid(self(DraftPositions.of(probs, previous, known, first), greedy, drawn))

    def save(self, folder: Path) -> None:
        """Raises OSError when the disk is full."""
        write_head(
            folder,
            "model.safetensors",
            {"model_type": KIND, **asdict(self.config)},
            dict(self.state_dict()),
        )

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None = None) -> AcceptanceHead:
        """`vocab_size`: width of the logits of the draft model that it is to stop. Raises
        CheckpointError: nothing there, another kind of head, a tensor that does not fit, a draft
        model of another width than the head's."""
        source = HeadSource.open(folder)
        values = {
            name: value
            for name, value in source.config.items()
            if name in AcceptanceConfig.__dataclass_fields__
        }
        if source.config.get("model_type") != KIND:
            raise CheckpointError(
                f"'{folder}' is no acceptance head: its config.json does not say model_type {KIND}"
            )
        with source.making("an acceptance head"):
            head = cls(AcceptanceConfig(**values))
        config = source.fill(head, "an acceptance head").config
        if config.token_size and vocab_size not in (None, config.vocab_size):
            raise CheckpointError(
                f"acceptance head '{folder}' was trained for draft model '{config.draft}' of "
                f"{config.vocab_size} tokens, "
                f'this one has {vocab_size}: train one for it (outrider train "acceptance '
                'draft=FOLDER")'
            )
        return head


def features(positions: DraftPositions, greedy: Tensor, drawn: Tensor | None = None) -> Tensor:
    """Greedy rows (...) bool; tokens drawn (...) int64, None before the draw -> (..., NUM_FEATURES)
    fp32."""
    before = torch.where(positions.first, torch.ones_like(positions.before), positions.before)
    known = (
        torch.ones_like(before)
        if drawn is None
        else positions.probs.gather(-1, drawn[..., None])[..., 0]
    )
    single = [
        before.clamp(min=LEAST).log(),
        positions.first.float(),
        greedy.float(),
        known.clamp(min=LEAST).log(),
        torch.full_like(before, drawn is not None),
    ]
    return torch.cat([positions.looks, torch.stack(single, dim=-1)], dim=-1)


def _meanings(table: Tensor, positions: DraftPositions, drawn: Tensor | None) -> Tensor:
    """(..., 2 token_size): of the token before, and of the token drawn or the mean over what may be
    drawn. A target's padded vocabulary may be wider than the draft's, or narrower."""
    last = len(table) - 1
    width = min(len(table), positions.probs.shape[-1])
    next_one = (
        positions.probs[..., :width] @ table[:width]
        if drawn is None
        else F.embedding(drawn.clamp(max=last), table)
    )
    return torch.cat([F.embedding(positions.previous.clamp(max=last), table), next_one], dim=-1)
