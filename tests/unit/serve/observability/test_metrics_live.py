"""A real engine behind a real HTTP server, measured by our own lab and watched by everything at
once."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.lab.server.client import RequestOptions, ServerEndpoint
from outrider.lab.server.counters import parse
from outrider.lab.server.measure import bench_servers
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.sampling.params import SamplingParams
from outrider.serve.app import make_app
from outrider.serve.observability.logs import Logging
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.observability.tracing import Tracing
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

PROMPTS = 4
TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Everything an operator can switch on."""
    folder = tmp_path_factory.mktemp("live")
    target = tiny_llama(257, sharpness=4.0)
    for name, model in (("target", target), ("draft", disturbed(target, 0.05))):
        save_checkpoint(folder / name, model, byte_tokenizer())
    options = Options(
        target=str(folder / "target"),
        drafter="draft-model",
        draft=str(folder / "draft"),
        num_draft_tokens=3,
    )
    exporter = InMemorySpanExporter()
    state = ServerState(ServerSettings(models=(ServedModel(name="tiny", options=options),)))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(Tracing, "to", lambda endpoint: Tracing(SimpleSpanProcessor(exporter)))
    monitoring = Monitoring(
        state.metrics, otlp_endpoint="http://nobody:4318", log_requests=folder / "traffic.jsonl"
    )
    monkeypatch.undo()
    log = io.StringIO()
    logging = Logging("json", "info", log)
    engine = make_engine(
        options,
        EngineSettings(kv_memory=64 << 20),
        observer=monitoring.observer("tiny"),
        name="tiny",
    )
    engine.start()
    state.serve([monitoring.ready(engine)], created=0)
    app = monitoring.around(make_app(state))
    web = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=web.run)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = web.servers[0].sockets[0].getsockname()[1]
    yield SimpleNamespace(
        url=f"http://127.0.0.1:{port}",
        metrics=state.metrics,
        exporter=exporter,
        monitoring=monitoring,
        log=log,
        logging=logging,
        file=folder / "traffic.jsonl",
    )
    web.should_exit = True
    thread.join()
    engine.stop()
    engine.check_integrity()


@pytest.mark.slow
def test_lab_measures_our_server_and_everything_is_reported(server: SimpleNamespace) -> None:
    """`outrider bench URL`: the page's counts of engine, tokens and speculation agree with the
    server's log of requests."""
    assert parse(server.metrics.render()[0].decode()).generated == 0, (
        "the self-test is nobody's request"
    )
    workload = Workload(
        "w", tuple(WorkloadRequest(id=f"r{i}", prompt=f"prompt {i}") for i in range(PROMPTS))
    )
    options = RequestOptions(
        concurrency=2,
        settle_s=0.1,
        timeout_s=60.0,
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    )
    (result,) = bench_servers(
        {"ours": ServerEndpoint.parse(server.url)}, workload, options, prompts=PROMPTS
    ).servers
    assert (result.engine, result.model) == ("outrider", "tiny")
    assert result.failures == []
    assert result.speculation is not None
    assert result.speculation.num_steps > 0

    server.monitoring.close()
    server.logging.close()
    assert server.monitoring.self_tests["tiny"].numbers["draft-model"]["drafted"] > 0
    prompts = {request.prompt for request in load_workload(str(Path(server.file))).requests}
    assert {f"prompt {i}" for i in range(PROMPTS)} <= prompts
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert len(requests) >= PROMPTS
    measured = requests[-PROMPTS:]  # those before warm the server up
    assert sum(line["drafted"] for line in measured) == result.speculation.num_draft_tokens
    assert sum(line["accepted"] for line in measured) == result.speculation.num_accepted_tokens
    spans = server.exporter.get_finished_spans()
    web = {span.context.span_id for span in spans if span.name == "POST /v1/completions"}
    inner = [span for span in spans if span.name == "text_completion tiny"]
    assert len(inner) == len(requests)
    assert all(span.parent.span_id in web for span in inner)
