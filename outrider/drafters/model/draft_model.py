"""A separate, smaller causal LM guesses a chain, token by token: the classic (Leviathan et al.
2211.17192).

Each draft token is drawn from the draft's own distribution under the row's sampling options,
filtered as the target's but for large nuclei (`sampling/draft_filters.py`), and that distribution
travels with it as `Draft.probs`. Greedy rows need no distribution: their tokens are the argmax, a
deterministic draft. Rows of a coupled verifier (`rows.coupled_rows`) get the winners of the
target's own noise instead.

A model with a mask token (PARD, 2504.18583) drafts a chain in one pass: after the text it is fed a
mask for every further token, and guesses one at each. Masks never stay in its cache.

The model's cache is kept by catch-up alone: before drafting it is fed whatever the row has that the
cache lacks (after a full acceptance that is two tokens, else one), after a step it forgets what was
rejected. A row that nothing is drafted for is not read either; alongside others a long text is read in
chunks (`prepare`, `reading.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.model.reading import Turns, read_together
from outrider.drafters.parallel import DistributionStop, Guesses, LevelGuesses, draft_chain
from outrider.drafters.programs import Loop, bans_bite, drafted, loop_of, programs_serve
from outrider.drafters.requirements import Requirements
from outrider.drafters.window import Window, windowed_draft
from outrider.errors import ConfigError
from outrider.kv import KVCache
from outrider.models.heads.acceptance import AcceptanceHead
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import check_same_vocabulary
from outrider.rows import Row, Rows
from outrider.runtime.drafting import with_masks
from outrider.runtime.run import NativeRun
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.types import Draft, TargetOutput, Verdict

MAX_RAGGED = 2  # tokens a row may lag behind and still catch up inside the first drafting pass
# the same where that pass is the only one: all that was kept of a draft
MAX_RAGGED_MASKED = 32


class ModelDrafter(Drafter):
    """Chains from a draft model."""

    needs = "a smaller model with the same tokenizer (--draft)"
    requires = Requirements(draft=True)
    reads_texts: ClassVar[bool] = True  # into a cache of its own, from nothing but the tokens
    loading_notes: Sequence[str] = ()

    def __init__(
        self,
        lm: LM,
        loop: Loop | None = None,
        confidence: ConfidenceSettings | None = None,
        mask_token: int | None = None,
    ) -> None:
        """`mask_token`: chains take one pass. Raises CheckpointError when a stop rule's trained head
        cannot be read."""
        self.lm = lm
        self._mask_token = mask_token
        self._loop = loop
        self._confidence = confidence or ConfidenceSettings()
        folder = self._confidence.acceptance_head
        self._acceptance = (
            AcceptanceHead.load(Path(folder), lm.shape.vocab_size).to(lm.device) if folder else None
        )
        self._turns = Turns()
        # of the open proposal, per row: its text was not read, its results mean nothing
        self._idle: list[bool] = []
        # the same: positions of the committed text that its cache holds
        self._known: list[int] = []

    @property
    def runs_modules(self) -> bool:
        return not isinstance(self.lm.run, NativeRun)

    @property
    def model(self) -> LM | None:
        # the guesses at masks know nothing of the tokens before them
        return self.lm if self._mask_token is None else None

    @property
    def notes(self) -> list[str]:
        if self._mask_token is None:
            return list(self.loading_notes)
        return [
            *self.loading_notes,
            f"the draft model has mask token {self._mask_token}: a draft is one pass (PARD)",
        ]

    @property
    def longest_text(self) -> int | None:
        return self.lm.shape.context_length if self.reads_texts else None

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        lm, loop, mask_token, _ = draft_model_of(setup)
        return cls(lm, loop, mask_token=mask_token)

    def start(self, row: Row) -> None:
        self.lm.kv.add_row()

    @property
    def text_caches(self) -> list[KVCache]:
        return [self.lm.kv] if self.reads_texts and self.lm.kv.by_position else []

    @property
    def caches(self) -> list[KVCache]:
        return [self.lm.kv]

    def pack(self, index: int) -> object:
        return self.lm.kv.pack(index) if self.reads_texts else None

    def unpack(self, state: object) -> None:
        self.lm.kv.unpack(self.lm.kv.num_rows - 1, state)

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        if not self.reads_texts:
            return gamma
        wanted = self._within_context(rows, gamma)
        texts = [row.tokens for row in rows]
        self._turns.read(
            self.lm,
            texts,
            [i for i, many in enumerate(self._lags(rows)) if many and wanted[i]],
            budget,
        )
        return [0 if many else g for g, many in zip(gamma, self._lags(rows), strict=True)]

    def unread(self, rows: Rows) -> list[int]:
        if not self.reads_texts:
            return super().unread(rows)
        return [
            max(0, len(row.tokens) - 1 - length)
            for row, length in zip(rows, self.lm.kv.lengths, strict=True)
        ]

    def catch_up(self, rows: Rows, gamma: list[int]) -> None:
        if not self.reads_texts or not any(gamma):
            return
        wanted = self._within_context(rows, gamma)
        if any(wanted):
            self._read_long(rows, self._passed_over(rows, wanted))

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        wanted = self._within_context(rows, gamma)
        steps = max(wanted)
        if steps == 0:
            return Draft.empty(len(rows), rows.device)
        self._idle = self._passed_over(rows, wanted)
        pending = self._catch_up(rows)
        held = list(self.lm.kv.lengths)
        if self._loop is not None and self._confidence.stop == "none" and programs_serve(rows):
            found = self._loop.draft(rows, pending, steps)
            draft = None if found is None else drafted(rows, *found, wanted)
            if draft is not None and not bans_bite(rows, draft):
                return draft
            for index, length in enumerate(held):
                self.lm.kv.truncate(index, length)
        return self._propose_stepwise(rows, pending, wanted)

    def _propose_stepwise(self, rows: Rows, pending: list[list[int]], wanted: list[int]) -> Draft:
        """Token by token: any sampling option, any stop rule, no compiler."""
        rule = self._stop_rule(rows)
        return draft_chain(
            rows,
            wanted,
            self._guesses(pending, max(wanted)),
            None if rule is None else DistributionStop(rule),
        )

    def _guesses(self, pending: list[list[int]], num_levels: int) -> Guesses:
        """The model's guesses at the next tokens of rows whose caches lack `pending`."""
        if self._mask_token is None:
            return _Passes(self.lm, pending, num_levels)
        return LevelGuesses(_masked_logits(self.lm, pending, num_levels, self._mask_token))

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        kv = self.lm.kv
        for index, (row, accepted) in enumerate(zip(rows, verdict.lists.num_accepted, strict=True)):
            if index < len(self._known):
                kv.truncate(index, min(self._known[index] + accepted, len(row.tokens) - 1))
        self._idle = []
        self._known = []

    def stop(self, index: int) -> None:
        self.lm.kv.swap_remove(index)
        super().stop(index)

    def _stop_rule(self, rows: Rows) -> StopRule | None:
        head = self._acceptance
        settings = self._confidence
        if settings.stop == "none":
            return None
        greedy = torch.tensor([row.params.is_greedy for row in rows], device=rows.device)
        pending = torch.tensor([row.tokens[-1] for row in rows], device=rows.device)
        predict = None if head is None else partial(head.chance, greedy=greedy)
        ends = [row.stop_tokens for row in rows]
        return StopRule(settings, len(rows), rows.device, predict, pending=pending, ends=ends)

    def _within_context(self, rows: Rows, gamma: list[int]) -> list[int]:
        """Nodes per row that the draft model has room for."""
        context = self.lm.shape.context_length
        return [
            max(0, min(g, context - len(row.tokens))) for g, row in zip(gamma, rows, strict=True)
        ]

    def _lags(self, rows: Rows) -> list[bool]:
        """Per row, whether its cache lacks more than the first drafting pass can feed."""
        most = MAX_RAGGED if self._mask_token is None else MAX_RAGGED_MASKED
        return [
            len(row.tokens) - length > most
            for row, length in zip(rows, self.lm.kv.lengths, strict=True)
        ]

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        """The tokens that each row's cache still lacks after any long catch-up: one, or two after a
        full acceptance. An idle row gets a token that is not kept."""
        kv = self.lm.kv
        idle = self._idle
        self._read_long(rows, idle)
        self._known = [
            n if skip else len(row.tokens)
            for row, n, skip in zip(rows, kv.lengths, idle, strict=True)
        ]
        return [
            row.tokens[-1:] if skip else row.tokens[n:]
            for row, n, skip in zip(rows, kv.lengths, idle, strict=True)
        ]

    def _passed_over(self, rows: Rows, wanted: list[int]) -> list[bool]:
        """Per row, whether its text stays unread in this step."""
        return [many and not count for many, count in zip(self._lags(rows), wanted, strict=True)]

    def _read_long(self, rows: Rows, idle: list[bool]) -> None:
        """Read the texts but for those of idle rows, where any lacks more than a drafting pass can
        feed."""
        if any(lags and not skip for lags, skip in zip(self._lags(rows), idle, strict=True)):
            texts = [
                row.tokens[: n + 1] if skip else row.tokens
                for row, n, skip in zip(rows, self.lm.kv.lengths, idle, strict=True)
            ]
            read_together(self.lm, texts, range(len(texts)))
            self.lm.catch_up(texts)


