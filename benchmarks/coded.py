"""bf16 weights in 12 bits a number beside bf16 panels: passes by width, a prompt, memory and loading.

One model is loaded both ways, and passes are timed in turns; the fastest of several counts. Logits of
both must have the same bits. A text is behind every pass, its keys and values random.

    python benchmarks/coded.py FOLDER_OR_GGUF
    python benchmarks/coded.py 1B      # random weights in the shape of a Llama with 1.2 billion,
                                       # made once below .peers/models
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig
from workload import PEERS, console, model_name, write_result

from outrider import __version__
from outrider.build import load_models
from outrider.demo import demo_paths
from outrider.machine import memory_bandwidth
from outrider.models.lm import LM
from outrider.models.probes.probe import probe_tokens
from outrider.options import Needs, Options
from outrider.runtime.coding import ALWAYS, NEVER, SWITCH

WIDTHS = (1, 8, 16)
PROMPT = 512
WAYS = {"bf16": NEVER, "coded": ALWAYS}
ONE_BILLION = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)


def main(
    model: Annotated[str, typer.Argument(help="A model folder or GGUF file, or 1B.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens in front of a pass.")] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "coded",
) -> None:
    """Measure passes both ways."""
    folder = random_model(PEERS / "models" / "random-1B") if model == "1B" else model
    lms, loading = {}, {}
    options = Options(folder, drafter="none", runtime="native", threads=threads)
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
        "model": model if model == "1B" else model_name(Path(model)),
        "context": context,
        "same_bits": same,
        "weight_bytes": sizes,
        "passes_s": passes,
        "reading_s": {PROMPT: reading},
        "loading_s": loading,
        "read_bytes_per_s": memory_bandwidth(threads),
    }
    path = write_result(name, content, threads)
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
    out.print(f"written to benchmarks/results/{path.name}")


def random_model(folder: Path) -> str:
    """A model of normal weights, whose exponents are spread as those of trained ones, with the
    tokenizer of the demo's."""
    if (folder / "tokenizer.json").exists():
        return str(folder)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        AutoModelForCausalLM.from_config(ONE_BILLION).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    for file in demo_paths()[0].glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return str(folder)


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
