"""Whatever happens on the wire, the text is that of one process, the reason is counted, and
afterwards drafts are used again.

Each failure with greedy rows and with seeded invariant ones, against texts made without any
drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.remote.draft import connection
from outrider.remote.draft.text import DraftWait
from outrider.remote.protocol import MAX_MESSAGE_BYTES, PROTOCOL, messages
from outrider.remote.security import ServerSecurity
from tests.certificates import make_certificate
from tests.draft_service import FakeDraftService, Known
from tests.unit.remote.conftest import Demo, drafter_of
from tests.unit.remote.draft.test_drafter import wait_for

pytestmark = pytest.mark.usefixtures("short_pauses")

KINDS = ("greedy", "invariant")
every_kind = pytest.mark.parametrize("kind", KINDS)


def verifier(kind: str) -> str:
    return "gumbel" if kind == "invariant" else "auto"


def check(
    demo: Demo, kind: str, address: str, reason: str | None, times: int = 1, **options: object
) -> dict[str, float]:
    """Decode everything `times` over: right texts, and this trouble among those counted (None: none
    at all). Its counters."""
    with demo.remote(address, verifier(kind), **options) as llm:
        for _ in range(times):
            assert demo.texts(kind, llm) == demo.plain[kind]
        troubles = drafter_of(llm).connection.counts.troubles
        assert troubles == {} if reason is None else reason in troubles, troubles
        return drafter_of(llm).counters


@every_kind
def test_it_dies_and_comes_back(demo: Demo, folder: Path, kind: str) -> None:
    """In the middle of a stream, with another process in its place later that knows no row."""
    service = FakeDraftService(folder, Known(demo.plain[kind]))
    service.start()
    with demo.remote(service.address, verifier(kind)) as llm:
        assert demo.texts(kind, llm) == demo.plain[kind]
        line = drafter_of(llm).connection
        decoder = llm._decoder
        steps = 0
        step = decoder.step

        def dies_at_the_third() -> list[int]:
            nonlocal steps
            steps += 1
            if steps == 3:
                service.stop()
                wait_for(lambda: not line.is_open)
            if steps == 6:
                service.start()
                wait_for(lambda: line.is_open)
            return step()

        decoder.step = dies_at_the_third  # type: ignore[method-assign]
        assert demo.texts(kind, llm) == demo.plain[kind]
        assert steps > 6
        assert "unreachable" in line.counts.troubles or "lost" in line.counts.troubles
        before = drafter_of(llm).counters["remote_draft_nodes"]
        assert demo.texts(kind, llm) == demo.plain[kind]
        assert drafter_of(llm).counters["remote_draft_nodes"] > before
    service.stop()


@every_kind
def test_every_stream_breaks(demo: Demo, folder: Path, kind: str) -> None:
    """An error of its own after every few requests."""
    with FakeDraftService(folder, Known(demo.plain[kind])) as service:
        service.break_after = 3
        check(demo, kind, service.address, "lost")


@every_kind
def test_it_never_answers(
    demo: Demo, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go in, nothing comes out: a row waits at its beginning, and then no more."""
    expects = DraftWait.expects
    waits = []
    monkeypatch.setattr(
        DraftWait, "expects", lambda *given: waits.append(expects(*given)) or waits[-1]
    )
    with FakeDraftService(
        folder, Known(demo.plain[kind]), misbehave=lambda service, request: []
    ) as service:
        counts = check(demo, kind, service.address, None)
    assert (
        counts["remote_draft_hits"]
        == counts["remote_draft_waits"]
        == counts["remote_draft_round_trips"]
        == 0
    )
    assert counts["remote_draft_misses"] > 20
    assert sum(waits) < counts["remote_draft_misses"] / 4


