"""The log and the traffic file: what is written, and what must never be."""

from __future__ import annotations

import io
import json
import logging
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.engine.request import Finish, Request
from outrider.errors import ConfigError, NumericalError
from outrider.lab.workload.load import load_workload
from outrider.sampling.params import SamplingParams
from outrider.serve.app import make_app
from outrider.serve.observability.logs import Logging, RequestLog
from outrider.serve.observability.telemetry import Telemetry
from outrider.serve.observability.traffic import LoggedAnswer, LoggedExchange, TrafficLog
from outrider.stats import DecodeStats
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, serving, state_of


def request() -> Request:
    return Request(id="cmpl-1", prompt=[1, 2], params=SamplingParams(max_tokens=8, stop=["SECRET"]))


def finish(**facts: Any) -> Finish:
    stats = DecodeStats(
        emitted=9,
        steps=3,
        drafted=10,
        tested=8,
        accepted=6,
        answers=1,
        first_tokens=3,
        ttft_s=0.5,
        decode_s=1.5,
    )
    fields = {
        "reason": "stop",
        "stats": stats,
        "seed": 1,
        "lossless": True,
        "drafter": "ngram",
        "prompt_tokens": 2,
    }
    return Finish(**{**fields, **facts})


def written(style: str, *ends: Finish, level: str = "info") -> str:
    """The log lines of requests with these ends."""
    stream = io.StringIO()
    running = Logging(style, level, stream)
    try:
        for end in ends:
            RequestLog("m").finished(request(), end)
    finally:
        running.close()
    return stream.getvalue()


def test_who_is_turned_away_is_logged() -> None:
    """A full queue and a wrong key are logged; without a line the log would show no request. Probes
    of health are not logged."""
    stream = io.StringIO()
    running = Logging("json", "info", stream)
    try:
        with serving(FakeEngine(max_queue=0), api_keys=("right",)) as client:
            for key, path in (
                ("right", "/v1/chat/completions"),
                ("wrong", "/v1/models"),
                ("right", "/v1/models/none"),
            ):
                headers = {"Authorization": f"Bearer {key}"}
                client.post(path, json=chat(), headers=headers) if "chat" in path else client.get(
                    path, headers=headers
                )
            client.state.draining = True
            assert client.get("/ready").status_code == 503
    finally:
        running.close()
    lines = [
        entry
        for entry in map(json.loads, stream.getvalue().splitlines())
        if entry["event"] == "refused"
    ]
    assert [(one["status"], one["level"], one["path"]) for one in lines] == [
        (429, "warning", "/v1/chat/completions"),
        (401, "info", "/v1/models"),
        (404, "info", "/v1/models/none"),
    ]
    reasons = ("0 requests wait already", "the API key is wrong", "the model 'none' does not exist")
    for line, reason in zip(lines, reasons, strict=True):
        assert line["reason"].startswith(reason)
    assert "right" not in stream.getvalue()


def test_a_reason_holds_no_value_that_was_sent() -> None:
    """Guards against text of a prompt in the log."""
    stream = io.StringIO()
    running = Logging("human", "info", stream)
    try:
        with serving(FakeEngine()) as client:
            client.post("/v1/chat/completions", json=chat(temperature="SECRET"))
            client.post("/v1/completions", json={"prompt": {"text": "SECRET"}})
    finally:
        running.close()
    assert "'temperature' must be a number" in stream.getvalue()
    assert "SECRET" not in stream.getvalue()


