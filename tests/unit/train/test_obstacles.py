"""What vLLM is known not to read of a head, and folders of its layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import export_block, load_block
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads, export_medusa
from outrider.train.export import Target, export, obstacles
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, tiny_llama

DFLASH = BlockConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=40,
    block_size=6,
    target_hidden_size=64,
    target_layers=(1, 2),
    num_target_layers=3,
    mask_token_id=1,
    sample_from_anchor=False,
    qk_norm=True,
)


def target() -> Any:
    return tiny_llama(40, num_hidden_layers=3).requires_grad_(False)


def block(**changes: Any) -> BlockHead:
    return BlockHead.new(replace(DFLASH, **changes), target())


def test_obstacles_of_blocks() -> None:
    """Each of what vLLM's DFlash would read otherwise is named, and nothing else."""
    assert obstacles(block()) == []
    assert obstacles(block(markov_rank=4, sample_from_anchor=True)) == []
    cases = {
        "sample_from_anchor=false": {"sample_from_anchor": True},
        "'vanilla'": {"markov_rank": 4, "markov_gated": True},
        "scaled logits": {"logit_scale": 2.0},
        "scaled embeddings": {"embedding_scale": 2.0},
        "capped logits": {"softcap": 30.0},
        "norm queries": {"qk_norm": False},
    }
    for word, changes in cases.items():
        (line,) = obstacles(block(**changes))
        assert word in line


def test_obstacles_of_eagle_heads() -> None:
    """One place for both biases of attention in vLLM's EAGLE-3; its EAGLE knows `qkv_bias`."""
    config = target().config
    (line,) = obstacles(random_eagle("eagle3", config, attention_bias=True))
    assert "both or neither" in line
    assert obstacles(random_eagle("eagle3", config, attention_bias=True, output_bias=True)) == []
    assert obstacles(random_eagle("eagle", config, attention_bias=True)) == []


def test_what_vllm_needs_stands_in_the_folders(tmp_path: Path) -> None:
    """Refused by vLLM 0.32 before: an unknown model_type in speculators' layout, Medusa's sizes in
    the original one."""
    module = target()
    destination = Target("/models/target", module, byte_tokenizer(), "demo")
    source = tmp_path / "source"
    save_eagle(random_eagle("eagle3", module.config), source)
    export(source, "speculators", tmp_path / "eagle3", destination)
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert "model_type" not in config
    assert config["speculators_config"]["verifier"]["name_or_path"] == "/models/target"
    heads = MedusaHeads.new(MedusaConfig(64, 40, 2, bias=False), module)
    export_medusa(heads, tmp_path / "medusa", "original")
    config = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["medusa_fc_bias"]) == (
        64,
        40,
        False,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_causality_in_the_words_of_vllm(causal: bool, tmp_path: Path) -> None:
    """vLLM takes it from `sliding_window_non_causal` in speculators' layout; ours must still read
    it back."""
    export_block(block(causal=causal), tmp_path, "speculators")
    assert (
        json.loads((tmp_path / "config.json").read_text())["sliding_window_non_causal"]
        is not causal
    )
    assert load_block(tmp_path, 64, 40, 3).config.causal is causal
