"""Conditions for a replica: one protocol, one tokenizer, equal weights and arithmetic; and how lost ones return."""

from __future__ import annotations

import logging

import pytest

from outrider.remote.coordinator.engine import Carriage
from outrider.remote.coordinator.fleet import Fleet, ReplicaNeeds
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import model_identity
from outrider.remote.protocol import stubs
from outrider.remote.security import ClientSecurity, ServerSecurity
from outrider.remote.serving import GrpcServer, ServiceSettings
from tests.helpers import byte_tokenizer, word_tokenizer
from tests.unit.engine.conftest import Answer
from tests.unit.remote.conftest import PATIENCE, Coordinate, Coordinated, asked, until
from tests.unit.remote.scripted_target import FACTS, VOCAB, ScriptedTarget, answer


def refused(made: Coordinated) -> str:
    """Why one of them is refused."""
    until(lambda: any(one.standing == "refused" for one in made.replicas), "a refusal")
    return next(one.reason for one in made.replicas if one.standing == "refused")


def test_other_weights_are_not_mixed(coordinate: Coordinate) -> None:
    """A retry would change the text. What differs is named; /health has it."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(facts={**FACTS, "weights": "xyz"}), ready=1)
    reason = refused(made)
    assert "weights" in reason
    assert "dtype" not in reason
    report = next(one for one in made.fleet.report() if one["standing"] == "refused")
    assert report["reason"] == reason


def test_refusals_are_logged_once(coordinate: Coordinate, caplog: pytest.LogCaptureFixture) -> None:
    """However often it is asked again."""
    with caplog.at_level(logging.WARNING, "outrider.service"):
        made = coordinate(ScriptedTarget(), ScriptedTarget(protocol=99), ready=1)
        assert "version 99 of the protocol" in refused(made)
    assert len([line for line in caplog.messages if "refused" in line]) == 1


def test_another_tokenizer(coordinate: Coordinate) -> None:
    """Token ids would mean something else."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(tokenizer=word_tokenizer(257)), ready=1)
    assert "vocabulary" in refused(made)


def test_a_service_that_does_not_say_what_it_is(coordinate: Coordinate) -> None:
    """Without a hash nothing is known about its texts."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(facts=None), ready=1)
    assert "does not say which weights" in refused(made)


def test_needs_name_what_is_missing(coordinate: Coordinate) -> None:
    """Why a replica cannot take a request."""
    replica = coordinate(ScriptedTarget()).replicas[0]
    assert ReplicaNeeds(length=5).why_not(replica) is None
    assert "other weights" in (ReplicaNeeds(length=5, model_sha256="1234").why_not(replica) or "")
    assert "context" in (ReplicaNeeds(length=5000).why_not(replica) or "")


def test_a_new_version_takes_over_when_the_old_one_is_gone(coordinate: Coordinate) -> None:
    """A rolling update: refused beside the old weights, welcome after them."""
    old, new = ScriptedTarget(), ScriptedTarget(facts={**FACTS, "weights": "new"})
    made = coordinate(old, new, ready=1)
    refused(made)
    standing = {one.target: replica for one, replica in zip(made.services, made.replicas, strict=True)}
    kept = old if standing[old].is_usable else new
    other = new if kept is old else old
    next(one for one in made.services if one.target is kept).kill()
    until(lambda: standing[other].is_usable, "the other version to be used")
    got = Answer()
    made.engine.submit(asked(), got)
    assert got.token_ids == answer((7, 8, 9), 20)
    assert len(other.seen) == 1


def test_a_dead_engine_behind_a_live_port(coordinate: Coordinate) -> None:
    """The service reports itself that its engine failed."""
    made = coordinate(ScriptedTarget(), ScriptedTarget())
    made.targets[0].failed = "RuntimeError: out of memory"
    until(lambda: len(made.fleet.usable) == 1, "the failure to be seen")
    assert any("out of memory" in one.reason for one in made.replicas)
    made.targets[0].failed = ""
    until(lambda: len(made.fleet.usable) == 2, "it to come back")


def test_a_service_without_a_target(coordinate: Coordinate) -> None:
    """A draft service shakes hands, too; its welcome has no target's terms."""
    made = coordinate(ScriptedTarget(), ScriptedTarget(is_target=False), ready=1)
    assert "is no target service" in refused(made)


def test_tokens_are_shown_and_asked_for() -> None:
    """A coordinator without the secret is refused; one with it gets answers."""
    carriage = Carriage()
    server = carriage.result(guarded(ScriptedTarget()))
    fleets = {token: carriage.result(fleet_of(server.address, token)) for token in ("sesame", None)}
    try:
        until(lambda: fleets["sesame"].usable, "the one with the secret")
        stranger = fleets[None].replicas[0]
        until(lambda: stranger.standing == "refused", "the refusal")
        assert "UNAUTHENTICATED" in stranger.reason
    finally:
        for fleet in fleets.values():
            carriage.result(fleet.close())
        carriage.result(server.stop())
        carriage.close()


def test_a_replica_that_was_just_given_up_does_not_outlive_its_fleet() -> None:
    """Catches a cancellation of the task that is taken for one of its call: closing would wait for ever."""
    carriage = Carriage()
    server = carriage.result(guarded(ScriptedTarget()))
    fleet = carriage.result(fleet_of(server.address, "sesame"))
    until(lambda: fleet.usable, "the replica")

    async def give_up_and_close() -> None:
        fleet.replicas[0].give_up("lost", "it lost a request")
        await fleet.close()

    try:
        carriage.result(give_up_and_close(), timeout_s=10.0)
    finally:
        carriage.result(server.stop())
        carriage.close()


async def guarded(target: ScriptedTarget) -> GrpcServer:
    """A service that asks for a secret, on a free port."""
    server = GrpcServer(ServiceSettings(security=ServerSecurity(tokens=("sesame",))))
    stubs.add_to_server(stubs.TARGET, target, server.server)
    await server.listen()
    return server


async def fleet_of(address: str, token: str | None) -> Fleet:
    fleet = Fleet(
        "scripted", [Endpoint.parse(address)], ClientSecurity(token=token), model_identity("scripted", byte_tokenizer(), VOCAB),
        PATIENCE, instance="test", hold_s=1.0,
    )  # fmt: skip
    fleet.start()
    return fleet