def test_a_full_disk_is_reported_without_what_people_wrote(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against texts in the server's log, and against a server that ends with a traceback for
    its last line."""
    traffic = TrafficLog(Path("/dev/full"))
    with caplog.at_level(logging.ERROR, "outrider.serve"):
        for _ in range(2):
            body = {"prompt": "SECRET " * 2000}
            traffic.add("/v1/completions", exchange("cmpl-1", body, "SECRET"))
        traffic.close()
    output = capsys.readouterr()
    assert "SECRET" not in output.err + output.out + caplog.text
    assert "could not be written to /dev/full: " in caplog.text
    assert "No space left" in caplog.text


def test_traffic_goes_on_when_its_folder_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a thread that dies of one failure: nothing would be written any more, and the
    queue grow for ever."""
    file = tmp_path / "logs" / "traffic.jsonl"
    file.parent.mkdir()
    traffic = TrafficLog(file)
    for number in range(3):
        if number == 1:
            file.unlink()
            file.parent.rmdir()
        if number == 2:
            wait_until(lambda: "could not be written" in caplog.text)
            file.parent.mkdir()
        traffic.add("/v1/completions", exchange(f"cmpl-{number}", {"prompt": "x"}, "y"))
        if number == 0:
            wait_until(lambda: file.stat().st_size > 0)
    traffic.close()
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["cmpl-2"]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    assert condition()


def test_request_is_one_line_of_json() -> None:
    (line,) = written("json", finish()).splitlines()
    entry = json.loads(line)
    wanted = {
        "event": "request",
        "level": "info",
        "logger": "outrider.requests",
        "request_id": "cmpl-1",
        "model": "m",
        "finish": "stop",
        "tokens": 9,
        "prompt_tokens": 2,
        "ttft_s": 0.5,
        "tau": 3.0,
        "drafted": 10,
        "accepted": 6,
        "tpot_s": 0.25,
        "decode_tokens_per_s": 4.0,
        "tokens_per_s": 4.5,
        "drafter": "ngram",
    }
    assert {name: entry.get(name) for name in wanted} == wanted
    assert entry["timestamp"].endswith("Z")
    assert "error" not in entry
    assert "preemptions" not in entry
    assert "SECRET" not in line
    assert "lossless" not in entry


def test_line_says_what_was_lost() -> None:
    entry = json.loads(written("json", finish(lossless=False, prompt_share=0.21)))
    assert (entry["lossless"], entry["prompt_share"]) == (False, 0.21)


def test_human_line_says_the_same() -> None:
    (line,) = written("human", finish()).splitlines()
    for part in ("request", "request_id=cmpl-1", "tau=3.0", "accepted=6", "finish=stop"):
        assert part in line


def test_failed_request_is_an_error_and_a_late_one_a_warning() -> None:
    lines = written(
        "json",
        finish(reason="error", error=NumericalError("NaN in layer 3")),
        finish(reason="timeout"),
    ).splitlines()
    failed, late = map(json.loads, lines)
    assert (failed["level"], failed["error"]) == ("error", "NaN in layer 3")
    assert late["level"] == "warning"
    assert written("json", finish(), level="warning") == ""


@pytest.fixture
def uvicorn_speaks() -> Iterator[None]:
    """Another server of this process may have silenced it."""
    logger = logging.getLogger("uvicorn.error")
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("uvicorn_speaks")
def test_exceptions_and_lines_of_libraries_have_the_same_form() -> None:
    """A traceback of many lines would break what reads the log line by line."""
    stream = io.StringIO()
    running = Logging("json", "info", stream)
    try:
        logging.getLogger("a.library").info(
            "started on %s", "here", extra={"color_message": "\x1b[1mstarted"}
        )
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            logging.getLogger("outrider.engine").exception("it broke")
    finally:
        running.close()
    started, broke = map(json.loads, stream.getvalue().splitlines())
    assert started["event"] == "started on here"
    assert "color_message" not in started
    assert "ZeroDivisionError" in broke["exception"]


def test_what_libraries_tell_of_their_own_work_is_left_out() -> None:
    """A GGUF file's metadata is written to a scratch file: its name in the log makes people look
    for it."""
    stream = io.StringIO()
    running = Logging("json", "info", stream)
    for level in (logging.INFO, logging.WARNING):
        logging.getLogger("gguf.gguf_writer").log(level, "Writing the following files:")
    running.close()
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == ["warning"]


def test_closing_puts_the_log_back() -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    level = root.level
    Logging("json", "debug", io.StringIO()).close()
    assert (root.handlers, root.level) == (before, level)


# ---------------------------------------------------------------- traffic


def exchange(name: str, asked: dict[str, Any], *texts: str) -> LoggedExchange:
    return LoggedExchange(name, asked, [LoggedAnswer(text, None, "stop") for text in texts], {})


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """A served fake engine whose traffic goes to `client.file`."""
    from starlette.testclient import TestClient

    engine = FakeEngine()
    traffic = TrafficLog(tmp_path / "traffic.jsonl")
    app = Telemetry(make_app(state_of(engine)), tracing=None, traffic=traffic)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.file, client.traffic = tmp_path / "traffic.jsonl", traffic  # type: ignore[attr-defined]
        yield client
    engine.stop()


def logged(client: Any) -> tuple[Any, ...]:
    """What `outrider bench` reads from the file; a single bad line would refuse it."""
    client.traffic.close()
    return load_workload(str(client.file)).requests


def ask(client: Any, path: str, **body: Any) -> Any:
    response = client.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    return response


QUESTION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Zwölf Boxkämpfer \U0001f600?"},
]


