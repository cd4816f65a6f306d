"""Tokens per second of Outrider and four other engines, plain and with a draft model, on the same
weights.

Every engine in every configuration is one worker process, loaded once. Runs are interleaved: each
prompt goes through all of them before the next, in an order that turns round every time, so that a
slow minute of the machine hits all alike. Greedy, batch 1, bf16, exactly `max_tokens` tokens. A run
during which other processes used more than `max_other_cpu` of the machine is repeated. An engine's
text with the draft is compared with its own plain text. What each engine was given is at the top of
its `peers/*_peer.py`.

    python benchmarks/peers.py                         all that setup_peers.sh installed, and ourselves
    python benchmarks/peers.py --peers llamacpp,outrider --rounds 5 --k 3,5,8
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, TypeVar

import inflate
import typer
from peer_report import Run, Runs, floors, show, stored, summarise
from rich.console import Console
from workers import PEER_NAMES, Configuration, Worker, WorkerError, interpreter
from workload import (
    PAIRS,
    PEERS,
    console,
    encode,
    model_name,
    model_pair,
    prompt_texts,
    write_result,
)

from outrider.lab.disturbance import Repeats

MAX_MODEL_LEN = 1024
# generated before every measured run: a worker that waited has lost its pages and caches
WAKING_TOKENS = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """What every engine is asked, and under which conditions a run counts."""

    prompts: int
    max_tokens: int
    threads: int
    rounds: int
    warmup: int
    max_other_cpu: float
    repeats: int


@dataclass
class Field:
    """The workers that are running and the reasons why others are not."""

    workers: list[Worker] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def attempt(self, worker: Worker, action: Callable[[Worker], T]) -> T | None:
        """The action's result; a worker that fails is noted, closed and out of the race."""
        try:
            return action(worker)
        except WorkerError as error:
            self.failures[worker.configuration.name] = str(error)
            self.workers.remove(worker)
            worker.close()
            return None


def main(
    pair: Annotated[
        str, typer.Option(help=f"Target and draft: {', '.join(PAIRS)}, or a folder of both.")
    ] = "shared",
    mlp: Annotated[
        int, typer.Option(help="Inflate the target's MLPs to this width; 0: leave them.")
    ] = 8192,
    extra_layers: Annotated[int, typer.Option(help="Inflate the target by silent layers.")] = 0,
    peers: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PEER_NAMES)}.")] = "",
    k: Annotated[str, typer.Option(help="Draft lengths to sweep, comma-separated.")] = "3,5",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Unmeasured runs of each worker.")] = 2,
    max_other_cpu: Annotated[
        float, typer.Option(help="Repeat a run beside busier neighbours.")
    ] = 0.08,
    repeats: Annotated[int, typer.Option(help="How often a disturbed run is repeated.")] = 4,
    runtime: Annotated[str, typer.Option(help="Outrider's --runtime.")] = "auto",
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "peers",
) -> None:
    """Compare decoding speed with peers on the same weights."""
    out = console()
    names = installed(peers, out)
    workload = Workload(prompts, max_tokens, threads, rounds, warmup, max_other_cpu, repeats)
    target, draft = model_pair(pair)
    wide, inflation = inflated(target, mlp, extra_layers)
    load = {
        "target": str(wide),
        "threads": threads,
        "runtime": runtime,
        "max_model_len": MAX_MODEL_LEN,
    }
    configurations = [
        Configuration(peer, length) for peer in names for length in (0, *map(int, k.split(",")))
    ]
    race = start(configurations, {**load, "cache": str(PEERS / "models")}, draft, out)
    try:
        runs = measure(race, encode(prompt_texts(prompts), wide), workload, out)
        engines = {worker.configuration.name: engine(worker) for worker in race.workers}
    finally:
        for worker in race.workers:
            worker.close()
    summary = {c.name: summarise(c, runs, max_tokens, max_other_cpu) for c in runs}
    content = {
        "models": {
            "target": model_name(target),
            "draft": model_name(draft),
            "inflation": inflation,
        },
        "workload": {
            "source": "GSM8K test, first questions",
            "batch": 1,
            "greedy": True,
            **asdict(workload),
        },
        "engines": engines,
        "failures": race.failures,
        "summary": summary,
        "floors": floors(summary),
        "runs": {c.name: [stored(run) for run in measured] for c, measured in runs.items()},
    }
    path = write_result(name, content, threads)
    show(out, content)
    out.print(f"written to benchmarks/results/{path.name}")
    sys.exit(1 if race.failures else 0)


