"""A whole draft of Medusa heads as ONE compiled program: from the target's last hidden state to every head's token and law.

The heads do not look at one another's tokens, so all levels are picked at once. No penalties, biases or grammars; the
general path is `drafters/parallel.py` on the same heads, and the test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider.models.compile import ONE_THREAD, compile_program
from outrider.models.draft_loop import MAX_SMALL_PARAMETERS
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.picking import Draws, example_draws, pick_all
from outrider.models.vocabulary import fit_width
from outrider.models.workshop import Workshop


class MedusaProgram(nn.Module):
    """What is compiled. Also runs eagerly, for the equality test. Only the first `num_tokens` heads are asked."""

    def __init__(self, heads: MedusaHeads, num_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.target_output = heads.target_output  # registered, so that all weights become constants of the program
        self.num_tokens, self.vocab_size = num_tokens, vocab_size

    def forward(
        self,
        hidden: Tensor,  # (B, T, H): what the target's output head read
        columns: Tensor,  # (B,) int64: each row's last
        draws: list[Tensor],  # `Draws`
    ) -> tuple[Tensor, Tensor]:
        """(tokens (B, n) int64, laws (R, n + 1, V) fp32 of the rows that draw; the last is zero: nothing is drawn after it)."""
        features = hidden.gather(1, columns[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        logits = fit_width(self.heads(features, self.num_tokens), self.vocab_size)
        tokens, laws = pick_all(logits, Draws(*draws))
        return tokens, torch.cat([laws, torch.zeros_like(laws[:, :1])], dim=1)


def medusa_program(workshop: Workshop, heads: MedusaHeads, num_tokens: int, vocab_size: int) -> Callable[..., Any] | None:
    """The compiled `MedusaProgram` of heads bound to their target; None where there is none. Call it before linears are packed
    for oneDNN, which compilation does by itself."""
    program = MedusaProgram(heads, num_tokens, vocab_size)
    facts = (heads.config, num_tokens, vocab_size, heads.dtype)

    def make(path: Path) -> None:
        inputs, dynamic = example(program)
        is_small = sum(weight.numel() for weight in program.parameters()) <= MAX_SMALL_PARAMETERS
        compile_program(program, inputs, dynamic, path, ONE_THREAD if is_small else {})

    tensors = dict(program.named_parameters()) | dict(program.named_buffers())
    return workshop.program("medusa", facts, tensors, "the Medusa heads", make)


def example(program: MedusaProgram) -> tuple[tuple, tuple]:
    """Example inputs for three rows, and which dimensions stay symbolic."""
    hidden = torch.zeros(3, 4, program.heads.config.hidden_size, dtype=program.heads.dtype)
    draws, dynamic_draws = example_draws(program.num_tokens, program.vocab_size, hidden.device)
    rows = {0: Dim("rows", min=1, max=4096)}
    dynamic = ({**rows, 1: Dim("columns", min=1, max=1 << 16)}, rows, dynamic_draws)
    return (hidden, torch.tensor([0, 3, 1]), draws), dynamic
