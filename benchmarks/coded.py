"""bf16 weights in 12 bits a number beside bf16 panels: passes by width, a prompt, memory and loading.

One model is loaded both ways, and passes are timed in turns; the fastest of several counts. Logits of
both must have the same bits. Every pass follows a text of random keys and values.

    python benchmarks/coded.py FOLDER_OR_GGUF
    python benchmarks/coded.py 1B      # a file of random weights in a shape of shape_files.py,
                                       # made once below .peers/models
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from real_model import MODEL, gguf_file
from rich.table import Table
from shape_files import SHAPES, file_of
from workload import PEERS, console, model_name, write_result

from outrider import __version__
from outrider.build import load_models
from outrider.machine import memory_bandwidth
from outrider.models.lm import LM
from outrider.models.probes.probe import probe_tokens
from outrider.options import Needs, Options
from outrider.runtime.coding import ALWAYS, NEVER, SWITCH

WIDTHS = (1, 8, 16)
PROMPT = 512
WAYS = {"bf16": NEVER, "coded": ALWAYS}


def main(
    model: Annotated[str, typer.Argument(help="A model folder, a GGUF file or a shape (1B).")],
    context: Annotated[int, typer.Option(min=1, help="Tokens in front of a pass.")] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "coded",
) -> None:
    """Measure passes both ways."""
    path = model_of(model)
    lms, loading = {}, {}
    options = Options(path, drafter="none", runtime="native", threads=threads)
    os.environ[SWITCH] = NEVER
    load_models(options, Needs())
    for way, choice in WAYS.items():  # later starts, both
        os.environ[SWITCH] = choice
        start = time.perf_counter()
        lms[way] = load_models(options, Needs()).target.lm
        loading[way] = time.perf_counter() - start
    with torch.inference_mode():
        passes, same = passes_s(lms, context, repeats)
        reading = reading_s(lms)
    sizes = {way: weight_bytes(lm) for way, lm in lms.items()}
    content = {
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "model": model if model in SHAPES else model_name(Path(model)),
        "context": context,
        "same_bits": same,
        "weight_bytes": sizes,
        "passes_s": passes,
        "reading_s": {PROMPT: reading},
        "loading_s": loading,
        "read_bytes_per_s": memory_bandwidth(threads),
    }
    file = write_result(name, content, threads)
    table = Table("", *WAYS, "times as fast")
    for width, row in passes.items():
        row_ms = [f"{row[way] * 1e3:.2f}" for way in WAYS]
        table.add_row(f"pass of {width}, ms", *row_ms, f"{row['bf16'] / row['coded']:.2f}")
    table.add_row(
        f"prompt of {PROMPT}, s",
        *(f"{reading[way]:.3f}" for way in WAYS),
        f"{reading['bf16'] / reading['coded']:.2f}",
    )
    table.add_row("weights, MB", *(f"{sizes[way] / 1e6:.0f}" for way in WAYS))
    table.add_row("loading, s", *(f"{loading[way]:.1f}" for way in WAYS))
    out = console()
    out.print(table)
    share = sizes["coded"] / sizes["bf16"]
    out.print(f"{'same' if same else 'OTHER'} bits; weights take {share:.3f} of bf16's memory")
    out.print(f"written to benchmarks/results/{file.name}")


def model_of(name: str) -> str:
    """The path of a model, or of the bf16 file of a shape. Its weights are normal, and so their
    exponents spread as those of trained ones."""
    if name not in SHAPES:
        return name
    words = gguf_file(MODEL)
    if words is None:
        raise typer.BadParameter(f"no GGUF file at {MODEL}, whose tokenizer a shape's file gets")
    return str(file_of(SHAPES[name], name, "BF16", words, PEERS / "models" / "shapes"))


def weight_bytes(lm: LM) -> int:
    """Bytes of what the executor reads besides values: every tensor once."""
    run: Any = lm.run
    kept = run.executor._binding._kept
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def passes_s(
    lms: dict[str, LM], context: int, repeats: int
) -> tuple[dict[int, dict[str, float]], bool]:
    """Seconds by width, and whether logits have the same bits."""
    first = next(iter(lms.values()))
    tokens = probe_tokens(first.shape.vocab_size, max(WIDTHS), first.device)
    for lm in lms.values():
        lm.kv.add_row()
        lm.kv.reserve(1, context + max(WIDTHS))
        torch.manual_seed(0)
        for store in (*lm.kv.keys, *lm.kv.values):
            store.normal_()
        lm.kv.lengths[0] = context
    best = {width: dict.fromkeys(lms, float("inf")) for width in WIDTHS}
    same = True
    for width, row in best.items():
        logits = [lm.forward(tokens[:, :width]).logits for lm in lms.values()]
        same = same and torch.equal(*(one.view(torch.int32) for one in logits))
        for _ in range(repeats):
            for way, lm in lms.items():
                row[way] = min(row[way], _seconds(partial(lm.forward, tokens[:, :width])))
    for lm in lms.values():
        lm.kv.swap_remove(0)
    return best, same


def reading_s(lms: dict[str, LM]) -> dict[str, float]:
    """Seconds to read a prompt, in turns, the fastest of three."""
    row = dict.fromkeys(lms, float("inf"))
    for _ in range(3):
        for way, lm in lms.items():
            tokens = probe_tokens(lm.shape.vocab_size, PROMPT + 1, lm.device)[0].tolist()
            lm.kv.add_row()
            row[way] = min(row[way], _seconds(partial(lm.catch_up, [tokens])))
            lm.kv.swap_remove(0)
    return row


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
