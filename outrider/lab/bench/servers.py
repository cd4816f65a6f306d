"""A bench result from servers: `outrider/lab/server` measures, this puts it into the envelope and the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from outrider.lab.bench.material import digest, firsts
from outrider.lab.bench.result import BenchResult, WorkloadInfo
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.server import Endpoint, LoadOptions, measure_servers
from outrider.lab.workload.types import Workload
from outrider.machine import versions


def bench_servers(
    endpoints: Mapping[str, Endpoint], workload: Workload, options: LoadOptions, journal_path: Path, *, prompts: int,
    resume: bool, progress: Progress,
) -> tuple[BenchResult, Journal, bool]:  # fmt: skip
    """The result, the journal (close it when the result is safe) and whether every request was answered or refused. `prompts`: of
    each task. Raises what `measure_servers` raises."""
    asked = replace(workload, requests=tuple(firsts(workload.requests, prompts)))
    plan = {
        "verb": "bench", "servers": {label: [one.root, one.model] for label, one in endpoints.items()},
        "load": asdict(options), "workload": digest(asked), "versions": versions(),
    }  # fmt: skip
    journal = Journal.open(journal_path, plan, resume=resume)
    with journal:
        found = measure_servers(endpoints, asked, options, journal=journal, progress=progress)
    result = BenchResult(
        workload=WorkloadInfo(name=workload.name, notes=list(workload.notes), num_skipped_lines=len(workload.skipped)),
        settings={**asdict(options), "prompts": prompts},
        servers=found,
        seconds=sum(level.busy_s for one in found for level in one.levels),
        interrupted=any(one.interrupted for one in found),
    )
    return result, journal, all(one.complete for one in found)
