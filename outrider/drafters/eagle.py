"""EAGLE and EAGLE-3: a small head trained on the target's hidden states drafts chains or trees (`models/heads/eagle.py`).

The drafting is a draft model's, token by token or level by level (`draft_model.py`, `draft_tree.py`: EAGLE-2's dynamic trees are
`tree=best-first`), with the head in the model's place. What is different is what the head's cache may hold: only tokens beside
the TARGET's own features. So after every step it forgets all it drafted, accepted or not, and `commit` puts aside the features of
the tokens that stayed; the next draft feeds them first. Prompts are fed as the target reads them.

    place of a row's cache    0              1              ...   n - 2
    token                     x_{b+1}        x_{b+2}              x_{n-1}, the pending token
    feature                   g_b            g_{b+1}              g_{n-2}

b is 0 unless the beginning of the prompt was never read (its keys and values came from a store): then the head knows the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import DraftSetup
from outrider.drafters.draft_model import ModelDrafter
from outrider.drafters.draft_tree import DraftModelSettings, TreeModelDrafter
from outrider.errors import CapabilityError
from outrider.models.heads.eagle import EagleHead, Kind
from outrider.models.heads.eagle_files import TargetSizes, head_signals, load_eagle
from outrider.models.heads.eagle_lm import EagleLM
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.models.load import LoadedModel
from outrider.models.pack import can_pack, pack_linears, panel_linears
from outrider.rows import Row, Rows
from outrider.settings import setting
from outrider.trees.plan import TreePlan
from outrider.types import Draft, TargetOutput, Verdict

MAX_WAITING = 64  # features put aside before they are fed even though nobody asked for a draft


@dataclass(frozen=True)
class EagleSettings(DraftModelSettings):
    """Which head, and how its guesses branch."""

    head: str = setting("", "folder of the head; the same as --draft")


@dataclass
class _Fed:
    """One row: where its cache begins in the text, and the target's features of the tokens behind it."""

    row: Row
    begin: int = 0  # b of the module docstring
    waiting: list[Tensor] = field(default_factory=list)  # parts (k, H), in order, not fed yet

    @property
    def num_waiting(self) -> int:
        return sum(len(part) for part in self.waiting)

    def features(self) -> Tensor:
        """(k, H), all that wait."""
        if len(self.waiting) > 1:
            self.waiting = [torch.cat(self.waiting)]
        return self.waiting[0]


class FeatureFed(ModelDrafter):
    """What a head needs beside drafting: the target's features, fed in time. Mixed into the drafters of chains and trees."""

    lm: EagleLM  # type: ignore[assignment]
    _fed: list[_Fed]
    _counts: list[int] | None  # of an open proposal: waiting features per row that it fed
    _lengths: list[int]  # of the caches when it began

    def __init__(self, lm: EagleLM, *details: Any) -> None:
        super().__init__(lm, *details)  # type: ignore[arg-type]
        self._fed, self._counts, self._lengths = [], None, []

    @property
    def signals(self) -> tuple[int, ...]:
        return self.lm.head.config.signals

    @property
    def model(self) -> LM | None:
        """None: its law depends on the target's features, so it is no law of a text."""
        return None

    def start(self, row: Row) -> None:
        super().start(row)
        self._fed.append(_Fed(row))

    def stop(self, index: int) -> None:
        super().stop(index)
        self._fed[index] = self._fed[-1]
        self._fed.pop()
        self._counts = None

    @torch.inference_mode()
    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        fed = self._fed[index]
        if start != fed.begin + self.lm.kv.lengths[index] + fed.num_waiting:  # what lies before was never read
            fed.begin, fed.waiting = start, []
            self.lm.kv.truncate(index, 0)
        fed.waiting.append(self.lm.head.features(hidden))
        self._feed_most(index)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        """A row without features, such as one whose prompt is a single token, gets its first draft a step later."""
        self._forget_draft()
        known = [g if fed.waiting else 0 for g, fed in zip(gamma, self._fed, strict=True)]
        return super().propose(rows, known)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        counts, lengths = self._counts or [0] * len(self._fed), self._lengths
        self._close(verdict, draft)
        for index, (fed, count) in enumerate(zip(self._fed, counts, strict=True)):
            if lengths:
                self.lm.kv.truncate(index, lengths[index])  # all that was drafted
                self.lm.kv.advance(index, count)  # but the target's features stay
            if count:
                fed.waiting = []
        for index, features in enumerate(self._kept_features(output)):
            self._fed[index].waiting.append(features)
            if self._fed[index].num_waiting > MAX_WAITING:
                self._feed_most(index)

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        """The open proposal is judged."""
        self._counts, self._lengths = None, []

    def _forget_draft(self) -> None:
        """A proposal that was never judged leaves nothing behind."""
        for index, length in enumerate(self._lengths if self._counts is not None else []):
            self.lm.kv.truncate(index, length)
        self._counts, self._lengths = None, []

    def _kept_features(self, output: TargetOutput) -> list[Tensor]:
        """Per row (k, H): of the tokens of the target's pass that stayed."""
        longest = max(map(len, output.kept))
        columns = torch.tensor([line + [0] * (longest - len(line)) for line in output.kept], device=self.lm.device)
        rows = torch.arange(len(columns), device=self.lm.device)[:, None]
        features = self.lm.head.features({signal: output.hidden[signal][rows, columns] for signal in self.signals})
        return [features[index, : len(line)] for index, line in enumerate(output.kept)]

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        """The tokens that wait with their features, the last one pending. A row without any gets a place that is not kept."""
        nothing = torch.zeros(1, self.lm.head.config.hidden_size, dtype=self.lm.dtype, device=self.lm.device)
        self._counts = [fed.num_waiting for fed in self._fed]
        self._lengths = list(self.lm.kv.lengths)
        self.lm.give([fed.features() if fed.waiting else nothing for fed in self._fed])
        return [row.tokens[-max(count, 1) :] for row, count in zip(rows, self._counts, strict=True)]

    def _feed_most(self, index: int) -> None:
        """Feed what waits but the last one, whose token may be the pending one: the next draft begins with it."""
        fed = self._fed[index]
        features = fed.features()
        first = fed.begin + self.lm.kv.lengths[index] + 1
        for start in range(0, len(features) - 1, PREFILL_CHUNK):
            part = features[start : min(start + PREFILL_CHUNK, len(features) - 1)]
            self.lm.feed(index, fed.row.tokens[first + start : first + start + len(part)], part)
        fed.waiting = [features[-1:]]


