"""Experts of GGUF files: they keep their blocks, and multiply as the dequantised model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

from outrider.models.gguf.experts import SAME
from outrider.models.gguf.header import read_gguf
from outrider.models.gguf.linear import BlockExperts, block_layers
from outrider.models.gguf.packing import by_torch
from outrider.models.gguf.weights import gguf_bytes, gguf_module, gguf_notes
from outrider.models.loading.load import build_lm, load_config, load_module
from outrider.models.loading.memory import model_memory
from outrider.models.source import resolve
from outrider.runtime import library
from outrider.runtime.block_packing import by_library
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.gguf_files import VOCABULARY_SIZE, Kind, add_value, finish, rounded, write_model
from tests.unit.models.gguf.test_loading import DELTA_NET, DELTA_NET_KEYS
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
EXPERTS = 4
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.1,
    "num_experts_per_tok": EXPERTS,  # all: rounded activations would change what a router picks
}  # fmt: skip
MOE = {"num_experts": EXPERTS, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
    "truncate": False,
}
MODELS = {
    "llama": lambda size: MixtralConfig(  # published so
        **SIZES, hidden_size=size, intermediate_size=96, num_local_experts=EXPERTS, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen35moe": lambda size: Qwen3_5MoeTextConfig(
        **SIZES, hidden_size=size, moe_intermediate_size=size, shared_expert_intermediate_size=64, num_experts=EXPERTS,
        **{name: value for name, value in DELTA_NET.items() if name != "num_hidden_layers"},
    ),
    "qwen3vlmoe": lambda size: Qwen3MoeConfig(
        **SIZES, **MOE, hidden_size=size, intermediate_size=96, moe_intermediate_size=size, head_dim=32
    ),
    "qwen2moe": lambda size: Qwen2MoeConfig(
        **SIZES, hidden_size=size, intermediate_size=96, moe_intermediate_size=size, shared_expert_intermediate_size=64,
        num_experts=EXPERTS,
    ),
    "qwen3moe": lambda size: Qwen3MoeConfig(
        **SIZES, **MOE, hidden_size=size, intermediate_size=96, moe_intermediate_size=size, head_dim=32
    ),
    "gpt-oss": lambda size: GptOssConfig(
        **SIZES, hidden_size=size, intermediate_size=size, num_local_experts=EXPERTS, head_dim=32, sliding_window=16,
        rope_parameters=YARN,
    ),
}  # fmt: skip


def changes(architecture: str, config: Any) -> dict[str, Any]:
    found = {f"{architecture}.attention.key_length": getattr(config, "head_dim", None)}
    if architecture == "gpt-oss":
        return found | {
            "gpt-oss.attention.sliding_window": 16,
            "gpt-oss.rope.scaling.type": "yarn",
            "gpt-oss.rope.scaling.factor": 4.0,
            "gpt-oss.rope.scaling.original_context_length": 128,
        }
    if architecture == "llama":
        return {
            "llama.expert_count": EXPERTS,
            "llama.expert_used_count": EXPERTS,
            "llama.rope.dimension_count": None,
        }
    if architecture == "qwen35moe":
        found |= {
            key.replace("qwen35.", "qwen35moe."): value for key, value in DELTA_NET_KEYS.items()
        }
    return found | {
        f"{architecture}.expert_feed_forward_length": config.moe_intermediate_size,
        f"{architecture}.expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
    }


def checkpoint(
    path: Path, architecture: str, kinds: dict[str, Kind], size: int = 64
) -> tuple[Path, Any]:
    """A file whose experts are stored in these formats (by "gate", "up" and "down"), and the same
    model with their values."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            MODELS[architecture](size), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # norms, biases, sinks
                if parameter.ndim == 1 or (parameter.ndim == 2 and len(parameter) == EXPERTS):
                    parameter.add_(torch.randn(parameter.shape) * 0.1)

    def kind(name: str) -> Kind:
        return next((own for part, own in kinds.items() if f"ffn_{part}_exps" in name), Kind.F32)

    write_model(path, model, architecture, kind=kind, changes=changes(architecture, model.config))
    with torch.no_grad():
        for part in model.modules():
            if hasattr(part, "has_gate"):
                _round(part, kinds)
    return path, model


def _round(part: Any, kinds: dict[str, Kind]) -> None:
    turned = (
        (lambda weight: weight.transpose(1, 2)) if part.is_transposed else (lambda weight: weight)
    )
    rows = turned(part.gate_up_proj)
    halves = rows.chunk(2, dim=1) if part.is_concatenated else (rows[:, ::2], rows[:, 1::2])
    for half, name in zip(halves, ("gate", "up"), strict=True):
        half.copy_(rounded(half.contiguous(), kinds[name]))
    down = turned(part.down_proj)
    down.copy_(rounded(down.contiguous(), kinds["down"]))


def loaded(path: Path) -> Any:
    return load_module(resolve(str(path)), load_config(resolve(str(path))), torch.float32, CPU)


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        return module(input_ids=torch.arange(3, 43)[None] % VOCABULARY_SIZE, use_cache=False).logits


