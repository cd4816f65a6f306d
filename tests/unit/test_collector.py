"""Python's garbage collector while something loads: paused, and afterwards as it was, with what
became garbage gone."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from outrider import collector


class _Part:
    """An object that can be in a cycle."""

    other: _Part


def _cycle() -> weakref.ref[_Part]:
    one = _Part()
    one.other = one
    return weakref.ref(one)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(was_on: bool) -> None:
    """Also where loading fails, and where a program collects by itself."""
    (gc.enable if was_on else gc.disable)()
    try:
        with contextlib.suppress(ZeroDivisionError), collector.paused():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_garbage_of_loading_is_gone_and_older_objects_are_not_looked_through() -> None:
    """A module of transformers' is in cycles; a second copy of the weights must not stay until the
    next collection."""
    gc.unfreeze()  # what the fixtures of all tests froze
    try:
        with collector.paused():
            with collector.collected():
                made = _cycle()
                frozen = gc.get_freeze_count()
            assert frozen > 0
            assert gc.get_freeze_count() == 0
            assert made() is None
    finally:
        gc.freeze()


@pytest.mark.slow
def test_objects_that_a_program_froze_stay_frozen() -> None:
    """A server freezes what stays, once."""
    gc.freeze()
    with collector.collected():
        made = _cycle()
    assert made() is None
    assert gc.get_freeze_count() > 0
