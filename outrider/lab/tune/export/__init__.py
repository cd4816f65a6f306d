"""The advice in the words of other engines: what they would be told to do the same, and where they cannot."""

from __future__ import annotations

from outrider.lab.tune.result import TuneResult, Words


def in_other_words(result: TuneResult) -> list[Words]:
    """One entry an engine, the first recommendation throughout."""
    return []
