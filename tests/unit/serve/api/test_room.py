"""A body of very many answers is refused before anything is made of it, and one that fits exactly
is not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outrider.engine.request import Request
from outrider.sampling.params import SamplingParams
from outrider.serve.api import exchange
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.rules import Rule
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FLOOD = {"model": "fake", "prompt": ["Hello"] * 2048, "n": 128}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made of bodies: texts that were read, engine requests."""
    made: list[str] = []
    encode = SharedTokenizer.encode
    render = SharedTokenizer.render

    async def counted_encode(texts: SharedTokenizer, text: str, **options: Any) -> list[int]:
        made.append("tokens")
        return await encode(texts, text, **options)

    async def counted_render(texts: SharedTokenizer, *arguments: Any, **options: Any) -> list[int]:
        made.append("tokens")
        return await render(texts, *arguments, **options)

    def counted_request(**fields: Any) -> Request:
        made.append("request")
        return Request(**fields)

    monkeypatch.setattr(SharedTokenizer, "encode", counted_encode)
    monkeypatch.setattr(SharedTokenizer, "render", counted_render)
    monkeypatch.setattr(exchange, "Request", counted_request)
    return made


def busy(engine: FakeEngine, count: int) -> FakeEngine:
    """With so many requests that do not end."""
    for number in range(count):
        engine.submit(
            Request(id=f"r{number}", prompt=[1], params=SamplingParams(max_tokens=9)),
            lambda update: None,
        )
    return engine


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        (COMPLETIONS, FLOOD, 2048 * 128),
        (COMPLETIONS, {**FLOOD, "stream": True}, 2048 * 128),
        (COMPLETIONS, {"model": "fake", "prompt": ["a", "b"], "best_of": 3}, 6),
        (COMPLETIONS, {"model": "fake", "prompt": [[1], [2], [3], [4], [5], [6]]}, 6),
        (CHAT, chat(n=6), 6),
    ],
)
def test_more_than_may_ever_wait_is_a_400_before_anything_is_made(
    made: list[str], path: str, body: dict[str, Any], asked: int
) -> None:
    """`Retry-After` would have the client come again for ever."""
    engine = FakeEngine(max_queue=5)
    with serving(engine) as client:
        response = client.post(path, json=body)
        error = error_of(response, 400)
        assert error["type"] == "invalid_request_error"
        assert f"{asked} answers" in error["message"]
        assert "at most 5" in error["message"]
        assert "retry-after" not in response.headers
    assert (made, engine.seen) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_there_is_room_for_now_is_a_429_before_anything_is_made(
    made: list[str], stream: bool
) -> None:
    engine = busy(FakeEngine(max_queue=5, gate=threading.Semaphore(0)), 2)
    with serving(engine) as client:
        for path, body in (
            (COMPLETIONS, {"model": "fake", "prompt": ["a", "b"], "n": 2}),
            (CHAT, chat(n=4)),
        ):
            response = client.post(path, json={**body, "stream": stream})
            assert error_of(response, 429)["code"] == "queue_full"
            assert response.headers["retry-after"] == "3"
        engine.cancelled += ["r0", "r1"]
    assert made == []
    assert [request.id for request in engine.seen] == ["r0", "r1"]


def test_what_fits_exactly_is_answered(made: list[str]) -> None:
    with serving(FakeEngine(max_queue=6)) as client:
        response = client.post(
            COMPLETIONS, json={"model": "fake", "prompt": ["a", "b"], "n": 3, "max_tokens": 2}
        )
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 6
        assert client.post(CHAT, json=chat(n=6, max_tokens=2)).status_code == 200
    assert made.count("request") == 12


def test_a_route_is_refused_only_for_the_model_that_would_answer(made: list[str]) -> None:
    """If the prompt's length chooses the model, a full queue of the other model has no effect."""
    small = FakeEngine(name="small", max_queue=1)
    large = FakeEngine(name="large", max_queue=4)
    rules = (Rule(model="auto", max_prompt_tokens=20, to="small"), Rule(model="auto", to="large"))
    with serving(small, large, rules=rules) as client:
        asked = {"model": "auto", "prompt": "x" * 30, "max_tokens": 2}
        assert client.post(COMPLETIONS, json={**asked, "n": 3}).json()["model"] == "large"
        error_of(client.post(COMPLETIONS, json={**asked, "prompt": "x", "n": 3}), 400)
        assert small.seen == []
        made.clear()
        assert (
            "5 answers"
            in error_of(client.post(COMPLETIONS, json={**asked, "n": 5}), 400)["message"]
        )
        assert made == []
        assert (
            error_of(client.post(COMPLETIONS, json={**asked, "model": "atuo"}), 404)["code"]
            == "model_not_found"
        )
