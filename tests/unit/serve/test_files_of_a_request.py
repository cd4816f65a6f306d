"""A newcomer who follows one chat request through the server reads few files, in the order of its
way: route, body, conversation, engine requests, stream, log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient

import outrider.serve
from outrider.build import Options
from outrider.serve.app import make_app
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.run import load_engines
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.fake_engine import TEMPLATE

MAX_FILES = 22
LOG = "/observability/logs.py"
FOLDER = str(Path(outrider.serve.__file__).parent)
MESSAGES = [{"role": "user", "content": "Hi"}]
Ask = Callable[[dict[str, Any]], set[str]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Posts a chat to a server as it is by default, and names the files whose functions ran."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = save_checkpoint(tmp_path_factory.mktemp("files") / "m", tiny_llama(257), tokenizer)
    options = Options(target=str(model), drafter="ngram", runtime="eager")
    settings = ServerSettings(models=(ServedModel(name="m", options=options),), self_test=False)
    state = ServerState(settings)
    monitoring = Monitoring(state.metrics)
    files: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            files.add(frame.f_code.co_filename.removeprefix(FOLDER))

    threading.setprofile(profile)  # of threads that begin from here on: the engine's and the loop's
    try:
        engines = load_engines(settings, monitoring, lambda line: None)
        state.serve(engines, created=0)
        with TestClient(monitoring.around(make_app(state))) as client:

            def send(body: dict[str, Any]) -> set[str]:
                files.clear()
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                # the engine's thread writes the line of the log after the answer has left
                deadline = time.monotonic() + 60
                while LOG not in files and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert LOG in files
                return set(files)

            def post(body: dict[str, Any]) -> set[str]:
                send(body)  # makes what is made only once
                return send(body)

            yield post
    finally:
        threading.setprofile(None)
    for engine in engines:
        engine.stop()


@pytest.mark.slow
def test_a_chat_request_runs_through_few_files(ask: Ask) -> None:
    whole = {"messages": MESSAGES, "max_tokens": 4}
    stream = {**whole, "stream": True, "stream_options": {"include_usage": True}}
    files = ask(whole) | ask(stream)
    assert "/api/chat.py" in files
    assert len(files) <= MAX_FILES, sorted(files)


def test_what_a_request_asks_for_is_what_it_runs_through(ask: Ask) -> None:
    """Log-probabilities, tools and output formats have files of their own."""
    plain = ask({"messages": MESSAGES, "max_tokens": 4})
    named = ask({"messages": MESSAGES, "max_tokens": 4, "logprobs": True})
    assert named - plain == {"/api/logprobs.py"}
