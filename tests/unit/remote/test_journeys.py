"""Requests over replicas that die, stall, lie, fill up and leave: the reader gets the whole text, every token once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.request import Finish, Request
from outrider.errors import CapabilityError, ConfigError, QueueFullError, RequestError, UnavailableError
from outrider.remote.coordinator.journey import RetryLimits
from outrider.remote.coordinator.replica import Replica, Timeouts
from outrider.remote.protocol import stubs
from tests.unit.engine.conftest import Answer
from tests.unit.remote.conftest import Coordinate, Coordinated, asked, until
from tests.unit.remote.scripted_target import ScriptedTarget, answer, text_of

PROMPT = (7, 8, 9)
LIES = [
    "gap", "again", "vocabulary", "text", "origins", "origin", "finish", "stats", "negative stats", "endless numbers",
    "nested stats", "floods",
]  # fmt: skip


def ask(made: Coordinated, request: Request | None = None) -> Answer:
    listener = Answer()
    made.engine.submit(request or asked(), listener)
    return listener


def settled(made: Coordinated, request: Request) -> None:
    """Raises what refused it."""
    asyncio.run(asyncio.wait_for(made.engine.settle(request.id), 30))


def check_whole(got: Answer, count: int = 20) -> Finish:
    """Every token once, in order, and the numbers of all of them."""
    assert got.token_ids == answer(PROMPT, count)
    assert got.text == text_of(PROMPT, count)
    stats = got.finish.stats
    assert (got.finish.reason, stats.emitted, stats.answers) == ("length", count, 1)
    assert stats.accepted + stats.steps == count
    assert stats.drafted == 3 * stats.steps
    assert sum(len(update.origins) for update in got.updates) == count
    return got.finish


def failures(made: Coordinated) -> dict[str, int]:
    """Kinds of trouble, over all replicas."""
    found: dict[str, int] = {}
    for replica in made.replicas:
        for kind, count in replica.failures.items():
            found[kind] = found.get(kind, 0) + count
    return found


def test_one_replica_answers(coordinate: Coordinate) -> None:
    """The plain case: one call, with all that was asked."""
    made = coordinate(ScriptedTarget())
    request = asked(temperature=0.5, seed=9, stop=["never"], logit_bias={4: 1.5})
    check_whole(ask(made, request))
    (seen,) = made.targets[0].seen
    assert (list(seen.prompt), list(seen.committed), seen.seed) == (list(PROMPT), [], 9)
    assert seen.speculation.invariant
    assert not failures(made)


@pytest.mark.parametrize("cut", [0, 2, 6, 18])
def test_a_stream_that_is_lost_goes_on_elsewhere(coordinate: Coordinate, cut: int) -> None:
    """Behind the tokens that came, and under another id, since the first may still be alive there."""
    made = coordinate(ScriptedTarget(cuts=[cut]), ScriptedTarget(cuts=[cut]))
    check_whole(ask(made))
    first, second, *more = [message for target in made.targets for message in target.seen]
    sizes = sorted(len(message.committed) for message in [first, second, *more])
    assert sizes == sorted([0, cut, 2 * cut] if cut < 10 else [0, cut])[: len(sizes)]
    assert len({message.id for message in [first, second, *more]}) == 2 + len(more)
    assert failures(made)["lost"] >= 1


def test_a_connection_that_is_killed(coordinate: Coordinate) -> None:
    """Several requests under way, both services killed in turn and started again."""
    made = coordinate(ScriptedTarget(pause_s=0.02), ScriptedTarget(pause_s=0.02))
    answers = [ask(made, asked(max_tokens=60)) for _ in range(6)]
    for service in made.services:
        until(lambda one=service: len(one.target.seen) > 0, "a request")
        service.kill()
        service.again()
        until(lambda: len(made.fleet.usable) == 2, "both replicas")
    for got in answers:
        check_whole(got, 60)


def test_connections_that_break_again_and_again(coordinate: Coordinate) -> None:
    """Guards against losses that are never forgiven, and against a pause that every lost request doubles."""
    made = coordinate(ScriptedTarget(pause_s=0.04), ScriptedTarget(pause_s=0.04))
    answers = [ask(made, asked((7, 8, number), max_tokens=160)) for number in range(8)]
    breaks = 0
    while not all(got.over.is_set() for got in answers) and breaks < 16:
        time.sleep(0.15)
        for service in made.services:
            service.kill()
            service.again()
        breaks += 1
        until(lambda: len(made.fleet.usable) == 2, "both replicas", seconds=3)
    assert breaks > 4
    assert failures(made)["lost"] > 4 * len(answers)
    for number, got in enumerate(answers):
        assert got.finish.reason == "length", got.finish.error
        assert got.token_ids == answer((7, 8, number), 160)


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_counted_and_the_text_stays_right(coordinate: Coordinate, lie: str) -> None:
    """A replica that lies is left like a dead one, and not asked again for a while."""
    made = coordinate(ScriptedTarget(lies=[lie]), ScriptedTarget(lies=[lie]))
    check_whole(ask(made))
    assert failures(made)["lied"] in (1, 2)


@pytest.fixture
def sends_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services may answer with bytes in place of messages."""
    methods = stubs._methods

    def with_bytes(service: str) -> Iterator[Any]:
        for method, form, asked_as, answered in methods(service):
            written = lambda reply, write=answered.SerializeToString: reply if isinstance(reply, bytes) else write(reply)  # noqa: E731
            yield method, form, asked_as, SimpleNamespace(FromString=answered.FromString, SerializeToString=written)

    monkeypatch.setattr(stubs, "_methods", with_bytes)


