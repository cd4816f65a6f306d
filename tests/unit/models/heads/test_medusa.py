"""Medusa heads: their arithmetic by hand, and every layout that the world publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError, ConfigError
from outrider.models.heads.medusa import (
    MedusaConfig,
    MedusaHeads,
    export_medusa,
    load_medusa,
    save_medusa,
)

H = 8
V = 11


def tensors(num_heads: int = 2, num_layers: int = 1, prefix: str = "") -> dict[str, torch.Tensor]:
    """The original layout, random."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(H, H, generator=generator)
            found[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(H, generator=generator)
        found[f"{prefix}{head}.{num_layers}.weight"] = torch.randn(V, H, generator=generator)
    return found


def write(
    folder: Path,
    found: dict[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    *,
    pt: bool = False,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if pt:
        torch.save(found, folder / "medusa_lm_head.pt")
    else:
        save_file(found, str(folder / "medusa_lm_head.safetensors"))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_heads(**changes: Any) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(H, V, 3, **{"trained_for": "a/target", **changes}))
    heads.bind(torch.nn.Linear(H, V, bias=False))
    return heads.requires_grad_(False)


@pytest.mark.parametrize("pt", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_the_original_layout_by_hand(tmp_path: Path, pt: bool, prefix: str) -> None:
    """Catches blocks in another order, a residual that is not added, a bias that is dropped. The
    config's count is wrong, as on the hub: heads are counted in the file."""
    found = tensors(5, 2, prefix)
    heads = load_medusa(
        write(tmp_path, found, {"medusa_num_heads": 2, "medusa_num_layers": 1}, pt=pt), H, V
    )
    assert (heads.num_heads, heads.config.num_layers) == (5, 2)
    features = torch.randn(4, H)
    for head in range(5):
        state = features
        for layer in range(2):
            weight, bias = (
                found[f"{prefix}{head}.{layer}.linear.{name}"] for name in ("weight", "bias")
            )
            state = state + F.silu(state @ weight.T + bias)
        torch.testing.assert_close(
            heads(features)[:, head], state @ found[f"{prefix}{head}.2.weight"].T
        )


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 2, "bias": False}, {"own_output": False}], ids=str
)
def test_what_is_saved_comes_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    heads = random_heads(accuracies=((0.5, 0.25), (0.4, 0.1), (0.3, 0.0)), **changes)
    save_medusa(heads, tmp_path)
    again = load_medusa(tmp_path, H, V)
    assert again.config == heads.config
    again.bind(heads.__dict__["_target_output"] or torch.nn.Identity())
    features = torch.randn(3, H)
    torch.testing.assert_close(again(features), heads(features), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["original", "vllm"])
@pytest.mark.parametrize("own_output", [True, False])
def test_exports_say_the_same(tmp_path: Path, layout: str, own_output: bool) -> None:
    """An exported head stands alone: shared output layers are written out."""
    heads = random_heads(own_output=own_output)
    export_medusa(heads, tmp_path, layout)
    again = load_medusa(tmp_path, H, V)
    features = torch.randn(3, H)
    torch.testing.assert_close(again(features), heads(features))
    config = json.loads((tmp_path / "config.json").read_text())
    if layout == "vllm":
        assert config["architectures"] == ["MedusaModel"]
        assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (
            3,
            1,
            True,
        )
        assert config["original_lm_head"] is (not own_output)
        names = set(load_file(str(tmp_path / "model.safetensors")))
        assert {"blocks.0.layers.0.weight", "blocks.2.layers.0.bias", "lm_heads.0.weight"} <= names
        assert ("lm_heads.1.weight" in names) is own_output
    else:
        assert config["base_model_name_or_path"] == "a/target"
        assert set(torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)) == set(
            f"{head}.{rest}"
            for head in range(3)
            for rest in ("0.linear.weight", "0.linear.bias", "1.weight")
        )


def test_unknown_export_layout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        export_medusa(random_heads(), tmp_path, "vlm")


def vllm_tensors(rows: int) -> dict[str, torch.Tensor]:
    return {
        "medusa_heads.blocks.0.layers.0.weight": torch.randn(H, H),
        "medusa_heads.lm_heads.0.weight": torch.randn(rows, H),
        "medusa_heads.token_map": torch.tensor([7, 2, 9]),
    }


@pytest.mark.parametrize("rows", [3, V])
def test_a_reduced_vocabulary(tmp_path: Path, rows: int) -> None:
    """Catches logits at the draft's own ids: token_map says which of the target's tokens they are
    about."""
    found = vllm_tensors(rows)
    heads = load_medusa(write(tmp_path / "a", found), H, V)
    weight = found["medusa_heads.lm_heads.0.weight"]
    block = found["medusa_heads.blocks.0.layers.0.weight"]
    features = torch.randn(1, H)
    wanted = (features + F.silu(features @ block.T)) @ (
        weight if rows == 3 else weight[[7, 2, 9]]
    ).T
    logits = heads(features)[0, 0]
    torch.testing.assert_close(logits[[7, 2, 9]], wanted[0])
    assert float(logits.softmax(-1)[[7, 2, 9]].sum()) == pytest.approx(1)
    save_medusa(heads, tmp_path / "b")
    torch.testing.assert_close(load_medusa(tmp_path / "b", H, V)(features), heads(features))


def test_messages_say_which_tensor_and_which_target(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tensors(), {"base_model_name_or_path": "lmsys/vicuna"})
    shapes = r"'0.0.linear.weight' has shape \[8, 8\], expected \[16, 16\]"
    with pytest.raises(CheckpointError, match=f"trained for 'lmsys/vicuna'.*{shapes}"):
        load_medusa(folder, 16, V)
    with pytest.raises(
        CheckpointError, match=r"'0.1.weight' has shape \[11, 8\], expected \[12, 8\]"
    ):
        load_medusa(folder, H, 12)
    extra = write(tmp_path / "b", {**tensors(), "fc.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"no part of Medusa heads: fc.weight"):
        load_medusa(extra, H, V)
    lacking = tensors()
    del lacking["1.0.linear.bias"]
    with pytest.raises(CheckpointError, match=r"lacks tensor '1.0.linear.bias'"):
        load_medusa(write(tmp_path / "c", lacking), H, V)
    outputless = {name: tensor for name, tensor in tensors().items() if "linear" in name}
    with pytest.raises(CheckpointError, match=r"lacks tensor '0.1.weight'"):
        load_medusa(write(tmp_path / "d", outputless), H, V)


def test_folders_that_hold_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no head folder"):
        load_medusa(tmp_path / "nowhere", H, V)
    (tmp_path / "README").write_text("empty")
    with pytest.raises(CheckpointError, match=r"holds no weights.*README"):
        load_medusa(tmp_path, H, V)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="is damaged: 6 bytes are no safetensors file"):
        load_medusa(tmp_path, H, V)
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        load_medusa(write(tmp_path / "b", {"midlayer.weight": torch.zeros(1)}), H, V)
    (tmp_path / "b" / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_medusa(tmp_path / "b", H, V)
