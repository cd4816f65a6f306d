"""A drafter of Outrider's in the steps of another engine: it learns what became of its last drafts,
and makes the next ones.

One `step` is the second half of ours and the first half of the next: the drafts of the last step
are settled with the tokens that the engine kept (`commit`), texts that are gone leave (`stop`), new
ones begin (`start`), all are drafted for (`propose`). The engine verifies; stop rules, sampling and
caches are its own, so rows here are nothing but tokens.

What is drafted follows from the calls alone: the same texts in the same order get the same drafts,
on every rank of a tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from outrider.drafters.base import Drafter
from outrider.drafters.proposals import proposed
from outrider.rows import PerRow, Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

ENDLESS = 1 << 60  # the engine ends texts, not we
# how the engine samples is not known here, and no draft depends on it
GREEDY = SamplingParams(temperature=0)
# texts and drafts may hold placeholders of images, which no model can emit: `_chain` ends a draft
# there
NUM_IDS = 1 << 31


@dataclass(frozen=True)
class Ask:
    """One text that wants a draft."""

    key: Hashable  # names the text from step to step
    length: int  # of the text now
    # the tokens it got in this step, one at least: drafted ones that were kept, then one of the
    # target's
    emitted: Sequence[int]
    text: Callable[[], list[int]]  # all its tokens; called for a text that begins
    room: int  # most tokens to draft


class Counters(Protocol):
    """The calls that a counter receives."""

    def started(self, texts: int) -> None: ...

    def proposed(self, part: str, tokens: int) -> None: ...

    def kept(self, part: str, tokens: int) -> None: ...


@dataclass
class _Sent:
    """The draft of one row in the last step, as the engine got it."""

    nodes: list[int]
    tokens: list[int]
    part: str


class BatchDrafter:
    """One drafter and the texts it drafts for."""

    def __init__(
        self, drafter: Drafter, name: str, vocab_size: int, counters: Counters | None = None
    ) -> None:
        self.drafter = drafter
        self._name = name
        self._vocab_size = vocab_size
        self._counters = counters
        self._rows = Rows(NUM_IDS, torch.device("cpu"))
        self._keys = PerRow[Hashable]()  # of the rows
        self._draft: Draft | None = None  # of the last step, for the rows as they stand
        self._sent: list[_Sent] = []

    def step(self, asks: Sequence[Ask]) -> list[list[int]]:
        """One chain for each text, possibly empty: at most `room` tokens, all inside the
        vocabulary."""
        going_on = self._settle({ask.key: ask for ask in asks})
        begun = [ask for ask in asks if ask.key not in going_on]
        for ask in begun:
            self._start(ask)
        if self._counters is not None and begun:
            self._counters.started(len(begun))
        if not asks:
            self._draft = None
            self._sent = []
            return []
        rooms = {ask.key: ask.room for ask in asks}
        gamma = [max(0, rooms[key]) for key in self._keys]
        self._draft = proposed(self.drafter, self._rows, gamma)
        self._sent = [self._chain(self._draft, index, limit) for index, limit in enumerate(gamma)]
        sent = dict(zip(self._keys, self._sent, strict=True))
        if self._counters is not None:
            for one in self._sent:
                self._counters.proposed(one.part, len(one.tokens))
        return [sent[ask.key].tokens for ask in asks]

    # ---------------------------------------------------------------- what became of the last drafts

    def _settle(self, asks: dict[Hashable, Ask]) -> set[Hashable]:
        """Take the tokens of known texts, tell the drafter, and let go of texts that are gone, or
        went another way than ours did. Returns the keys of those that continue."""
        paths = []
        counts = []
        nexts = []
        complete = []
        width = 0 if self._draft is None else self._draft.num_nodes
        going_on: set[Hashable] = set()
        for key, row, sent in zip(self._keys, self._rows, self._sent, strict=True):
            ask = asks.get(key)
            num_kept = _kept(ask, row, sent)
            # its last draft was never verified, which counts as turned down
            if ask is None or num_kept is None:
                num_kept = 0
                next_token = row.tokens[-1]
            else:
                going_on.add(key)
                next_token = ask.emitted[-1]
                row.tokens.extend(ask.emitted)
                row.stats.count_step(
                    len(sent.tokens), num_kept, num_kept + 1, rejected=num_kept < len(sent.tokens)
                )
                if self._counters is not None:
                    self._counters.kept(sent.part, num_kept)
            paths.append(sent.nodes[:num_kept] + [-1] * (width - num_kept))
            counts.append(num_kept)
            nexts.append(next_token)
            complete.append(num_kept == len(sent.tokens))
        if self._draft is not None and self._keys:
            verdict = Verdict.of_lists(
                VerdictLists(paths, counts, nexts, complete), width, self._rows.device
            )
            columns = [
                [0, *(node + 1 for node in path[:count])]
                for path, count in zip(paths, counts, strict=True)
            ]
            logits = torch.zeros(len(self._keys), width + 1, 0)  # which no drafter in here reads
            self.drafter.commit(
                self._rows, self._draft, verdict, TargetOutput(logits, kept=columns)
            )
        for index in reversed(range(len(self._keys))):
            if self._keys[index] not in going_on:
                self._stop(index)
        return going_on

    # ---------------------------------------------------------------- texts

    def _start(self, ask: Ask) -> None:
        tokens = ask.text()
        row = Row(
            request=0,
            tokens=tokens,
            num_prompt=len(tokens) - len(ask.emitted),
            params=GREEDY,
            seed=0,
            max_tokens=ENDLESS,
            stop_tokens=frozenset(),
            detokenizer=None,
            stops=StopStrings(()),
        )
        self.drafter.join(self._rows, row)
        self._keys.append(ask.key)

    def _stop(self, index: int) -> None:
        self.drafter.stop(index)
        self._rows.swap_remove(index)
        self._keys.swap_remove(index)

    def _chain(self, draft: Draft, index: int, limit: int) -> _Sent:
        """The draft of one row as a chain: the first child of each node. A token outside the
        vocabulary ends it: texts may contain placeholders of images, which cannot be emitted.
        """
        nodes: list[int] = []
        tokens = draft.lists[0][index]
        children = draft.children[index]
        below = children[0]
        while below and len(nodes) < limit and 0 <= tokens[below[0]] < self._vocab_size:
            nodes.append(below[0])
            below = children[below[0] + 1]
        # of a composite, its part that drafted the first token
        parts = None if draft.parts is None else draft.parts[index]
        part = self._name if parts is None else parts[nodes[0]] if nodes else "none"
        return _Sent(nodes, [tokens[node] for node in nodes], part)


def _kept(ask: Ask | None, row: Row, sent: _Sent) -> int | None:
    """How many tokens of the last draft are in the text now; None where the text is gone, or went
    on without our draft."""
    if ask is None or not ask.emitted or ask.length != len(row.tokens) + len(ask.emitted):
        return None
    num_kept = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(ask.emitted[:-1], sent.tokens, strict=False)
        )
    )
    return num_kept if num_kept == len(ask.emitted) - 1 else None
