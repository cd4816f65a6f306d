"""The steps and tokens of an answer, counted from its updates, because a lost replica never sends its own numbers.

Every step of a row emits its accepted draft tokens and then one token of the target's, so the origin of its tokens shows where
a step ends.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.request import Update
from outrider.stats import DecodeStats


class Tally:
    """Counters of the part of an answer that one replica sent. Times are not in it."""

    def __init__(self) -> None:
        self._stats = DecodeStats()
        self._accepted = 0  # tokens of the step that is not complete yet

    def add(self, update: Update) -> None:
        """Count what an update brought."""
        for origin in update.origins:
            if origin == "accepted":
                self._accepted += 1
            else:
                self._stats.count_step(0, self._accepted, self._accepted + 1, rejected=origin == "correction")
                self._accepted = 0
        self._stats.drafted += update.drafted

    @property
    def stats(self) -> DecodeStats:
        """The numbers so far. Of a step that was cut its accepted tokens count as a step."""
        whole = self._stats.merge(DecodeStats())
        if self._accepted:
            whole.count_step(0, self._accepted, self._accepted, rejected=False)
        return whole


def total(parts: list[DecodeStats], *, ttft_s: float, decode_s: float) -> DecodeStats:
    """The numbers of one answer that several replicas gave one after the other; times are those that its reader saw."""
    whole = DecodeStats()
    for part in parts:
        whole = whole.merge(part)
    first = next((part.first_tokens for part in parts if part.emitted), 0)
    return replace(whole, answers=min(1, whole.answers), first_tokens=first, ttft_s=ttft_s, decode_s=decode_s)
