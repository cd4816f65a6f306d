"""The host's side of compiled drafting programs: which batches they serve, how rows draw, and the draft that comes out.

A program picks its own tokens (`models/picking.py`), with the numbers that `choice.choose` would have drawn them with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.rows import Rows
from outrider.types import Draft


def programs_serve(rows: Rows) -> bool:
    """Programs know greedy rows and temperature; filters, penalties, biases, grammars and shared noise take the general path."""
    sampling = rows.sampling
    filters = (sampling.warpers.top_k, sampling.warpers.top_p, sampling.warpers.min_p, sampling.bias, sampling.constraints)
    return rows.coupled_rows is None and rows.history is None and all(part is None for part in filters)


def draws_of(rows: Rows, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the R rows that draw (R,) int64, their temperatures (R,) fp32, their uniforms (R, num_tokens) fp64)."""
    sampling = rows.sampling
    drawing = sampling.sampled_rows
    if not len(drawing):
        return drawing, torch.empty(0), torch.empty(0, num_tokens, dtype=torch.float64)
    scale = sampling.warpers.temperature
    temperature = torch.ones(len(drawing)) if scale is None else scale[:, 0, 0].float()
    uniforms = rows.rng.draft_uniforms(rows.positions, num_tokens)
    return drawing, temperature, uniforms if len(drawing) == len(rows) else uniforms[drawing]


def drafted(rows: Rows, tokens: Tensor, laws: Tensor, lengths: Sequence[int]) -> Draft:
    """A program's tokens (B, n), and laws (R, n + 1, V) of the rows that draw, as a draft of lengths[b] tokens a row."""
    width, counts = max(lengths), torch.tensor(lengths, device=tokens.device)
    if width < tokens.shape[1]:
        tokens, laws = tokens[:, :width], F.pad(laws[:, :width], (0, 0, 0, 1))
    if not len(laws):
        return Draft(tokens, counts)
    if len(laws) < len(tokens):  # beside rows that draw, greedy ones have laws, too
        full = laws.new_zeros(len(tokens), *laws.shape[1:])
        full[:, :width].scatter_(2, tokens[..., None], 1.0)
        full[rows.sampling.sampled_rows] = laws
        laws = full
    return Draft(tokens, counts, probs=laws)
