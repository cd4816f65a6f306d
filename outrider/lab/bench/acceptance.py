"""How far drafts survive, added up over runs; and what that costs at the end of answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from outrider.lab.bench.bench_result import DepthAcceptance
from outrider.lab.bench.notes import RunNote


def acceptance(notes: Sequence[RunNote]) -> DepthAcceptance | None:
    """Acceptance of all runs together; None where nothing was drafted."""
    num_steps = sum(note.num_drafts for note in notes)
    if not num_steps:
        return None
    return DepthAcceptance(
        num_steps=num_steps, reached=_sums(note.reached for note in notes), kept=_sums(note.kept for note in notes)
    )


def _sums(lists: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
