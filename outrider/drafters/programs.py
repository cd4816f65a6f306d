"""The host's side of compiled drafting programs: which batches they serve, how rows draw, and the draft that comes out.

A program picks its own tokens (`models/picking.py`), with the numbers that `choice.choose` would have drawn them with.

It knows nothing of bans (`min_tokens`, `bad_words`), but bans rarely bite, and one row's must not keep a whole batch from its
program. So the program drafts, and `bans_bite` looks whether the general path could have drafted anything else: a token that a
greedy row may not say, or a place of a drawn chain at which its row may not say everything. If so the general path drafts anew,
with the same random numbers. What is proposed is what the general path proposes, always: to drop a token for its value would
bias the output, so a drawn chain is judged by the places it comes through, not by the tokens drawn there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.picking import Draws
from outrider.rows import Row, Rows
from outrider.sampling.bans import Bans
from outrider.types import Draft


def programs_serve(rows: Rows) -> bool:
    """Programs know greedy rows and temperature; filters, penalties, biases, grammars and shared noise (which greedy rows have
    no use for) take the general path. Where bans may wait for `bans_bite`, it must be asked."""
    sampling = rows.sampling
    if rows.coupled_rows is not None and not all(row.params.is_greedy for row in rows):
        return False
    filters = (sampling.warpers.top_k, sampling.warpers.top_p, sampling.warpers.min_p, sampling.bias)
    if rows.history is not None or any(part is not None for part in filters):
        return False
    return sampling.constraints is None or all(map(_may_wait, rows))


def bans_bite(rows: Rows, draft: Draft) -> bool:
    """Whether the bans of a row change this chain of a program, for rows that programs serve."""
    return rows.sampling.constraints is not None and any(
        _bites(row, tokens[:length]) for row, tokens, length in zip(rows, *draft.lists, strict=True)
    )


def _may_wait(row: Row) -> bool:
    """Whether what the row may not say can be looked at afterwards. A drawn row's first law must be whole already."""
    bans = row.constraint
    return bans is None or (
        isinstance(bans, Bans) and not bans.has_grammar and (row.params.is_greedy or not bans.forbidden([]))
    )


def _bites(row: Row, chain: list[int]) -> bool:
    bans = row.constraint
    if not isinstance(bans, Bans):
        return False
    forbidden = (bans.forbidden(chain[:node]) for node in range(len(chain)))
    if row.params.is_greedy:
        return any(token in tokens for token, tokens in zip(chain, forbidden, strict=True))
    return any(forbidden)


def draws_of(rows: Rows, num_tokens: int) -> Draws:
    """How rows draw this step, with `num_tokens` uniforms each."""
    sampling, device = rows.sampling, rows.device
    drawing = sampling.sampled_rows
    if not len(drawing):
        return drawing, torch.empty(0, device=device), torch.empty(0, num_tokens, dtype=torch.float64, device=device)
    scale = sampling.warpers.temperature
    temperature = torch.ones(len(drawing), device=device) if scale is None else scale[:, 0, 0].float()
    uniforms = rows.rng.draft_uniforms(rows.positions, num_tokens).to(device)
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