class _Passes:
    """`Guesses` of a model that runs a pass for every token, after texts whose last tokens its
    caches lack."""

    def __init__(self, lm: LM, pending: list[list[int]], num_levels: int) -> None:
        self.num_levels = num_levels
        self._lm = lm
        self._pending = pending

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        """(B, 1, V), the caches fed with `parents` (B, 1), or first with all that they lack."""
        lines = [[0]] * len(parents) if level else self._pending
        width = max(map(len, lines))
        fed = (
            parents
            if level
            else torch.tensor(
                [line + [0] * (width - len(line)) for line in lines], device=self._lm.device
            )
        )
        logits = self._lm.forward(fed).logits
        for index, line in enumerate(lines):
            self._lm.kv.advance(index, len(line))
        last = torch.tensor([len(line) - 1 for line in lines], device=self._lm.device)
        return logits[torch.arange(len(lines), device=self._lm.device), last][:, None]


def _masked_logits(lm: LM, pending: list[list[int]], num_levels: int, mask_token: int) -> Tensor:
    """(B, levels, V): the guesses of one pass, which feeds the caches what they lack."""
    lines = with_masks(pending, mask_token, num_levels)
    width = max(map(len, lines))
    padded = [line + [mask_token] * (width - len(line)) for line in lines]
    logits = lm.forward(torch.tensor(padded, device=lm.device)).logits
    for index, line in enumerate(pending):
        lm.kv.advance(index, len(line))
    first = torch.tensor([len(line) - 1 for line in pending], device=lm.device)
    columns = first[:, None] + torch.arange(num_levels, device=lm.device)
    return logits[torch.arange(len(lines), device=lm.device)[:, None], columns]


def draft_model_of(
    setup: DraftSetup, window: Window = 0
) -> tuple[LM, Loop | None, int | None, list[str]]:
    """The model given with --draft, its whole loop, its mask token, and notes on its window.

    Raises ConfigError when there is none or the window is too small, CapabilityError when it speaks
    another vocabulary or cannot have a window."""
    if setup.draft is None:
        raise ConfigError(
            "drafter 'draft-model' needs a model: --draft FOLDER_OR_HUB_ID (draft=... in Python)"
        )
    target = setup.target
    draft = setup.draft
    if target.tokenizer is not None and draft.tokenizer is not None:
        check_same_vocabulary(
            target.tokenizer, draft.tokenizer, target.label, draft.label, may_lack=True
        )
    draft, notes = windowed_draft(
        draft, window, target.lm.shape.context_length, setup.num_draft_tokens
    )
    return draft.lm, loop_of(draft, target.lm.shape.vocab_size), draft.mask_token, notes
