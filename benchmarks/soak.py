"""Thousands of requests, many of them wrong, cut off or cancelled: is any lost, does anything stay behind?

Server and engine run in this process, so that the engine's own integrity check can be asked at the end; clients speak HTTP.
Kinds, drawn at random: answers streamed and whole, several choices, seeded sampling, stop strings, JSON answers, speculation
off / fixed / auto, bodies that are no JSON, fields that are refused by name, impossible values, prompts too long, clients that
hang up before or in the middle of the answer. A request is lost when it neither answers nor is refused in time.

    python benchmarks/soak.py --requests 10000
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx2
import psutil
import typer
import uvicorn
from rich.progress import track
from workload import console, write_result

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.lab.workload.load import load_workload
from outrider.serve.app import make_app
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings

PATIENCE_S = 120.0
SAMPLES = 20  # of the process's memory


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)  # what should not have happened

    def expect(self, kind: str, status: int, *allowed: int) -> None:
        self.outcomes[f"{kind}: {status}"] += 1
        if status not in allowed:
            self.wrong.append(f"{kind} was answered with {status}, expected one of {allowed}")


@dataclass
class Soak:
    """Draws and sends requests."""

    http: httpx2.AsyncClient
    model: str
    prompts: list[str]
    rng: random.Random
    tally: Tally = field(default_factory=Tally)

    async def one(self) -> None:
        kinds = (
            self.whole, self.whole, self.streamed, self.streamed, self.chat, self.several, self.hangs_up, self.hangs_up_at_once,
            self.no_json, self.refused_field, self.impossible, self.too_long, self.structured,
        )  # fmt: skip
        kind = self.rng.choice(kinds)
        try:
            await asyncio.wait_for(kind(), PATIENCE_S)
        except TimeoutError:
            self.tally.wrong.append(f"{kind.__name__} was lost: no end after {PATIENCE_S:g} s")
        except httpx2.HTTPError as error:
            self.tally.wrong.append(f"{kind.__name__} failed: {type(error).__name__}: {error}")

    def body(self, **more: Any) -> dict[str, Any]:
        rng = self.rng
        fixed = {"mode": "fixed", "max_draft_tokens": rng.randint(1, 5)}
        speculations: list[dict[str, Any]] = [{}, {"mode": "off"}, fixed, {"mode": "auto"}]
        speculation = rng.choice(speculations)
        seeded = {"temperature": 1, "seed": rng.randrange(100)}
        samplings: list[dict[str, Any]] = [{"temperature": 0}, seeded, {"temperature": 0.7, "top_p": 0.9}]
        sampling = rng.choice(samplings)
        return {
            "model": self.model, "prompt": rng.choice(self.prompts), "max_tokens": rng.randint(1, 40),
            **({"speculation": speculation} if speculation else {}), **sampling, **more,
        }  # fmt: skip

    async def whole(self) -> None:
        answer = await self.http.post("/v1/completions", json=self.body(stop=["\n\n"]))
        self.tally.expect("whole", answer.status_code, 200, 429)
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] < 1:
            self.tally.wrong.append("an answer without tokens")

    async def several(self) -> None:
        answer = await self.http.post("/v1/completions", json=self.body(n=3, temperature=0.8, max_tokens=8))
        self.tally.expect("several", answer.status_code, 200, 429)
        if answer.status_code == 200 and len(answer.json()["choices"]) != 3:
            self.tally.wrong.append("n=3 did not give three choices")

    async def streamed(self) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        self.tally.expect("streamed", answer.status_code, 200, 429)
        if answer.status_code == 200 and lines[-1] != "data: [DONE]":
            self.tally.wrong.append("a stream without its end")

    async def chat(self) -> None:
        body = self.body(max_tokens=12)
        messages = [{"role": "user", "content": body.pop("prompt")}]
        answer = await self.http.post("/v1/chat/completions", json={**body, "messages": messages})
        self.tally.expect("chat", answer.status_code, 200, 429)

    async def structured(self) -> None:
        schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = self.body(max_tokens=24)
        messages = [{"role": "user", "content": body.pop("prompt")}]
        answer = await self.http.post("/v1/chat/completions", json={**body, "messages": messages, "response_format": wanted})
        self.tally.expect("structured", answer.status_code, 200, 429)

    async def hangs_up(self) -> None:
        async with self.http.stream("POST", "/v1/completions", json=self.body(stream=True, max_tokens=900)) as answer:
            count = 0
            async for _ in answer.aiter_lines():
                count += 1
                if count > self.rng.randint(1, 6):
                    break
        self.tally.expect("hangs up", answer.status_code, 200, 429)

    async def hangs_up_at_once(self) -> None:
        try:
            await asyncio.wait_for(
                self.http.post("/v1/completions", json=self.body(max_tokens=900)), self.rng.uniform(0.001, 0.2)
            )
        except TimeoutError:
            self.tally.outcomes["hung up at once"] += 1

    async def no_json(self) -> None:
        answer = await self.http.post("/v1/completions", content=b'{"prompt": "a', headers={"content-type": "application/json"})
        self.refused("no JSON", answer)

    async def refused_field(self) -> None:
        self.refused("refused field", await self.http.post("/v1/completions", json=self.body(use_beam_search=True)))

    async def impossible(self) -> None:
        wrong: list[dict[str, Any]] = [{"top_p": 7}, {"max_tokens": -1}, {"model": "nobody"}, {"prompt": []}]
        wrong.append({"logit_bias": {"x": 1}})
        body = self.body(**self.rng.choice(wrong))
        self.refused("impossible", await self.http.post("/v1/completions", json=body), 400, 404)

    async def too_long(self) -> None:
        self.refused("too long", await self.http.post("/v1/completions", json=self.body(prompt="word " * 5000)))

    def refused(self, kind: str, answer: httpx2.Response, *allowed: int) -> None:
        self.tally.expect(kind, answer.status_code, *(allowed or (400,)), 429)
        if "error" not in answer.json():
            self.tally.wrong.append(f"{kind}: a refusal without an error: {answer.text[:100]}")


async def soak(url: str, model: str, requests: int, together: int, seed: int) -> tuple[Tally, list[int]]:
    """All requests, `together` at a time; what became of them and how much memory the process held on the way."""
    memory: list[int] = []
    texts = [one.prompt or "" for one in load_workload("demo").requests]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
        run = Soak(http, model, texts, random.Random(seed))
        block = max(together, requests // SAMPLES)
        for start in track(range(0, requests, block), description="requests", console=console()):
            gate = asyncio.Semaphore(together)

            async def one(gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await run.one()

            await asyncio.gather(*(one() for _ in range(min(block, requests - start))))
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
        return run.tally, memory


def main(
    target: Annotated[str, typer.Option(help="Model.")] = "demo",
    requests: Annotated[int, typer.Option()] = 10000,
    together: Annotated[int, typer.Option(help="Requests at once.")] = 48,
    seed: Annotated[int, typer.Option()] = 1,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Thousands of requests, good and bad."""
    engine_settings = EngineSettings(max_num_seqs=24, kv_memory=256 << 20)
    options = Options(target=target, num_draft_tokens="auto:5", threads=threads)
    state = ServerState(ServerSettings(models=(ServedModel(name=target, options=options, engine=engine_settings),), port=0))
    engine = make_engine(options, engine_settings, name=target, observer=state.metrics.observer(target))
    engine.start()
    state.serve([engine], int(time.time()))
    server = uvicorn.Server(uvicorn.Config(make_app(state), port=0, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    began = time.perf_counter()
    tally, memory = asyncio.run(soak(f"http://127.0.0.1:{port}", target, requests, together, seed))
    seconds = time.perf_counter() - began
    drained = engine.drain(60)
    engine.check_integrity()
    snapshot = engine.snapshot()
    server.should_exit = True
    thread.join(10)
    engine.stop()
    half = len(memory) // 2
    content = {
        "target": target, "requests": requests, "together": together, "seconds": round(seconds, 1), "drained": drained,
        "outcomes": dict(sorted(tally.outcomes.items())), "wrong": tally.wrong[:50], "num_wrong": len(tally.wrong),
        "memory_mib": [round(value / 2**20, 1) for value in memory],
        "memory_growth_second_half": round(memory[-1] / memory[half] - 1, 4), "preemptions": snapshot.preemptions,
        "prefix_hits": snapshot.prefix_hits, "prefix_queries": snapshot.prefix_queries, "integrity": "checked at idle",
    }  # fmt: skip
    console().print_json(json.dumps(content))
    console().print(f"written to {write_result('soak', content, threads)}")


if __name__ == "__main__":
    typer.run(main)
