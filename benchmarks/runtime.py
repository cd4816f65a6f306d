"""The native runtime's passes on a real model: by width and context, reading prompts beside torch,
and on a busy machine.

Passes of 1, 8 and 16 tokens behind texts of several lengths; their differences say what attention
costs per cached token, beside its bytes at the bandwidth measured here. Prompts are read in chunks
as the engine does, native and eager in turns. Busy: passes of one token while so many processes of
this script do nothing but count. The fastest of several counts, since a machine is only ever slowed
down; on a busy machine the median does.

    python benchmarks/runtime.py FOLDER_OR_GGUF
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from workload import console, model_name, write_result

from outrider import __version__
from outrider.build import load_models
from outrider.machine import memory_bandwidth
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.models.probes.probe import probe_tokens
from outrider.options import Needs, Options

WIDTHS = (1, 8, 16)
BUSY = (0, 1, 2)


def main(
    model: Annotated[str, typer.Argument(help="A model folder or GGUF file.")],
    contexts: Annotated[
        str, typer.Option(help="Tokens in front of a pass.")
    ] = "128,2048,4096,8000",
    prompts: Annotated[
        str, typer.Option(help="Tokens of prompts that are read.")
    ] = "512,2048,4096,8000",
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    name: Annotated[
        str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")
    ] = "runtime",
) -> None:
    """Measure passes, prompts and a busy machine."""
    lms = {
        runtime: load_models(
            Options(model, drafter="none", runtime=runtime, threads=threads), Needs()
        ).target.lm
        for runtime in ("native", "eager")
    }
    native = lms["native"]
    out = console()
    with torch.inference_mode():
        passes = passes_s(native, _numbers(contexts), repeats)
        reading = reading_s(lms, _numbers(prompts))
        busy = busy_s(native, repeats)
    bandwidth = memory_bandwidth(threads)
    per_token = cached_token_s(passes)
    of_bytes = None if per_token is None else per_token * bandwidth / native.kv.bytes_per_token
    content = {
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "model": model_name_of(model),
        "passes_s": passes,
        "cached_token_s": per_token,
        "cached_token_of_its_bytes": of_bytes,
        "reading_s": reading,
        "busy_s": busy,
        "chunk": PREFILL_CHUNK,
    }
    path = write_result(name, content, threads)
    table = Table("context", *(f"{width} tokens, ms" for width in WIDTHS))
    for context, row in passes.items():
        table.add_row(str(context), *(f"{row[width] * 1e3:.1f}" for width in WIDTHS))
    out.print(table)
    if per_token is not None:
        out.print(
            f"a cached token: {per_token * 1e9:.0f} ns, {of_bytes:.2f} times its bytes at "
            f"{bandwidth / 1e9:.1f} GB/s"
        )
    for tokens, times in reading.items():
        out.print(
            f"reading {tokens}: "
            + ", ".join(f"{runtime} {seconds:.2f} s" for runtime, seconds in times.items())
        )
    out.print(
        "busy processes: "
        + ", ".join(
            f"{count}: {busy[0] / seconds:.2f} of its speed" for count, seconds in busy.items()
        )
    )
    out.print(f"written to benchmarks/results/{path.name}")


def cached_token_s(passes: dict[int, dict[int, float]]) -> float | None:
    """Seconds that one more cached token costs a pass; None where one context was measured."""
    shortest = min(passes)
    longest = max(passes)
    if longest == shortest:
        return None
    return (passes[longest][1] - passes[shortest][1]) / (longest - shortest)


def passes_s(
    lm: LM, contexts: list[int], repeats: int, widths: Sequence[int] = WIDTHS
) -> dict[int, dict[int, float]]:
    """Seconds by context and width; keys and values are random."""
    tokens = probe_tokens(lm.shape.vocab_size, max(widths), lm.device)
    _fill(lm, max(contexts))
    best = {context: dict.fromkeys(widths, float("inf")) for context in contexts}
    for _ in range(repeats):
        for context, row in best.items():
            lm.kv.lengths[0] = context
            for width in widths:
                row[width] = min(row[width], _seconds(partial(lm.forward, tokens[:, :width])))
    lm.kv.swap_remove(0)
    return best


def reading_s(lms: dict[str, LM], prompts: list[int]) -> dict[int, dict[str, float]]:
    """Seconds to read a prompt, runtimes in turns, the faster of two."""
    found: dict[int, dict[str, float]] = {}
    for count in prompts:
        row = found[count] = dict.fromkeys(lms, float("inf"))
        for _ in range(2):
            for runtime, lm in lms.items():
                tokens = probe_tokens(lm.shape.vocab_size, count + 1, lm.device)[0].tolist()
                lm.kv.add_row()
                row[runtime] = min(row[runtime], _seconds(partial(lm.catch_up, [tokens])))
                lm.kv.swap_remove(0)
    return found


def busy_s(lm: LM, repeats: int) -> dict[int, float]:
    """Median seconds of a pass of one token beside so many busy processes."""
    tokens = probe_tokens(lm.shape.vocab_size, 1, lm.device)
    found = {}
    _fill(lm, 512)
    for count in BUSY:
        others = [
            multiprocessing.get_context("spawn").Process(target=_count, daemon=True)
            for _ in range(count)
        ]
        for other in others:
            other.start()
        time.sleep(2.0 if others else 0.0)  # until they run
        found[count] = statistics.median(
            _seconds(lambda: lm.forward(tokens)) for _ in range(5 * repeats)
        )
        for other in others:
            other.terminate()
            other.join()
    lm.kv.swap_remove(0)
    return found


def _fill(lm: LM, context: int) -> None:
    lm.kv.add_row()
    lm.kv.reserve(1, context + max(WIDTHS))
    for store in (*lm.kv.keys, *lm.kv.values):
        store.normal_()
    lm.kv.lengths[0] = context


def _count() -> None:
    while True:
        pass


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def model_name_of(model: str) -> str:
    """The last two parts of a path, or a hub name."""

    return model_name(Path(model)) if Path(model).exists() else model


if __name__ == "__main__":
    typer.run(main)
