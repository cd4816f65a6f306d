"""A bench result from servers: `outrider/lab/server` measures, this puts it into the envelope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from outrider.lab.bench.bench_result import BenchResult, WorkloadInfo
from outrider.lab.bench.material import firsts
from outrider.lab.progress import Progress
from outrider.lab.server import LoadOptions, ServerEndpoint, measure_servers
from outrider.lab.workload.types import Workload


def bench_servers(
    endpoints: Mapping[str, ServerEndpoint], workload: Workload, options: LoadOptions, *, prompts: int, progress: Progress
) -> BenchResult:
    """`prompts`: of each task. Raises what `measure_servers` raises."""
    asked = replace(workload, requests=tuple(firsts(workload.requests, prompts)))
    found = measure_servers(endpoints, asked, options, progress=progress)
    return BenchResult(
        workload=WorkloadInfo(name=workload.name, notes=list(workload.notes), num_skipped_lines=len(workload.skipped)),
        settings={**asdict(options), "prompts": prompts},
        servers=found,
        seconds=sum(level.busy_s for one in found for level in one.levels),
        interrupted=any(one.interrupted for one in found),
    )
