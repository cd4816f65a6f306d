"""The coordinator over scripted targets that die, hang, lie and drain: clients see time, never
another text."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx2
import pytest

from outrider.cli.app import run
from outrider.remote.coordinator.target import in_words
from tests.unit.remote.coordinated import Setting, coordinated
from tests.unit.serve.fake_engine import FakeEngine

REPLY = "All of this text comes once, in its order, with nothing lost."
BODY: dict[str, Any] = {"model": "fake", "prompt": "Say", "max_tokens": 100, "temperature": 0}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def engines(count: int = 2, **fields: Any) -> list[FakeEngine]:
    return [FakeEngine(reply=REPLY, context=400, **fields) for _ in range(count)]


def events(content: str) -> list[dict[str, Any]]:
    """A stream's events; checks that nothing else is in it."""
    blocks = content.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(content: str) -> str:
    return "".join(choice["text"] for event in events(content) for choice in event["choices"])


def check(content: str) -> None:
    """One undisturbed answer: text, one id, counts."""
    assert text_of(content) == REPLY
    assert len({event["id"] for event in events(content)}) == 1
    assert events(content)[-1]["usage"]["completion_tokens"] == len(REPLY) + 1
    assert [
        c["finish_reason"] for e in events(content) for c in e["choices"] if c["finish_reason"]
    ] == ["stop"]


def break_busy(setting: Setting, fault: str, **fields: Any) -> None:
    """Break whatever target the next request goes to, once."""
    times = [1]
    for target in setting.targets:
        target.fault = fault
        target.times = times
        for name, value in fields.items():
            setattr(target, name, value)


def test_answers_are_those_of_a_target() -> None:
    """Whole, as streams, of every interface, and pages: what a client gets of the target itself."""
    with coordinated(*engines(1)) as setting:
        client = setting.client
        check(client.post(COMPLETIONS, json=STREAM).text)
        assert client.post(COMPLETIONS, json=BODY).json()["choices"][0]["text"] == REPLY
        message = {
            "model": "fake",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 100,
        }
        assert client.post(CHAT, json=message).json()["choices"][0]["message"]["content"] == REPLY
        assert client.post("/v1/messages", json=message).json()["content"][0]["text"] == REPLY
        streamed = client.post("/v1/messages", json={**message, "stream": True})
        assert "event: message_stop" in streamed.text
        assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
        assert client.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        assert client.get("/openapi.json").json()["info"]["title"] == "Outrider"
        refused = client.post(COMPLETIONS, json={**BODY, "temperature": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert client.post(COMPLETIONS, json={**BODY, "model": "other"}).status_code == 404
        assert client.post(COMPLETIONS, content=b"{no json").status_code == 400
        assert client.get("/nothing").status_code == 404
        assert len(client.get("/v1/models").headers.get_list("x-request-id")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 20])
def test_a_stream_that_breaks_off_continues_elsewhere(after: int) -> None:
    with coordinated(*engines()) as setting:
        break_busy(setting, "cut", after=after)
        check(setting.client.post(COMPLETIONS, json=STREAM).text)
        assert setting.metric("retries_total") == 1
        assert setting.metric("replica_failures_total") == 1
        setting.until("ready", "ready")


def test_a_chat_continues_with_its_thoughts_and_its_id() -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "max_tokens": 100,
        "n": 2,
    }
    with coordinated(*engines()) as setting:
        break_busy(setting, "cut", after=9)
        chunks = events(setting.client.post(CHAT, json=body).text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        choices = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == REPLY


@pytest.mark.slow
def test_a_whole_answer_is_asked_for_again() -> None:
    with coordinated(*engines()) as setting:
        break_busy(setting, "cut")
        answer = setting.client.post(COMPLETIONS, json=BODY)
        assert answer.json()["choices"][0]["text"] == REPLY
        assert setting.metric("retries_total") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_target_that_hangs_is_left(stream: bool) -> None:
    """Connected and silent, its probes too."""
    with coordinated(*engines()) as setting:
        break_busy(setting, "hang", after=4 if stream else 0)
        answers: list[str] = []
        body = STREAM if stream else BODY
        thread = threading.Thread(
            target=lambda: answers.append(setting.client.post(COMPLETIONS, json=body).text)
        )
        thread.start()
        while not any(target.asked for target in setting.targets):
            time.sleep(0.01)
        time.sleep(0.3)
        busy = next(target for target in setting.targets if target.asked)
        busy.stopped = True
        thread.join(20)
        if stream:
            check(answers[0])
        else:
            assert json.loads(answers[0])["choices"][0]["text"] == REPLY


@pytest.mark.slow
@pytest.mark.parametrize(
    "garbage",
    [
        b"data: {half\n\n",
        b": resume {}x\n\n",
        b': resume {"choice": -1}\n\n',
        b"\x00\xff" * 100 + b"\n\n",
        b"data: 3\n\n",
        b': resume {"choice": 0, "token_ids": ["a"]}\n\n',
        b"HTTP/1.1 200 OK\r\n\r\n\n\n",
    ],
)
def test_a_target_that_sends_nonsense_is_left(garbage: bytes) -> None:
    with coordinated(*engines()) as setting:
        break_busy(setting, "garbage", garbage=garbage, after=6)
        check(setting.client.post(COMPLETIONS, json=STREAM).text)
        assert sorted(setting.standings()) == ["away", "ready"]
        assert 'kind="invalid"' in setting.client.get("/metrics").text


def test_an_error_in_the_middle_is_tried_elsewhere() -> None:
    """A request that fails alone: the target stays in use."""
    with coordinated(*engines()) as setting:
        break_busy(setting, "garbage", garbage=b'data: {"error": {"message": "NaN"}}\n\n', after=6)
        check(setting.client.post(COMPLETIONS, json=STREAM).text)
        assert setting.standings() == ["ready", "ready"]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 6])
