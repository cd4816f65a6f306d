"""Drafting with a head that is fed the target's hidden states: EAGLE's (`eagle.py`), MTP's
(`mtp.py`).

The drafting is a draft model's, token by token or level by level (`draft_model.py`,
`draft_tree.py`: EAGLE-2's dynamic trees are `tree=best-first`), with the head instead of the model.
What is different is what the head's cache may hold: only tokens alongside the TARGET's own features.
So after every step it forgets all it drafted, accepted or not, and `commit` puts the target's pass
aside; the next draft takes the features of the tokens that stayed from it and feeds them first. So
steps without drafts cost next to nothing, and the first draft after them finds all but the last
token fed (`catch_up`). Prompts are fed as the target reads them.

    slot of a row's cache     0              1              ...   n - 2
    token                     x_{b+1}        x_{b+2}              x_{n-1}, the pending token
    feature                   g_b            g_{b+1}              g_{n-2}

b is 0 unless the beginning of the prompt was never read (its keys and values came from a store):
then the head knows the rest. A text that is longer than the head's own context is neither read nor
drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.draft_tree import MaskedTrees, TreeModelDrafter
from outrider.drafters.programs import bans_bite, drafted, programs_serve
from outrider.drafters.requirements import Requirements
from outrider.models.heads.head_lm import HeadLM
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.rows import PerRow, Row, Rows
from outrider.sampling.confidence import ConfidenceSettings
from outrider.types import Draft, TargetOutput, Verdict

# passes put aside, and features of a row that wait, before they are fed even though nobody asked
# for a draft
MAX_WAITING = 64


@dataclass
class _Fed:
    """One row: where its cache begins in the text, and what the target thought at the tokens after
    it."""

    row: Row
    begin: int = 0  # b of the module docstring
    # parts (k, F) of hidden states (`FedHead.join`), in order, not fed yet
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return sum(len(part) for part in self.waiting)

    def joined(self) -> Tensor:
        """(k, F), all that wait."""
        if len(self.waiting) > 1:
            self.waiting = [torch.cat(self.waiting)]
        return self.waiting[0]


class FeatureFed(ModelDrafter):
    """Feed a head the target's features in time. Mixed into the drafters of chains and trees."""

    lm: HeadLM  # type: ignore[assignment]
    reads_texts = False  # features, which the target has
    requires = Requirements(head=True)
    _fed: PerRow[_Fed]
    _counts: list[int] | None  # of an open proposal: waiting features per row that it fed
    _lengths: list[int]  # of the caches when it began
    # the target's passes whose features no row has taken yet: hidden states, and kept columns
    _aside: list[tuple[Mapping[int, Tensor], list[list[int]]]]

    def __init__(self, lm: HeadLM, *details: Any) -> None:
        super().__init__(lm, *details)  # type: ignore[arg-type]
        self._fed = PerRow()
        self._counts = None
        self._lengths = []
        self._aside = []

    @property
    def notes(self) -> list[str]:
        return list(self.loading_notes)

    @property
    def signals(self) -> tuple[int, ...]:
        return self.lm.head.config.signals

    @property
    def runs_modules(self) -> bool:
        return self.lm.run is None

    @property
    def model(self) -> LM | None:
        """None: its distribution depends on the target's features, so it is no distribution of a
        text."""
        return None

    def start(self, row: Row) -> None:
        self._take_aside()
        super().start(row)
        self._fed.append(_Fed(row))

    def stop(self, index: int) -> None:
        if len(self._fed) == 1:  # the only row that would read them
            self._aside = []
        self._take_aside()
        self._forget_draft()
        super().stop(index)

    def pack(self, index: int) -> object:
        self._take_aside()
        self._forget_draft()
        fed = self._fed[index]
        return fed.begin, list(fed.waiting), self.lm.kv.pack(index)

    def unpack(self, state: tuple[int, list[Tensor], Any]) -> None:  # type: ignore[override]
        fed = self._fed[-1]
        fed.begin, fed.waiting, packed = state
        self.lm.kv.unpack(self.lm.kv.num_rows - 1, packed)

    @torch.inference_mode()
    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        self._take_aside()
        fed = self._fed[index]
        if self._outgrown(fed):
            return
        # what lies before was never read
        if start != fed.begin + self.lm.kv.lengths[index] + fed.num_waiting:
            fed.begin = start
            fed.waiting = []
            self.lm.kv.truncate(index, 0)
        fed.waiting.append(self.lm.head.join(hidden))
        self._feed_capacity(index)

    @torch.inference_mode()
    def catch_up(self, rows: Rows, gamma: list[int]) -> None:
        if not any(gamma) or len(self._aside) < 2:  # one pass is the next draft's own to read
            return
        self._take_aside()
        for index, fed in enumerate(self._fed):
            if fed.num_waiting > 1:
                self._feed_capacity(index)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        """A row without features, such as one whose prompt is a single token, gets its first draft
        a step later."""
        self._forget_draft()
        if not any(gamma):
            return Draft.empty(len(rows), rows.device)
        return super().propose(rows, self._askable(gamma))

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        counts = self._counts
        lengths = self._lengths
        kv = self.lm.kv
        self._close(verdict, draft)
        if counts is not None:
            self.lm.settle()
            for index, (fed, count, length) in enumerate(
                zip(self._fed, counts, lengths, strict=True)
            ):
                true = max(0, count - self.lm.lag)
                kv.truncate(index, length)  # all that was drafted
                kv.advance(index, true)  # but the target's features stay
                if count:
                    fed.waiting = [fed.joined()[true:].clone()] if self.lm.lag else []
        self._aside.append((output.hidden, output.kept))
        if len(self._aside) >= MAX_WAITING:
            self._take_aside()

    @torch.inference_mode()
    def _take_aside(self) -> None:
        """Every row takes its features from the passes that were put aside."""
        aside = self._aside
        self._aside = []
        if not aside:
            return
        passes = [hidden for hidden, _ in aside]
        # side by side, (B, N+1, F) of each: after a pass of the target every operation costs 30 us
        joined = self.lm.head.join(
            {key: torch.cat([hidden[key] for hidden in passes], dim=1) for key in self.signals}
        )
        sizes = [hidden[self.signals[0]].shape[1] for hidden in passes]
        starts = list(accumulate(sizes, initial=0))
        for index, fed in enumerate(self._fed):
            columns = [
                start + column
                for start, (_, kept) in zip(starts, aside, strict=False)
                for column in kept[index]
            ]
            fed.waiting.append(_chosen(joined[index], columns))
        for index, fed in enumerate(self._fed):
            if not self._outgrown(fed) and fed.num_waiting >= MAX_WAITING:
                self._feed_capacity(index)

    def _outgrown(self, fed: _Fed) -> bool:
        """Whether a row's text is beyond the head's context; what was put aside for it is dropped."""
        if len(fed.row.tokens) < self.lm.shape.context_length:
            return False
        fed.waiting = []
        return True

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        """The open proposal is judged."""
        self._counts = None
        self._lengths = []

    def _forget_draft(self) -> None:
        """A proposal that was never judged leaves nothing behind."""
        for index, length in enumerate(self._lengths if self._counts is not None else []):
            self.lm.kv.truncate(index, length)
        self._counts = None
        self._lengths = []

    def _askable(self, gamma: list[int]) -> list[int]:
        """Nodes asked for of rows with features, as many as the head can draft."""
        self._take_aside()
        max_nodes = max(gamma) if self.lm.max_chain is None else self.lm.max_chain
        return [
            min(g, max_nodes) if fed.waiting else 0 for g, fed in zip(gamma, self._fed, strict=True)
        ]

    def _open(self, rows: Rows) -> list[tuple[list[int], Tensor]]:
        """A proposal begins. Per row, the tokens that wait with their hidden states (k, F), the
        last one pending. A row without any gets a pair that is not kept."""
        self._counts = [fed.num_waiting for fed in self._fed]
        self._lengths = list(self.lm.kv.lengths)
        return [
            (row.tokens[-max(count, 1) :], fed.joined() if count else self._nothing())
            for row, fed, count in zip(rows, self._fed, self._counts, strict=True)
        ]

    def _nothing(self) -> Tensor:
        """The features of a token whose hidden states nobody knows: (1, F)."""
        return torch.zeros(
            1, self.lm.head.config.feature_size, dtype=self.lm.dtype, device=self.lm.device
        )

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        pairs = self._open(rows)
        self.lm.give(self.lm.fused([joined for _, joined in pairs]))
        return [tokens for tokens, _ in pairs]

    def _feed_capacity(self, index: int) -> None:
        """Feed what waits but the last one, whose token may be the pending one: the next draft
        begins with it."""
        fed = self._fed[index]
        lag = self.lm.lag
        joined = fed.joined()
        first = fed.begin + self.lm.kv.lengths[index] + 1
        end = len(joined) - 1 - lag
        for start in range(0, end, PREFILL_CHUNK):
            part = joined[start : min(start + PREFILL_CHUNK, end)]
            self.lm.feed(
                index,
                fed.row.tokens[first + start : first + start + len(part) + lag],
                *self.lm.fused([part]),
            )
        fed.waiting = [joined[max(0, end) :].clone()]  # or the whole chunk stays


