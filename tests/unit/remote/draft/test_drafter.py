"""Drafter 'remote' with a service that keeps to the protocol: drafts arrive, are at hand, and are
asked for when wanted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.errors import CapabilityError, ConfigError
from outrider.remote.protocol import messages
from outrider.remote.security import ServerSecurity
from outrider.sampling.params import SamplingParams
from tests.draft_service import FakeDraftService, Known, MadeUp, Repeating
from tests.unit.remote.conftest import GREEDY, INVARIANT, PROMPTS, Demo, drafter_of

pytestmark = pytest.mark.usefixtures("short_pauses")


def wait_for(happens: object, seconds: float = 60.0) -> None:
    """Wait until the call returns True."""
    deadline = time.monotonic() + seconds
    while not happens():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["greedy", "invariant"])
def test_the_text_is_plain_text_and_drafts_are_used(
    demo: Demo, folder: Path, patient: None, kind: str
) -> None:
    """One process or two: the same tokens, in fewer steps."""
    known = Known(demo.plain[kind], errs=lambda position: position % 7 == 0)
    verifier = "gumbel" if kind == "invariant" else "auto"
    with FakeDraftService(folder, known) as service, demo.remote(service.address, verifier) as llm:
        assert demo.texts(kind, llm) == demo.plain[kind]
        drafter = drafter_of(llm)
        done = llm.generate(PROMPTS[0], GREEDY if kind == "greedy" else INVARIANT)[0]
        assert done.stats.accepted > done.stats.steps
        counts = drafter.counters
        assert counts["remote_draft_hits"] + counts["remote_draft_waits"] > 0
        assert drafter.connection.counts.troubles == {}
        sampling_sent = [
            request.sampling for request in service.requests if request.HasField("sampling")
        ]
        assert {sampling.coupled for sampling in sampling_sent} == {kind == "invariant"}


def test_a_draft_that_arrives_during_a_pass_is_at_hand_for_the_next(
    demo: Demo, folder: Path
) -> None:
    """No step waits; a reply comes while the pass runs, and what still fits the text is proposed
    after it."""
    known = Known(demo.plain["greedy"])
    with (
        FakeDraftService(folder, known) as service,
        demo.remote(service.address, max_wait_ms=0.0) as llm,
    ):
        drafter = drafter_of(llm)
        forward = llm._decoder.target.forward

        def after_a_reply(*arguments: object, **options: object) -> object:
            """A pass takes longer than the service does."""
            if not options and drafter._texts[0].asked_s:
                wait_for(lambda: drafter._box._replies)
            return forward(*arguments, **options)  # type: ignore[arg-type]

        llm._decoder.target.forward = after_a_reply  # type: ignore[method-assign, assignment]
        try:
            done = llm.generate(PROMPTS[0], GREEDY)[0]
        finally:
            del llm._decoder.target.forward
        counts = drafter.counters
    whole = done.prompt_token_ids + done.token_ids
    assert whole == demo.plain["greedy"][0][: len(whole)]
    assert counts["remote_draft_waits"] == 0
    # at the slowest every other step has one, and two steps emit 5 of the 28 tokens
    assert counts["remote_draft_hits"] >= 5
    assert done.stats.accepted > 0


def test_what_the_service_gets(demo: Demo, folder: Path, patient: None) -> None:
    """Every token once, the sampling once, the end once; of a seed only what cannot tell the
    target's coins."""
    params = SamplingParams(
        max_tokens=20, temperature=0.7, top_k=9, seed=77, ignore_eos=True, logit_bias={5: 1.5}
    )
    with FakeDraftService(folder, Repeating()) as service:
        with demo.remote(service.address) as llm:
            done = llm.generate(PROMPTS[0], params)[0]
            wait_for(lambda: service.requests and service.requests[-1].end)
        first, *later, end = service.requests
        text = []
        for request in service.requests[:-1]:
            text[request.base_length :] = request.tokens
        whole = done.prompt_token_ids + done.token_ids
        assert text == whole[: len(text)]
        assert sum(len(request.tokens) for request in service.requests) == len(text) < len(whole)
        assert not any(request.HasField("sampling") for request in (*later, end))
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_k, sampling.num_prompt) == (
            pytest.approx(0.7),
            9,
            len(done.prompt_token_ids),
        )
        assert dict(sampling.logit_bias) == {5: 1.5}
        assert sampling.seed != 77
        assert not sampling.coupled


