"""Python's garbage collector, paused while modules are imported and models load.

Both make objects by the million, nearly all of which stay: looking through them again and again
takes a tenth of a start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage meanwhile, and collect again afterwards if that was so before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collected() -> Iterator[None]:
    """Collect at the end what became garbage meanwhile, without looking through the objects that
    were there before."""
    froze = gc.get_freeze_count() == 0  # else somebody froze objects for good
    if froze:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if froze:
            gc.unfreeze()
