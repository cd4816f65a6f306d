"""OpenTelemetry traces: one span per request with queue, prefill and decode inside, joined to the
caller's trace.

    tracing = Tracing.to("http://collector:4318")          # --otlp-endpoint; off where none is given
    engine = make_engine(..., observer=Observers([..., tracing.observer(name)]))
    with tracing.http_span("POST /v1/completions", headers): # the caller's W3C traceparent, where it sent one
        tracing.arrived(request)                             # so that the engine's span is a child of this one
    tracing.close()

    POST /v1/chat/completions            SERVER
      chat NAME                          attributes: trace_attributes.py; events: preempted, first_token
        queue | prefill | decode

Spans of the engine are made after the fact, from times it reports; a background thread of the SDK
sends them. Which share of traces is kept is OpenTelemetry's own setting (OTEL_TRACES_SAMPLER), as
are more attributes of the service (OTEL_RESOURCE_ATTRIBUTES) and headers for the collector
(OTEL_EXPORTER_OTLP_HEADERS).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outrider.engine.observer import Observer
from outrider.engine.request import Finish, Request
from outrider.errors import GOT, CapabilityError, ConfigError, install_hint, without_values
from outrider.serve.observability.trace_attributes import of_finish, of_request, operation_of
from outrider.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanProcessor
    from opentelemetry.trace import Span

SERVICE = "outrider"
TRACES_PATH = "/v1/traces"  # OTLP over HTTP
NS = 1_000_000_000


class Tracing:
    """A tracer and the spans that are open. Methods may be called from any thread."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor`: where finished spans go. See `to`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer(SERVICE, __version__)
        self._parents: dict[str, Context] = {}  # of requests that are about to be queued
        self._lock = threading.Lock()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Send to an OTLP/HTTP collector, http://HOST:4318 or the whole path. Raises ConfigError
        for what is no such address, CapabilityError when OpenTelemetry is not installed."""
        url = trace_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise CapabilityError(
                f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing): "
                f"{install_hint('otel')} "
                "brings opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))

    def observer(self, model_name: str) -> RequestTraces:
        """The observer of this model's engine."""
        return RequestTraces(self, model_name)

    @contextmanager
    def http_span(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """A span around one HTTP request, in the trace its headers name (lower-case keys)."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier=headers)
        with self.tracer.start_as_current_span(
            name,
            context=parent,
            kind=SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:  # messages of exceptions may hold text
            try:
                yield span
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, without_values(error)))
                raise

    def arrived(self, request: Request) -> None:
        """The request is about to be submitted within the current span; call `refused` when the
        engine does not take it."""
        from opentelemetry.context import get_current

        with self._lock:
            self._parents[request.id] = get_current()

    def refused(self, request: Request) -> None:
        """The engine did not take it, or is done with it."""
        self.parent_of(request)

    def parent_of(self, request: Request) -> Context | None:
        """The context in which `arrived` was called; forgotten with this call."""
        with self._lock:
            return self._parents.pop(request.id, None)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


@dataclass
class _Open:
    """A request's span while it lives. Times are nanoseconds since 1970."""

    span: Any
    queued_ns: int
    phase_ns: int = 0  # when its present phase began
    phases: list[tuple[str, int, int]] = field(default_factory=list)  # (name, begin, end)

    def end_phase(self, name: str, now_ns: int) -> None:
        self.phases.append((name, self.phase_ns, now_ns))
        self.phase_ns = now_ns


class RequestTraces(Observer):
    """A span per request; none per step, which would cost more than it is worth. Everything happens
    in the engine's thread."""

    def __init__(self, tracing: Tracing, model_name: str) -> None:
        self._tracing = tracing
        self._model = model_name
        self._open: dict[str, _Open] = {}

    def queued(self, request: Request) -> None:
        """Begin the request's span."""
        now = time.time_ns()
        span = self._tracing.tracer.start_span(
            f"{operation_of(request)} {self._model}",
            context=self._tracing.parent_of(request),
            attributes=of_request(request, self._model),
            start_time=now,
        )
        self._open[request.id] = _Open(span, now, now)

    def admitted(self, request: Request, queued_s: float, cached_tokens: int) -> None:
        """The end of waiting."""
        if span := self._open.get(request.id):
            span.end_phase("queue", time.time_ns())

    def prefilled(self, request: Request, seconds: float, tokens: int) -> None:
        """The end of reading."""
        if span := self._open.get(request.id):
            span.end_phase("prefill", time.time_ns())

    def preempted(self, request: Request) -> None:
        """Record that the request was preempted in the middle of its answer."""
        if span := self._open.get(request.id):
            span.span.add_event("preempted")

    def finished(self, request: Request, finish: Finish) -> None:
        """End the request's span, with everything that is known now."""
        span = self._open.pop(request.id, None)
        if span is None:
            return
        now = time.time_ns()
        span.end_phase(("queue", "prefill", "decode")[min(len(span.phases), 2)], now)
        if finish.stats.emitted:
            span.span.add_event(
                "first_token", timestamp=span.queued_ns + int(finish.stats.ttft_s * NS)
            )
        self._add_phases(span)
        span.span.set_attributes(of_finish(finish))
        if finish.reason == "error":
            self._fail(span.span, finish)
        span.span.end(now)

    def _add_phases(self, span: _Open) -> None:
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(span.span)
        for name, begin, end in span.phases:
            self._tracing.tracer.start_span(name, context=inside, start_time=begin).end(end)

    def _fail(self, span: Any, finish: Finish) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", type(finish.error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(finish.error).partition(GOT)[0]))


def trace_url(endpoint: str) -> str:
    """The address traces are posted to. Raises ConfigError."""
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint '{endpoint}' is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            "--otlp-endpoint is a collector's OTLP/HTTP address, http://HOST:4318; got "
            f"'{endpoint}'"
        )
    return endpoint.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else endpoint
