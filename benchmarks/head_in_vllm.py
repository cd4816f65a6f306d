"""Does a head trained here do in vLLM what it does in Outrider? The same weights, prompts and draft length in both; acceptance
from vLLM's own counters against ours, greedy.

    python benchmarks/head_in_vllm.py demo runs/eagle3/drafter --workload demo

vLLM lies in `.peers/vllm` (benchmarks/setup_peers.sh). The head is exported in the raw EAGLE-3 layout first; what vLLM is known
not to read is said before it starts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from serve import Setting, free_port, serving, window
from workload import PEERS, console, model_name, write_result

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from outrider.lab.server.client import Client
from outrider.lab.server.counters import difference, read
from outrider.lab.server.endpoint import Endpoint
from outrider.lab.server.options import LoadOptions
from outrider.lab.server.types import Level
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.types import Request
from outrider.stats import DecodeStats
from outrider.train.export import Target, export


def in_vllm(
    target: Path, head: Path, requests: list[Request], sampling: SamplingParams, length: int, threads: int
) -> dict[str, Any]:
    """vLLM's counters over all requests, one at a time."""
    port = free_port()
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": length}
    command = [
        str(PEERS / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target),
        "--dtype", "bfloat16", "--max-num-seqs", "1", "--port", str(port), "--max-model-len", "1024",
        "--no-enable-prefix-caching", "--speculative-config", json.dumps(config),
    ]  # fmt: skip
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1"}
    with serving(command, port, "/health", PEERS / "head-vllm.log", **environment) as url:
        options = LoadOptions(concurrency=(1,), sampling=sampling, api="completions")
        asyncio.run(window(Setting("vllm", url, {}), Level(concurrency=1), requests[:1], options))
        before = asyncio.run(_counters(url))
        asyncio.run(window(Setting("vllm", url, {}), Level(concurrency=1), requests, options))
        counted = difference(before, asyncio.run(_counters(url))).speculation
    if counted is None:
        raise typer.BadParameter("vLLM counted no speculation")
    return {
        "tau": counted.tau, "draft_utilisation": counted.draft_utilisation, "per_position": counted.acceptance_per_position,
        "drafted": counted.num_draft_tokens, "accepted": counted.num_accepted_tokens,
    }  # fmt: skip


async def _counters(url: str) -> Any:
    await asyncio.sleep(2)  # it counts a request after its last byte
    async with Client(Endpoint.parse(url), timeout_s=60) as client:
        reading, why = await read(client, None)
    if reading is None:
        raise typer.BadParameter(why)
    return reading


def in_outrider(target: Path, head: Path, requests: list[Request], sampling: SamplingParams, length: int) -> dict[str, Any]:
    """Ours, over the same prompts."""
    llm = LLM(target, drafter="eagle3", draft=head, num_draft_tokens=length)
    total = DecodeStats()
    for one in requests:
        total = total.merge(llm.generate([one.prompt or ""], sampling)[0].stats)
    per_position = [count / total.steps for count in total.accepted_per_position]
    return {
        "tau": total.tau, "draft_utilisation": total.draft_utilisation, "per_position": per_position,
        "drafted": total.drafted, "accepted": total.accepted,
    }  # fmt: skip


def main(
    target: Annotated[str, typer.Argument(help="'demo' or a folder.")],
    head: Annotated[Path, typer.Argument(help="A folder that `outrider train eagle3` made.")],
    workload: Annotated[str, typer.Option()] = "demo",
    prompts: Annotated[int, typer.Option()] = 24,
    length: Annotated[int, typer.Option(help="Draft tokens per step.")] = 4,
    tokens: Annotated[int, typer.Option(help="Per answer.")] = 64,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """One head in two engines."""
    folder = Path(demo_paths().target) if target == "demo" else Path(target)
    requests = list(load_workload(workload, limit=prompts).requests)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as place:
        exported = Path(place) / "head"
        console().print(export(head, "raw", exported, Target.load(str(folder))))
        content: dict[str, Any] = {
            "target": model_name(folder), "workload": workload, "prompts": len(requests), "num_draft_tokens": length,
            "outrider": in_outrider(folder, head, requests, sampling, length),
            "vllm": in_vllm(folder, exported, requests, sampling, length, threads),
        }  # fmt: skip
    content["tau_ratio"] = content["vllm"]["tau"] / content["outrider"]["tau"]  # drafts beyond an answer's end: only vLLM counts them
    console().print_json(json.dumps(content))
    console().print(f"written to {write_result('head-in-vllm', content, threads)}")


if __name__ == "__main__":
    typer.run(main)
