"""The host's side of whole drafting loops: which batches they serve, how rows draw, and the draft
that comes out.

A program picks its own tokens (`models/picking.py`), with the numbers that `choice.choose` would
have drawn them with.

It knows nothing of bans (`min_tokens`, `bad_words`), but bans rarely bite, and one row's must not
keep a whole batch from its program. So the program drafts, and `bans_bite` looks whether the
general path could have drafted anything else: a token that a row may not say, or a position of a
drawn chain at which its row may not say everything. If so the general path drafts anew, with the
same random numbers. What is proposed is what the general path proposes, always: to drop a token for
its value would bias the output, so a drawn chain is judged by the positions it comes through, not
by the tokens drawn there. (Chains of greedy rows, and of those that race with the target's own
noise, are placed: any token may be looked at.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv.state_slots import StateSlots
from outrider.models.draft_loop import DraftLoop
from outrider.models.loaded import LoadedModel
from outrider.models.picking import Draws, no_draws
from outrider.rows import Row, Rows
from outrider.runtime.drafting import ChainLoop, MaskLoop
from outrider.runtime.run import NativeRun
from outrider.sampling.bans import Bans
from outrider.types import Draft


def programs_serve(rows: Rows) -> bool:
    """Programs know greedy rows, temperature, filters and shared noise; penalties, biases and
    grammars take the general path. Where bans may wait for `bans_bite`, it must be asked."""
    sampling = rows.sampling
    if rows.history is not None or sampling.bias is not None:
        return False
    return sampling.constraints is None or all(map(_may_wait, rows, _placed(rows)))


def bans_bite(rows: Rows, draft: Draft) -> bool:
    """Whether the bans of a row change this chain of a program, for rows that programs serve."""
    return rows.sampling.constraints is not None and any(
        _bites(row, tokens[:length], placed)
        for row, tokens, length, placed in zip(rows, *draft.lists, _placed(rows), strict=True)
    )


def _placed(rows: Rows) -> list[bool]:
    """Per row, whether its tokens are placed, not drawn."""
    return [
        row.params.is_greedy or races for row, races in zip(rows, rows.are_coupled, strict=True)
    ]


def _may_wait(row: Row, placed: bool) -> bool:
    """Whether what the row may not say can be looked at afterwards. A drawn row's first
    distribution must be whole already."""
    bans = row.constraint
    return bans is None or (
        isinstance(bans, Bans) and not bans.has_grammar and (placed or not bans.bite([]))
    )


def _bites(row: Row, chain: list[int], placed: bool) -> bool:
    bans = row.constraint
    if not isinstance(bans, Bans):
        return False
    if placed:
        return any(bans.forbids(chain[:node], token) for node, token in enumerate(chain))
    return any(bans.bite(chain[:node]) for node in range(len(chain)))


def draws_of(rows: Rows, num_tokens: int) -> Draws:
    """The inputs for picking the next `num_tokens` tokens of each row."""
    sampled = rows.sampling.sampled_rows
    device = rows.device
    draws = no_draws(num_tokens, rows.vocab_size, device)
    num_sampled = len(sampled)
    if not num_sampled:
        return draws
    scale = rows.sampling.warpers.temperature
    filters = rows.sampling.warpers.filters
    temperature = (
        torch.ones(num_sampled, device=device) if scale is None else scale[:, 0, 0].float()
    )
    draws = draws._replace(sampled=sampled, temperature=temperature)
    if filters is not None:
        draws = draws._replace(
            **dict(zip(("filtered", "top_k", "top_p", "min_p"), filters, strict=True))
        )
    everyone = torch.arange(num_sampled, device=device)
    if rows.coupled_rows is None:
        return draws._replace(drawn=everyone, uniforms=_uniforms(rows, sampled, num_tokens))
    races = rows.coupled_rows[sampled]
    uniforms = _uniforms(rows, sampled[~races], num_tokens)
    noise = _noise(rows, sampled[races], num_tokens)
    return draws._replace(
        drawn=everyone[~races], uniforms=uniforms, racing=everyone[races], noise=noise
    )


def _uniforms(rows: Rows, drawn: Tensor, num_tokens: int) -> Tensor:
    """(R, n) fp64: the coins that `choice.choose` would toss."""
    uniforms = rows.rng.draft_uniforms(rows.positions, num_tokens).to(rows.device)
    return uniforms if len(drawn) == len(rows) else uniforms[drawn]


def _noise(rows: Rows, racing: Tensor, num_tokens: int) -> Tensor:
    """(C, n, V) fp64: the target's own, of the text positions that are drafted."""
    positions = rows.positions[racing, None] + torch.arange(num_tokens, device=rows.device)
    return rows.rng.select(racing.tolist()).gumbel(positions, rows.vocab_size)


def drafted(rows: Rows, tokens: Tensor, probs: Tensor, lengths: Sequence[int]) -> Draft:
    """A program's tokens (B, n), and distributions (R, n + 1, V) of the rows that draw, as a draft
    of lengths[b] tokens a row."""
    width = max(lengths)
    counts = torch.tensor(lengths, device=tokens.device)
    if not len(probs):
        return Draft(tokens[:, :width], counts)
    if width < tokens.shape[1]:
        tokens = tokens[:, :width]
        probs = F.pad(probs[:, :width], (0, 0, 0, 1))
    if len(probs) < len(tokens):  # alongside rows that draw, the others have distributions, too
        full = probs.new_zeros(len(tokens), *probs.shape[1:])
        full[:, :width].scatter_(2, tokens[..., None], 1.0)
        full[_drawing(rows)] = probs
        probs = full
    drawn = None if rows.coupled_rows is None else ~rows.coupled_rows[:, None].expand_as(tokens)
    return Draft(tokens, counts, probs=probs, sampled=drawn)


def _drawing(rows: Rows) -> Tensor:
    """The sampled rows that no coupled rule verifies (R,)."""
    sampled = rows.sampling.sampled_rows
    return sampled if rows.coupled_rows is None else sampled[~rows.coupled_rows[sampled]]


class Loop(Protocol):
    """A whole chain of draft tokens for a batch, in few calls."""

    def draft(
        self, rows: Rows, pending: Sequence[list[int]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens (B, n), n at least `num_tokens`, after rows whose caches lack `pending`, and then
        hold all but the last token.

        With them distributions (R, n + 1, V) of the rows that draw, the last ones 0. None, and
        nothing held, where scores are no numbers.
        """


class ProgramLoop:
    """A loop of programs (`models/draft_loop.py`) as a `Loop`."""

    def __init__(self, loop: DraftLoop) -> None:
        self._loop = loop

    def draft(
        self, rows: Rows, pending: Sequence[list[int]], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """See `Loop`."""
        count = self._loop.length(num_tokens)
        return self._loop(pending, draws_of(rows, count), count)


def loop_of(draft: LoadedModel, vocab_size: int) -> Loop | None:
    """The draft model's whole loop over the target's vocabulary; None where it drafts token by
    token, or by the passes of `LM.forward`."""
    if draft.mask_token is not None:
        if not isinstance(draft.lm.run, NativeRun) or isinstance(draft.lm.kv, StateSlots):
            return None
        return MaskLoop(draft.lm, draft.lm.run, vocab_size, draft.mask_token)
    if isinstance(draft.lm.run, NativeRun):
        return ChainLoop(draft.lm, draft.lm.run, vocab_size)
    return None if draft.draft_loop is None else ProgramLoop(draft.draft_loop)
