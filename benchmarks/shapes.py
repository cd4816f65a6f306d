"""GGUF files of well-known shapes and types: plain decoding, wide passes, prompts, loads and memory,
beside llama.cpp.

A file of random weights is written for each shape and type (`shape_files.py`), with SmolLM2's
tokenizer; 135M in Q4_1 is SmolLM2's own file. Both engines have the file loaded at once and take
turns. The first load of ours has an empty cache folder, the later one what the first has kept; files
are in the page cache. Passes: the fastest counts; the rest: medians over the rounds.

    python benchmarks/shapes.py                                        135M and 1B in all types
    python benchmarks/shapes.py --shapes 3B,8B --types Q4_K --remove   large files, deleted after use
    python benchmarks/shapes.py --types Q6_K --onto benchmarks/results/shapes-DATE.json
    python benchmarks/shapes.py --loads --peers none --onto benchmarks/results/shapes-DATE.json
    python benchmarks/shapes.py --render benchmarks/results/shapes-DATE.json
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from real_start import PROMPT, first_letter
from rich.console import Console
from shape_files import SHAPES, TYPES, file_of
from workers import Worker, WorkerError, interpreter
from workload import PEERS, RESULTS, SHARED, console, read_result, write_result

NAME = "shapes"
FOLDER = PEERS / "models" / "shapes"
REAL = SHARED / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
REAL_CELL = ("135M", "Q4_1")
CONTEXTS = (128, 2048)
WIDTHS = (1, 4, 8, 16)
PROMPT_TOKENS = 2048
MAX_MODEL_LEN = 2304
ANSWER = 64  # tokens of plain decoding
NUM_TOKENS = 257  # different ones in prompts


@dataclass(frozen=True)
class Engine:
    """An engine with one file."""

    peer: str
    k: int = 0  # `Worker` hands it on: no draft model


def main(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "135M,1B",
    types: Annotated[str, typer.Option(help=f"Of {', '.join(TYPES)}.")] = ",".join(TYPES),
    peers: Annotated[str, typer.Option(help="llamacpp, or none.")] = "llamacpp",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Of every pass in a round.")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    starts: Annotated[
        bool, typer.Option("--starts/--no-starts", help="Time whole commands, too.")
    ] = True,
    onto: Annotated[
        Path | None,
        typer.Option(help="Keep the other files of a result of this machine.", dir_okay=False),
    ] = None,
    loads: Annotated[
        bool, typer.Option("--loads", help="Of files of --onto: time loads and commands again.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete each file after use.")] = False,
    render: Annotated[
        Path | None, typer.Option(help="Print a stored result again.", dir_okay=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = NAME,
) -> None:
    """Measure every shape in every type, and print the table."""
    out = console()
    if render:
        out.print(markdown(read_result(render)), markup=False, soft_wrap=True)
        return
    if not REAL.is_file():
        out.print(f"skipped: the tokenizer comes from {REAL}, which is not there")
        return
    chosen = _chosen(shapes, SHAPES), _chosen(types, TYPES)
    _chosen(peers, ["llamacpp", "none"])
    engines = [Engine("outrider")]
    if peers != "none" and interpreter("llamacpp").exists():
        engines.append(Engine("llamacpp"))
    elif peers != "none":
        out.print("llamacpp: not installed, left out (benchmarks/setup_peers.sh llamacpp)")
    if loads and onto is None:
        raise typer.BadParameter("--loads needs --onto, the result whose other numbers stay")
    earlier = {} if onto is None else {_place(cell): cell for cell in read_result(onto)["cells"]}
    cells = dict(earlier)
    for shape in chosen[0]:
        for form in chosen[1]:
            is_real = (shape, form) == REAL_CELL
            file = REAL if is_real else file_of(SHAPES[shape], shape, form, REAL, FOLDER)
            turns = 0 if loads else rounds
            measured = measure(file, engines, turns, repeats, threads, starts=starts, out=out)
            if loads:
                measured = with_loads(earlier[shape, form], measured)
            cells[shape, form] = {"shape": shape, "type": form, "file": file.name, **measured}
            if remove and not is_real:
                file.unlink()
            out.print(f"{shape} {form}: measured")
    order = [(shape, form) for shape in SHAPES for form in TYPES]
    listed = sorted(cells.values(), key=lambda cell: order.index(_place(cell)))
    content = {"rounds": rounds, "repeats": repeats, "cells": listed}
    path = write_result(name, content, threads)
    for older in RESULTS.glob(f"{name}-[0-9]*.json*"):
        if older.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            older.unlink()
    out.print(markdown(read_result(path)), markup=False, soft_wrap=True)
    out.print(f"written to benchmarks/results/{path.name}")


def _chosen(text: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for one in names:
        if one not in known:
            raise typer.BadParameter(f"'{one}' is none of {', '.join(known)}")
    return names


def _place(cell: dict[str, Any]) -> tuple[str, str]:
    return cell["shape"], cell["type"]


def with_loads(earlier: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """What was measured of a file before, with the loads and commands of now."""
    engines = dict(earlier["engines"])
    for peer, loaded in measured["engines"].items():
        again = {name: loaded[name] for name in ("loads_s", "commands_s") if name in loaded}
        engines[peer] = {**engines.get(peer, {"runs": []}), **again}
    return {**earlier, "reading_s": measured["reading_s"], "engines": engines}


def measure(
    file: Path,
    engines: Sequence[Engine],
    rounds: int,
    repeats: int,
    threads: int,
    *,
    starts: bool,
    out: Console,
) -> dict[str, Any]:
    """Everything of one file, by engine."""
    found: dict[str, dict[str, Any]] = {engine.peer: {"runs": []} for engine in engines}
    _write_out()
    with tempfile.TemporaryDirectory(prefix="outrider-shapes-") as cache, _cache(cache):
        reading = reading_s(file)
        if starts:
            arguments = ["generate", str(file), PROMPT, "--threads", str(threads)]
            seconds = [round(first_letter(arguments), 3) for _ in range(2)]
            found["outrider"]["commands_s"] = seconds
    _write_out()
    with tempfile.TemporaryDirectory(prefix="outrider-shapes-") as cache, _cache(cache):
        workers: dict[str, Worker] = {}
        PEERS.mkdir(exist_ok=True)
        try:
            for engine in engines:
                loads = []
                with (PEERS / f"shapes-{engine.peer}.worker.log").open("w") as log:
                    try:
                        for _ in range(2):  # the second finds what the first has kept
                            if engine.peer in workers:
                                workers.pop(engine.peer).close()
                            worker = Worker(engine, _load(file, threads), log)  # type: ignore[arg-type]
                            workers[engine.peer] = worker
                            loads.append(round(worker.load_s, 3))
                    except WorkerError as error:
                        found[engine.peer]["failed"] = str(error)
                        out.print(f"{engine.peer} with {file.name}: FAILED: {error}", style="red")
                        continue
                found[engine.peer] |= {"loads_s": loads, "about": workers[engine.peer].about}
            for turn in range(rounds):
                for peer, worker in [*workers.items()][:: 1 if turn % 2 == 0 else -1]:
                    found[peer]["runs"].append(one_round(worker, repeats))
            for peer, worker in workers.items():
                found[peer]["peak_bytes"] = worker.peak_bytes()
        finally:
            for worker in workers.values():
                worker.close()
    size = file.stat().st_size
    return {"file_bytes": size, "reading_s": round(reading, 6), "engines": found}


def _write_out() -> None:
    """Wait until files are on the disk: a start keeps as much as that takes without a wait."""
    if hasattr(os, "sync"):
        os.sync()


def _load(file: Path, threads: int) -> dict[str, Any]:
    return {
        "target": str(file),
        "draft": None,
        "threads": threads,
        "max_model_len": MAX_MODEL_LEN,
        "cache": str(PEERS / "models"),
        "runtime": "auto",
        "dtype": "auto",
    }


def one_round(worker: Worker, repeats: int) -> dict[str, Any]:
    """Plain decoding, a prompt, and passes, of a woken worker."""
    tokens = [number * 7919 % NUM_TOKENS for number in range(PROMPT_TOKENS)]
    worker.run(tokens[:16], 4)
    plain = worker.run(tokens[: CONTEXTS[0]], ANSWER)
    prompt = worker.run(tokens, 1)
    stats = plain.get("stats", {})
    seconds = stats["decode_s"] if stats else plain["seconds"] - plain["ttft_s"]
    count = len(plain["token_ids"]) - stats.get("first_tokens", 1)
    passes = worker.passes(CONTEXTS, WIDTHS, repeats)
    return {
        "token_s": round(seconds / max(count, 1), 6),
        "prompt_s": round(prompt["ttft_s"], 4),
        "passes_s": [[round(one, 6) for one in row] for row in passes],
        "other_cpu": round(max(plain["other_cpu"], prompt["other_cpu"]), 3),
    }


def reading_s(file: Path) -> float:
    """Seconds to read a file that is in the page cache into memory of its own."""
    best = float("inf")
    for _ in range(2):  # the first brings it into the page cache
        room = bytearray(file.stat().st_size)
        began = time.perf_counter()
        with file.open("rb", buffering=0) as stream:
            view = memoryview(room)
            while len(view) and (count := stream.readinto(view)):
                view = view[count:]
        best = min(best, time.perf_counter() - began)
    return best


@contextmanager
def _cache(folder: str) -> Iterator[None]:
    """Have the processes that are started meanwhile keep what they keep in this folder."""
    before = os.environ.get("OUTRIDER_CACHE")
    os.environ["OUTRIDER_CACHE"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["OUTRIDER_CACHE"]
        else:
            os.environ["OUTRIDER_CACHE"] = before


# ---------------------------------------------------------------- the table


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """One engine's numbers for a file."""
    runs = measured["runs"]
    widest = range(len(WIDTHS))
    fastest = [
        [min(run["passes_s"][context][width] for run in runs) for width in widest]
        for context in range(len(CONTEXTS))
    ]
    return {
        "token_ms": statistics.median(run["token_s"] for run in runs) * 1e3,
        "prompt_s": statistics.median(run["prompt_s"] for run in runs),
        "pass_ms": [row[0] * 1e3 for row in fastest],
        "ratios": [[one / row[0] for one in row[1:]] for row in fastest],
        "loads_s": measured["loads_s"],
        "peak_gb": measured["peak_bytes"] / 1e9,
    }


