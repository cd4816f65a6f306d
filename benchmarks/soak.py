"""Thousands of requests, many of them wrong, hostile, cut off or cancelled: is any lost, does
anything stay behind?

Server and engine run in this process, so that the engine's own integrity check can be asked at the
end; clients speak HTTP. Kinds, drawn at random: answers streamed and whole, several choices, seeded
sampling, stop strings, JSON answers, speculation off / fixed / auto, bodies that are no JSON,
fields that are refused by name, impossible values, prompts too long, clients that hang up before or
in the middle of the answer, that read slowly or never, whose connections break in the middle of a
body or an answer, grammars that explode, bodies of 50 MB. Meanwhile 500 connections do nothing, and
a well-behaved client asks for a token four times a second. A request is lost when it neither
answers nor is refused in time; a text is changed when it is not the one that the same greedy
request had alone.

    python benchmarks/soak.py --requests 10000
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx2
import psutil
import typer
from rich.progress import track
from workload import console, write_result

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.lab.workload.load import load_workload
from outrider.serve.app import make_app
from outrider.serve.run import Process
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings

PATIENCE_S = 120.0
SAMPLES = 20  # of the process's memory
BIG_BODY = 50 * 10**6
IDLE_S = 5.0  # before memory is looked at for the last time
BREAK_S = 0.25  # between two requests of the well-behaved client
WAITS = {"median_s": 0.5, "p99_s": 0.99, "longest_s": 1.0}
TEXTS = 8  # greedy answers that are asked for again and again


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)  # what should not have happened
    lost: int = 0
    changed: int = 0
    waits_s: list[float] = field(default_factory=list)  # of the well-behaved client

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
    address: tuple[str, int]
    num_bombs: int
    tally: Tally = field(default_factory=Tally)
    # prompt -> its greedy answer, asked for alone
    texts: dict[str, str] = field(default_factory=dict)

    async def one(self) -> None:
        kinds = (
            self.whole,
            self.whole,
            self.streamed,
            self.streamed,
            self.chat,
            self.several,
            self.hangs_up,
            self.hangs_up_at_once,
            self.no_json,
            self.refused_field,
            self.impossible,
            self.too_long,
            self.structured,
            self.again,
            self.again,
            self.reads_slowly,
            self.never_reads,
            self.cut_in_body,
            self.cut_in_answer,
            self.big_body,
            *([self.bomb] if self.num_bombs else []),
        )
        kind = self.rng.choice(kinds)
        try:
            await asyncio.wait_for(kind(), PATIENCE_S)
        except TimeoutError:
            self.tally.lost += 1
            self.tally.wrong.append(f"{kind.__name__} was lost: no end after {PATIENCE_S:g} s")
        except httpx2.HTTPError as error:
            self.tally.lost += 1
            self.tally.wrong.append(f"{kind.__name__} failed: {type(error).__name__}: {error}")

    def body(self, **more: Any) -> dict[str, Any]:
        rng = self.rng
        fixed = {"mode": "fixed", "max_draft_tokens": rng.randint(1, 5)}
        speculations: list[dict[str, Any]] = [{}, {"mode": "off"}, fixed, {"mode": "auto"}]
        speculation = rng.choice(speculations)
        seeded = {"temperature": 1, "seed": rng.randrange(100)}
        samplings: list[dict[str, Any]] = [
            {"temperature": 0},
            seeded,
            {"temperature": 0.7, "top_p": 0.9},
        ]
        sampling = rng.choice(samplings)
        return {
            "model": self.model,
            "prompt": rng.choice(self.prompts),
            "max_tokens": rng.randint(1, 40),
            **({"speculation": speculation} if speculation else {}),
            **sampling,
            **more,
        }

    async def whole(self) -> None:
        answer = await self.http.post("/v1/completions", json=self.body(stop=["\n\n"]))
        self.tally.expect("whole", answer.status_code, 200, 429)
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] < 1:
            self.tally.wrong.append("an answer without tokens")

    async def several(self) -> None:
        answer = await self.http.post(
            "/v1/completions", json=self.body(n=3, temperature=0.8, max_tokens=8)
        )
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
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "integer"}},
            "required": ["answer"],
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = self.body(max_tokens=24)
        messages = [{"role": "user", "content": body.pop("prompt")}]
        answer = await self.http.post(
            "/v1/chat/completions", json={**body, "messages": messages, "response_format": wanted}
        )
        self.tally.expect("structured", answer.status_code, 200, 429)

    async def hangs_up(self) -> None:
        async with self.http.stream(
            "POST", "/v1/completions", json=self.body(stream=True, max_tokens=900)
        ) as answer:
            count = 0
            async for _ in answer.aiter_lines():
                count += 1
                if count > self.rng.randint(1, 6):
                    break
        self.tally.expect("hangs up", answer.status_code, 200, 429)

    async def hangs_up_at_once(self) -> None:
        try:
            await asyncio.wait_for(
                self.http.post("/v1/completions", json=self.body(max_tokens=900)),
                self.rng.uniform(0.001, 0.2),
            )
        except TimeoutError:
            self.tally.outcomes["hung up at once"] += 1

    async def no_json(self) -> None:
        answer = await self.http.post(
            "/v1/completions",
            content=b'{"prompt": "a',
            headers={"content-type": "application/json"},
        )
        self.refused("no JSON", answer)

    async def refused_field(self) -> None:
        self.refused(
            "refused field",
            await self.http.post("/v1/completions", json=self.body(use_beam_search=True)),
        )

    async def impossible(self) -> None:
        wrong: list[dict[str, Any]] = [
            {"top_p": 7},
            {"max_tokens": -1},
            {"model": "nobody"},
            {"prompt": []},
        ]
        wrong.append({"logit_bias": {"x": 1}})
        body = self.body(**self.rng.choice(wrong))
        self.refused("impossible", await self.http.post("/v1/completions", json=body), 400, 404)

    async def too_long(self) -> None:
        self.refused(
            "too long",
            await self.http.post("/v1/completions", json=self.body(prompt="word " * 5000)),
        )

    async def greedy(self, prompt: str, **more: Any) -> str | None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        answer = await self.http.post("/v1/completions", json=body)
        self.tally.expect("again", answer.status_code, 200, 429)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None

    async def again(self) -> None:
        prompt = self.rng.choice(list(self.texts))
        drafting = self.rng.choice(
            [{"mode": "off"}, {"mode": "auto"}, {"mode": "fixed", "max_draft_tokens": 4}]
        )
        text = await self.greedy(prompt, speculation=drafting)
        if text is not None and text != self.texts[prompt]:
            self.tally.changed += 1
            self.tally.wrong.append(
                f"a text has changed: {text!r} instead of {self.texts[prompt]!r}"
            )

    async def reads_slowly(self) -> None:
        async with self.http.stream(
            "POST", "/v1/completions", json=self.body(stream=True, logprobs=5)
        ) as answer:
            async for _ in answer.aiter_bytes(512):
                await asyncio.sleep(0.02)
        self.tally.expect("reads slowly", answer.status_code, 200, 429)

    async def never_reads(self) -> None:
        body = self.body(
            stream=True, n=4, logprobs=20, max_tokens=400, ignore_eos=True, temperature=1
        )
        with await self.sent(json.dumps(body).encode()):
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
        self.tally.outcomes["never read"] += 1

    async def cut_in_body(self) -> None:
        body = json.dumps(self.body()).encode()
        _cut(await self.sent(body[: self.rng.randrange(len(body))], len(body)))
        self.tally.outcomes["cut in its body"] += 1

    async def cut_in_answer(self) -> None:
        client = await self.sent(json.dumps(self.body(stream=True, max_tokens=400)).encode())
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        _cut(client)
        self.tally.outcomes["cut in its answer"] += 1

    async def bomb(self) -> None:
        number = self.rng.randrange(self.num_bombs)
        letter = chr(ord("a") + number)
        patterns = [
            {"type": "string", "pattern": f"[a-z]*{chr(97 + at)}[a-z]{{{20 + at + number}}}"}
            for at in range(26)
        ]
        chain = "\n".join(f'x{at}: x{at + 1} "{letter}" | "b"' for at in range(4000))
        kinds: dict[str, dict[str, Any]] = {
            "million letters": {"regex": f"({letter}{{1000}}){{1000}}"},
            "minutes to compile": {"json": {"allOf": patterns}},
            "deep stack": {"grammar": f'start: x0\n{chain}\nx4000: "c"'},
        }
        kind = self.rng.choice(list(kinds))
        answer = await self.http.post(
            "/v1/completions", json=self.body(structured_outputs=kinds[kind])
        )
        self.tally.expect(f"bomb of {kind}", answer.status_code, 200, 400, 429)

    async def big_body(self) -> None:
        head = b'{"prompt": "'
        self.refused(
            "50 MB",
            await self.http.post("/v1/completions", content=head + b"w" * (BIG_BODY - len(head))),
            413,
        )

    async def sent(self, body: bytes, length: int | None = None) -> socket.socket:
        """A connection that has sent a body, of which more may be promised."""
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.address)
        lines = ["POST /v1/completions HTTP/1.1", "Host: soak", "Content-Type: application/json"]
        head = "\r\n".join(
            [*lines, f"Content-Length: {len(body) if length is None else length}", "", ""]
        )
        await loop.sock_sendall(client, head.encode() + body)
        return client

    async def behave(self) -> None:
        """One token, again and again, ahead of whoever waits; how long that takes."""
        body = {"model": self.model, "prompt": self.prompts[0], "max_tokens": 1, "priority": -1}
        while True:
            began = time.perf_counter()
            answer = await self.http.post("/v1/completions", json=body)
            self.tally.waits_s.append(time.perf_counter() - began)
            self.tally.expect("well-behaved", answer.status_code, 200)
            await asyncio.sleep(BREAK_S)

    def refused(self, kind: str, answer: httpx2.Response, *allowed: int) -> None:
        self.tally.expect(kind, answer.status_code, *(allowed or (400,)), 429)
        if "error" not in answer.json():
            self.tally.wrong.append(f"{kind}: a refusal without an error: {answer.text[:100]}")


def _cut(client: socket.socket) -> None:
    """Closes a connection with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def _idle(address: tuple[str, int], count: int) -> list[asyncio.StreamWriter]:
    """Connections that send nothing, or half of a first line."""
    writers = []
    for number in range(count):
        _, writer = await asyncio.open_connection(*address)
        if number % 2:
            writer.write(b"POST /v1/comp")
        writers.append(writer)
    return writers


