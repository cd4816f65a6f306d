"""The trained correction of an early exit: a scale after the target's final norm, and a low-rank
term.

    x  = final_norm(h_E)                      the target's own norm, on the stream entering layer E
    x' = scale * x + up(silu(down(x)))        trained: H + 2 H r numbers
    logits = head(x')                         the target's own output head

The scale stands for a norm of its own; the correction, of rank r, moves what layer E knows to where
the head looks for it (logits change by head(up(...)), a low-rank correction of the head). Layout,
ours alone: `config.json` and `model.safetensors`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.models.heads.source import HeadSource, write_head

KIND = "outrider-exit-head"


@dataclass(frozen=True)
class ExitConfig:
    """Sizes, and the target that the head was trained for."""

    hidden_size: int
    exit_layer: int  # E: the draft is layers 0 .. E-1
    num_layers: int  # of the target
    rank: int
    target: str  # as the user named it

    def __post_init__(self) -> None:
        if not 0 < self.exit_layer < self.num_layers or self.rank < 1 or self.hidden_size < 1:
            raise CheckpointError(
                f"an exit head needs 0 < exit_layer < {self.num_layers} layers and a rank; "
                f"got layer {self.exit_layer}, rank {self.rank}"
            )


class ExitHead(nn.Module):
    """Corrects the hidden state of an exit layer before the target's output layer.

    Untrained it is the identity: plain early exit.
    """

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) after the final norm -> (..., H) for the output head, in the dtype of `hidden`."""
        states = hidden.to(self.scale.dtype)
        return (self.scale * states + self.up(F.silu(self.down(states)))).to(hidden.dtype)

    def save(self, folder: Path) -> None:
        """Raises OSError when the disk is full."""
        tensors = {name: value.float() for name, value in self.state_dict().items()}
        write_head(
            folder, "model.safetensors", {"model_type": KIND, **asdict(self.config)}, tensors
        )

    @classmethod
    def load(cls, folder: Path) -> ExitHead:
        """The head in a folder. Raises CheckpointError: nothing there, another kind of head, a
        tensor that does not fit."""
        source = HeadSource.open(folder)
        values = {name: value for name, value in source.config.items() if name != "model_type"}
        if source.config.get("model_type") != KIND:
            how = "'outrider train early-exit' makes one"
            raise CheckpointError(
                f"'{folder}' is no exit head: its config.json does not say model_type {KIND}; {how}"
            )
        with source.making("an exit head"):
            head = cls(ExitConfig(**values))
        return source.fill(head, "an exit head")


class ExitReader(nn.Module):
    """The target's output head after an exit head: stands where the output head stood."""

    def __init__(self, exit_head: ExitHead, output: nn.Module) -> None:
        super().__init__()
        self.exit_head = exit_head
        self.output = output

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.exit_head(hidden))
        return logits
