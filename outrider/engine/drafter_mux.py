"""Several drafters in one batch, each drafting for the rows that asked for it, `prediction` for
rows that carry one.

Every drafter sees every row (so its state is right whenever a row is its own), but is asked for
nodes only where the row is its own. The drafts are put side by side into one: row by row, whole,
never merged within a row. While one drafter owns all rows and no other needs to see them, it is
asked alone, and this costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from outrider.drafters.base import Drafter, start_all
from outrider.drafters.proposals import proposed
from outrider.kv import KVCache
from outrider.rows import PerRow, Row, Rows
from outrider.trees.side_by_side import side_by_side
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

FOLLOWER = "prediction"  # the drafter of rows that carry one; it needs to see no others


class DrafterMux(Drafter):
    """`drafters`: by name, `usual` for rows that name none; among them FOLLOWER where rows may
    carry a prediction."""

    shape = "chain or tree"

    def __init__(self, drafters: Mapping[str, Drafter], usual: str) -> None:
        self._drafters = dict(drafters)
        self._owners = PerRow[str]()  # per row
        # of this step, one a drafter that was asked; none where one was asked alone
        self._drafts: dict[str, Draft] = {}
        self.next_owner = usual  # of the row that starts next

    @property
    def signals(self) -> tuple[int, ...]:
        return tuple(
            sorted({layer for drafter in self._drafters.values() for layer in drafter.signals})
        )

    @property
    def runs_modules(self) -> bool:
        return any(drafter.runs_modules for drafter in self._drafters.values())

    @property
    def notes(self) -> list[str]:
        return [note for drafter in self._drafters.values() for note in drafter.notes]

    @property
    def counters(self) -> dict[str, float]:
        return {
            name: value
            for drafter in self._drafters.values()
            for name, value in drafter.counters.items()
        }

    @property
    def summary(self) -> list[str]:
        return [line for drafter in self._drafters.values() for line in drafter.summary]

    def drafts_for(self, index: int) -> bool:
        return self._drafters[self._owners[index]].drafts_for(index)

    def name_for(self, index: int) -> str:
        return self._owners[index]

    def may_lose_nodes(self, index: int) -> bool:
        return self._drafters[self._owners[index]].may_lose_nodes(index)

    def start(self, row: Row) -> None:
        start_all(self._drafters.values(), row, len(self._owners))
        self._owners.append(
            FOLLOWER if row.prediction and FOLLOWER in self._drafters else self.next_owner
        )

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        for drafter in self._drafters.values():
            if drafter.signals:
                drafter.read(index, start, hidden)

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        each = [
            drafter.prepare(rows, self._own(gamma, name), budget)
            for name, drafter in self._drafters.items()
        ]
        return [max(counts) for counts in zip(*each, strict=True)]  # a row is asked for by one

    def catch_up(self, rows: Rows, gamma: list[int]) -> None:
        for name, drafter in self._drafters.items():
            drafter.catch_up(rows, self._own(gamma, name))

    def unread(self, rows: Rows) -> list[int]:
        each = [self._own(drafter.unread(rows), name) for name, drafter in self._drafters.items()]
        return [sum(counts) for counts in zip(*each, strict=True)]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        asked = self._asked()
        if len(asked) == 1:
            (alone,) = asked.values()
            return proposed(alone, rows, gamma)
        self._drafts = {
            name: proposed(drafter, rows, self._own(gamma, name)) for name, drafter in asked.items()
        }
        names = list(self._drafts)
        return side_by_side(
            list(self._drafts.values()), [names.index(owner) for owner in self._owners]
        )

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if not self._drafts:
            (alone,) = self._asked().values()
            alone.commit(rows, draft, verdict, output)
            return
        for name, part_draft in self._drafts.items():
            mine = [owner == name for owner in self._owners]
            seen = TargetOutput(
                output.logits[:, : part_draft.num_nodes + 1], output.hidden, output.kept
            )
            self._drafters[name].commit(
                rows, part_draft, verdict_for(part_draft, mine, draft, verdict), seen
            )
        self._drafts = {}

    def stop(self, index: int) -> None:
        super().stop(index)
        for drafter in self._drafters.values():
            drafter.stop(index)

    def pack(self, index: int) -> dict[str, Any] | None:
        states = {name: drafter.pack(index) for name, drafter in self._drafters.items()}
        lost = any(states[name] is None and one.signals for name, one in self._drafters.items())
        return None if lost or not any(state is not None for state in states.values()) else states

    def unpack(self, state: dict[str, Any]) -> None:
        for name, part_state in state.items():
            if part_state is not None:
                self._drafters[name].unpack(part_state)

    @property
    def text_caches(self) -> list[KVCache]:
        return [cache for drafter in self._drafters.values() for cache in drafter.text_caches]

    @property
    def caches(self) -> list[KVCache]:
        return [cache for drafter in self._drafters.values() for cache in drafter.caches]

    def close(self) -> None:
        for drafter in self._drafters.values():
            drafter.close()

    def _own(self, gamma: list[int], name: str) -> list[int]:
        """The drafting asked of one drafter."""
        return [g if owner == name else 0 for g, owner in zip(gamma, self._owners, strict=True)]

    def _asked(self) -> dict[str, Drafter]:
        """The drafters that take part in a step."""
        return {
            name: drafter
            for name, drafter in self._drafters.items()
            if name != FOLLOWER or FOLLOWER in self._owners
        }


def verdict_for(part_draft: Draft, mine: Sequence[bool], draft: Draft, verdict: Verdict) -> Verdict:
    """The verdict as the drafter of `part_draft` sees it: its rows' as it is; in the others it drafted
    nothing and the text went on."""
    lists = verdict.lists
    tokens = draft.lists[0]
    paths = []
    counts = []
    next_tokens = []
    complete = []
    for row, is_mine in enumerate(mine):
        accepted = lists.path[row][: lists.num_accepted[row]]
        first = tokens[row][accepted[0]] if accepted else lists.next_token[row]
        paths.append(
            [*(accepted if is_mine else []), *[-1] * part_draft.num_nodes][: part_draft.num_nodes]
        )
        counts.append(len(accepted) if is_mine else 0)
        next_tokens.append(lists.next_token[row] if is_mine else first)
        complete.append(lists.all_accepted[row] if is_mine else True)
    return Verdict.of_lists(
        VerdictLists(paths, counts, next_tokens, complete),
        part_draft.num_nodes,
        part_draft.tokens.device,
    )
