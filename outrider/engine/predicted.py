"""Rows that carry a prediction beside rows that do not: any server can follow one, whatever drafts there usually.

While nobody predicts anything the usual drafter is alone, and this costs nothing. Else both draft, each for its own rows, and
the drafts are put side by side (`switch.py`); the usual drafter sees every row, so its state is right when it is asked again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.engine.switch import side_by_side, verdict_for
from outrider.kv import KVCache
from outrider.rows import Row, Rows
from outrider.types import Draft, TargetOutput, Verdict

FOLLOWER = "prediction"  # who drafts for rows that carry one


class Predicted(Drafter):
    """`usual` drafts for rows without a prediction, `follower` for the others."""

    shape = "chain or tree"

    def __init__(self, usual: Drafter, follower: Drafter) -> None:
        self.usual, self._follower = usual, follower
        self._follows: list[bool] = []  # per row
        self._drafts: list[Draft] = []  # of this step, the usual drafter's and the follower's; none while nobody predicts

    @property
    def signals(self) -> tuple[int, ...]:
        return self.usual.signals

    @property
    def runs_modules(self) -> bool:
        return self.usual.runs_modules

    @property
    def notes(self) -> list[str]:
        return self.usual.notes

    @property
    def counters(self) -> dict[str, float]:
        return self.usual.counters

    @property
    def summary(self) -> list[str]:
        return self.usual.summary

    def start(self, row: Row) -> None:
        self._follows.append(bool(row.prediction))
        self.usual.start(row)
        self._follower.start(row)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        self.usual.read(index, start, hidden)

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        if not any(self._follows):
            return self.usual.prepare(rows, gamma, budget)
        ready = self.usual.prepare(rows, self._of(gamma, follows=False), budget)
        return [mine + others for mine, others in zip(self._of(gamma, follows=True), ready, strict=True)]

    def unread(self, rows: Rows) -> list[int]:
        return self._of(self.usual.unread(rows), follows=False)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        if not any(self._follows):
            return self.usual.propose(rows, gamma)
        pairs = ((self.usual, False), (self._follower, True))
        self._drafts = [drafter.propose(rows, self._of(gamma, follows=follows)) for drafter, follows in pairs]
        return side_by_side(self._drafts, [int(follows) for follows in self._follows])

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if not self._drafts:
            self.usual.commit(rows, draft, verdict, output)
            return
        for drafter, own, follows in zip((self.usual, self._follower), self._drafts, (False, True), strict=True):
            mine = [one == follows for one in self._follows]
            seen = TargetOutput(output.logits[:, : own.num_nodes + 1], output.hidden, output.kept)
            drafter.commit(rows, own, verdict_for(own, mine, draft, verdict), seen)
        self._drafts = []

    def stop(self, index: int) -> None:
        self._follows[index] = self._follows[-1]
        self._follows.pop()
        self.usual.stop(index)
        self._follower.stop(index)

    def pack(self, index: int) -> Any:
        return self.usual.pack(index)

    def unpack(self, state: Any) -> None:
        self.usual.unpack(state)

    @property
    def text_caches(self) -> list[KVCache]:
        return self.usual.text_caches

    def close(self) -> None:
        self.usual.close()

    def _of(self, gamma: list[int], *, follows: bool) -> list[int]:
        """What is asked for rows that follow a prediction, or for the others."""
        return [count if one == follows else 0 for count, one in zip(gamma, self._follows, strict=True)]
