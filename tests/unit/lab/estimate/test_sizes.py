"""Sizes from config.json, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from outrider.demo import demo_paths
from outrider.errors import CheckpointError
from outrider.lab.estimate.sizes import size_of_folder
from outrider.models.loading.memory import folder_weights_bytes
from tests.gguf_files import VOCABULARY_SIZE, Kind, write_model
from tests.helpers import tiny_llama

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    """Of a table of its own single rows are read, of a tied one all, as output layer."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    size = size_of_folder(tmp_path, "int4", "mine")
    assert size.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert size.num_params - size.params_per_pass == (0 if tied else 100 * 64)
    assert size.kv_bytes_per_token == 3 * 2 * 16 * 2 * 2  # layers, KV heads, head size, keys and values, 16 bits
    assert (size.name, size.dtype, size.is_mixture) == ("mine", "int4", False)


def test_weights_files_say_the_same(tmp_path: Path) -> None:
    tiny_llama(50).save_pretrained(tmp_path)
    size = size_of_folder(tmp_path, "float32")
    assert size.weights_bytes == folder_weights_bytes(tmp_path, torch.float32)
    assert size.name == tmp_path.name
    assert size.kv_bytes_per_token == 2 * 2 * 16 * 2 * 4


def test_the_demo_pair() -> None:
    target, draft = (size_of_folder(folder, "bfloat16") for folder in demo_paths())
    assert (target.num_params, draft.num_params) == (14_162_304, 1_115_008)  # the model card's 14M and 1.1M


def test_mixtures_are_seen(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
    ).save_pretrained(tmp_path)  # fmt: skip
    assert size_of_folder(tmp_path, "bfloat16").is_mixture


def test_a_gguf_file_says_how_wide_its_weights_are(tmp_path: Path) -> None:
    """8.5 bits in Q8_0; norms are plain. Catches an estimate by the dtype of the arithmetic, twice as much."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY_SIZE}, tie_word_embeddings=False))
    size = size_of_folder(write_model(tmp_path / "m.gguf", model, "llama", kind=Kind.Q8_0), "bfloat16")
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    padding = (-VOCABULARY_SIZE % 32) * 64 * 2  # panels have 32 outputs
    assert size.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert size.weights_bytes == pytest.approx((size.num_params - norms + padding) * 8.5 / 8 + norms * 2)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model folder"):
        size_of_folder(tmp_path / "none", "bfloat16")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        size_of_folder(tmp_path, "bfloat16")
