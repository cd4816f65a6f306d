"""Tracebacks for the log: where code failed, without the values of variables and without messages that may quote a request."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from outrider.errors import without_values

CAUSE = "The direct cause of:"
CONTEXT = "During its handling came:"


def plain_traceback(error: BaseException) -> str:
    """The frames of an error and of those before it, the first one first; members of a group follow it."""
    return "\n".join(_lines(error, set()))


def _lines(error: BaseException, told: set[int]) -> Iterator[str]:
    told.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in told:
        yield from _lines(earlier, told)
        yield CAUSE if error.__cause__ is not None else CONTEXT
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield without_values(error)
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        if id(member) not in told:
            yield "One of its members:"
            yield from _lines(member, told)
