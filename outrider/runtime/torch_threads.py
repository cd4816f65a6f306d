"""torch's operations on one thread while a step's passes run on the executor's threads.

What happens between two passes are small operations. One that is long enough to be divided wakes
torch's OpenMP threads, which afterwards wait for more work without sleeping, on the processors that
the next pass needs.

The number is set for the calling thread alone, by OpenMP itself: `torch.set_num_threads` also sets
what threads that compute for the first time are given. Where torch has no OpenMP nothing is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar

import torch

from outrider.models.lm import LM


class OnOwnThreads:
    """A run whose passes compute on threads of its own."""


class _Decoder(Protocol):
    target: LM
    drafter: Any  # of `drafters/base.py`, a floor above


Self = TypeVar("Self", bound=_Decoder)
Result = TypeVar("Result")


def spare_threads(step: Callable[[Self], Result]) -> Callable[[Self], Result]:
    """A step in which torch has one thread, where passes run on the executor and drafting runs no
    modules of torch."""

    @wraps(step)
    def spared(decoder: Self) -> Result:
        if not isinstance(decoder.target.run, OnOwnThreads) or decoder.drafter.runs_modules:
            return step(decoder)
        before = torch.get_num_threads()  # asked first: it gives a new thread the process's number
        set_threads = _openmp()
        try:
            set_threads(1)
            return step(decoder)
        finally:
            set_threads(before)

    return spared


@cache
def _openmp() -> Callable[[int], object]:
    """`omp_set_num_threads` of the library that torch computes with; where it has none, what does
    nothing."""
    before = torch.get_num_threads()
    try:
        # torch loads its OpenMP for the whole process
        set_threads = ctypes.CDLL(None).omp_set_num_threads
        set_threads.argtypes = (ctypes.c_int,)
        set_threads.restype = None
        set_threads(before + 1)
        serves = torch.get_num_threads() == before + 1
        set_threads(before)
    except (OSError, TypeError, AttributeError):  # TypeError: Windows
        return lambda count: None
    return set_threads if serves else lambda count: None
