"""What rejected drafts and trees cost a hybrid model, on the native runtime: passes behind a
rejection, and over branches.

The model is random and shaped like Qwen3.5 (three gated delta nets to one attention layer), because
published hybrids cannot be fetched here and time does not depend on the weights' values. A pass
holds the pending token and five draft tokens. Runs with all, none, or some of them kept take turns,
so that each meets the same minutes; a ratio compares neighbours. A tree has as many tokens as its
chain; what moves when a path of it is kept counts, too.

    python benchmarks/rollback.py
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
from workload import console, write_result

from outrider import __version__
from outrider.cache import cache_folder
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.models.probes.probe import probe_tokens
from outrider.models.stateful.lm import StateLM
from outrider.runtime.own_states import native_states

DRAFTED = 5
FLOOR = 1.1  # a pass behind a rejection / one behind none
TREES = (6, 16)  # tokens of trees, whose nodes have two children
SHAPE: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def main(
    context: Annotated[int, typer.Option(min=1, help="Tokens in front of the passes.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each kind.")] = 60,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Measure passes by the number of draft tokens that the one before kept."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # of kernels for GPUs that are not installed
    out = console()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        lm, count = model(dtype)
        name = str(dtype).removeprefix("torch.")
        found[name] = measured(lm, context, repeats)
        table = Table(
            f"{name}, {count / 1e6:.0f}M weights", "ms", "times a pass behind no rejection"
        )
        for kept, seconds in found[name]["pass_s"].items():
            table.add_row(
                f"{kept} of {DRAFTED} kept",
                f"{seconds * 1e3:.1f}",
                f"{found[name]['ratio'][kept]:.3f}",
            )
        table.add_row("a single token", f"{found[name]['single_s'] * 1e3:.1f}", "")
        for size, tree in found[name]["trees"].items():
            table.add_row(
                f"tree of {size} tokens",
                f"{tree['tree_s'] * 1e3:.1f}",
                f"{tree['ratio']:.3f} times its chain",
            )
        out.print(table)
    content = {
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "shape": SHAPE,
        "context": context,
        "floor": FLOOR,
        "found": found,
    }
    path = write_result("rollback", content, threads)
    out.print(f"written to benchmarks/results/{path.name}")


def model(dtype: torch.dtype) -> tuple[LM, int]:
    """A random model on the native runtime, and its number of weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SHAPE)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    count = sum(parameter.numel() for parameter in module.parameters())
    eager = build_lm(module, "random", dtype, torch.device("cpu"))
    assert isinstance(eager, StateLM)
    return native_states(eager, module, cache_folder()), count


@torch.inference_mode()
def measured(lm: LM, context: int, repeats: int) -> dict[str, Any]:
    """Median seconds of a pass by what the one before kept, and median ratios of neighbours."""
    kinds = (DRAFTED, 0, 3)
    text = probe_tokens(lm.shape.vocab_size, context + 1, lm.device)[0].tolist()
    block = probe_tokens(lm.shape.vocab_size, DRAFTED + 1, lm.device)
    lm.kv.add_row()
    lm.catch_up([text])
    seconds: dict[int, list[float]] = {kept: [] for kept in kinds}
    for _ in range(repeats + 1):
        for kept in kinds:
            lm.forward(block)
            lm.kv.keep(0, range(kept + 1))
            start = time.perf_counter()
            lm.forward(block)
            seconds[kept].append(time.perf_counter() - start)
            lm.kv.keep(0, range(DRAFTED + 1))
    single = []
    for _ in range(repeats):
        start = time.perf_counter()
        lm.forward(block[:, :1])
        single.append(time.perf_counter() - start)
        lm.kv.keep(0, [0])
    ratios = {
        kept: median(mine / none for mine, none in zip(row[1:], seconds[DRAFTED][1:], strict=True))
        for kept, row in seconds.items()
    }
    return {
        "pass_s": {kept: median(row[1:]) for kept, row in seconds.items()},
        "ratio": ratios,
        "single_s": median(single),
        "trees": {size: _tree(lm, size, repeats) for size in TREES},
    }


def _tree(lm: LM, size: int, repeats: int) -> dict[str, float]:
    """Median seconds of passes over a tree and over a chain of as many tokens, a path of the tree
    being kept; median ratio."""
    block = probe_tokens(lm.shape.vocab_size, size, lm.device)
    # -1: the pending token
    parents = torch.tensor([[(node + 1) // 2 - 1 for node in range(size - 1)]])
    path = [size - 1]
    while path[0]:
        path.insert(0, (path[0] - 1) // 2)
    seconds: dict[str, list[float]] = {"tree": [], "chain": []}
    for _ in range(repeats + 1):
        for kind, shape, kept in (("tree", parents, path), ("chain", None, range(len(path)))):
            start = time.perf_counter()
            lm.forward(block, shape)
            lm.kv.keep(0, kept)
            seconds[kind].append(time.perf_counter() - start)
    ratio = median(
        tree / chain for tree, chain in zip(seconds["tree"][1:], seconds["chain"][1:], strict=True)
    )
    return {
        "tree_s": median(seconds["tree"][1:]),
        "chain_s": median(seconds["chain"][1:]),
        "ratio": ratio,
    }


if __name__ == "__main__":
    typer.run(main)