@pytest.mark.parametrize(
    ("architecture", "kind", "size"),
    [
        ("gpt-oss", Kind.MXFP4, 64),
        ("gpt-oss", Kind.Q8_0, 64),
        ("qwen3moe", Kind.Q4_0, 64),
        ("qwen3moe", Kind.MXFP4, 64),
        ("qwen2moe", Kind.Q5_1, 96),
        ("llama", Kind.Q4_0, 64),
        ("qwen35moe", Kind.Q4_0, 64),
        ("qwen3vlmoe", Kind.Q8_0, 64),
    ],
)
def test_experts_keep_their_blocks(
    architecture: str, kind: Kind, size: int, tmp_path: Path, library_path: Path
) -> None:
    """Logits of the dequantised model; on the native runtime up to activations in 8 bits."""
    path, reference = checkpoint(
        tmp_path / "m.gguf", architecture, dict.fromkeys(("gate", "up", "down"), kind), size
    )
    module = loaded(path)
    experts = [layer for layer in block_layers(module) if isinstance(layer, BlockExperts)]
    assert len(experts) == 4
    expected = logits(reference)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    assert not any("widened" in note for note in gguf_notes(read_gguf(path), module, "it"))
    memory = model_memory(resolve(str(path)), load_config(resolve(str(path))), torch.float32)
    assert memory.quantised_bytes == pytest.approx(
        sum(layer.panels.nbytes for layer in experts), rel=0.35
    )
    if architecture == "qwen35moe":
        return  # has states: tests/e2e/test_gguf.py
    lm = build_lm(module, "it", torch.float32, CPU)
    plain = every_pass(lm)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), plain)
    assert max(worst.values()) < 0.05, worst


def test_experts_that_lie_one_by_one_are_those_that_lie_together(
    tmp_path: Path, library_path: Path
) -> None:
    """As llama.cpp wrote Mixtral in 2023: the same panels, by either packer, and the same room."""
    together, reference = checkpoint(
        tmp_path / "m.gguf", "llama", dict.fromkeys(("gate", "up", "down"), Kind.Q4_0)
    )
    file = read_gguf(together)
    writer = GGUFWriter(tmp_path / "old.gguf", "llama")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for tensor in file.tensors:
        named = {tensor.name: tensor.read()}
        if "_exps" in tensor.name:
            named = {
                tensor.name.replace("_exps", f".{number}"): own
                for number, own in enumerate(tensor.read())
            }
        for name, stored in named.items():
            writer.add_tensor(name, np.array(stored), raw_shape=stored.shape, raw_dtype=tensor.kind)
    old = finish(writer, tmp_path / "old.gguf")
    assert any(
        name.name == "blk.0.ffn_up.3.weight"
        for tensor in read_gguf(old).tensors
        for name in tensor.parts
    )
    first = loaded(together)
    second = loaded(old)
    panels = [[layer.panels for layer in block_layers(module)] for module in (first, second)]
    assert len(panels[0]) == 4
    assert all(torch.equal(one, other) for one, other in zip(*panels, strict=True))
    assert torch.allclose(logits(second), logits(reference), atol=1e-4)
    memory = [
        model_memory(resolve(str(path)), load_config(resolve(str(path))), torch.float32)
        for path in (together, old)
    ]
    assert memory[0].weights_bytes == memory[1].weights_bytes
    stored = tuple(tensor for tensor in read_gguf(old).tensors if tensor.parts)[:1]
    assert torch.equal(
        by_library(library.load(library_path), (stored, SAME)), by_torch((stored, SAME))
    )


def test_gate_and_up_may_be_one_tensor(tmp_path: Path) -> None:
    """As newer files of Qwen3.5 have them."""
    for architecture in ("gpt-oss", "qwen3moe"):
        kinds = dict.fromkeys(("gate", "up", "down"), Kind.Q8_0)
        apart, _ = checkpoint(tmp_path / f"{architecture}.gguf", architecture, kinds)
        file = read_gguf(apart)
        writer = GGUFWriter(tmp_path / "joined.gguf", architecture)
        for key, value in file.metadata.items():
            if key != "general.architecture":
                add_value(writer, key, value)
        stored = {tensor.name: tensor for tensor in file.tensors}
        for name, tensor in stored.items():
            rows = np.array(tensor.read())
            if "ffn_up_exps" in name:
                continue
            if "ffn_gate_exps" in name:
                rows = np.concatenate(
                    [rows, stored[name.replace("gate", "up")].read()],
                    axis=-1 if rows.ndim == 2 else 1,
                )
                name = name.replace("gate", "gate_up")
            writer.add_tensor(name, rows, raw_shape=rows.shape, raw_dtype=tensor.kind)
        first, second = (loaded(path) for path in (apart, finish(writer, tmp_path / "joined.gguf")))
        assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize(
    "kinds",
    [
        {"gate": Kind.Q4_0, "up": Kind.Q8_0, "down": Kind.Q8_0},
        dict.fromkeys(("gate", "up", "down"), Kind.F16),
    ],
)
def test_experts_that_cannot_stay_are_widened(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """Gate and up lie in one matrix, which has one format; a note says what is widened."""
    for architecture in ("gpt-oss", "qwen3moe"):
        path, reference = checkpoint(tmp_path / f"{architecture}.gguf", architecture, kinds)
        module = loaded(path)
        expected = logits(reference)
        assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
        notes = gguf_notes(read_gguf(path), module, "it")
        assert any("widened (2 in Q4_0, 2 in Q8_0;" in note for note in notes) == (
            kinds["gate"] is Kind.Q4_0
        ), notes


def test_on_a_gpu_experts_are_widened(tmp_path: Path) -> None:
    """There no kernel multiplies blocks, and widening one expert at a time in each pass would be
    slow."""
    path, reference = checkpoint(
        tmp_path / "m.gguf", "gpt-oss", dict.fromkeys(("gate", "up", "down"), Kind.MXFP4)
    )
    file = read_gguf(path)
    config = load_config(resolve(str(path)))
    module = gguf_module(file, config, torch.float32, experts_stay=False)
    expected = logits(reference)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    assert any("widened (6 in MXFP4;" in note for note in gguf_notes(file, module, "it"))
    held = sum(parameter.nbytes for parameter in module.parameters())
    assert gguf_bytes(file, config, torch.float32, experts_stay=False) == (held, 0)
