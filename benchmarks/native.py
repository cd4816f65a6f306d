"""The native CPU kernels beside torch's: the linears of an 80M target and one layer's attention, bf16, few rows.

Linears: all weight matrices of the widened target (8 layers of 384, MLP 8192, 4096 tokens), each used once, so that every
weight comes from memory as in a decoding pass. `nn.Linear`, oneDNN's packed linear and our panels (by vectors, and by tiles
where the processor has them) take turns, and the same weights in 4 and 8 bits, by torch's kernels and by ours. Attention: 6
heads, 2 KV heads of 64, behind 150 keys.

    python benchmarks/native.py
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from workload import console, spread, write_result

from outrider import __version__
from outrider.huge_pages import advise_huge_pages
from outrider.models import native, ops
from outrider.models.attention import _attend
from outrider.models.layout import attention_mask
from outrider.models.pack import PackedLinear, has_fast_bf16
from outrider.models.panel import PanelLinear
from outrider.models.quantised_linear import Int4Linear, Int8Linear, QuantisedPanels

HIDDEN, MLP, KV, VOCABULARY, LAYERS = 384, 8192, 128, 4096, 8
SHAPES = [(HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV), (HIDDEN, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)] * LAYERS
HEADS, SIZE, KEYS = 6, 64, 150
GROUP = 32  # inputs that share a scale in 4 bits
ROWS = (1, 2, 4, 6, 8, 16, 64)


def main(
    repeats: Annotated[int, typer.Option(min=5)] = 40,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "native",
) -> None:
    """Measure linears and attention, every implementation in turn."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        library = Path(scratch) / "native.so"
        native.build(library)
        ops.enable(library)
        linear, attention = linears(native.load(library), repeats), attentions(repeats)
    num_bytes = 2 * sum(inputs * outputs for inputs, outputs in [*SHAPES, (HIDDEN, VOCABULARY)])
    content = {
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "weight_bytes": num_bytes, "linears_s": linear, "attention_s": attention,
    }  # fmt: skip
    path = write_result(name, content, threads)
    out = console()
    for title, results in (("all linears, ms (median)", linear), ("one layer's attention, us (median)", attention)):
        table = Table("rows", *map(str, ROWS), title=title)
        scale = 1e3 if results is linear else 1e6
        for kind, row in results.items():
            table.add_row(kind, *(f"{row[rows]['median'] * scale:.1f}" for rows in ROWS))
        out.print(table)
    out.print(f"{num_bytes / 1e6:.0f} MB of weights; written to benchmarks/results/{path.name}")


def linears(library: ctypes.CDLL, repeats: int) -> dict[str, dict[int, dict[str, float]]]:
    plain = [nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for shape in [*SHAPES, (HIDDEN, VOCABULARY)]]
    panels = [*map(PanelLinear, plain)]
    packed_dtype = torch.bfloat16 if has_fast_bf16() else torch.float32  # on AVX2 oneDNN has only this: twice the bytes
    packed = [PackedLinear(copy.deepcopy(layer).to(packed_dtype)) for layer in plain]
    fewer_bits = {
        "8 bits, torch": [Int8Linear(layer) for layer in plain],
        "8 bits, ours": [QuantisedPanels(layer, 8, GROUP) for layer in plain],
        "4 bits, torch": [Int4Linear(layer, GROUP) for layer in plain],
        "4 bits, ours": [QuantisedPanels(layer, 4, GROUP) for layer in plain],
    }
    advise_huge_pages()
    inputs = {size: torch.randn(max(ROWS), size).bfloat16() for size in (HIDDEN, MLP)}

    def use(layers: list[Any], dtype: torch.dtype = torch.bfloat16) -> Callable[[int], None]:
        read = {size: x.to(dtype) for size, x in inputs.items()}

        def run(rows: int) -> None:
            for layer in layers:
                layer(read[layer.in_features][:rows])

        return run

    def use_kernel(name: str) -> Callable[[int], None]:
        kernel, out = getattr(library, name), torch.empty(max(ROWS) * MLP, dtype=torch.bfloat16)

        def run(rows: int) -> None:
            for layer in panels:
                x, weights = inputs[layer.in_features].data_ptr(), layer.panels.data_ptr()
                kernel(x, rows, layer.in_features, weights, None, out.data_ptr(), layer.out_features)

        return run

    kinds = {"nn.Linear": use(plain), f"oneDNN packed{'' if has_fast_bf16() else ', fp32'}": use(packed, packed_dtype)}
    for name in native.PANEL_KERNELS:
        if "tiles" not in name or library.outrider_has_tiles():
            kinds[f"panels by {name.rpartition('_')[2]}"] = use_kernel(name)
    kinds |= {name: use(layers) for name, layers in fewer_bits.items()}
    return _measure(kinds, repeats)


def attentions(repeats: int) -> dict[str, dict[int, dict[str, float]]]:
    keys, values = (torch.randn(1, 512, 2, SIZE).bfloat16() for _ in range(2))
    query = torch.randn(1, max(ROWS), HEADS, SIZE).bfloat16().transpose(1, 2)
    masks = {rows: attention_mask(torch.tensor([KEYS]), rows, 512, torch.bfloat16) for rows in ROWS}

    def fused(rows: int) -> Tensor:
        padded = nn.functional.pad(query[:, :, :rows], (0, 0, 0, masks[rows].shape[2] - rows))
        return _attend(padded, keys.transpose(1, 2), values.transpose(1, 2), masks[rows], None)

    def ours(rows: int) -> Tensor:
        return torch.ops.outrider.cache_attention(query[:, :, :rows], keys, values, masks[rows], SIZE**-0.5)

    return _measure({"scaled_dot_product_attention": fused, "cache_attention": ours}, repeats * 10)


def _measure(kinds: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, dict[int, dict[str, float]]]:
    seconds: dict[str, dict[int, list[float]]] = {kind: {rows: [] for rows in ROWS} for kind in kinds}
    for _ in range(repeats):
        for rows in ROWS:
            for kind, run in kinds.items():
                start = time.perf_counter()
                run(rows)
                seconds[kind][rows].append(time.perf_counter() - start)
    return {kind: {rows: spread(values[3:]) for rows, values in row.items()} for kind, row in seconds.items()}


if __name__ == "__main__":
    typer.run(main)
