"""Responses that later ones may go on from: in memory, the latest of them, gone with the process."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from outrider.serve.errors import ApiError

MAX_CHARACTERS = 64 << 20  # of all messages that are kept
Message = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """What one response added to its conversation, behind what it went on from."""

    messages: tuple[Message, ...]
    response: dict[str, Any]  # as the client got it
    size: int
    before: Stored | None = None

    def conversation(self) -> list[Message]:
        """All messages from the first one on."""
        turns, one = [], self
        while True:
            turns.append(one.messages)
            if one.before is None:
                return [message for turn in reversed(turns) for message in turn]
            one = one.before


class ResponseStore:
    """At most `max_responses` responses; the oldest make room for new ones."""

    def __init__(self, max_responses: int, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses, self._max_characters = max_responses, max_characters
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def find(self, name: str, *, to_go_on: bool = True) -> Stored:
        """Raises ApiError for one that is not here, or not any more. `to_go_on`: a request names it as the one before."""
        if name not in self._kept:
            kept = f"the last {self._max_responses}" if self._max_responses else "none"
            if not to_go_on:
                raise ApiError(
                    f"there is no response '{name[:60]}': this server keeps {kept} (max_stored_responses), unless 'store' is "
                    "false, until it ends", status=404, param="response_id",
                )  # fmt: skip
            raise ApiError(
                f"there is no response '{name[:60]}' to go on from: this server keeps {kept} (max_stored_responses), unless "
                "'store' is false, until it ends. Send the conversation in 'input'",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return self._kept[name]

    def drop(self, name: str) -> None:
        """Forget one; those that went on from it keep what they need. Raises ApiError for one that is not here."""
        self._size -= self.find(name, to_go_on=False).size
        del self._kept[name]

    def keep(self, name: str, messages: list[Message], response: dict[str, Any], before: Stored | None) -> None:
        """A response that is whole."""
        stored = Stored(tuple(messages), response, sum(len(json.dumps(each)) for each in (*messages, response)), before)
        self._kept[name] = stored
        self._size += stored.size
        while len(self._kept) > self._max_responses or self._size > self._max_characters:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size
