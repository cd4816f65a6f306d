"""The messages of remote.proto. `make proto` generates the modules next to this file; a test
compares them with the source."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from outrider.remote.protocol import remote_pb2 as messages
from outrider.remote.protocol import stubs

Part = TypeVar("Part", messages.RowRequest, messages.RowReply)

PROTOCOL = 2  # what Hello and Welcome carry; both sides must have the same one
MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens has 3 MB


def fitting(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut a list where it is too much for one message; a part that is too large by itself stays
    alone."""
    first = size = 0
    for number, part in enumerate(parts):
        part_size = part.ByteSize()
        if size + part_size > MAX_MESSAGE_BYTES // 2 and number > first:
            yield list(parts[first:number])
            first = number
            size = 0
        size += part_size
    if parts:
        yield list(parts[first:])


__all__ = ["MAX_MESSAGE_BYTES", "PROTOCOL", "fitting", "messages", "stubs"]