def test_a_request_that_breaks_every_target_ends_with_an_error(after: int) -> None:
    """Before the first byte with a status, after it as an event; and it ends."""
    with coordinated(*engines(), max_retries=2) as setting:
        for target in setting.targets:
            target.fault = "garbage"
            target.garbage = b'data: {"error": {"message": "NaN"}}\n\n'
            target.after = after
        answer = setting.client.post(COMPLETIONS, json=STREAM)
        assert sum(target.asked for target in setting.targets) == 3
        if after == 0:
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "NaN")
        else:
            assert events(answer.text)[-1]["error"]["code"] == "target_lost"


@pytest.mark.slow
def test_tokens_make_up_for_connections_that_broke() -> None:
    """More losses than max_retries, each with progress between."""
    with coordinated(*engines(), max_retries=1, wait_s=10.0) as setting:
        for target in setting.targets:
            target.fault = "cut"
            target.after = 9
        content = setting.client.post(COMPLETIONS, json=STREAM).text
        check(content)
        assert setting.metric("retries_total") > 2


@pytest.mark.slow
def test_a_target_that_drains_gets_nothing_new() -> None:
    first, second = engines()
    with coordinated(first, second) as setting:
        app = setting.targets[0]._app
        setting.targets[0]._app = _draining(app)
        setting.until("draining", "ready")
        for _ in range(4):
            check(setting.client.post(COMPLETIONS, json=STREAM).text)
        assert setting.targets[0].asked == 0
        setting.targets[0]._app = app
        setting.until("ready", "ready")


def _draining(app: Any) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        content = b'{"error": {"message": "shutting down", "code": "shutting_down"}}'
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": content})

    return answer


def test_a_full_target_is_passed_over_and_all_full_ones_say_so() -> None:
    with coordinated(*engines()) as setting:
        setting.targets[0].status = 429
        for _ in range(3):
            check(setting.client.post(COMPLETIONS, json=STREAM).text)
        setting.targets[1].status = 429
        assert setting.client.post(COMPLETIONS, json=STREAM).status_code == 429


def test_a_target_that_fails_is_tried_at_the_others_and_its_answer_is_the_last_word() -> None:
    with coordinated(*engines()) as setting:
        setting.targets[0].status = 500
        for _ in range(3):
            check(setting.client.post(COMPLETIONS, json=STREAM).text)
        setting.targets[1].status = 500
        assert setting.client.post(COMPLETIONS, json=STREAM).json()["error"]["message"] == "no"


@pytest.mark.slow
def test_nobody_answers() -> None:
    """503 with the reason of each, after the wait; ready says so, health does not."""
    with coordinated(*engines(1)) as setting:
        setting.targets[0].stopped = True
        setting.until("away")
        answer = setting.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert "sent nothing for 1 s" in answer.json()["error"]["message"]
        assert setting.client.get("/ready").status_code == 503
        health = setting.client.get("/health")
        assert (health.status_code, health.json()["replicas"][0]["standing"]) == (200, "away")


