"""What waits for a reader: updates of answers that are made faster than somebody takes them."""

from __future__ import annotations

import time

from outrider.engine.request import Update
from outrider.serve.errors import ApiError

MOST = 1 << 16  # tokens and log-probabilities that may wait for a reader who holds them up: some 10 MB
PATIENCE_S = 2.0  # a reader who takes longer for one update holds up the others


class Backlog:
    """Counts what waits, and tells whether that is too much. Lives in one event loop."""

    def __init__(self) -> None:
        self._size = 0
        self._given_s: float | None = None  # when the reader got the latest update; None: it waits for one

    def add(self, update: Update) -> bool:
        """Count an update; False where it is too much. A reader who is quick may have any number: then we are slow ourselves."""
        self._size += weight(update)
        return self._size <= MOST or self._given_s is None or time.monotonic() - self._given_s < PATIENCE_S

    def ask(self) -> None:
        """The reader wants the next update."""
        self._given_s = None

    def give(self, update: Update) -> None:
        """The reader gets an update."""
        self._size -= weight(update)
        self._given_s = time.monotonic()


def weight(update: Update) -> int:
    """Tokens and log-probabilities of an update: what its size in memory follows."""
    of_prompt = sum(len(alternatives or ()) for alternatives in update.prompt_logprobs or ())
    return len(update.token_ids) + sum(map(len, update.logprobs)) + of_prompt


def too_slow() -> ApiError:
    """The end of an answer whose reader let too much wait."""
    return ApiError(
        f"the answer was ended: more than {MOST} of its tokens and log-probabilities waited for their reader. Read faster, or "
        "ask for fewer answers or log-probabilities", status=408, code="slow_reader",
    )  # fmt: skip
