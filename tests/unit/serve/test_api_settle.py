"""What an engine elsewhere refuses after `submit` has a status of its own, streams included."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError, OutriderError, QueueFullError, UnavailableError
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, serving

REFUSALS: list[tuple[OutriderError, int]] = [
    (ConfigError("bad_words holds 'x', which no tokens write"), 400),
    (QueueFullError("4 requests wait", 3.0), 429),
    (UnavailableError("no replica answers"), 503),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status"), REFUSALS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_late_refusals(path: str, refusal: OutriderError, status: int, stream: bool) -> None:
    """Not a 200 with an error inside, and nothing is left running."""
    body: dict[str, Any] = chat(stream=stream) if "chat" in path else {"model": "fake", "prompt": "Hi", "stream": stream}
    engine = FakeEngine(settles=refusal)
    with serving(engine) as client:
        response = client.post(path, json=body)
        assert str(refusal) in error_of(response, status)["message"]
    assert engine.seen
    assert {request.id for request in engine.seen} >= set(engine.cancelled)