@pytest.mark.parametrize("stream", [False, True])
def test_conversation_comes_back_as_the_lab_reads_it(client: Any, stream: bool) -> None:
    ask(client, "/v1/chat/completions", messages=QUESTION, max_tokens=50, stream=stream)
    (found,) = logged(client)
    assert list(found.messages) == QUESTION
    assert found.answer == "Hello, world"
    assert found.max_tokens == 50
    assert found.id.startswith("chatcmpl-")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_stand_beside_the_answer(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(reply="<think>hm</think>yes")
    engine.tokenizer.chat_template += "{# </think> #}"
    state = state_of(engine)
    traffic = TrafficLog(tmp_path / "t.jsonl")
    with TestClient(Telemetry(make_app(state), tracing=None, traffic=traffic)) as client:
        ask(client, "/v1/chat/completions", messages=QUESTION, max_tokens=50, stream=stream)
    traffic.close()
    engine.stop()
    (choice,) = json.loads((tmp_path / "t.jsonl").read_text())["response"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "Why?", "instructions": "Be kind."}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "Why?"}],
                "system": "Be kind.",
                "max_tokens": 90,
            },
        ),
    ],
)
def test_other_interfaces_come_back_as_chats(
    client: Any, path: str, fields: dict[str, Any], stream: bool
) -> None:
    ask(client, path, stream=stream, **fields)
    (found,) = logged(client)
    assert [message["content"] for message in found.messages] == ["Be kind.", "Why?"]
    assert found.answer == "Hello, world"
    assert found.id.startswith(("resp_", "msg_"))


@pytest.mark.parametrize("stream", [False, True])
def test_completion_comes_back_as_the_lab_reads_it(client: Any, stream: bool) -> None:
    ask(client, "/v1/completions", prompt="Once\nupon", max_tokens=5, stream=stream)
    (found,) = logged(client)
    assert (found.prompt, found.answer, found.max_tokens) == ("Once\nupon", "Hello", 5)


def test_every_prompt_of_a_request_is_a_line(client: Any) -> None:
    """Prompts of token ids are logged as text, too; answers stay with their prompt."""
    ids = FakeEngine().tokenizer("cd")["input_ids"]
    ask(client, "/v1/completions", prompt=["ab", "ef"], n=2)
    ask(client, "/v1/completions", prompt=ids, echo=True)
    ask(client, "/v1/chat/completions", prompt_token_ids=ids)
    found = logged(client)
    assert [one.prompt for one in found] == ["ab", "ef", "cd", "cd"]
    assert {one.answer for one in found} == {"Hello, world"}
    assert len({one.id for one in found}) == 4
    first = json.loads(client.file.read_text().splitlines()[0])
    assert len(first["response"]["choices"]) == 2


def test_refused_request_is_not_logged(client: Any) -> None:
    """Nor one that asked for no answer: neither is anything that a model could be measured on."""
    ask(client, "/v1/completions", prompt="only its logprobs", max_tokens=0, echo=True, logprobs=0)
    assert (
        client.post(
            "/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": -1}
        ).status_code
        == 400
    )
    assert client.get("/health").status_code == 200
    client.traffic.close()
    assert client.file.read_text() == ""


def test_texts_reach_the_file_and_not_the_log(client: Any) -> None:
    stream = io.StringIO()
    running = Logging("human", "debug", stream)
    try:
        ask(client, "/v1/completions", prompt="my secret diary")
    finally:
        running.close()
    assert logged(client)[0].prompt == "my secret diary"
    assert "diary" not in stream.getvalue()
    assert "Hello" not in stream.getvalue()


def test_traffic_file_is_its_owners_only_and_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    for number in range(2):
        traffic = TrafficLog(file)
        traffic.add("/v1/completions", exchange(f"r{number}", {"prompt": "100 %s"}, "\ud83d", "b"))
        traffic.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["r0", "r1"]
    assert lines[0]["request"]["prompt"] == "100 %s"
    assert lines[0]["response"]["choices"][0]["text"] == "\ud83d"


def test_a_file_that_others_could_read_is_its_owners_only(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("{}\n")
    file.chmod(0o644)
    TrafficLog(file).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "{}\n"


def test_file_moved_away_by_logrotate_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    old = tmp_path / "t.1"
    traffic = TrafficLog(file)
    traffic.add("/", exchange("a", {"prompt": "x"}, "y"))
    limit = time.monotonic() + 10
    while not file.read_text() and time.monotonic() < limit:  # another thread writes
        time.sleep(0.005)
    file.rename(old)
    traffic.add("/", exchange("b", {"prompt": "x"}, "y"))
    traffic.close()
    assert json.loads(old.read_text())["id"] == "a"
    assert json.loads(file.read_text())["id"] == "b"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log-requests"):
        TrafficLog(tmp_path / "nowhere" / "t.jsonl")
