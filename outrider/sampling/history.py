"""Which tokens a row has seen, as tables over the vocabulary: what repetition, presence and
frequency penalties ask.

Kept incrementally (one small update per committed block) and built only when some row of the batch
has a penalty. The tables hold committed tokens only, the pending token included; tokens of a draft
path are added per node by `path_counts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.types import Draft


@dataclass
class History:
    """Committed tokens of every row, counted."""

    prompt_mask: Tensor  # (B, V) bool: token occurs in the prompt
    output_counts: Tensor  # (B, V) int32: occurrences in what was generated so far

    @classmethod
    def start(
        cls,
        prompts: list[list[int]],
        outputs: list[list[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> History:
        """Tables for rows whose text so far is prompts[b] + outputs[b]."""
        history = cls(
            prompt_mask=torch.zeros(0, vocab_size, dtype=torch.bool, device=device),
            output_counts=torch.zeros(0, vocab_size, dtype=torch.int32, device=device),
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            history.add_row(prompt, output)
        return history

    def add_row(self, prompt: list[int], output: list[int] | None = None) -> None:
        """A new last row."""
        counts = self._count(output or [])
        self.prompt_mask = torch.cat([self.prompt_mask, (self._count(prompt) > 0)[None]])
        self.output_counts = torch.cat([self.output_counts, counts[None]])

    def append(self, row: int, tokens: list[int]) -> None:
        """`tokens` were committed to the output of `row`."""
        index = torch.tensor(tokens, dtype=torch.int64, device=self.output_counts.device)
        self.output_counts[row].index_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def swap_remove(self, row: int) -> None:
        """Drop `row`; the last row takes its place."""
        last = self.prompt_mask.shape[0] - 1
        for table in (self.prompt_mask, self.output_counts):
            table[row] = table[last].clone()
        self.prompt_mask = self.prompt_mask[:last]
        self.output_counts = self.output_counts[:last]

    def _count(self, tokens: Iterable[int]) -> Tensor:
        # (V,) int32; ids beyond the output vocabulary cannot be emitted, so nothing is lost by not
        # counting them
        vocab_size = self.output_counts.shape[1]
        known = torch.tensor([token for token in tokens if token < vocab_size], dtype=torch.int64)
        return torch.bincount(known, minlength=vocab_size).to(self.output_counts)


def path_counts(draft: Draft, first_node: int, num_outputs: int, vocab_size: int) -> Tensor:
    """How often each token occurs on the draft path that leads to an output: (B, M, V) int32.

    Output m follows node m - 1, so its path is node m - 1 and that node's ancestors; output 0 has
    an empty path:

        chain a b c     output 0: {}   1: {a}   2: {a, b}   3: {a, b, c}
    """
    on_path = _on_path(draft)[:, first_node : first_node + num_outputs]  # (B, M, N) bool
    num_rows, num_outputs, _ = on_path.shape
    counts = torch.zeros(
        num_rows, num_outputs, vocab_size, dtype=torch.int32, device=draft.tokens.device
    )
    index = draft.tokens[:, None, :].expand(-1, num_outputs, -1)
    return counts.scatter_add_(-1, index, on_path.to(torch.int32))


def _on_path(draft: Draft) -> Tensor:
    # (B, N+1, N) bool: node n lies on the path to output m
    num_rows, num_nodes = draft.tokens.shape
    device = draft.tokens.device
    if draft.parents is None:
        below = torch.ones(num_nodes + 1, num_nodes, dtype=torch.bool, device=device).tril(-1)
        return below.expand(num_rows, -1, -1)
    on_path = torch.zeros(num_rows, num_nodes + 1, num_nodes, dtype=torch.bool, device=device)
    rows = torch.arange(num_rows, device=device)
    for node in range(num_nodes):  # parents come before children, so the parent's path is complete
        on_path[:, node + 1] = on_path[rows, draft.parents[:, node] + 1]
        on_path[:, node + 1, node] = True
    return on_path
