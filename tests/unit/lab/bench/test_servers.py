"""Servers by way of `outrider bench URL`: the envelope around `outrider/lab/server`, and going on after a server went away."""

from __future__ import annotations

import os
import signal
import time

from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.progress import Progress
from outrider.lab.result import comparables
from outrider.lab.server.options import LoadOptions, ServerEndpoint
from outrider.lab.server.study import bench_servers
from outrider.lab.workload.types import BadLine, Workload, WorkloadRequest
from outrider.report.bench import document
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.unit.lab.server.fake_server import Fake

WORKLOAD = Workload(
    "w", tuple(WorkloadRequest(f"r{n}", prompt=f"prompt {n}", task="ab"[n % 2]) for n in range(10)), (BadLine(3, "bad"),)
)


def run(*fakes: Fake, prompts: int = 2) -> BenchResult:
    endpoints = {name: ServerEndpoint.parse(one.url) for name, one in zip(("plain", "speculative"), fakes, strict=False)}
    options = LoadOptions(concurrency=(1,), warmup=1, settle_s=0.0, timeout_s=5.0)
    return bench_servers(endpoints, WORKLOAD, options, prompts=prompts, progress=Progress())


def test_two_servers_make_one_result() -> None:
    with Fake() as plain, Fake() as other:
        result = run(plain, other)
    assert all(one.complete for one in result.servers)
    assert [[answer.id for answer in one.levels[0].answers] for one in result.servers] == [["r0", "r1", "r2", "r3"]] * 2
    assert (result.workload.num_skipped_lines, result.settings["prompts"]) == (1, 2)
    text = to_markdown(document(result))
    assert "Bench: speculative against plain" in text
    assert "1 bad lines skipped" in text
    labels = list(comparables(result))
    assert "speculative, 1 at once: tokens/s" in labels


def test_ctrl_c_leaves_what_was_answered() -> None:
    """The signal comes with the fourth request, one of them a warm-up: the two answers that came are reported."""

    def stop(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with Fake(on_request=stop) as one:
        result = run(one)
    assert result.interrupted
    (server,) = result.servers
    assert not server.complete
    assert [answer.id for answer in server.levels[0].answers] == ["r0", "r1"]
    assert "the run was stopped: 2 requests are without an answer" in server.notes
    assert "this is what was known" in to_markdown(render(result))