@pytest.mark.usefixtures("sends_bytes")
def test_bytes_that_are_no_reply(coordinate: Coordinate) -> None:
    """Damaged messages are the replica's fault, not the request's."""
    made = coordinate(ScriptedTarget(lies=["bytes"]), ScriptedTarget(lies=["bytes"]))
    check_whole(ask(made))
    assert failures(made)["lied"] in (1, 2)


@pytest.mark.usefixtures("sends_bytes")
@pytest.mark.parametrize(("garbage", "words"), [("Open", "no Welcome"), ("Watch", "no TargetState")])
def test_bytes_that_are_no_handshake(
    coordinate: Coordinate, caplog: pytest.LogCaptureFixture, garbage: str, words: str
) -> None:
    """Another program on that port, say: named in our log, without a traceback."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(garbage=garbage), ready=1)
    until(lambda: words in made.replicas[1].reason, "the reason")
    assert not [record for record in caplog.records if record.name.startswith("outrider") and record.exc_info]


def test_an_answer_that_goes_on_behind_its_end(coordinate: Coordinate) -> None:
    """The answer stays valid; its replica does not."""
    made = coordinate(ScriptedTarget(lies=["goes on"]))
    check_whole(ask(made))
    until(lambda: failures(made), "the lie to be counted")
    assert failures(made) == {"lied": 1}


def test_a_stream_that_stays_open_behind_its_end(coordinate: Coordinate) -> None:
    """The request is over all the same: it holds no place, and cancelling it ends it no second time."""
    watching = Watching()
    made = coordinate(ScriptedTarget(lies=["lingers"]), observer=watching)
    request = asked()
    got = ask(made, request)
    check_whole(got)
    made.engine.cancel(request.id)
    until(lambda: not made.engine.snapshot().running, "the place to be free", 10.0)
    assert watching.calls.count("finished") == 1
    assert sum(update.finish is not None for update in got.updates) == 1


@pytest.mark.parametrize(("how", "kind"), [("aborts", "leaving"), ("fails", "failed")])
def test_requests_that_are_given_up_go_on_elsewhere(coordinate: Coordinate, how: str, kind: str) -> None:
    """A service that ends, or whose engine fails, reports it in a finish."""
    made = coordinate(ScriptedTarget(lies=[how]), ScriptedTarget(lies=[how]))
    check_whole(ask(made))
    assert (kind in failures(made)) == (kind == "failed")  # leaving is no failure


def test_a_request_that_fails_everywhere_takes_no_replica_from_others(
    coordinate: Coordinate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broken prompt, sent again and again, would end everything that waits or is read at the replicas it meets."""
    given_up: list[str] = []
    monkeypatch.setattr(Replica, "give_up", lambda replica, kind, *_, **__: given_up.append(kind))
    made = coordinate(ScriptedTarget(lies=["fails"] * 9), ScriptedTarget(lies=["fails"] * 9))
    got = ask(made)
    assert isinstance(got.finish.error, UnavailableError)
    assert "a GPU fell off" in str(got.finish.error)
    assert [len(target.seen) for target in made.targets] == [2, 2]  # each time where it has not failed yet
    assert failures(made) == {"failed": 4}
    assert not given_up


def test_silence_is_noticed(coordinate: Coordinate) -> None:
    """A stream without messages, on a replica whose watch is silent, too, as when a process is stopped."""
    made = coordinate(ScriptedTarget(stalls=[4]), ScriptedTarget(stalls=[4]))
    got = ask(made)
    until(lambda: any(len(target.seen) for target in made.targets), "a request")
    until(lambda: len(got.updates) >= 2, "its first tokens")
    (stalled,) = [target for target in made.targets if target.seen]
    other = next(target for target in made.targets if target is not stalled)
    other.stalls.clear()
    stalled.silent = True
    check_whole(got)
    assert failures(made) == {"stalled": 1}


