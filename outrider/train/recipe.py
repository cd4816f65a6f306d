"""The interface between trainer and kinds: a `Recipe` for each kind turns a batch of target
features into a loss.

    recipe = KINDS.load("eagle3").build(RecipeSetup(...))     # kinds.py: the trainer knows no kind by name
    report = recipe.loss(batch)                                # batch: the target's features of some texts
    report.loss.backward()
    recipe.save(folder)                                        # what the drafter `recipe.drafter` loads

Indices of a batch. `tokens[b, t]` is x_t; `logits[b, t]` is the target's distribution of x_{t+1};
`hidden[k][b, t]` belongs to x_t. `mask[b, t]` marks that `logits[b, t]` counts: x_{t+1} is a token
of the response (so the last token of the prompt counts, the last token of the text does not). With
prompt (p0 p1) and response (r0 r1):

    t          0    1    2    3
    tokens     p0   p1   r0   r1
    mask       no   yes  yes  no          logits[1] is the distribution of r0, logits[2] that of r1

Rows shorter than T are padded on the right: `lengths[b]` tokens count, mask is False beyond.

Randomness (anchors, noise) comes from torch's global generator, which the trainer seeds from (seed,
step) before every batch: a resumed run draws what the uninterrupted one would have, and every
validation sees the same draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FeatureBatch:
    """The target's features of B texts of at most T tokens; see the module docstring."""

    tokens: Tensor  # (B, T) int64, padded on the right with any valid id
    mask: Tensor  # (B, T) bool: logits[b, t] counts, x_{t+1} is of the response
    # layer -> (B, T, H) keys as in `LM.capture`, -1 = after the final norm
    hidden: dict[int, Tensor]
    logits: Tensor  # (B, T, V) the target's, in its dtype
    lengths: Tensor  # (B,) int64, valid tokens of each row
    # share of the training that is over, 0..1: for curricula. 1 in validation
    progress: float = 1.0

    @property
    def valid(self) -> Tensor:
        """(B, T) bool: positions that hold a token."""
        columns = self.lengths.new_tensor(range(self.tokens.shape[1]))
        return columns[None] < self.lengths[:, None]


@dataclass
class LossReport:
    """The losses of one batch. All means are over `count` positions, so that several batches add
    up.

    Acceptances are measured in validation: while the module trains, `per_position` and `survival`
    may be empty.
    """

    loss: Tensor  # scalar fp32, with a gradient
    # [j]: mean of sum_x min(p, q) at draft position j, given that it is reached
    per_position: list[float]
    # losses and other means by name, for the log
    parts: dict[str, float] = field(default_factory=dict)
    # [j]: mean of the products along chains, where they are known
    survival: list[float] = field(default_factory=list)
    count: int = 1  # positions that the means are over


@dataclass(frozen=True)
class RecipeSetup:
    """The inputs for building a recipe."""

    target: Any  # transformers module: frozen, in eval mode, on the device that trains
    tokenizer: Any
    name: str  # of the target, as the user named it: heads remember who they were trained for
    settings: Any  # an instance of the recipe's own `Settings`
    token_counts: Tensor  # (V,) int64 on CPU: how often each token stands in the training responses
    # --init: a folder that this kind saved (or a model folder, for draft-model) to continue from
    init: Path | None = None
    # of the checkpoint, where the target was loaded in one that this machine trains faster in
    dtype: torch.dtype | None = None

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype of a drafter's weights on disk: the target's own, in which it will run,
        whatever it is trained in."""
        return (
            self.dtype
            or self.target.config.get_text_config().dtype
            or self.target.get_input_embeddings().weight.dtype
        )


class Recipe(Protocol):
    """One kind of drafter in training. `kinds.py` registers it as a class that also satisfies
    `RecipeKind`.

    `max_positions`, where it has that, is the most positions of a text that its loss is a mean
    over; else all do.
    """

    signals: tuple[int, ...]  # layers whose hidden states `loss` wants; () = logits only
    # what is trained: its parameters with requires_grad. May hold frozen parts, which no checkpoint
    # saves
    module: nn.Module

    def loss(self, batch: FeatureBatch) -> LossReport:
        """In training mode and, under no_grad, in validation."""

    def save(self, folder: Path) -> None:
        """Write what the drafter loads. Raises OSError when the disk is full."""


class RecipeKind(Protocol):
    """The attributes that a registered class adds to `Recipe`."""

    Settings: ClassVar[type]  # frozen dataclass of `setting(default, help)` fields
    # who drafts with it, in the text form of configuration.py; "{folder}" stands for the saved
    # folder
    drafter: ClassVar[str]
    uses_draft: ClassVar[bool]  # the drafter gets the folder with --draft
    default_lr: ClassVar[float | None]  # highest learning rate; None: by the target's size

    @classmethod
    def build(cls, setup: RecipeSetup) -> Recipe:
        """The recipe for a target.

        Raises ConfigError or CapabilityError: settings that do not fit the target, a target without
        the needed features.
        """


@runtime_checkable
class Calibrates(Protocol):
    """A recipe whose confidences are set after training, on held-out batches, before it is saved
    for good."""

    def calibrate(self, batches: Iterable[FeatureBatch]) -> dict[str, float]:
        """Numbers for the report by name. Called under no_grad with the best weights loaded."""
