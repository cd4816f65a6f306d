"""A small head that predicts acceptance from a draft model's law, and so when to stop drafting (after SpecDec++, 2405.19715).

    before the draw   sigmoid(MLP(features of q))           ~  sum min(p, q), the chance that a token drawn from q is accepted
    behind it         sigmoid(MLP(features of q and q(x)))  ~  min(1, p(x) / q(x)), the chance that the drawn x is

SpecDec++ reads the draft's hidden state behind the drawn token, which costs the pass that drafting was to be stopped before.
Here features are those of the law that the next token WOULD be drawn from: entropy, the likeliest tokens' probabilities, and
how likely the token before was. That is non-anticipating, needs no further pass, and fits any draft model, compiled or not.

A greedy row's token is accepted when both models' likeliest tokens agree, which is another question: a feature says which one.

Tried on pair-14M, worked out from the laws (16,500 positions, estimates before the draw only, at the tau of a fixed length 5):
with the draft's last hidden state beside these features 20 % of the drafted tokens are saved at T = 1 and 43 % at T = 0, without
it 21 % and 36 %. So it would help greedy rows only, and drafters would have to hand it over. docs/heads.md: what real runs save.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.models.heads.tensors import HeadTensors, write_head

KIND = "acceptance"
NUM_TOP = 8  # likeliest tokens whose probabilities are features
NUM_FEATURES = NUM_TOP + 7
LEAST = 1e-6  # probabilities below this are as good as none


@dataclass(frozen=True)
class AcceptanceConfig:
    """Size, and what it was trained on."""

    hidden_size: int = 32
    num_layers: int = 2
    target: str = ""
    draft: str = ""


class AcceptanceHead(nn.Module):
    """Residual SiLU layers over the features of a law."""

    def __init__(self, config: AcceptanceConfig) -> None:
        super().__init__()
        self.config = config
        self.enter = nn.Linear(NUM_FEATURES, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_layers))
        self.leave = nn.Linear(config.hidden_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Features (..., NUM_FEATURES) -> logits of acceptance (...)."""
        states = F.silu(self.enter(features))
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return self.leave(states)[..., 0]

    def chance(self, law: Tensor, before: Tensor | None, drawn: Tensor | None, greedy: Tensor) -> Tensor:
        """Laws (B, V), the probability (B,) of the token before (None: there is none) and of the token drawn from these laws
        (None: not drawn yet), greedy rows (B,) bool -> (B,)."""
        first = torch.full(law.shape[:-1], before is None, device=law.device)
        known = torch.ones_like(law[..., 0]) if before is None else before
        return torch.sigmoid(self(law_features(law, known, first, greedy, drawn)))

    def save(self, folder: Path) -> None:
        """Raises OSError when the disk is full."""
        write_head(folder, "model.safetensors", {"model_type": KIND, **asdict(self.config)}, dict(self.state_dict()))

    @classmethod
    def load(cls, folder: Path) -> AcceptanceHead:
        """Raises CheckpointError: nothing there, another kind of head, a tensor that does not fit."""
        files = HeadTensors.read(folder)
        found = {name: value for name, value in files.config.items() if name in AcceptanceConfig.__dataclass_fields__}
        if files.config.get("model_type") != KIND:
            raise CheckpointError(f"'{folder}' is no acceptance head: its config.json does not say model_type {KIND}")
        head = cls(AcceptanceConfig(**found))
        head.load_state_dict({name: files.take(name, *tensor.shape) for name, tensor in head.state_dict().items()})
        files.finish("an acceptance head")
        return head.eval().requires_grad_(False)


def law_features(law: Tensor, before: Tensor, first: Tensor, greedy: Tensor, drawn: Tensor | None = None) -> Tensor:
    """Laws (..., V); probability of the token before (...); whether there is none (...) bool; greedy rows (...) bool;
    probability of the token drawn (...), None before the draw -> (..., NUM_FEATURES) fp32."""
    law = law.float()
    top = law.topk(min(NUM_TOP, law.shape[-1]), dim=-1).values
    top = F.pad(top, (0, NUM_TOP - top.shape[-1]))
    entropy = torch.special.entr(law).sum(dim=-1)
    before = torch.where(first, torch.ones_like(before), before).float()
    known = torch.ones_like(before) if drawn is None else drawn.float()
    single = [
        entropy, 1 - top.sum(dim=-1), before.clamp(min=LEAST).log(), first.float(), greedy.float(),
        known.clamp(min=LEAST).log(), torch.full_like(before, drawn is not None),
    ]  # fmt: skip
    return torch.cat([top.clamp(min=LEAST).log() / 4, torch.stack(single, dim=-1)], dim=-1)