async def soak(
    address: tuple[str, int],
    model: str,
    requests: int,
    together: int,
    seed: int,
    num_idle: int,
    num_bombs: int,
) -> tuple[Tally, list[int]]:
    """All requests, `together` at a time; what became of them and how much memory the process held
    on the way."""
    memory: list[int] = []
    url = f"http://{address[0]}:{address[1]}"
    texts = [one.prompt or "" for one in load_workload("demo").requests]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(
        base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as http:
        run = Soak(http, model, texts, random.Random(seed), address, num_bombs)
        for prompt in texts[:TEXTS]:
            run.texts[prompt] = await run.greedy(prompt, speculation={"mode": "off"}) or ""
        idle = await _idle(address, num_idle)
        memory.append(psutil.Process().memory_info().rss)
        behaving = asyncio.ensure_future(run.behave())
        block = max(together, requests // SAMPLES)
        for start in track(range(0, requests, block), description="requests", console=console()):
            gate = asyncio.Semaphore(together)

            async def one(gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await run.one()

            await asyncio.gather(*(one() for _ in range(min(block, requests - start))))
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
        behaving.cancel()
        await asyncio.wait({behaving})
        if not behaving.cancelled() and (error := behaving.exception()) is not None:
            run.tally.wrong.append(
                f"the well-behaved client failed: {type(error).__name__}: {error}"
            )
        for writer in idle:
            writer.close()
        return run.tally, memory


def main(
    target: Annotated[str, typer.Option(help="Model.")] = "demo",
    requests: Annotated[int, typer.Option()] = 10000,
    together: Annotated[int, typer.Option(help="Requests at once.")] = 48,
    idle: Annotated[int, typer.Option(help="Connections that do nothing.")] = 500,
    bombs: Annotated[
        int,
        typer.Option(min=0, max=26, help="Different grammars that explode; 0: no such request."),
    ] = 8,
    seed: Annotated[int, typer.Option()] = 1,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Thousands of requests, good and bad."""
    engine_settings = EngineSettings(max_num_seqs=24, kv_memory=256 << 20)
    options = Options(target=target, num_draft_tokens="auto:5", threads=threads)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    models = (ServedModel(name=target, options=options, engine=engine_settings),)
    state = ServerState(ServerSettings(models=models, port=address[1]))
    engine = make_engine(
        options, engine_settings, name=target, observer=state.metrics.observer(target)
    )
    engine.start()
    server = Process(state, make_app(state), lambda: [engine])
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while state.loading:
        time.sleep(0.05)
    began = time.perf_counter()
    tally, memory = asyncio.run(soak(address, target, requests, together, seed, idle, bombs))
    seconds = time.perf_counter() - began
    drained = engine.drain(60)
    engine.check_integrity()
    snapshot = engine.snapshot()
    time.sleep(IDLE_S)
    gc.collect()
    after = psutil.Process().memory_info().rss
    server.should_exit = True
    thread.join(10)
    half = len(memory) // 2
    waits_s = sorted(tally.waits_s)
    faults = sum(
        count
        for outcome, count in tally.outcomes.items()
        if outcome.partition(": ")[2].startswith("5")
    )
    content = {
        "target": target,
        "requests": requests,
        "together": together,
        "idle_connections": idle,
        "bombs": bombs,
        "seconds": round(seconds, 1),
        "drained": drained,
        "faults": faults,
        "lost": tally.lost,
        "changed": tally.changed,
        "well_behaved": {
            "requests": len(waits_s),
            **{
                name: round(waits_s[int(share * (len(waits_s) - 1))], 3)
                for name, share in WAITS.items()
            },
        },
        "outcomes": dict(sorted(tally.outcomes.items())),
        "wrong": tally.wrong[:50],
        "num_wrong": len(tally.wrong),
        "memory_mib": [round(value / 2**20, 1) for value in [*memory, after]],
        "memory_growth_second_half": round(memory[-1] / memory[half] - 1, 4),
        "preemptions": snapshot.preemptions,
        "prefix_hits": snapshot.prefix_hits,
        "prefix_queries": snapshot.prefix_queries,
        "integrity": "checked at idle",
    }
    console().print_json(json.dumps(content))
    console().print(f"written to {write_result('soak', content, threads)}")


if __name__ == "__main__":
    typer.run(main)