def test_a_stream_that_waits_its_turn_is_no_stall(coordinate: Coordinate) -> None:
    """A stream that is silent for longer than the limit, while the watch continues, is waited for."""
    made = coordinate(ScriptedTarget(pause_s=1.5), patience=Timeouts(watch_interval_s=0.05, silence_s=0.6, hang_s=5.0))
    check_whole(ask(made, asked(max_tokens=4)), 4)
    assert not failures(made)


def test_a_hung_engine_is_left(coordinate: Coordinate) -> None:
    """A service that answers calls while its engine's loop stands still."""
    made = coordinate(ScriptedTarget(stalls=[2]), ScriptedTarget(stalls=[2]))
    got = ask(made)
    until(lambda: got.updates, "its first tokens")
    (hung,) = [target for target in made.targets if target.seen]
    next(target for target in made.targets if target is not hung).stalls.clear()
    hung.turn_age_s = 99.0
    check_whole(got)
    assert any("come round" in replica.reason for replica in made.replicas)


def test_a_request_ends_when_it_lost_too_many(coordinate: Coordinate) -> None:
    """Retries without a new token are bounded, and the client gets the number of tokens so far."""
    made = coordinate(ScriptedTarget(cuts=[2, 2, 2, *[0] * 9]), limits=RetryLimits(max_retries=2, wait_s=5.0))
    got = ask(made)
    assert got.finish.reason == "error"
    assert isinstance(got.finish.error, UnavailableError)
    assert "3 replicas of 'scripted' lost this request after 6 tokens" in str(got.finish.error)
    assert got.token_ids == answer(PROMPT, 6)
    until(lambda: made.engine.retries == 4, "the retries to be counted")


def test_refusals_are_final_and_come_before_the_answer(coordinate: Coordinate) -> None:
    """In the engine's own words and kind; nobody else is asked."""
    made = coordinate(ScriptedTarget(refusal="bad_words holds 'x'"), ScriptedTarget(refusal="bad_words holds 'x'"))
    request = asked()
    got = ask(made, request)
    with pytest.raises(ConfigError, match="bad_words holds 'x'"):
        settled(made, request)
    assert got.finish.reason == "error"
    assert sum(len(target.seen) for target in made.targets) == 1
    assert not failures(made)


def test_a_taken_request_settles_at_once(coordinate: Coordinate) -> None:
    """Long before its first token."""
    made = coordinate(ScriptedTarget(pause_s=0.5))
    request = asked()
    got = ask(made, request)
    settled(made, request)
    assert not got.updates
    made.engine.cancel(request.id)
    assert got.finish.reason == "abort"


def test_full_queues_are_passed_by(coordinate: Coordinate) -> None:
    """One queue is full, then both: the client gets a time to retry."""
    made = coordinate(ScriptedTarget(full=1), ScriptedTarget())
    made.targets[1].full = 0
    check_whole(ask(made))
    for target in made.targets:
        target.full = 9
    request = asked()
    ask(made, request)
    with pytest.raises(QueueFullError) as caught:
        settled(made, request)
    assert caught.value.retry_after_s == 3


def test_a_request_that_has_begun_waits_for_room(coordinate: Coordinate) -> None:
    """A running request is not dropped because the other queue is full for a moment."""
    made = coordinate(ScriptedTarget(cuts=[4], full=0), ScriptedTarget(cuts=[4], full=0))
    got = ask(made)
    until(lambda: any(target.seen for target in made.targets), "a request")
    for target in made.targets:
        target.full += 0 if target.seen else 1
    check_whole(got)


def test_draining_replicas_finish_and_get_nothing_new(coordinate: Coordinate) -> None:
    """Running requests stay there."""
    made = coordinate(ScriptedTarget(pause_s=0.05), ScriptedTarget(pause_s=0.05))
    first = ask(made)
    until(lambda: first.updates, "its first tokens")
    (leaving,) = [target for target in made.targets if target.seen]
    leaving.draining = True
    until(lambda: len(made.fleet.usable) == 1, "the drain to be seen")
    for _ in range(4):
        check_whole(ask(made))
    check_whole(first)
    assert len(leaving.seen) == 1
    assert not failures(made)