def test_a_silent_line_is_opened_anew(
    demo: Demo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message in half a minute (here: at once) means a dead connection."""
    monkeypatch.setattr(connection, "SILENT_S", 0.01)
    known = Known(demo.plain["greedy"])
    silent = FakeDraftService(folder, known, misbehave=lambda service, request: [])
    with silent as service, demo.remote(service.address) as llm:
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
        wait_for(lambda: "silent" in drafter_of(llm).connection.counts.troubles)


@every_kind
def test_it_answers_late(demo: Demo, folder: Path, kind: str) -> None:
    """Every reply comes some steps too late: grafted where it still fits."""
    with FakeDraftService(folder, Known(demo.plain[kind])) as service:
        service.delay_s = 0.05
        check(demo, kind, service.address, None)


def node(token: int = 3, **distribution: object) -> messages.Node:
    sent = messages.Distribution(**distribution) if distribution else None
    return messages.Node(token=token, distribution=sent)


NODES: dict[str, list[messages.Node]] = {
    "outside the vocabulary": [node(10**6)],
    "not a number": [node(tokens=[3, 4], probs=[float("nan"), 0.5])],
    "a sum of two": [node(tokens=[3, 4], probs=[1.0, 1.0])],
    "not in its distribution": [node(tokens=[4], probs=[1.0])],
    "too many": [node() for _ in range(2000)],
}


@pytest.mark.parametrize("lie", NODES)
@every_kind
def test_it_lies(demo: Demo, folder: Path, kind: str, lie: str) -> None:
    """Beside right nodes: they go with the wrong ones, and after a few lies the line is closed for
    a while."""

    def lies(
        service: FakeDraftService, request: messages.RowRequest
    ) -> list[messages.RowReply] | None:
        honest = service.answers(request)
        if honest and len(service.requests) % 3 == 0:
            honest[0].nodes.extend(NODES[lie])
        return honest

    with FakeDraftService(folder, Known(demo.plain[kind]), misbehave=lies) as service:
        check(demo, kind, service.address, "invalid")
        service.hellos = []
        with demo.remote(service.address, verifier(kind)) as llm:

            def is_opened_again() -> bool:
                assert demo.texts(kind, llm) == demo.plain[kind]
                return len(service.hellos) > 1

            wait_for(is_opened_again)


@every_kind
def test_nodes_for_texts_of_tomorrow(demo: Demo, folder: Path, kind: str) -> None:
    """A base that is longer than the text."""

    def lies(service: FakeDraftService, request: messages.RowRequest) -> list[messages.RowReply]:
        honest = service.answers(request)
        for reply in honest:
            reply.base_length += 3
        return honest

    with FakeDraftService(folder, Known(demo.plain[kind]), misbehave=lies) as service:
        check(demo, kind, service.address, "invalid")


@every_kind
def test_wrong_guesses_are_no_trouble(demo: Demo, folder: Path, kind: str) -> None:
    """Nodes that are nonsense and well-formed: rejected, one by one."""
    with FakeDraftService(folder, Known(demo.plain[kind], errs=lambda position: True)) as service:
        check(demo, kind, service.address, None)


FLOODS: dict[str, tuple[Callable[[messages.RowRequest], list[messages.RowReply]], str]] = {
    "empty replies": (lambda request: [messages.RowReply(row=request.row)] * 5000, "flood"),
    "replies for no row": (lambda request: [messages.RowReply(row=10**9, nodes=[node()])] * 5000, "flood"),
    "a message beyond all bounds": (
        lambda request: [messages.RowReply(row=request.row, reason="x" * (MAX_MESSAGE_BYTES + 1))], "too_large"
    ),
    "much more than can be looked at": (
        lambda request: [messages.RowReply(row=request.row, reason="x" * (MAX_MESSAGE_BYTES - 1000))] * 4, "flood"
    ),
}  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS)
@every_kind
def test_it_floods(demo: Demo, folder: Path, kind: str, flood: str) -> None:
    """Memory stays bounded: the line is cut."""
    replies, reason = FLOODS[flood]

    def floods(
        service: FakeDraftService, request: messages.RowRequest
    ) -> list[messages.RowReply] | None:
        return replies(request) if len(service.requests) == 2 else None

    known = Known(demo.plain[kind])
    with (
        FakeDraftService(folder, known, misbehave=floods) as service,
        demo.remote(service.address, verifier(kind)) as llm,
    ):
        assert demo.texts(kind, llm) == demo.plain[kind]
        wait_for(lambda: reason in drafter_of(llm).connection.counts.troubles)
        wait_for(lambda: drafter_of(llm).connection.is_open)
        assert demo.texts(kind, llm) == demo.plain[kind]


@pytest.mark.parametrize("where", ["Open", "Draft"])
@every_kind
def test_bytes_that_are_no_message(demo: Demo, folder: Path, kind: str, where: str) -> None:
    """Bytes of another program, or damaged ones of ours: also at the start, where the sender is
    unknown."""
    service = FakeDraftService(folder, Known(demo.plain[kind]))
    service.garbage = {where}
    with service, demo.remote(service.address, verifier(kind)) as llm:
        assert ("malformed" in llm._built.notes[-1]) is (where == "Open")
        assert demo.texts(kind, llm) == demo.plain[kind]
        wait_for(lambda: "malformed" in drafter_of(llm).connection.counts.troubles)


TROUBLES = {
    messages.TROUBLE_UNKNOWN_ROW: "unknown_row",
    messages.TROUBLE_MISSING_TOKENS: "missing_tokens",
    messages.TROUBLE_REFUSED: "refused",
    messages.TROUBLE_BUSY: "busy",
}


@pytest.mark.parametrize("trouble", TROUBLES)
@every_kind
def test_troubles_of_a_row(
    demo: Demo, folder: Path, kind: str, trouble: int, patient: None
) -> None:
    """Rows that were evicted or lack tokens are sent again and get drafts; refused ones are left
    alone."""
    lost = 2

    def forgets(
        service: FakeDraftService, request: messages.RowRequest
    ) -> list[messages.RowReply] | None:
        nonlocal lost
        text = service.texts.get(request.row)
        if request.HasField("sampling") or not request.num_draft_tokens or text is None or not lost:
            return None
        lost -= 1
        if trouble == messages.TROUBLE_UNKNOWN_ROW:
            del service.texts[request.row]
            return None  # and says so by itself
        if trouble == messages.TROUBLE_MISSING_TOKENS:
            del text.tokens[4:]
            return None
        return [
            messages.RowReply(
                row=request.row, base_length=len(text.tokens), trouble=trouble, reason="not now"
            )
        ]

    known = Known(demo.plain[kind])
    with (
        FakeDraftService(folder, known, misbehave=forgets) as service,
        demo.remote(service.address, verifier(kind)) as llm,
    ):
        assert demo.texts(kind, llm) == demo.plain[kind]
        troubles = drafter_of(llm).connection.counts.troubles
        assert troubles[TROUBLES[trouble]] == 2
        # what a busy service did not take
        assert set(troubles) <= {TROUBLES[trouble], "missing_tokens"}
        counts = drafter_of(llm).counters
        assert counts["remote_draft_hits"] + counts["remote_draft_waits"] > 5


@pytest.mark.slow
def test_another_model_in_its_place_later(demo: Demo, folder: Path) -> None:
    """Somebody starts the service with another model: counted, tried again, and used when the right
    one is back."""
    service = FakeDraftService(folder, Known(demo.plain["greedy"]))
    service.start()
    with demo.remote(service.address) as llm:
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
        line = drafter_of(llm).connection
        service.stop()
        service.model = messages.ModelIdentity(name="other", vocab_size=10, vocabulary_sha256="aa")
        service.start()
        wait_for(lambda: "other_model" in line.counts.troubles)
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
        service.stop()
        service.model = None
        service.protocol = 7
        service.start()
        wait_for(lambda: line.counts.troubles["other_model"] > 2)
        service.stop()
        service.protocol = PROTOCOL
        service.start()
        wait_for(lambda: line.is_open)
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
    service.stop()


def test_the_token_changes_later(demo: Demo, folder: Path) -> None:
    """Refused in the middle of a life: decoding goes on."""
    service = FakeDraftService(folder, Known(demo.plain["greedy"]))
    service.start()
    with demo.remote(service.address) as llm:
        line = drafter_of(llm).connection
        service.stop()
        service.security = ServerSecurity(token="new")
        service.start()
        wait_for(lambda: "token" in line.counts.troubles)
        assert demo.texts("greedy", llm) == demo.plain["greedy"]
    service.stop()


@pytest.fixture
def certified(demo: Demo, folder: Path) -> Iterator[tuple[FakeDraftService, Path]]:
    """A service with TLS, and the file of the authority that signed its certificate."""
    certificate, key = make_certificate(folder)
    service = FakeDraftService(folder, Known(demo.plain["greedy"]))
    service.listens_on = "localhost:0"
    service.security = ServerSecurity(certificate=certificate, key=key)
    with service:
        yield service, certificate


def test_tls(demo: Demo, certified: tuple[FakeDraftService, Path]) -> None:
    """With the right authority drafts arrive."""
    service, ca = certified
    counts = check(demo, "greedy", service.address, None, ca=str(ca))
    assert counts["remote_draft_nodes"] > 0


@pytest.mark.slow
def test_tls_mismatch(demo: Demo, certified: tuple[FakeDraftService, Path], folder: Path) -> None:
    """Another authority, or no TLS on one side: unreachable, and decoding goes on."""
    service, _ = certified
    (folder / "other").mkdir()
    other, _ = make_certificate(folder / "other")
    counts = check(demo, "greedy", service.address, "unreachable", times=1, ca=str(other))
    assert counts["remote_draft_nodes"] == 0
    check(demo, "greedy", service.address.replace("grpcs", "grpc"), "unreachable", times=1)


def test_a_reason_is_logged_once(
    demo: Demo, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line when it goes, a line when it is back; nothing for each attempt between."""
    caplog.set_level(logging.WARNING, "outrider.remote")
    service = FakeDraftService(folder, Known(demo.plain["greedy"]))
    service.start()
    with demo.remote(service.address) as llm:
        line = drafter_of(llm).connection
        service.stop()
        wait_for(lambda: sum(line.counts.troubles.values()) > 5)
        service.start()
        wait_for(lambda: line.is_open)
    service.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "outrider.remote"]
    assert len(lines) <= 3, lines  # lost, unreachable, back
    assert lines[-1].endswith("is back")
