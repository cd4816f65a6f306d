"""Traces: one span per request, joined to the caller's, whole whatever happens to the request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from outrider.engine.request import Finish, Request, Speculation
from outrider.errors import CapabilityError, ConfigError, QueueFullError, RequestError
from outrider.sampling.params import SamplingParams
from outrider.serve.app import make_app
from outrider.serve.observability.telemetry import Telemetry, Traced
from outrider.serve.observability.trace_attributes import operation_of
from outrider.serve.observability.tracing import Tracing, trace_url
from outrider.stats import DecodeStats
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import state_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Recorded:
    """Tracing into a list."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def request() -> Request:
    params = SamplingParams(max_tokens=8, temperature=0.5, seed=3, stop=["SECRET"])
    return Request(
        id="chatcmpl-1",
        prompt=[5, 6, 7],
        params=params,
        speculation=Speculation(max_draft_tokens=2),
    )


def finish(**facts: Any) -> Finish:
    counts = {
        "emitted": 9,
        "steps": 3,
        "drafted": 10,
        "tested": 8,
        "accepted": 6,
        "accepted_per_position": [3, 3],
    }
    stats = DecodeStats(**counts, ttft_s=0.5, decode_s=1.5)
    fields = {
        "reason": "stop",
        "stats": stats,
        "seed": 1,
        "lossless": True,
        "drafter": "draft-model",
        "prompt_tokens": 3,
    }
    return Finish(**{**fields, **facts})


def lead(recorded: Recorded, one: Request, end: Finish) -> None:
    """The life of a request."""
    observer = recorded.tracing.observer("m")
    observer.queued(one)
    observer.admitted(one, 0.1, 2)
    observer.prefilled(one, 0.2, 1)
    observer.preempted(one)
    observer.finished(one, end)


def test_span_of_a_request_tells_what_it_cost(recorded: Recorded) -> None:
    lead(recorded, request(), finish())
    assert set(recorded.spans) == {"chat m", "queue", "prefill", "decode"}
    span = recorded.spans["chat m"]
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 2.0,
        "outrider.spec_decode.tau": 3.0,
        "outrider.spec_decode.alpha": 0.75,
        "outrider.spec_decode.accepted_per_position": (3, 3),
        "outrider.speculation.max_draft_tokens": 2,
    }
    assert {name: span.attributes.get(name) for name in wanted} == wanted
    assert "gen_ai.request.top_k" not in span.attributes
    assert "SECRET" not in span.to_json(), "texts have no place in traces"
    assert [event.name for event in span.events] == ["preempted", "first_token"]
    first = span.events[1]
    assert first.timestamp - span.start_time == 500_000_000


def test_a_request_without_a_limit_has_no_such_attribute(recorded: Recorded) -> None:
    """None is no valid attribute value: OpenTelemetry would warn at every request."""
    endless = Request(id="chatcmpl-2", prompt=[5], params=SamplingParams(max_tokens=None))
    lead(recorded, endless, finish())
    assert "gen_ai.request.max_tokens" not in recorded.spans["chat m"].attributes


def test_numbers_that_otlp_cannot_send_are_texts(recorded: Recorded) -> None:
    """A seed of -1 is 2**64 - 1, for which the exporter would print a traceback."""
    large = Request(
        id="resp-1", prompt=[5], params=SamplingParams(seed=2**64 - 1), priority=-(2**63)
    )
    lead(recorded, large, finish())
    found = recorded.spans["chat m"].attributes
    assert (found["gen_ai.request.seed"], found["outrider.priority"]) == (str(2**64 - 1), -(2**63))


def test_every_interface_to_conversations_is_a_chat() -> None:
    kinds = {"cmpl": "text_completion", "chatcmpl": "chat", "resp": "chat", "msg": "chat"}
    for kind, operation in kinds.items():
        assert (
            operation_of(Request(id=f"{kind}-1", prompt=[5], params=SamplingParams())) == operation
        )


