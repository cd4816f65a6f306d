"""Streams that another server can continue: marks in the stream, and the state that they stand for.

A stream with `resume` in its request has marks, as comments of server-sent events, which clients
skip:

    : resume {"id": ..., "created": ...}           first
    : resume {"choice": 0, "token_ids": [...]...}  after the events of every update

The reader of the marks sends them back, in `resume` of the same body, to a server of the same
model. That server brings its answers to where the marks end, writes nothing meanwhile, and
continues.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outrider.engine.request import Request, Update
from outrider.serve.api.sse import dumped
from outrider.serve.errors import ApiError
from outrider.serve.schema.resumption import Mark, Resumption
from outrider.stats import DecodeStats

WriteMark = Callable[[str], Awaitable[None]]
MARK = ": resume "


class Marks:
    """The marks of one stream: those that it begins with, and those that it writes."""

    def __init__(
        self, resumption: Resumption | None, requests: Sequence[Request], identity: str
    ) -> None:
        """`identity`: of the answers, where the marks have none."""
        self._marks = [] if resumption is None else resumption.marks
        self._requests = requests
        self._is_wanted = resumption is not None
        given = Resumption.model_validate({}) if resumption is None else resumption
        self.id = given.id or identity
        self.created = int(time.time()) if given.created is None else given.created
        self._write: WriteMark | None = None
        # of the marks that it begins with
        self._stats = {number: DecodeStats() for number in range(len(requests))}
        # tokens of a step that is not complete yet
        self._accepted = dict.fromkeys(range(len(requests)), 0)
        self.is_silent = bool(self._marks)  # events repeat what the client has
        self.ended = frozenset(mark.choice for mark in self._marks if mark.ending is not None)

    async def begin(self, write: WriteMark) -> None:
        """Marks go to `write` from now on, where the request asked for them."""
        if self._is_wanted:
            self._write = write
            await self._mark({"id": self.id, "created": self.created})

    async def _mark(self, content: dict[str, Any]) -> None:
        if self._write is not None:
            await self._write(f"{MARK}{dumped(content)}\n\n")

    def replayed(self) -> Iterator[tuple[int, Update]]:
        """The updates that the first marks stand for. Their log-probabilities are placeholders:
        nobody reads them."""
        for mark in self._marks:
            self._count(mark)
            wanted = self._requests[mark.choice].params.logprobs is not None
            yield (
                mark.choice,
                replace(
                    mark.update(),
                    logprobs=[{token: 0.0} for token in mark.token_ids] if wanted else [],
                ),
            )
        self.is_silent = False

    async def passed(self, number: int, update: Update) -> None:
        """All events of this update were written: mark it."""
        if self._write is not None and not self.is_silent:
            await self._mark(Mark.of(number, update).model_dump(exclude_defaults=True))

    def whole(self, number: int, update: Update) -> Update:
        """An update whose end counts the steps of all servers that worked on the answer."""
        earlier = self._stats[number]
        if update.finish is None or not earlier.emitted:
            return update
        both = earlier.merge(update.finish.stats)
        stats = replace(both, answers=1, first_tokens=earlier.first_tokens)
        return replace(update, finish=replace(update.finish, stats=stats))

    def _count(self, mark: Mark) -> None:
        """Every step emits its accepted draft tokens and then one token of the target's."""
        if mark.choice in self.ended:
            return  # its end has the numbers
        stats = self._stats[mark.choice]
        for origin in mark.origins:
            if origin == "accepted":
                self._accepted[mark.choice] += 1
            else:
                accepted = self._accepted[mark.choice]
                stats.count_step(0, accepted, accepted + 1, rejected=origin == "correction")
                self._accepted[mark.choice] = 0
        stats.drafted += mark.drafted


def committed_of(resumption: Resumption | None, num_answers: int) -> list[list[int]]:
    """The tokens that each answer has. Raises ApiError for marks that no stream of this request can
    have."""
    committed: list[list[int]] = [[] for _ in range(num_answers)]
    ended = set()
    for number, mark in enumerate(resumption.marks if resumption is not None else ()):
        place = f"resume.marks.{number}"
        if mark.choice >= num_answers:
            raise ApiError(
                f"{place}.choice is {mark.choice}, and the request has {num_answers} answers",
                param=f"{place}.choice",
            )
        if mark.choice in ended:
            raise ApiError(f"{place} continues answer {mark.choice}, which has ended", param=place)
        sizes = [len(mark.token_ids), len(mark.origins), len(mark.pieces)]
        if len(set(sizes)) > 1:
            raise ApiError(
                f"{place} has {sizes[0]} token_ids, {sizes[1]} origins and {sizes[2]} pieces",
                param=place,
            )
        if mark.ending is not None:
            ended.add(mark.choice)
        committed[mark.choice] += mark.token_ids
    return committed
