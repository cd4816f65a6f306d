"""A target without weights: what a drafter is built with when there is only a tokenizer.

Who asks it for a pass, or reads numbers out of the logits it is shown, is refused: a drafter that needs them cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.attention import PassPlan
from outrider.models.lm import LM, LMShape, Reader
from outrider.models.loading.context import UNKNOWN_CONTEXT
from outrider.models.loading.load import LoadedModel, load_config, load_tokenizer

NO_MODEL = "this drafter runs the target's model, so it cannot be replayed: a replay has only text"
CPU = torch.device("cpu")


class TextLM(LM):
    """Knows its shape."""

    def __init__(self, shape: LMShape) -> None:
        super().__init__(_run, shape, torch.float32, CPU)  # type: ignore[arg-type]  # never called

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """Raises CapabilityError."""
        raise CapabilityError(NO_MODEL)

    def catch_up(self, rows: Sequence[Sequence[int]], read: Reader | None = None) -> None:
        """Raises CapabilityError."""
        raise CapabilityError(NO_MODEL)


def text_target(tokenizer: Any, vocab_size: int, name: str = "the log") -> LoadedModel:
    """A `LoadedModel` that knows its vocabulary and nothing else."""
    shape = LMShape(vocab_size, UNKNOWN_CONTEXT, layers=(), sliding_window=None, num_parameters=0)
    return LoadedModel(name, TextLM(shape), None, tokenizer, frozenset())


def load_text_target(name: str, trust_remote_code: bool = False) -> LoadedModel:
    """From a folder or a hub id: its tokenizer and, for the size of the vocabulary, its config. No weights.

    Raises CheckpointError when there is no tokenizer.
    """
    tokenizer = load_tokenizer(name, trust_remote_code)
    try:
        size = load_config(name, trust_remote_code).get_text_config().vocab_size  # may be padded beyond the tokenizer's
    except CheckpointError:  # a tokenizer alone will do
        size = len(tokenizer)
    return text_target(tokenizer, max(size, len(tokenizer)), name)


def unreadable_logits(num_rows: int, num_nodes: int, vocab_size: int) -> Tensor:
    """(B, N+1, V) without numbers: shapes can be computed with, reading a value raises NotImplementedError."""
    return torch.empty(num_rows, num_nodes + 1, vocab_size, device="meta")


def _run(ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
    raise AssertionError("`TextLM.forward` and `catch_up` let nobody get here")