class EagleChain(FeatureFed, ModelDrafter):
    """Chains, token by token."""


class EagleDrafter(FeatureFed, TreeModelDrafter):
    """The registered "eagle": chains unless the `tree` setting says otherwise."""

    needs = "an EAGLE head trained for the target (--draft FOLDER)"
    needs_draft = False
    needs_head = True
    trained = True
    Settings = EagleSettings
    kind: Kind = "eagle"

    @classmethod
    def loop_tokens(cls, settings: DraftModelSettings, most: int, *, any_length: bool) -> int:
        return 0

    @classmethod
    def head_signals(cls, head: str, target_config: Any) -> tuple[int, ...]:
        return head_signals(head, cls.kind, TargetSizes.of(target_config))

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        lm = _head_of(setup, cls.kind)
        settings: EagleSettings = setup.settings
        return cls(lm, TreePlan(settings)) if cls.drafts_trees(settings) else EagleChain(lm, None, settings)

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        super()._close(verdict, draft)
        self.plan.observe(draft, verdict)
        self._trees = []


class Eagle3Drafter(EagleDrafter):
    """The registered "eagle3"."""

    needs = "an EAGLE-3 head trained for the target (--draft FOLDER)"
    kind: Kind = "eagle3"


def _head_of(setup: DraftSetup, kind: Kind) -> EagleLM:
    """The head, on the target's kernels. Raises CheckpointError when it does not fit the target."""
    target = setup.target
    if setup.head is None or target.config is None:
        raise CapabilityError(f"drafter '{kind}' needs a head trained for this target: --draft FOLDER")
    head = load_eagle(setup.head, kind, TargetSizes.of(target.config, target.lm.shape.vocab_size))
    head.to(device=target.lm.device, dtype=target.lm.dtype)
    bind_target(head, target)
    if target.lm.native:
        panel_linears(head)
    if can_pack(target.lm.device, target.lm.dtype):
        pack_linears(head)
    shape = target.lm.shape
    return EagleLM(head, shape.vocab_size, shape.context_length, native=target.lm.native)


def bind_target(head: EagleHead, target: LoadedModel) -> None:
    """Give the head what it shares with the target. Raises CapabilityError where the target's were not kept."""
    if head.config.own_embedding and head.config.own_output:
        return
    if target.tables is None:
        raise CapabilityError(f"{target.name}: its tables were not kept, but the {head.config.kind} head needs them")
    table = target.tables.embedding.weight
    assert isinstance(table, Tensor)
    head.bind(table, target.tables.output)