def test_a_drain_that_is_not_seen_yet(coordinate: Coordinate) -> None:
    """The refusal of a draining replica sends the request elsewhere."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(), patience=Timeouts(watch_interval_s=5.0, silence_s=20.0))
    made.targets[0].draining = True
    for _ in range(3):
        check_whole(ask(made))
    assert not failures(made)


def test_requests_wait_for_a_replica(coordinate: Coordinate) -> None:
    """All gone for a moment: time, not text."""
    made = coordinate(ScriptedTarget())
    made.services[0].kill()
    until(lambda: not made.fleet.usable, "the loss to be seen")
    assert made.engine.snapshot().away is not None
    got = ask(made)
    made.services[0].again()
    check_whole(got)
    assert made.engine.snapshot().away is None


def test_waiting_has_an_end(coordinate: Coordinate) -> None:
    """After the limit, the client gets the reason and a time to retry."""
    made = coordinate(ScriptedTarget(), limits=RetryLimits(wait_s=0.3))
    made.services[0].kill()
    until(lambda: not made.fleet.usable, "the loss to be seen")
    request = asked()
    ask(made, request)
    with pytest.raises(UnavailableError, match="no replica of 'scripted' answers: grpc:"):
        settled(made, request)


def test_time_limits_hold_while_nobody_answers(coordinate: Coordinate) -> None:
    """The request ends with what there is."""
    made = coordinate(ScriptedTarget(cuts=[4]), limits=RetryLimits(wait_s=30.0))
    got = ask(made, asked(timeout_s=1.5))
    until(lambda: got.updates, "its first tokens")
    made.services[0].kill()
    assert got.finish.reason == "timeout"
    assert got.token_ids == answer(PROMPT, len(got.token_ids))
    assert got.text == text_of(PROMPT, len(got.token_ids))


def test_cancelling_ends_the_call(coordinate: Coordinate) -> None:
    """Cancelling reaches the service."""
    made = coordinate(ScriptedTarget(pause_s=0.1))
    request = asked(max_tokens=200)
    got = ask(made, request)
    until(lambda: got.updates, "its first tokens")
    made.engine.cancel(request.id)
    assert got.finish.reason == "abort"
    until(lambda: made.targets[0].cancelled, "the service to hear of it")


def test_draining_the_coordinator(coordinate: Coordinate) -> None:
    """What is under way finishes; nothing new is taken."""
    made = coordinate(ScriptedTarget(pause_s=0.02))
    got = ask(made)
    assert made.engine.drain(30)
    check_whole(got)
    with pytest.raises(UnavailableError, match="shutting down"):
        ask(made)


def test_ids_and_lengths_are_checked_here(coordinate: Coordinate) -> None:
    """What needs no replica to be refused."""
    made = coordinate(ScriptedTarget(pause_s=0.1))
    request = asked()
    ask(made, request)
    with pytest.raises(RequestError, match="running already"):
        made.engine.submit(request, Answer())
    with pytest.raises(RequestError, match="one must be left to answer: shorten it"):
        ask(made, asked([5] * 500))
    with pytest.raises(QueueFullError, match="under way"):
        made.engine.check_room(12)
    made.engine.cancel(request.id)


def test_a_drafter_that_nobody_has(coordinate: Coordinate) -> None:
    """Refused at once, not after waiting."""
    from dataclasses import replace

    from outrider.engine.request import Speculation

    made = coordinate(ScriptedTarget())
    request = replace(asked(), speculation=Speculation(drafter="suffix"))
    ask(made, request)
    with pytest.raises(CapabilityError, match="has no drafter 'suffix'"):
        settled(made, request)


def test_requests_that_grow_differently_long(coordinate: Coordinate) -> None:
    """The context is that of the smallest replica, and lengths that were left open are settled by it."""
    made = coordinate(ScriptedTarget(context=100), ScriptedTarget(context=300))
    assert made.engine.context == 100
    check_whole(ask(made, asked(max_tokens=None)), 97)


def test_traces_are_passed_on(coordinate: Coordinate) -> None:
    """The W3C header of the request's span."""
    made = coordinate(ScriptedTarget(), headers=lambda: {"traceparent": "00-1-2-01"})
    check_whole(ask(made))
    assert made.targets[0].headers[0]["traceparent"] == "00-1-2-01"


class Watching:
    """An observer that takes notes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name)


def test_observers_see_one_request_whatever_it_lost(coordinate: Coordinate) -> None:
    """Metrics, logs and spans count it once."""
    watching = Watching()
    made = coordinate(ScriptedTarget(cuts=[4]), ScriptedTarget(cuts=[4]), observer=watching)
    check_whole(ask(made))
    until(lambda: "finished" in watching.calls, "the end")
    assert watching.calls == ["queued", "admitted", "prefilled", "finished"]