class Chains(Protocol):
    """Whole chains of a head for a batch, in few calls."""

    def draft(
        self, rows: Rows, pairs: Sequence[tuple[list[int], Tensor]], num_tokens: int
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens (B, n), n at least `num_tokens`, and distributions (R, n + 1, V) of rows that
        draw; commits nothing.

        The rows' caches lack these pairs. None where scores are no numbers.
        """


class FedChain(FeatureFed, ModelDrafter):
    """Chains: in one go where that is possible, else token by token."""

    def __init__(
        self,
        lm: HeadLM,
        loop: Chains | None = None,
        confidence: ConfidenceSettings | None = None,
        mask_token: int | None = None,
    ) -> None:
        super().__init__(lm, None, confidence, mask_token)
        self._whole = loop

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        if not any(gamma) or self._whole is None or self._confidence.stop != "none":
            return super().propose(rows, gamma)
        if not programs_serve(rows):
            return super().propose(rows, gamma)
        self._forget_draft()
        wanted = self._within_context(rows, self._askable(gamma))
        if not any(wanted):
            return Draft.empty(len(rows), rows.device)
        found = self._whole.draft(rows, self._open(rows), max(wanted))
        draft = None if found is None else drafted(rows, *found, wanted)
        return super().propose(rows, gamma) if draft is None or bans_bite(rows, draft) else draft


class FedTree(FeatureFed, TreeModelDrafter):
    """Trees, level by level."""

    @property
    def known(self) -> Tensor | None:
        return self.lm.head.draft_ids

    def _logits(self, tokens: Tensor, parents: Tensor, columns: Tensor) -> Tensor:
        return self.lm.own_logits(tokens, parents, columns)

    def _in_full(self, scores: Tensor) -> Tensor:
        return self.lm.head.in_full(scores)

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        super()._close(verdict, draft)
        self.plan.observe(draft, verdict, [tree.growth for tree in self._trees])
        self._trees = []


class FedMaskedTree(FeatureFed, MaskedTrees):
    """Trees from the one pass of a head with a mask token."""

    def _close(self, verdict: Verdict, draft: Draft) -> None:
        super()._close(verdict, draft)
        MaskedTrees._close(self, verdict, draft)


def _chosen(states: Tensor, columns: list[int]) -> Tensor:
    """These columns (k, F) of a row's passes; of one pass of a chain, its first ones."""
    chain = columns[-1] == len(columns) - 1
    return states[: len(columns)] if chain else states[torch.tensor(columns, device=states.device)]
