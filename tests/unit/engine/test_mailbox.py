"""Whether a thread hangs: what takes long without hanging, and what rests, must not look like it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.decode import Decoder
from outrider.engine import mailbox as mailbox_module
from outrider.engine.mailbox import Mailbox
from outrider.engine.prefill import Prefiller
from tests.unit.engine.conftest import MakeEngine, ask, prompt, request

PART_S = 0.3  # a part of a turn that is slow
NEAR_S = 0.2  # and what is little beside it


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that a test sets."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(mailbox_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def nothing() -> None:
    """A command."""


def test_age_is_since_the_loop_came_round_whoever_brings_work_meanwhile(
    clock: SimpleNamespace,
) -> None:
    """Catches a hung engine that looks alive because clients keep asking."""
    mailbox = Mailbox()
    mailbox.receive(wait=False)
    clock.now = 7.0
    mailbox.put(nothing)
    clock.now = 9.0
    assert mailbox.heartbeat.age_s == 9.0
    mailbox.receive(wait=False)
    assert mailbox.heartbeat.age_s == 0.0


def test_a_loop_that_rests_is_expected_back_from_when_there_is_work(clock: SimpleNamespace) -> None:
    """Catches an idle night that counts as a hang, all of it at once when the first request of the
    morning comes in."""
    mailbox = Mailbox()
    mailbox.receive(wait=False)
    thread = threading.Thread(target=lambda: mailbox.receive(wait=True))
    thread.start()
    while not mailbox.lock._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    clock.now = 1000.0
    assert mailbox.heartbeat.age_s == 0.0
    with mailbox.lock:  # so that the other thread cannot come round
        mailbox.put(nothing)
        clock.now = 1004.0
        assert mailbox.heartbeat.age_s == 4.0
    thread.join(10)
    assert mailbox.heartbeat.age_s == 0.0


def test_every_chunk_of_a_prompt_counts(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is many passes; one that takes long is no hang."""
    engine = engine_of(drafter="ngram", draft=False)
    advance = Prefiller.advance
    ages = []

    def slow(prefiller: Prefiller) -> Any:
        ages.append(engine.snapshot().turn_age_s)
        time.sleep(PART_S)
        return advance(prefiller)

    monkeypatch.setattr(Prefiller, "advance", slow)
    ask(engine, request(prompt(600), max_tokens=2))[0].wait()
    assert len(ages) == 3
    assert max(ages) < NEAR_S


def test_every_step_of_looking_for_the_guilty_counts(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that broke a step makes it again row by row, in one turn."""
    engine = engine_of(drafter="ngram", draft=False, start=False)
    step = Decoder.step
    ages = []
    broke = threading.Event()

    def fails_together(decoder: Decoder) -> Any:
        if len(decoder.rows) == 3:
            broke.set()
            raise RuntimeError("a bug of ours")
        if broke.is_set() and len(ages) < 3:
            ages.append(engine.snapshot().turn_age_s)
            time.sleep(PART_S)
        return step(decoder)

    answers = ask(engine, *(request(prompt(9, seed), max_tokens=8) for seed in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", fails_together)
        engine.start()
        while len(ages) < 3:
            time.sleep(0.01)
    assert max(ages) < NEAR_S
    assert {answer.finish.reason for answer in answers} == {"length"}


def test_a_dead_thread_is_not_hung(engine_of: MakeEngine) -> None:
    """Stopped or failed: other words say so."""
    engine = engine_of(drafter="ngram", draft=False)
    ask(engine, request(prompt(9)))[0].wait()
    engine.stop()
    assert engine.snapshot().turn_age_s == 0.0
