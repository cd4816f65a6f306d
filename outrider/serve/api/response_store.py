"""Responses that later ones may continue from: in memory, the latest of them, gone with the process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from outrider.serve.errors import ApiError

# of memory, for everything that is kept: many small items take several times their characters
MAX_BYTES = 64 << 20
Item = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """The turns that one response added to its conversation, after the one it continued."""

    own_input: tuple[Item, ...]  # its own input
    own_output: tuple[Item, ...]  # its output, as far as later responses see it
    response: dict[str, Any]  # as the client got it
    size: int  # bytes
    before: Stored | None = None

    def conversation(self) -> list[Item]:
        """All items from the first turn on, its own output included."""
        turns: list[tuple[Item, ...]] = []
        response: Stored | None = self
        while response is not None:
            turns.append((*response.own_input, *response.own_output))
            response = response.before
        return [item for turn in reversed(turns) for item in turn]


class ResponseStore:
    """At most `max_responses` responses; the oldest make room for new ones."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, Stored] = {}  # oldest first
        self._items: dict[str, Item] = {}  # of their outputs, by id
        self._held: WeakSet[Stored] = WeakSet()  # those, and forgotten ones that they went on from

    def find(self, name: str, *, to_go_on: bool = True) -> Stored:
        """A stored response.

        Raises ApiError for one that is not here, or not any more. `to_go_on`: a request names it as
        the one before.
        """
        if name not in self._kept:
            store = f"the last {self._max_responses}" if self._max_responses else "none"
            if not to_go_on:
                raise ApiError(
                    f"there is no response '{name[:60]}': this server keeps {store} "
                    "(max_stored_responses), unless 'store' is "
                    "false, until it ends",
                    status=404,
                    param="response_id",
                )
            raise ApiError(
                f"there is no response '{name[:60]}' to continue from: this server keeps {store} "
                "(max_stored_responses), unless "
                "'store' is false, until it ends. Send the conversation in 'input'",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._kept[name]

    def find_item(self, name: str) -> Item:
        """An item of an output that is kept. Raises ApiError for one that is not here."""
        if name not in self._items:
            raise ApiError(
                f"there is no item '{name[:60]}' in the responses that are kept: give its content "
                "instead of the reference",
                param="input",
            )
        return self._items[name]

    def drop(self, name: str) -> None:
        """Forget one; those that went on from it keep what they need. Raises ApiError for one that
        is not here."""
        self.find(name, to_go_on=False)
        self._forget(name)

    def keep(
        self,
        name: str,
        own_input: list[Item],
        own_output: list[Item],
        response: dict[str, Any],
        before: Stored | None,
    ) -> None:
        """A response that is whole."""
        size = held_bytes([own_input, own_output, response])
        self._kept[name] = Stored(tuple(own_input), tuple(own_output), response, size, before)
        self._held.add(self._kept[name])
        self._items.update((item["id"], item) for item in response["output"])
        while self._kept and (
            len(self._kept) > self._max_responses or self._size > self._max_bytes
        ):
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        for item in self._kept.pop(name).response["output"]:
            del self._items[item["id"]]

    @property
    def _size(self) -> int:
        return sum(stored.size for stored in self._held)


def held_bytes(value: Any) -> int:
    """The memory that a JSON value takes. Names in objects are not counted, since most of them are
    shared."""
    size = 0
    rest = [value]
    while rest:
        item = rest.pop()
        size += sys.getsizeof(item)
        rest += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return size
