"""What fails is logged without a word of what clients sent: no variables, no quoting messages, in
every format."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.build import Options
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.errors import RequestError
from outrider.serve.observability import tracing
from outrider.serve.observability.logs import Logging, plain_traceback
from outrider.serve.settings import LogFormat
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.fake_engine import TEMPLATE, FakeEngine
from tests.unit.serve.served_app import chat, serving

SECRET = "meet me at the old mill"
BAD_WORD = "windmill"


class Logged:
    """The log in one format, as text once it is over."""

    def __init__(self, style: LogFormat) -> None:
        self._stream = io.StringIO()
        self._style = style

    def __enter__(self) -> Logged:
        self._running = Logging(self._style, "debug", self._stream)
        return self

    def __exit__(self, *why: object) -> None:
        self._running.close()

    @property
    def text(self) -> str:
        return self._stream.getvalue()


def failing(where: str) -> Any:
    """A part that raises as careless code does: the error quotes what the request holds."""

    def fails(*arguments: Any, **named: Any) -> Any:
        prompt = SECRET
        try:
            raise KeyError(prompt)
        except KeyError as error:
            raise ValueError(f"{where} cannot read {prompt!r}") from error

    return fails


@pytest.mark.slow
@pytest.mark.parametrize("style", get_args(LogFormat))
@pytest.mark.parametrize("part", ["propose", "start", "stop"])
def test_a_step_that_fails_says_where_and_not_what(
    style: LogFormat, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against prompts, answers, stop strings and bad words of everybody's rows in the log."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target = save_checkpoint(
        tmp_path / "tiny", tiny_llama(257, sharpness=4.0, max_position_embeddings=512), tokenizer
    )
    engine = make_engine(
        Options(target=str(target), drafter="ngram"),
        EngineSettings(kv_memory=64 << 20),
        name="fake",
    )
    monkeypatch.setattr(NgramDrafter, part, failing(part))
    body = chat(SECRET, max_tokens=8, ignore_eos=True, stop=[f"{SECRET}!"], bad_words=[BAD_WORD])
    with Logged(style) as log:
        engine.start()
        with serving(engine) as client:
            ask = partial(client.post, "/v1/chat/completions", json=body)
            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert "Traceback (most recent call last):" in log.text
    assert "in fails" in log.text
    assert "ValueError (its message is left out" in log.text
    for text in (SECRET, BAD_WORD):
        assert text not in log.text
    assert len(log.text.splitlines()) < 300


@pytest.mark.parametrize("style", get_args(LogFormat))
def test_our_own_code_that_fails(style: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate, and a stream."""
    engine = FakeEngine()
    with Logged(style) as log, serving(engine) as client:
        monkeypatch.setattr("outrider.serve.api.chat.ChatChoiceWriter.deltas", failing("deltas"))
        assert (
            "server failed"
            in client.post("/v1/chat/completions", json=chat(SECRET, stream=True)).text
        )
        monkeypatch.setattr("outrider.serve.api.chat.ChatChoiceWriter.message", failing("message"))
        assert client.post("/v1/chat/completions", json=chat(SECRET)).status_code == 500
        engine.reply = RequestError(f"a word must be written, got {SECRET!r}")
        client.post("/v1/completions", json={"prompt": "a"})
    assert log.text.count("Traceback (most recent call last):") >= 2
    assert SECRET not in log.text


@pytest.mark.parametrize("style", get_args(LogFormat))
def test_a_template_that_quotes(style: LogFormat) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = (
        "{{ raise_exception('no turn may say ' + messages[0].content) }}"
    )
    with Logged(style) as log, serving(engine) as client:
        answer = client.post("/v1/chat/completions", json=chat(SECRET))
        assert SECRET in answer.json()["error"]["message"]
    assert "the chat template refused the messages" in log.text
    assert SECRET not in log.text


@pytest.mark.parametrize("style", get_args(LogFormat))
def test_threads_and_callbacks_that_die(style: LogFormat) -> None:
    """Python and asyncio have ways of their own to say that something failed."""
    with Logged(style) as log:
        thread = threading.Thread(target=failing("thread"), name="worker")
        thread.start()
        thread.join()

        async def calls() -> None:
            asyncio.get_running_loop().call_soon(failing("callback"), SECRET)
            task = asyncio.ensure_future(asyncio.to_thread(failing("task"), SECRET))
            await asyncio.sleep(0.2)
            del task  # nobody asks what became of it

        asyncio.run(calls())
    assert "worker died" in log.text
    assert "Exception in callback" in log.text
    assert SECRET not in log.text


def test_the_thread_hook_is_put_back() -> None:
    before = threading.excepthook
    with Logged("human"):
        assert threading.excepthook is not before
    assert threading.excepthook is before


def test_a_traceback_tells_the_whole_story() -> None:
    """Causes come first; what the system says is shown."""
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("the size of tensor a (3) must match") from error
    except RuntimeError as error:
        lines = plain_traceback(error).splitlines()
    assert "OSError: [Errno 28] No space left on device" in lines
    assert lines[-1] == "RuntimeError: the size of tensor a (3) must match"
    assert lines.index("OSError: [Errno 28] No space left on device") < lines.index(
        "The direct cause of:"
    )
    group = plain_traceback(
        ExceptionGroup("several", [KeyError(SECRET), RequestError(f"too long, got {SECRET}")])
    )
    assert SECRET not in group
    assert "RequestError: too long" in group


def test_an_error_that_is_its_own_context_ends() -> None:
    first = ValueError("a")
    second = ValueError("b")
    first.__context__ = second
    second.__context__ = first
    assert plain_traceback(first).count("ValueError") == 2


def test_spans_hold_no_text_of_an_error() -> None:
    exporter = InMemorySpanExporter()
    traces = tracing.Tracing(SimpleSpanProcessor(exporter))
    with pytest.raises(ValueError, match="mill"), traces.http_span("GET /", {}):
        raise ValueError(SECRET)
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert SECRET not in span.to_json()
    traces.close()


def test_the_command_line_shows_no_variables(tmp_path: Path) -> None:
    """A bug of ours ends a command with Python's own traceback."""
    code = (
        "import outrider.cli.app as app\n"
        "def fails(*_, **__):\n    hidden = 'variable'.upper()\n    raise KeyError('bug')\n"
        "app.build_app = fails\n"
        "app.sys.argv = ['outrider', 'ls']\napp.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "KeyError" in done.stderr
    assert "VARIABLE" not in done.stderr
    assert "\u2502" not in done.stderr


def test_json_lines_stay_lines() -> None:
    with Logged("json") as log:
        try:
            failing("x")()
        except ValueError:
            logging.getLogger("outrider").exception("failed")
    (entry,) = [json.loads(line) for line in log.text.splitlines()]
    assert entry["exception"].startswith("Traceback")