def markdown(content: dict[str, Any]) -> str:
    """The table of a result, and where it was measured."""
    wide = ", ".join(map(str, WIDTHS[1:]))
    columns = [
        "file", "engine", "plain, ms a token", f"prompt of {PROMPT_TOKENS}, s",
        *(f"passes of {wide} after {context}, times one of 1 (ms)" for context in CONTEXTS),
        "first load, s (times reading)", "later load", "command, first and later, s", "peak, GB",
    ]  # fmt: skip
    lines = [
        "| " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * (len(columns) - 2),
    ]
    for cell in content["cells"]:
        for peer, measured in cell["engines"].items():
            name = f"{cell['shape']} {cell['type']}, {cell['file_bytes'] / 1e9:.2f} GB"
            if not measured["runs"]:
                why = measured.get("failed", "?")
                lines.append(f"| {name} | {peer} | failed: {why} |" + " |" * (len(columns) - 3))
                continue
            found = summary(measured)
            first, later = found["loads_s"]
            commands = ", ".join(f"{one:.1f}" for one in measured.get("commands_s", []))
            passes = [
                f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} ({one:.1f})"
                for ratios, one in zip(found["ratios"], found["pass_ms"], strict=True)
            ]
            values = [
                name, peer, f"{found['token_ms']:.1f}", f"{found['prompt_s']:.2f}", *passes,
                f"{first:.2f} ({first / cell['reading_s']:.1f})", f"{later:.2f}", commands,
                f"{found['peak_gb']:.2f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(values) + " |")
    hardware = content["hardware"]
    lines += [
        "",
        f"{hardware['cpu']}, {hardware['threads_used']} threads, "
        f"{hardware['memory_read_gb_per_s']:.0f} GB/s, {content['date']}: `{content['command']}`.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