def test_phases_lie_inside_and_follow_one_another(recorded: Recorded) -> None:
    lead(recorded, request(), finish())
    whole = recorded.spans["chat m"]
    parts = [recorded.spans[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    ends = [whole.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == ends[:-1]
    assert ends[-1] == whole.end_time


def test_request_that_dies_in_the_queue_has_a_whole_span(recorded: Recorded) -> None:
    observer = recorded.tracing.observer("m")
    one = request()
    observer.queued(one)
    observer.finished(
        one, finish(reason="error", stats=DecodeStats(), error=RequestError("no such thing"))
    )
    span = recorded.spans["chat m"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "RequestError"
    assert set(recorded.spans) == {"chat m", "queue"}
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_engine_span_joins_the_callers_trace(recorded: Recorded) -> None:
    tracing = recorded.tracing
    one = request()
    with tracing.http_span("POST /v1/chat/completions", HEADERS):
        tracing.arrived(one)
    # the engine's thread knows no context
    thread = threading.Thread(target=lead, args=(recorded, one, finish()))
    thread.start()
    thread.join()
    outer = recorded.spans["POST /v1/chat/completions"]
    inner = recorded.spans["chat m"]
    assert f"{outer.context.trace_id:032x}" == f"{inner.context.trace_id:032x}" == TRACE
    assert f"{outer.parent.span_id:016x}" == PARENT
    assert inner.parent.span_id == outer.context.span_id


def test_request_without_http_begins_a_trace_of_its_own(recorded: Recorded) -> None:
    lead(recorded, request(), finish())
    assert recorded.spans["chat m"].parent is None


class Tracked(FakeEngine):
    """Tells an observer what the real engine would."""

    observer: Any = None

    def submit(self, request: Request, listener: Any) -> None:
        super().submit(request, listener)
        self.observer.queued(request)
        self.observer.finished(request, finish())


def test_application_traces_requests_and_only_those(recorded: Recorded) -> None:
    """Through HTTP: the caller's trace, the route, the engine's span inside; /health would only be
    noise."""
    from starlette.testclient import TestClient

    engine = Tracked()
    engine.observer = recorded.tracing.observer("fake")
    state = state_of(engine)
    state.serve([Traced(engine, recorded.tracing)], created=0)
    app = Telemetry(make_app(state), tracing=recorded.tracing, traffic=None)
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        assert (
            client.post(
                "/v1/completions", json={"model": "fake", "prompt": "Hi"}, headers=HEADERS
            ).status_code
            == 200
        )
        assert (
            client.post("/v1/completions", json={"model": "nobody", "prompt": "Hi"}).status_code
            == 404
        )
    engine.stop()
    spans = recorded.exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == [
        *["POST /v1/completions"] * 2,
        "queue",
        "text_completion fake",
    ]
    served = next(
        span for span in spans if span.name.startswith("POST") and span.parent is not None
    )
    inner = next(span for span in spans if span.name == "text_completion fake")
    assert inner.parent.span_id == served.context.span_id
    assert served.attributes["http.response.status_code"] == 200


def test_refused_request_leaves_nothing_behind(recorded: Recorded) -> None:
    """A full queue under load would otherwise fill memory with contexts."""
    engine = Traced(FakeEngine(max_queue=0), recorded.tracing)
    one = request()
    with pytest.raises(QueueFullError):
        engine.submit(one, lambda update: None)
    assert recorded.tracing.parent_of(one) is None


def test_request_that_ends_before_it_is_queued_leaves_nothing_behind(recorded: Recorded) -> None:
    """Replicas refuse later than `submit`, and nobody observes the request then."""
    fake = FakeEngine(reply=RequestError("no such thing"))
    ended = threading.Event()
    one = request()
    Traced(fake, recorded.tracing).submit(one, lambda update: ended.set())
    assert ended.wait(10)
    fake.stop()
    assert recorded.tracing.parent_of(one) is None


class _Collector(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posted.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[Any]:
    server = HTTPServer(("127.0.0.1", 0), _Collector)
    server.posted = []  # type: ignore[attr-defined]
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    yield server
    server.shutdown()
    server.server_close()


def test_spans_reach_a_collector(collector: Any) -> None:
    """The real exporter over HTTP, in the protocol's own form; closing sends what is left."""
    tracing = Tracing.to(f"http://127.0.0.1:{collector.server_address[1]}")
    observer = tracing.observer("m")
    one = request()
    observer.queued(one)
    observer.finished(one, finish())
    tracing.close()
    (path, body), *_ = collector.posted
    assert path == "/v1/traces"
    (spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {
        attribute.key: attribute.value.string_value for attribute in spans.resource.attributes
    }
    assert resource["service.name"] == "outrider"
    assert {span.name for scope in spans.scope_spans for span in scope.spans} == {"chat m", "queue"}


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "ftp://a", "", "http://", "http://[", "grpc://h:1"]
)
def test_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        trace_url(endpoint)


def test_path_of_the_endpoint_is_kept_where_there_is_one() -> None:
    assert trace_url("http://c:4318") == trace_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert trace_url("https://c/otel/v1/traces") == "https://c/otel/v1/traces"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who asks for traces must not run without them."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(CapabilityError, match=r"pip install '\.\[otel\]'"):
        Tracing.to("http://localhost:4318")
