"""A separate, smaller causal LM guesses a chain, token by token: the classic (Leviathan et al. 2211.17192).

Each draft token is drawn from the draft's own law under the row's sampling options, the same filters in the same order
as the target's, and that law travels with it as `Draft.probs`. Greedy rows need no law: their tokens are the argmax, a
deterministic draft. In drafter-invariant mode (`rows.coupled`) the draft argmaxes with the target's own noise instead.

The model's cache is kept by catch-up alone: before drafting it is fed whatever the row has that the cache lacks (after a
full acceptance that is two tokens, else one), after a step it forgets what was rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSetup
from outrider.errors import ConfigError
from outrider.models.lm import LM
from outrider.models.vocabulary import check_same_vocabulary, fit_width
from outrider.rows import Row, Rows
from outrider.sampling.distribution import distribution
from outrider.sampling.rng import Purpose
from outrider.types import Draft, Verdict

MAX_RAGGED = 2  # tokens a row may lag behind and still catch up inside the first drafting pass


class ModelDrafter(Drafter):
    """Chains from a draft model."""

    needs_draft = True

    def __init__(self, lm: LM) -> None:
        self.lm = lm

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        if setup.draft is None:
            raise ConfigError("drafter 'draft-model' needs a model: --draft FOLDER_OR_HUB_ID (draft=... in Python)")
        target, draft = setup.target, setup.draft
        if target.tokenizer is not None and draft.tokenizer is not None:
            check_same_vocabulary(target.tokenizer, draft.tokenizer, target.name, draft.name)
        return cls(draft.lm)

    def start(self, row: Row) -> None:
        self.lm.kv.add_row()

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        context = self.lm.shape.context_length
        wanted = [max(0, min(g, context - len(row.tokens))) for g, row in zip(gamma, rows, strict=True)]
        steps = max(wanted)
        if steps == 0:
            return Draft.empty(len(rows), rows.device)
        lengths = torch.tensor(wanted, device=rows.device)
        plain_greedy = rows.sampling.sampled_rows.numel() == 0 and rows.sampling.bias is None and rows.history is None
        tokens: list[Tensor] = []  # each (B,)
        laws: list[Tensor] = []  # each (B, V)
        logits = self._first_logits(rows)
        for node in range(steps):
            if node:
                logits = self.lm.forward(tokens[-1][:, None])[:, 0]
                self._advance()
            logits = fit_width(logits, rows.vocab_size)
            if plain_greedy:
                tokens.append(logits.argmax(dim=-1))
                continue
            so_far = Draft(torch.stack(tokens, 1), lengths.clamp(max=node)) if tokens else None
            law = distribution(logits[:, None], rows.sampling, rows.history, so_far, first_node=node)[:, 0]
            laws.append(law)
            tokens.append(_choose(law, rows, node))
        chosen = torch.stack(tokens, dim=1)
        if plain_greedy or rows.coupled:
            return Draft(chosen, lengths)
        laws.append(torch.zeros_like(laws[0]))  # nothing is drawn after the last node
        return Draft(chosen, lengths, probs=torch.stack(laws, dim=1))

    def commit(self, rows: Rows, verdict: Verdict) -> None:
        kv = self.lm.kv
        for index, (row, accepted) in enumerate(zip(rows, verdict.num_accepted.tolist(), strict=True)):
            before = self._committed[index]  # tokens of the row when it was drafted for, all in the cache
            kv.truncate(index, min(before + accepted, len(row.tokens) - 1))

    def stop(self, index: int) -> None:
        self.lm.kv.swap_remove(index)

    def _first_logits(self, rows: Rows) -> Tensor:
        """Logits (B, V) after each row's last token, the cache caught up to include it."""
        kv = self.lm.kv
        if any(len(row.tokens) - length > MAX_RAGGED for row, length in zip(rows, kv.lengths, strict=True)):
            self.lm.catch_up([row.tokens for row in rows])
        pending = [row.tokens[length:] for row, length in zip(rows, kv.lengths, strict=True)]
        width = max(len(p) for p in pending)
        padded = torch.tensor([p + [0] * (width - len(p)) for p in pending], device=self.lm.device)
        last = torch.tensor([len(p) - 1 for p in pending], device=self.lm.device)
        logits = self.lm.forward(padded)
        for index, tokens in enumerate(pending):
            kv.advance(index, len(tokens))
        self._committed = list(kv.lengths)
        return logits[torch.arange(len(pending), device=self.lm.device), last]

    def _advance(self) -> None:
        for index in range(self.lm.kv.num_rows):
            self.lm.kv.advance(index, 1)


def _choose(law: Tensor, rows: Rows, node: int) -> Tensor:
    """One token per row (B,) from its law (B, V), with the row's own randomness for that position of its text."""
    positions = rows.positions + node
    if rows.coupled:
        noise = rows.rng.gumbel(positions[:, None], law.shape[-1])[:, 0]
        return (law.log() + noise.to(law)).argmax(dim=-1)
    return rows.rng.categorical(law, Purpose.DRAFT, positions)