@pytest.mark.slow
def test_too_many_wait() -> None:
    with coordinated(*engines(1), max_queue=1, wait_s=5.0) as setting:
        setting.targets[0].stopped = True
        setting.until("away")
        thread = threading.Thread(
            target=setting.client.post, args=(COMPLETIONS,), kwargs={"json": BODY}
        )
        thread.start()
        while not setting.coordinator.fleet.waiting:
            time.sleep(0.01)
        assert setting.client.post(COMPLETIONS, json=BODY).status_code == 429
        thread.join()


def test_a_target_with_other_texts_is_refused_by_name() -> None:
    other = FakeEngine(reply="Another text.", context=400)
    with coordinated(engines(1)[0], other, ready=False) as setting:
        limit = time.monotonic() + 20
        while sorted(setting.standings()) != ["ready", "refused"]:
            assert time.monotonic() < limit
            time.sleep(0.01)
        reasons = setting.coordinator.fleet.reasons()
        assert "weights or arithmetic" in reasons
        assert "tokenizer" not in reasons


def test_requests_go_where_their_model_is() -> None:
    one = FakeEngine("one", reply=REPLY, context=400)
    two = FakeEngine("two", reply="Two.", context=400)
    with coordinated(one, two) as setting:
        for name, text in (("one", REPLY), ("two", "Two."), ("one", REPLY), ("two", "Two.")):
            answer = setting.client.post(COMPLETIONS, json={**BODY, "model": name})
            assert answer.json()["choices"][0]["text"] == text


@pytest.mark.slow
def test_the_target_with_the_least_to_do_is_asked() -> None:
    gates = [threading.Semaphore(10**6), threading.Semaphore(10**6)]
    made = [FakeEngine(reply=REPLY, context=400, gate=gate) for gate in gates]
    with coordinated(*made) as setting:
        for gate in gates:
            while gate.acquire(blocking=False):
                pass
        threads = [
            threading.Thread(target=setting.client.post, args=(COMPLETIONS,), kwargs={"json": BODY})
            for _ in range(4)
        ]
        for number, thread in enumerate(threads, 1):
            thread.start()
            while setting.coordinator.fleet.in_flight < number:
                time.sleep(0.01)
        time.sleep(0.2)
        assert [target.in_flight for target in setting.coordinator.fleet.targets] == [2, 2]
        for gate in gates:
            gate.release(1000)
        for thread in threads:
            thread.join()


def test_a_client_that_leaves_is_not_answered_further() -> None:
    gate = threading.Semaphore(10**6)
    with coordinated(FakeEngine(reply=REPLY, context=400, gate=gate)) as setting:
        while gate.acquire(blocking=False):
            pass
        gate.release(4)
        with setting.client.stream("POST", COMPLETIONS, json=STREAM) as response:
            next(response.iter_lines())
        assert setting.targets[0].left.wait(20)
        gate.release(1000)


def test_a_stored_response_is_found_wherever_it_is() -> None:
    with coordinated(*engines()) as setting:
        made = [
            setting.client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
            for _ in range(4)
        ]
        for identity in made:
            assert setting.client.get(f"/v1/responses/{identity}").json()["id"] == identity
        assert setting.client.get("/v1/responses/resp_none").status_code == 404


def test_a_stream_of_another_interface_ends_with_an_error_event() -> None:
    """It cannot be continued; before its first byte it is asked for again."""
    message = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "stream": True,
    }
    with coordinated(*engines()) as setting:
        break_busy(setting, "cut", after=5)
        content = setting.client.post("/v1/messages", json=message).text
        assert content.split("\n\n")[-2].startswith("event: error\n")
        setting.until("ready", "ready")
        break_busy(setting, "cut", after=0)
        assert "event: message_stop" in setting.client.post("/v1/messages", json=message).text


def test_keys_of_clients_and_of_targets() -> None:
    with coordinated(*engines(1), token="inner", keys=("inner",), api_keys=("outer",)) as setting:
        assert setting.client.post(COMPLETIONS, json=BODY).status_code == 401
        answer = setting.client.post(
            COMPLETIONS, json=BODY, headers={"authorization": "Bearer outer"}
        )
        assert answer.json()["choices"][0]["text"] == REPLY
        assert setting.targets[0].headers["authorization"] == "Bearer inner"


