"""Widen a Llama-type checkpoint without changing what it computes: real acceptance at a realistic
cost.

A small trained pair has a believable acceptance rate but a target too cheap to be worth speculating
for. Wider MLPs whose new output columns are zero, and extra layers whose two output projections are
zero, add weights that every pass must read and multiply, and change nothing: each adds exact zeros
to the residual stream. The new input rows are random, at the scale of the old ones, so that no
kernel meets special values. The folder says what was done to it, in `inflation.json` and
`README.md`.

    python benchmarks/inflate.py ../shared/models/pair-14M/target .peers/models/pair-80M --mlp 8192
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from workload import GSM8K_TEST, encode, model_name, prompt_texts

GREEDY_TOKENS = 96
FP32_TOLERANCE = 1e-3  # of logits around 10: only the order of summation differs


def inflate(
    source: Path, destination: Path, mlp: int | None, extra_layers: int, seed: int = 0
) -> dict[str, Any]:
    """Write the wider checkpoint in bf16 and return what was done. ValueError: it cannot be
    widened."""
    config = AutoConfig.from_pretrained(source)
    width = mlp or config.intermediate_size
    if width < config.intermediate_size or extra_layers < 0:
        raise ValueError(
            f"mlp must be at least {config.intermediate_size} and extra_layers at least 0"
        )
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    state = small.state_dict()
    if "model.layers.0.mlp.down_proj.weight" not in state:
        raise ValueError(
            f"{source} is no Llama-type checkpoint: no model.layers.0.mlp.down_proj.weight"
        )
    generator = torch.Generator().manual_seed(seed)
    state = {name: _widen(name, weight, width, generator) for name, weight in state.items()}
    state |= _extra_layers(state, config.num_hidden_layers, extra_layers)
    wide_config = copy.deepcopy(config)
    wide_config.intermediate_size = width
    wide_config.num_hidden_layers = config.num_hidden_layers + extra_layers
    if getattr(wide_config, "layer_types", None):
        wide_config.layer_types = [*config.layer_types, *config.layer_types[-1:] * extra_layers]
    wide = AutoModelForCausalLM.from_config(wide_config, dtype=torch.bfloat16)
    wide.load_state_dict(state)
    wide.save_pretrained(destination)
    for file in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ):
        if (source / file).exists():
            shutil.copyfile(source / file, destination / file)
    return {
        "source": model_name(source),
        "parameters": sum(p.numel() for p in wide.parameters()),
        "source_parameters": sum(p.numel() for p in small.parameters()),
        "intermediate_size": [config.intermediate_size, width],
        "num_hidden_layers": [config.num_hidden_layers, wide_config.num_hidden_layers],
        "seed": seed,
    }


def _widen(name: str, weight: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """A weight at the new width: gate and up get random rows, down zero columns, others nothing."""
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):  # (width, hidden)
        shape = (width - weight.shape[0], weight.shape[1])
        rows = torch.randn(shape, generator=generator) * weight.float().std()
        return torch.cat([weight, rows.to(weight.dtype)], dim=0)
    if name.endswith("mlp.down_proj.weight"):  # (hidden, width)
        return torch.cat(
            [weight, weight.new_zeros(weight.shape[0], width - weight.shape[1])], dim=1
        )
    return weight


def _extra_layers(state: dict[str, Tensor], num_layers: int, extra: int) -> dict[str, Tensor]:
    """Copies of the last layer, appended, whose attention and MLP outputs are zero."""
    last = f"model.layers.{num_layers - 1}."
    added = {}
    for number in range(num_layers, num_layers + extra):
        for name, weight in state.items():
            if name.startswith(last):
                silent = name.endswith(
                    ("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")
                )
                added[f"model.layers.{number}.{name.removeprefix(last)}"] = (
                    torch.zeros_like(weight) if silent else weight.clone()
                )
    return added


@torch.inference_mode()
def verify(source: Path, destination: Path, num_prompts: int = 4) -> dict[str, Any]:
    """Compare both on real prompts: logits and greedy text. fp32 must agree; bf16 near-ties may
    turn."""
    report: dict[str, Any] = {"prompts": num_prompts, "greedy_tokens": GREEDY_TOKENS}
    prompts = encode(prompt_texts(num_prompts), source)
    for dtype in (torch.float32, torch.bfloat16):
        models = [
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            for path in (source, destination)
        ]
        difference = 0.0
        equal = 0
        for ids in prompts:
            inputs = torch.tensor([ids])
            small, wide = (model(inputs).logits.float() for model in models)
            difference = max(difference, (small - wide).abs().max().item())
            options = {
                "do_sample": False,
                "min_new_tokens": GREEDY_TOKENS,
                "max_new_tokens": GREEDY_TOKENS,
            }
            texts = [
                model.generate(inputs, **options, pad_token_id=0)[0].tolist() for model in models
            ]
            equal += texts[0] == texts[1]
        name = str(dtype).removeprefix("torch.")
        report[name] = {"largest_logit_difference": difference, "greedy_texts_equal": equal}
    exact = report["float32"]
    if (
        exact["largest_logit_difference"] > FP32_TOLERANCE
        or exact["greedy_texts_equal"] != num_prompts
    ):
        raise RuntimeError(f"the inflated checkpoint is not the same function: {report}")
    return report


README = """# Inflated checkpoint: a benchmark's stand-in, not a model

`{source}` ({source_parameters:,} parameters) widened to {parameters:,} by `benchmarks/inflate.py` without
changing its function: MLP width {intermediate_size[0]} -> {intermediate_size[1]} (new output columns zero),
layers {num_hidden_layers[0]} -> {num_hidden_layers[1]} (new output projections zero). It answers as the
original does and costs what a model of its size costs. What was checked is in `inflation.json`.
"""


def ensure(source: Path, destination: Path, mlp: int | None, extra_layers: int) -> dict[str, Any]:
    """The inflated folder's own record; makes and checks the folder first unless it is of this very
    source."""
    record_path = destination / "inflation.json"
    source_sha256 = sha256(source)
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    if record.get("source_sha256") != source_sha256:
        record = inflate(source, destination, mlp, extra_layers) | {"source_sha256": source_sha256}
        if GSM8K_TEST.exists():
            record["verified"] = verify(source, destination)
        (destination / "README.md").write_text(README.format(**record), encoding="utf-8")
        record_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def sha256(checkpoint: Path) -> str:
    """Of the weights of a checkpoint folder."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main(
    source: Annotated[
        Path, typer.Argument(help="A Llama-type checkpoint: Llama, Qwen2, Qwen3, Mistral.")
    ],
    destination: Annotated[
        Path, typer.Argument(help="The folder to write; an existing inflation is kept.")
    ],
    mlp: Annotated[int | None, typer.Option(help="New MLP width.")] = None,
    extra_layers: Annotated[int, typer.Option(help="Layers to append.")] = 0,
) -> None:
    """Widen a checkpoint without changing its function, and check that it did not change."""
    logging.set_verbosity_error()
    AutoTokenizer.from_pretrained(source)  # fails here, not after the work, when there is none
    print(json.dumps(ensure(source, destination, mlp, extra_layers), indent=1))


if __name__ == "__main__":
    typer.run(main)