def installed(peers: str, console: Console) -> list[str]:
    """The peers named, or all that are installed. A named one that is unknown or missing ends the
    program."""
    names = [name for name in peers.split(",") if name] or list(PEER_NAMES)
    for name in names:
        if name not in PEER_NAMES:
            raise typer.BadParameter(f"no peer '{name}'; available: {', '.join(PEER_NAMES)}")
    missing = [name for name in names if not interpreter(name).exists()]
    if missing and peers:
        raise typer.BadParameter(
            f"{missing[0]} is not installed: benchmarks/setup_peers.sh {missing[0]}"
        )
    for name in missing:
        console.print(f"{name}: not installed, left out (benchmarks/setup_peers.sh {name})")
    return [name for name in names if name not in missing]


def inflated(target: Path, mlp: int, extra_layers: int) -> tuple[Path, dict[str, Any] | None]:
    """The folder to decode with, and what was done to the target to get it."""
    if not mlp and not extra_layers:
        return target, None
    folder = PEERS / "models" / f"{target.parent.name}-{target.name}-mlp{mlp}-layers{extra_layers}"
    return folder, inflate.ensure(target, folder, mlp or None, extra_layers)


def start(
    configurations: list[Configuration], load: dict[str, Any], draft: Path, console: Console
) -> Field:
    """Load every worker, one after the other; what fails is reported and left out."""
    race = Field()
    PEERS.mkdir(exist_ok=True)
    for configuration in configurations:
        began = time.perf_counter()
        log = PEERS / f"{configuration.peer}-{configuration.k}.worker.log"
        try:
            with log.open("w") as stream:
                command = {**load, "draft": str(draft) if configuration.k else None}
                race.workers.append(Worker(configuration, command, stream))
            console.print(f"{configuration.name}: loaded in {time.perf_counter() - began:.0f} s")
        except WorkerError as error:
            race.failures[configuration.name] = str(error)
            console.print(
                f"{configuration.name}: FAILED to load, see .peers/{log.name}", style="red"
            )
    return race


def measure(race: Field, prompts: list[list[int]], workload: Workload, console: Console) -> Runs:
    """Warm up, then every round: each prompt through every worker, forwards and backwards in turn."""
    for worker in list(race.workers):
        for index in range(workload.warmup):
            prompt = prompts[index % len(prompts)]
            if race.attempt(worker, methodcaller("run", prompt, workload.max_tokens)) is None:
                break
    runs: Runs = {worker.configuration: [] for worker in race.workers}
    repeats = Repeats(workload.max_other_cpu, console.print)
    for turn in range(workload.rounds * len(prompts)):
        number, index = divmod(turn, len(prompts))
        for worker in race.workers[:: 1 if turn % 2 == 0 else -1]:
            run = race.attempt(
                worker,
                partial(quiet_run, prompt=prompts[index], workload=workload, repeats=repeats),
            )
            if run is not None:
                runs[worker.configuration].append({"round": number, "prompt": index, **run})
        if index == len(prompts) - 1:
            console.print(f"round {number + 1} of {workload.rounds}")
    return {configuration: measured for configuration, measured in runs.items() if measured}


def quiet_run(worker: Worker, prompt: list[int], workload: Workload, repeats: Repeats) -> Run:
    """One run of a woken worker; when others were busy meanwhile, the quietest of up to `repeats`
    more."""
    worker.run(prompt, WAKING_TOKENS)
    attempt = partial(worker.run, prompt, workload.max_tokens)
    best, _ = repeats.calmest(attempt, lambda run: run["other_cpu"], workload.repeats)
    if len(best["token_ids"]) != workload.max_tokens:
        raise WorkerError(f"{len(best['token_ids'])} tokens instead of {workload.max_tokens}")
    return best


def engine(worker: Worker) -> dict[str, Any]:
    """Versions and settings as the worker gave them, and the memory it holds now."""
    return {**worker.about, "memory_bytes": worker.memory_bytes()}


if __name__ == "__main__":
    typer.run(main)