def test_a_target_that_wants_another_key_is_named() -> None:
    with coordinated(*engines(1), token="wrong", keys=("inner",), ready=False) as setting:
        setting.until("refused")
        assert "OUTRIDER_SERVICE_TOKEN" in setting.coordinator.fleet.reasons()


@pytest.mark.slow
def test_an_answer_takes_no_longer_than_its_limit() -> None:
    """A target whose probes are well and whose answers never come."""
    with coordinated(*engines(1), request_timeout_s=0.5) as setting:
        import outrider.remote.coordinator.journey as journey

        setting.targets[0].fault = "hang"
        monkey = pytest.MonkeyPatch()
        monkey.setattr(journey, "OVERTIME_S", 0.2)
        try:
            assert setting.client.post(COMPLETIONS, json=BODY).status_code == 504
        finally:
            monkey.undo()


def test_the_health_of_a_server_is_asked_like_a_services(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`outrider service health http://...`: ready, not ready, nobody there."""
    with coordinated(*engines(1)) as setting:
        address = setting.addresses[0]
        assert run(["service", "health", address]) == 0
        assert "takes requests" in capsys.readouterr().out
        setting.targets[0]._app = _draining(setting.targets[0]._app)
        assert run(["service", "health", address]) == 1
        assert "takes no requests now" in capsys.readouterr().err
    assert run(["service", "health", "http://127.0.0.1:1"]) == 1
    assert "nobody listens there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "name the targets"),
        (["a:1,a:1"], "twice"),
        (["grpc://a:1"], "speaks HTTP"),
        (["http://a"], "http://HOST:PORT"),
        (["http://a:1/v1"], "http://HOST:PORT"),
        (["a:1", "--max-retries", "-1"], "max_retries"),
        (["a:1", "--stall-timeout", "0"], "stall_timeout"),
        (["a:1", "--max-queue", "0"], "max_queue"),
        (["a:1", "--tls-ca", "ca.pem"], "https://HOST:PORT"),
        (["a:1", "--tls-cert", "c.pem"], "--tls-key"),
        (["a:1", "--ssl-ca-certs", "ca.pem"], "--ssl-certfile"),
        (["a:1", "--port", "70000"], "port"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TARGET_ENDPOINT", raising=False)
    arguments = ["--target-endpoint", *given] if given else []
    assert run(["service", "coordinator", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert len(lines) == 1


def test_the_variable_names_the_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TARGET_ENDPOINT", "http://a:1,http://a:1")
    assert run(["service", "coordinator"]) == 2
    assert "twice" in capsys.readouterr().err


def test_a_server_reads_the_variables_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MODEL, BATCH_SIZE, MAX_DRAFT_TOKENS and DRAFT_ENDPOINT stand for options of `outrider serve`;
    an option wins."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "outrider.serve.run.run_server", lambda settings, status: seen.append(settings.models[0])
    )
    for name, value in (
        ("MODEL", "demo"),
        ("BATCH_SIZE", "3"),
        ("MAX_DRAFT_TOKENS", "2"),
        ("DRAFT_ENDPOINT", "grpc://d:1"),
    ):
        monkeypatch.setenv(name, value)
    assert run(["serve"]) == 0
    assert (
        run(
            [
                "serve",
                "other",
                "--max-num-seqs",
                "5",
                "--num-draft-tokens",
                "4",
                "--drafter",
                "ngram",
            ]
        )
        == 0
    )
    first, second = seen
    assert (
        first.options.target,
        first.engine.max_num_seqs,
        str(first.options.num_draft_tokens),
    ) == ("demo", 3, "2")
    assert (first.options.draft_endpoint, second.options.draft_endpoint) == ("grpc://d:1", None)
    assert (
        second.options.target,
        second.engine.max_num_seqs,
        str(second.options.num_draft_tokens),
    ) == ("other", 5, "4")
    assert "DRAFT_ENDPOINT is set, but not used" in capsys.readouterr().err


def test_a_certificate_refused_after_the_handshake_is_thought_of() -> None:
    """TLS 1.3 tells a caller of it with an alert that may be lost: all it sees is a closed line."""
    closed = httpx2.RemoteProtocolError("Server disconnected without sending a response.")
    assert "certificate" in in_words(closed)