def test_rows_of_a_batch_are_told_apart(demo: Demo, folder: Path, patient: None) -> None:
    """Greedy, drawn and invariant rows in one batch; rows leave by swap-remove."""
    params = [SamplingParams(max_tokens=10 + 9 * number, ignore_eos=True) for number in range(3)]
    with (
        FakeDraftService(folder, Known(demo.plain["greedy"])) as service,
        demo.remote(service.address) as llm,
    ):
        done = llm.generate(list(PROMPTS), params)
        for one, plain in zip(done, demo.plain["greedy"], strict=True):
            whole = one.prompt_token_ids + one.token_ids
            assert whole == plain[: len(whole)]
            assert one.stats.accepted > 0
        wait_for(lambda: not service.texts)


def test_distributions_off_asks_for_none_and_believes_none(
    demo: Demo, folder: Path, patient: None
) -> None:
    """The mode for a service that is not trusted."""
    asked: list[bool] = []

    def lawful(service: FakeDraftService, request: messages.RowRequest) -> None:
        """Sends distributions although none were asked for."""
        if request.HasField("sampling"):
            asked.append(request.sampling.deterministic)
            request.sampling.deterministic = False

    with FakeDraftService(folder, Repeating(), misbehave=lawful) as service:
        with demo.remote(service.address, probs="off") as llm:
            drafter = drafter_of(llm)
            propose = drafter.propose
            found = []

            def spied(rows, gamma):  # noqa: ANN001, ANN202
                draft = propose(rows, gamma)
                found.append(draft.probs)
                return draft

            drafter.propose = spied  # type: ignore[method-assign]
            llm.generate(
                PROMPTS[0], SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
            )
        assert asked == [True]
        assert found
        assert all(probs is None for probs in found)


def test_nothing_is_sent_while_nothing_is_wanted(demo: Demo, folder: Path, patient: None) -> None:
    """While the control does not draft, no message is sent; when it drafts again, the service gets
    the text so far."""
    with (
        FakeDraftService(folder, Known(demo.plain["greedy"])) as service,
        demo.remote(service.address) as llm,
    ):
        decoder = llm._decoder
        wanted = [4] * 2 + [0] * 9 + [4] * 30

        class Turns:
            def choose(self, rows):  # noqa: ANN001, ANN202
                seen.append(drafter_of(llm).counters["remote_draft_requests"])
                size = wanted[min(len(seen) - 1, len(wanted) - 1)]
                return [row.clamp_draft(size) for row in rows]

            def observe(self, *_: object) -> None:
                """Do nothing."""

            def summary(self) -> dict[str, object]:
                return {}

        seen: list[float] = []
        decoder.control = Turns()
        done = llm.generate(PROMPTS[0], GREEDY)[0]
        assert done.prompt_token_ids + done.token_ids == demo.plain["greedy"][0]
        # one request more after the last wish, then silence
        assert seen[2] < seen[3] == seen[11] < seen[12]
        text: list[int] = []
        for request in service.requests:
            if not request.end:
                assert request.base_length <= len(text)
                text[request.base_length :] = request.tokens
        assert done.stats.accepted > 8


def test_max_context_and_max_draft_tokens_of_the_service(
    demo: Demo, folder: Path, patient: None
) -> None:
    """Behind its context nothing is asked for, and never for more nodes than it gives."""
    with FakeDraftService(folder, Known(demo.plain["greedy"])) as service:
        service.terms.max_draft_tokens = 2
        service.terms.max_context = 30
        with demo.remote(service.address) as llm:
            assert demo.texts("greedy", llm) == demo.plain["greedy"]
        asking = [request for request in service.requests if request.num_draft_tokens]
        assert max(request.num_draft_tokens for request in asking) == 2
        assert max(request.base_length + len(request.tokens) for request in asking) < 30


def test_drafters_share_one_connection(demo: Demo, folder: Path) -> None:
    """One stream a service and process; the last user closes it."""
    with FakeDraftService(folder, Known(demo.plain["greedy"])) as service:
        first = demo.remote(service.address)
        second = demo.remote(service.address)
        assert drafter_of(first).connection is drafter_of(second).connection
        first.close()
        assert demo.texts("greedy", second) == demo.plain["greedy"]
        second.close()


