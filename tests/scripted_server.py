"""A server that speaks as ours does and answers from a script: what the playground shows is known
in advance.

The last message chooses the scene: "attack", "break", "busy", "differ", "html", "long", "markdown",
"refuse", "slow", "think", "tortoise", "unknown"; anything else gets STORY.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from outrider.serve.playground import router

Step = list[tuple[str, str]]
STORY: list[Step] = [
    [(" Sam", "accepted"), (" has", "accepted"), (" 37", "bonus")],
    [(" lemons", "accepted"), (",", "correction")],
    [
        (" and\n", "accepted"),
        ("James", "accepted"),
        (" has", "accepted"),
        (" 18", "accepted"),
        (".", "bonus"),
    ],
    [(" So", "plain")],
    [(" 19", "accepted"), (".", "accepted"), ("", "correction")],
]
STORY_TEXT = "".join(piece for step in STORY for piece, _ in step)
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt;\u202e\x1b[31m"
MARKDOWN = """Use **this**:

```python
def double(number):
    return 2 * number  # twice
```

| name | value |
|---|---|
| one | 1 |

1. first
2. [second](https://example.com/ "there")
"""
ATTACK = """<script>document.title = 'owned'</script><img src=x onerror="document.title='owned'">
<svg onload="document.title='owned'"><iframe srcdoc="<script>parent.document.title='owned'</script>"></iframe>
<math><mtext><table><mglyph><style><img src=x onerror="document.title='owned'"></style></mglyph></table></mtext></math>

[a](javascript:document.title='owned') [b](data:text/html,<script>1</script>) [c](vbscript:x)
[d](java&#115;cript:document.title='owned') <javascript:document.title='owned'>
![pixel](http://evil.example/pixel.png "x\" onerror=\"document.title='owned'")
[e](https://fine.example/"onmouseover="document.title='owned')

```"><img src=x onerror=document.title='owned'>
</code></pre><script>document.title='owned'</script>
```

<style>body { display: none }</style><form action="http://evil.example"><input></form>
| <img src=x onerror=document.title='owned'> | b |
|---|---|
| <a href="javascript:document.title='owned'">x</a> | d |
"""
KEY = "sesame"
PLAIN_SPEED = 200.0  # tokens per second, as the server tells them
SPEEDUPS = {"tortoise": 1 / 1.3}
SPEEDUP = 2.1
SPREAD = (1.0, 0.95, 1.05)  # of the runs of a comparison
FILE = "/models/second.gguf"
CARDS: list[dict[str, Any]] = [
    {"id": "tale-teller", "drafters": ["draft", "ngram"], "max_model_len": 1024, "kind": "chat"},
    {"id": FILE},  # of a server that tells nothing else
    {"id": "called-so", "kind": "demo"},
    {"id": "little", "kind": "small-chat"},
    {"id": "base", "kind": "text"},
]


@dataclass
class Scripted:
    """The running server: where it is, what it was asked, how often a stream was cut off by its
    reader."""

    url: str
    wants_key: bool = False
    loading: int = 0  # questions for its models that it still refuses
    bodies: list[dict[str, Any]] = field(default_factory=list)
    cut_off: int = 0


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    """Serves on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state = Scripted(f"http://127.0.0.1:{port}/")
    server = uvicorn.Server(uvicorn.Config(scripted_app(state), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def scripted_app(state: Scripted) -> FastAPI:
    app = FastAPI()
    app.include_router(router())

    def turned_away(request: Request) -> JSONResponse | None:
        if state.wants_key and request.headers.get("Authorization") != f"Bearer {KEY}":
            return refusal(401, "no valid key in the Authorization header")
        return None

    @app.get("/v1/models")
    def models(request: Request) -> Any:
        if state.loading:
            state.loading -= 1
            return refusal(503, "the models are still loading")
        return turned_away(request) or {"object": "list", "data": CARDS}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        state.bodies.append(body)
        return turned_away(request) or answer(state, body, body["messages"][-1]["content"], "chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        state.bodies.append(body)
        return turned_away(request) or answer(state, body, body["prompt"], "text")

    return app


def answer(state: Scripted, body: dict[str, Any], asked: str, form: str) -> Any:
    if asked == "refuse":
        return refusal(400, "temperature must be at most 2, got <9>")
    if asked == "busy":
        return refusal(429, "256 requests wait already", {"Retry-After": "3"})
    if asked == "long":
        message = "prompt is too long: 3006 tokens > 1023 maximum"
        return refusal(400, message, code="context_length_exceeded")
    return StreamingResponse(stream(state, body, asked, form), media_type="text/event-stream")


def refusal(
    status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": code}},
        status,
        headers,
    )


def scene(asked: str, speculates: bool) -> list[Step]:
    if asked == "html":
        return [[(HOSTILE, "accepted"), ("end", "bonus")]]
    if asked in ("attack", "markdown"):
        text = ATTACK if asked == "attack" else MARKDOWN
        return [[(piece, "plain")] for piece in re.findall(r".{1,7}", text, re.DOTALL)]
    if asked == "think":
        return [
            [("<think>", "plain")],
            [("*Hm*.", "plain")],
            [("</think>", "plain")],
            [("Yes.", "plain")],
        ]
    if asked == "slow":
        return [[(" tick", "plain")]] * 400
    story = STORY if speculates else [[(piece, "plain")] for step in STORY for piece, _ in step]
    return [*story[:-2], [(" Thus", "plain")]] if asked == "differ" and not speculates else story


async def stream(
    state: Scripted, body: dict[str, Any], asked: str, form: str
) -> AsyncIterator[str]:
    steps = scene(asked, body["speculation"]["mode"] != "off")
    try:
        for number, step in enumerate(steps):
            if asked == "break" and number == 2:
                yield event({"error": {"message": "the model ran out of memory"}})
                return
            yield event(chunk(step, form, known=asked != "unknown"))
            await asyncio.sleep(0.05 if asked == "slow" else 0.005)
    except asyncio.CancelledError:
        state.cut_off += 1
        raise
    yield event(chunk([], form, known=True, reason="stop"))
    yield event(last(steps, speed(state, body, asked)))
    yield "data: [DONE]\n\n"


def chunk(step: Step, form: str, *, known: bool, reason: str | None = None) -> dict[str, Any]:
    text = "".join(piece for piece, _ in step)
    origins = {"token_origins": [list(token) for token in step]} if known else {}
    fields = {"delta": {"content": text}} if form == "chat" else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": reason, **fields, **origins}]}


def speed(state: Scripted, body: dict[str, Any], asked: str) -> float:
    """Tokens per second: the same without drafts, another one with them in each round of two."""
    if body["speculation"]["mode"] == "off":
        return PLAIN_SPEED
    round_number = (len(state.bodies) - 1) // 2
    return PLAIN_SPEED * SPEEDUPS.get(asked, SPEEDUP) * SPREAD[round_number % len(SPREAD)]


def last(steps: list[Step], tokens_per_s: float) -> dict[str, Any]:
    fates = [fate for step in steps for _, fate in step]
    accepted = fates.count("accepted")
    counts = {"num_draft_tokens": accepted + 6, "num_accepted_draft_tokens": accepted}
    return {
        "choices": [],
        "usage": {"completion_tokens": len(fates)},
        "metrics": {
            "speculative_decoding": counts if accepted else None,
            "timing": {"decode_tokens_per_s": tokens_per_s},
        },
    }


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
