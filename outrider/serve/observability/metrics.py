"""`/metrics`: Prometheus' view of the server, under vLLM's names after `outrider:`
(`metrics_families.py` lists them).

    metrics = ServerMetrics()
    engine = make_engine(options, observer=Observers([metrics.observer(name)]))
    metrics.watch(engine)                      # gauges are asked of it at every scrape
    metrics.answered("/v1/completions", 200)   # every HTTP answer, by the route's template, never by the raw path
    page, content_type = metrics.render()

prometheus_client does the format; nothing is registered globally, so a process may hold several
servers.
"""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed
from typing import Any, Protocol

import torch
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.engine.observer import EngineSnapshot
from outrider.serve.observability.metrics_families import PREFIX, facts, of_snapshots, of_totals
from outrider.serve.observability.metrics_totals import ModelTotals
from outrider.serve.observability.selftest import SelfTest
from outrider.version import __version__

# labels of model_info; never a path
SHOWN_CONFIG = ("drafter", "num_draft_tokens", "verifier", "dtype", "device", "runtime")


class Watched(Protocol):
    """The calls made to an engine."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def context(self) -> int: ...

    @property
    def lossless(self) -> bool: ...

    def snapshot(self) -> EngineSnapshot: ...


class ServerMetrics(Collector):
    """The server's Prometheus metrics. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._totals: dict[str, ModelTotals] = {}
        self._engines: dict[str, Watched] = {}
        self._self_tests: dict[str, SelfTest] = {}
        self._answers: Counter[tuple[str, str]] = Counter()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def observer(self, model_name: str) -> ModelTotals:
        """The observer of this model's engine; the same one for the same name."""
        with self._lock:
            return self._totals.setdefault(model_name, ModelTotals())

    def watch(self, engine: Watched) -> None:
        """Ask this engine for its state at every scrape."""
        with self._lock:
            self._engines[engine.name] = engine

    def tested(self, model_name: str, result: SelfTest) -> None:
        """Show what the start-up self-test found."""
        with self._lock:
            self._self_tests[model_name] = result

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer."""
        with self._lock:
            self._answers[route, str(status)] += 1

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def describe(self) -> list[Metric]:
        """No families in advance: a registry would otherwise scrape before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        with self._lock:
            totals = dict(self._totals)
            engines = dict(self._engines)
            tests = dict(self._self_tests)
            answers = dict(self._answers)
        yield from of_totals(totals)
        yield from of_snapshots({name: engine.snapshot() for name, engine in engines.items()})
        yield self._http(answers)
        yield facts("build_info", "What runs.", [_versions()])
        yield facts(
            "model_info",
            "How each model is served.",
            [_model_labels(engine) for engine in engines.values()],
        )
        yield facts(
            "self_test_finding_info", "What the start-up self-test warns of.", _findings(tests)
        )

    def _http(self, answers: Mapping[tuple[str, str], int]) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "http_responses", "HTTP answers.", labels=["route", "status"]
        )
        for (route, status), count in sorted(answers.items()):
            family.add_metric([route, status], count)
        return family


def _versions() -> dict[str, str]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
    }


def _model_labels(engine: Watched) -> dict[str, str]:
    config = engine.config
    shown = {name: str(config.get(name, "")) for name in SHOWN_CONFIG}
    return {
        "model_name": engine.name,
        **shown,
        "context": str(engine.context),
        "lossless": str(engine.lossless).lower(),
    }


def _findings(tests: Mapping[str, SelfTest]) -> Iterator[dict[str, str]]:
    """Each series once, as the format wants it: several drafters, and several texts of one, may be
    found wanting alike."""
    names = ("model_name", "finding", "severity", "drafter")
    findings = (
        (model, finding.code, finding.severity, finding.drafter or "")
        for model, test in tests.items()
        for finding in test.findings
    )
    return (dict(zip(names, labels, strict=True)) for labels in dict.fromkeys(findings))
