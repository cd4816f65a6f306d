"""A small OpenAI-compatible server on the loopback that speculates on paper: it answers "w0 w1 w2
..." in chunks, counts as vLLM, SGLang, llama.cpp or Outrider would, and misbehaves on request.

`faults`: number of the completion request (from 0, warm-up included) -> what goes wrong with it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

DRAFT = 3  # tokens of every draft
KEPT = 2  # of them are accepted, every time
MODEL = "fake-model"


@dataclass
class Fake:
    """How the server behaves, and what it has seen."""

    engine: str = "vllm"
    speculates: bool = True
    metrics: bool = True
    usage: bool = True
    num_tokens: int = 13
    chunk_s: float = 0.0
    first_s: float = 0.0
    models: tuple[str, ...] = (MODEL,)
    key: str | None = None
    faults: dict[int, str] = field(default_factory=dict)
    text: Callable[[dict[str, Any]], str] | None = None
    # log-probabilities where they are asked for: of the likeliest words in the place of word i
    logprobs: Callable[[int, str], dict[str, float]] | None = None
    counted_as: int | None = None  # what `usage` says, whatever the answer
    late_counting_s: float = 0.0
    foreign_tokens: int = 0  # generated for others beside every request
    seen: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    steps: int = 100  # the server has been running for a while
    drafted: int = 300
    accepted: int = 200
    positions: list[int] = field(default_factory=lambda: [100, 100, 0])
    generated: int = 1000
    requests: int = 40
    in_flight: int = 0
    max_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    server: ThreadingHTTPServer | None = None
    on_request: Callable[[int], None] | None = None

    def __enter__(self) -> Fake:
        fake = self

        class Bound(_Handler):
            pass

        Bound.fake = fake
        self.server = _Server(("127.0.0.1", 0), Bound)
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def stop(self) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()

    def count(self, tokens: int, *, drafts: bool = True) -> None:
        """One request is over: its first token came from the prompt's pass, the others from steps
        of KEPT + 1."""
        if self.late_counting_s:
            time.sleep(self.late_counting_s)
        steps = (tokens - 1) // (KEPT + 1)
        with self.lock:
            self.generated += tokens + self.foreign_tokens
            self.requests += 1
            if self.speculates and drafts:
                self.steps += steps
                self.drafted += DRAFT * steps
                self.accepted += KEPT * steps
                self.positions = [
                    count + steps * (index < KEPT) for index, count in enumerate(self.positions)
                ]

    def page(self) -> str:
        """/metrics."""
        with self.lock:
            if self.engine == "sglang":
                lines = _counter("sglang:generation_tokens_total", self.generated) + _counter(
                    "sglang:num_requests_total", self.requests
                )
                if self.speculates:
                    lines += _counter("sglang:spec_verify_calls_total", self.steps)
                return "\n".join(lines) + "\n"
            prefix = self.engine
            generated = "generation_tokens_total"
            if self.engine == "llamacpp":
                generated = "tokens_predicted_total"
            lines = _counter(f"{prefix}:{generated}", self.generated)
            if self.speculates:
                lines += _counter(f"{prefix}:spec_decode_num_drafts_total", self.steps)
                lines += _counter(f"{prefix}:spec_decode_num_draft_tokens_total", self.drafted)
                lines += _counter(f"{prefix}:spec_decode_num_accepted_tokens_total", self.accepted)
                name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
                lines.append(f"# TYPE {name} counter")
                lines += [
                    f'{name}{{model_name="{MODEL}",position="{i}"}} {count}'
                    for i, count in enumerate(self.positions)
                ]
            return "\n".join(lines) + "\n"


def _counter(name: str, value: float) -> list[str]:
    return [f"# TYPE {name} counter", f'{name}{{engine="0",model_name="{MODEL}"}} {value}']


def _logprobs(
    of: Callable[[int, str], dict[str, float]],
    words: list[str],
    start: int,
    end: int,
    *,
    chat: bool,
) -> dict[str, Any]:
    """In the shape of a completion, or of a chat."""
    tokens = [word + " " * (number < len(words) - 1) for number, word in enumerate(words)]
    places = [(tokens[number], of(number, tokens[number])) for number in range(start, end)]
    if not chat:
        return {
            "tokens": [token for token, _ in places],
            "token_logprobs": [tops[token] for token, tops in places],
            "top_logprobs": [tops for _, tops in places],
        }
    return {
        "content": [
            {
                "token": token,
                "logprob": tops[token],
                "bytes": list(token.encode()),
                "top_logprobs": [
                    {"token": other, "logprob": value, "bytes": list(other.encode())}
                    for other, value in tops.items()
                ],
            }
            for token, tops in places
        ]
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # else small chunks wait for one another, as no real server lets them
    disable_nagle_algorithm = True
    fake: Fake

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        fake = self.fake
        fake.paths.append(self.path)
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self._json(
                401,
                {
                    "error": {
                        "message": f"Incorrect API key provided: {given}",
                        "type": "auth",
                        "code": 401,
                    }
                },
            )
        elif self.path == "/v1/models":
            self._json(
                200, {"data": [{"id": name, "owned_by": fake.engine} for name in fake.models]}
            )
        elif self.path == "/metrics" and fake.metrics:
            self._send(200, fake.page().encode(), "text/plain; version=0.0.4")
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            number = len(fake.seen)
            fake.seen.append({"path": self.path, **body})
            fake.in_flight += 1
            fake.max_in_flight = max(fake.max_in_flight, fake.in_flight)
        self.is_counted = True
        try:
            if fake.on_request:
                fake.on_request(number)
            self._answer(body, fake.faults.get(number, ""))
        finally:
            self._over()

    def _over(self) -> None:
        """Before the client can know it, so that its next request finds this one gone."""
        with self.fake.lock:
            self.fake.in_flight -= self.is_counted
        self.is_counted = False

    def _answer(self, body: dict[str, Any], fault: str) -> None:
        if fault.isdigit():
            self._refuse(int(fault))
        elif fault == "json":
            self._json(200, {"choices": [{"text": "all at once"}]})
        elif fault == "echo":
            self._json(400, {"error": {"message": f"bad {self.headers['Authorization']}"}})
        elif fault == "html":
            self._send(502, b"<html><h1>Bad\ngateway</h1></html>", "text/html")
        elif fault == "close":
            self._hang_up()
        else:
            self._stream(body, fault)

    def _refuse(self, status: int) -> None:
        bodies = {
            400: {
                "error": {
                    "message": "This model's maximum context length is 64 tokens.",
                    "type": "BadRequestError",
                }
            },
            429: {
                "error": {
                    "message": "Rate limit reached",
                    "type": "rate_limit",
                    "code": "rate_limit_exceeded",
                }
            },
            500: {"object": "error", "message": "CUDA out of memory", "code": 500},
            422: {"detail": [{"loc": ["body", "top_k"], "msg": "Extra inputs are not permitted"}]},
        }
        self._json(status, bodies[status])

    def _stream(self, body: dict[str, Any], fault: str) -> None:
        fake = self.fake
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        tokens = min(fake.num_tokens, body["max_tokens"])
        words = (fake.text(body) if fake.text else " ".join(f"w{i}" for i in range(tokens))).split(
            " "
        )
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(fake.first_s)
        # the first word alone, then KEPT + 1 of them at a time
        cuts = [0, 1, *range(1 + KEPT + 1, len(words), KEPT + 1), len(words)]
        for index, (start, end) in enumerate(pairwise(cuts)):
            if end <= start:
                continue
            if index:
                time.sleep(fake.chunk_s)
            if index == 2 and self._misbehave(fault):
                return
            text = " ".join(words[start:end]) + ("" if end == len(words) else " ")
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if fake.logprobs and body.get("logprobs"):
                choice["logprobs"] = _logprobs(fake.logprobs, words, start, end, chat=chat)
            self._event({"choices": [choice]})
        if fault == "no-finish":
            self._chunk(b"")
            return
        self._event(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {},
                        "finish_reason": "abort" if fault == "abort" else "length",
                    }
                ]
            }
        )
        if fake.late_counting_s:
            threading.Thread(target=fake.count, args=(tokens,), daemon=True).start()
        else:
            # as Outrider's requests switch drafts off
            fake.count(tokens, drafts=body.get("speculation", {}).get("mode") != "off")
        self._end(body, tokens, fault)

    def _end(self, body: dict[str, Any], tokens: int, fault: str) -> None:
        fake = self.fake
        last: dict[str, Any] = {"choices": []}
        if fake.usage and body.get("stream_options", {}).get("include_usage"):
            count = tokens if fake.counted_as is None else fake.counted_as
            last["usage"] = {"prompt_tokens": 10, "completion_tokens": count}
        self._event(last)
        self._over()
        self._chunk(b"data: [DONE]\n\n")
        self._hang_up() if fault == "rude" else self._chunk(b"")

    def _misbehave(self, fault: str) -> bool:
        """In the middle of the stream; True when it is over."""
        if fault == "drop":
            self._hang_up()
        elif fault == "garbage":
            self._chunk(b'data: {"choices": [{"text": "w\n\n')
        elif fault == "list":
            self._chunk(b"data: [1, 2]\n\n")
        elif fault == "error":
            self._event({"error": {"message": "EngineCore died", "code": 500}})
        elif fault == "refusal":
            self._event({"error": {"message": "min_p is not yet supported", "code": 400}})
        elif fault == "stall":
            time.sleep(1.5)
        elif fault == "heartbeat":
            self._chunk(b": ping\n\ndata:\n\n")
            return False
        else:
            return False
        self.close_connection = True
        return True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(content)}\n\n".encode())

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
