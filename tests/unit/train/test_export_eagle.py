"""EAGLE heads written in every published layout, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.source import rounded_to_fp8
from outrider.train.export import obstacles
from outrider.train.export_eagle import export_eagle
from tests.heads import random_eagle
from tests.helpers import tiny_llama

VOCAB = 40
ALL_FLAGS: dict[str, Any] = {
    "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "signals": (0, 2, 3),
    "trained_for": "someone/target", "rope": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def bound(head: EagleHead) -> EagleHead:
    module = target()
    return head.bind(module.get_input_embeddings().weight, module.get_output_embeddings())


def target() -> Any:
    return tiny_llama(VOCAB, num_hidden_layers=3).requires_grad_(False)


@torch.inference_mode()
def answers(head: EagleHead) -> torch.Tensor:
    """Logits of a few pairs: what two copies must agree on."""
    generator = torch.Generator().manual_seed(0)
    hidden = {signal: torch.randn(1, 6, 64, generator=generator) for signal in head.config.signals}
    features = head.features(hidden)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    states = head(torch.arange(6)[None], features, torch.arange(6)[None], attend)
    return head.in_full(head.logits(head.carry(states) if head.config.norm_output else states))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_in_8_bits_a_head_is_small_and_still_itself(kind: Any, tmp_path: Path) -> None:
    """Catches tables of the target that travel along, and scales that are lost. A row of zeros must
    not become NaN, and rounding goes to the nearest number of e4m3."""
    head = random_eagle(kind, target().config)
    with torch.no_grad():
        head.fc.weight[3] = 0
    export_eagle(bound(head), tmp_path, "fp8")
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    assert {
        stored[name].dtype for name in stored if stored[name].dim() == 2 and "scale" not in name
    } == {torch.float8_e4m3fn}
    again = load_eagle(tmp_path, kind, TargetSizes.of(target().config))
    for name, value in head.state_dict().items():
        there = again.state_dict()[name].float()
        assert torch.equal(there, rounded_to_fp8(value).to(again.dtype).float()), name
        assert ((there - value).abs() <= value.abs() / 15 + value.abs().amax() / 2**15).all(), name


@pytest.mark.parametrize("layout", ["raw", "speculators"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab": 17}, ALL_FLAGS, {"own_output": False}, {"num_layers": 2, "qk_norm": True}],
)
def test_eagle3_goes_there_and_back(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches a flag that is not written, a vocabulary map written as ids instead of offsets, a
    shared table that is lost."""
    head = bound(random_eagle("eagle3", target().config, **changes))
    export_eagle(head, tmp_path, layout)
    again = bound(load_eagle(tmp_path, "eagle3", TargetSizes.of(target().config)))
    assert again.config.own_embedding
    assert again.config.own_output
    flags = (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "rope",
        "draft_vocab_size",
        "trained_for",
    )
    for name in ("signals", *flags):
        assert getattr(again.config, name) == getattr(head.config, name), name
    torch.testing.assert_close(answers(again), answers(head), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norm_before_residual"] is head.config.norm_before_residual
    assert config["eagle_aux_hidden_state_layer_ids"] == list(head.config.signals)
    tensors = load_file(tmp_path / "model.safetensors")
    if head.draft_ids is not None:
        assert torch.equal(torch.arange(17) + tensors["d2t"], head.draft_ids)
        assert tensors["t2d"].nonzero()[:, 0].tolist() == head.draft_ids.tolist()
    if layout == "raw":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert ("midlayer.hidden_norm.weight" in tensors) == (head.config.num_layers == 1)
    else:
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
        assert config["transformer_layer_config"]["vocab_size"] == VOCAB
        assert "layers.0.hidden_norm.weight" in tensors


@pytest.mark.parametrize("tables", [True, False])
def test_eagle_goes_there_and_back(tables: bool, tmp_path: Path) -> None:
    head = bound(random_eagle("eagle", target().config, fc_bias=True))
    export_eagle(head, tmp_path, "raw", tables=tables)
    again = bound(load_eagle(tmp_path, "eagle", TargetSizes.of(target().config)))
    assert again.config.own_embedding is tables
    torch.testing.assert_close(answers(again), answers(head))
    assert "no place" not in " ".join(obstacles(head))
    assert len(obstacles(head)) == 1


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    head = bound(random_eagle("eagle", target().config))
    with pytest.raises(ConfigError, match="raw"):
        export_eagle(head, tmp_path, "speculators")
    with pytest.raises(ConfigError, match=r"Did you mean 'raw'"):
        export_eagle(head, tmp_path, "rav")
    assert not list(tmp_path.iterdir())