def test_drawn_rows_use_distributions(demo: Demo, folder: Path, patient: None) -> None:
    """A sampled row's draft is drawn, and carries the whole distribution it was drawn from."""
    vocab = demo.models.target.lm.shape.vocab_size
    with FakeDraftService(folder, MadeUp(vocab)) as service, demo.remote(service.address) as llm:
        drafter = drafter_of(llm)
        propose = drafter.propose
        drafts = []
        drafter.propose = lambda rows, gamma: drafts.append(propose(rows, gamma)) or drafts[-1]  # type: ignore[method-assign, func-returns-value]
        llm.generate(
            PROMPTS[0], SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
        )
    drawn = [draft for draft in drafts if draft.probs is not None]
    assert drawn
    for draft in drawn:
        for index in range(int(draft.lengths[0])):
            probs = draft.probs[0, index]
            assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
            assert int((probs > 0).sum()) == 4
            assert probs[draft.tokens[0, index]] > 0


# ---------------------------------------------------------------- at the start


def test_nobody_answers(demo: Demo, folder: Path) -> None:
    """A warning, and decoding without drafts; once it is there, it is used."""
    with demo.remote(f"unix:{folder}/draft.sock") as llm:
        assert "does not answer (unreachable" in llm._built.notes[-1]
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
        assert drafter_of(llm).connection.counts.troubles["unreachable"] >= 1
        assert drafter_of(llm).counters["remote_draft_misses"] == 0  # nobody was asked
        with FakeDraftService(folder, Known(demo.plain["greedy"])):
            wait_for(lambda: drafter_of(llm).connection.is_open)
            assert demo.texts("greedy", llm) == demo.plain["greedy"]
            assert drafter_of(llm).counters["remote_draft_nodes"] > 0


def test_another_vocabulary_is_refused(demo: Demo, folder: Path) -> None:
    """Token 5 of another vocabulary is another word."""
    with FakeDraftService(folder, MadeUp(100)) as service:
        service.model = messages.ModelIdentity(
            name="other", vocab_size=100, vocabulary_sha256="00ff"
        )
        with pytest.raises(CapabilityError, match="other"):
            demo.remote(service.address)


def test_another_version_is_refused(demo: Demo, folder: Path) -> None:
    """The message names both releases."""
    with FakeDraftService(folder, MadeUp(100)) as service:
        service.protocol = 9
        with pytest.raises(CapabilityError, match=r"version 9 .*install one release"):
            demo.remote(service.address)


def test_a_wrong_token_is_refused(
    demo: Demo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token is refused, and the right one appears in no message."""
    with FakeDraftService(folder, Known(demo.plain["greedy"])) as service:
        service.stop()
        service.security = ServerSecurity(token="right-secret")
        service.start()
        monkeypatch.setenv("OUTRIDER_SERVICE_TOKEN", "wrong")
        with pytest.raises(ConfigError, match="OUTRIDER_SERVICE_TOKEN"):
            demo.remote(service.address)
        monkeypatch.setenv("OUTRIDER_SERVICE_TOKEN", "right-secret")
        with demo.remote(service.address) as llm:
            assert demo.texts("greedy", llm) == demo.plain["greedy"]
            assert "right-secret" not in str(llm.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://localhost:1"}, "OpenAI server's"),
        ({"endpoint": "grpc://localhost"}, "grpc://HOST:PORT"),
        ({"endpoint": "grpc://localhost:1", "ca": "/nowhere/ca.pem"}, "grpcs://"),
        (
            {"endpoint": "grpcs://localhost:1", "ca": "/nowhere/ca.pem"},
            "cannot read /nowhere/ca.pem",
        ),
        ({"endpoint": "grpcs://localhost:1", "cert": "/nowhere/c.pem"}, "key"),
        ({"endpoint": "grpc://localhost:1", "max_wait_ms": -1.0}, "max_wait_ms"),
        ({"endpoint": "local"}, "must be like grpc://HOST:PORT"),
        ({}, "--draft-endpoint"),
    ],
)
def test_wrong_settings_are_refused(demo: Demo, options: dict[str, object], message: str) -> None:
    """Before anything is generated."""
    with pytest.raises(ConfigError, match=message):
        demo.llm("remote", **options)


def test_the_address_from_the_environment(
    demo: Demo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRAFT_ENDPOINT stands for the option, which wins."""
    with FakeDraftService(folder, Known(demo.plain["greedy"])) as service:
        monkeypatch.setenv("DRAFT_ENDPOINT", service.address)
        with demo.llm("remote") as llm:
            assert demo.texts("greedy", llm) == demo.plain["greedy"]
        monkeypatch.setenv("DRAFT_ENDPOINT", f"unix:{folder}/nobody.sock")
        with demo.remote(service.address) as llm:
            assert drafter_of(llm).connection.is_open
