"""Reading MTP heads: found by the names of tensors in each layout, refused in one line where there
is none or it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from outrider.build import named_drafter
from outrider.errors import CapabilityError, CheckpointError, OutriderError
from outrider.models import families
from outrider.models.heads import mtp_body
from outrider.models.heads.kinds import head_kind
from outrider.models.heads.mtp_body import one_layer_config
from outrider.models.heads.mtp_files import load_mtp, ships_mtp, weigh_mtp
from outrider.models.heads.mtp_layout import MtpTensors, find_tensors
from outrider.models.source import resolve
from outrider.options import Options
from tests.helpers import tiny_llama
from tests.mtp_heads import MTP_LAYOUTS, WEIGHTS, save_with_mtp
from tests.unit.runtime.families import make

CPU = torch.device("cpu")
VOCAB = 60


def llama(seed: int) -> Any:
    return tiny_llama(VOCAB, seed=seed)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a head in every layout, and one without."""
    root = tmp_path_factory.mktemp("mtp")
    for layout in MTP_LAYOUTS:
        save_with_mtp(root / layout, llama, layout)
    llama(0).save_pretrained(root / "none")
    return root


def edited(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder.mkdir()
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def load(folder: Path) -> Any:
    return load_mtp(resolve(str(folder)), AutoConfig.from_pretrained(folder), torch.float32, CPU)


def error_of(folder: Path, kind: type[OutriderError] = CheckpointError) -> str:
    """What is reported of a head when it is weighed, before anything is loaded."""
    with pytest.raises(kind) as caught:
        weigh_mtp(resolve(str(folder)), AutoConfig.from_pretrained(folder), torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("layout", MTP_LAYOUTS)
def test_every_layout_is_read(checkpoints: Path, layout: str) -> None:
    """Catches a tensor that lands elsewhere, one that is counted twice, a copy of the target's
    tables taken for a weight."""
    folder = checkpoints / layout
    head = load(folder)
    tensors = load_file(folder / WEIGHTS)
    found = find_layout(tensors, 2)
    assert found is not None
    assert found.layout.name == head.config.layout == layout
    own = dict(head.named_parameters())
    weighed = weigh_mtp(resolve(str(folder)), AutoConfig.from_pretrained(folder), torch.float32)
    assert weighed.weights_bytes == 4 * sum(part.numel() for part in own.values())
    assert weighed.kv_bytes_per_token == 4 * 2 * 2 * 16
    for name, there in found.layers[0].items():
        here = name.replace("block.", "body.layers.0.")
        assert torch.equal(own[f"layers.0.{here}"], tensors[there]), name
    assert ships_mtp(str(folder))


def find_layout(names: Iterable[str], num_layers: int) -> MtpTensors | None:
    return find_tensors(families.MTP_LAYOUTS.values(), names, num_layers)


def test_names_are_told_apart() -> None:
    """Catches layers of the target taken for the head's, prefixes of multimodal checkpoints, and
    foreign layouts."""
    parts = (
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "mlp.up_proj.weight",
    )
    deep = [f"model.language_model.layers.{n}.{part}" for n in (46, 47) for part in parts]
    found = find_layout([*deep, "model.language_model.layers.45.mlp.up_proj.weight"], 46)
    assert found is not None
    assert len(found.layers) == 2
    assert found.layers[1]["block.mlp.up_proj.weight"] == deep[-1]
    assert not found.lacking
    assert find_layout(deep, 48) is None
    assert find_layout(["mtp.0.attn.wq.weight", "mtp.0.main_norm.weight"], 48) is None
    assert find_layout([f"model.mtp_layers.0.{part}" for part in parts], 48) is None


def test_a_checkpoint_without_a_head(checkpoints: Path, tmp_path: Path) -> None:
    message = error_of(checkpoints / "none")
    assert "has no MTP head" in message
    assert "model.layers.2.eh_proj" in message
    assert "--drafter ngram" in message
    assert not ships_mtp(str(checkpoints / "none"))
    assert not ships_mtp(str(tmp_path / "nowhere"))

    def foreign(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.0.attn.wq.weight"] = torch.zeros(2)

    message = error_of(edited(checkpoints / "none", tmp_path / "foreign", foreign))
    assert "layout that is not read (tensor 'mtp.0.attn.wq.weight')" in message
    single = tmp_path / "model.bin"
    single.write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="single file"):
        weigh_mtp(resolve(str(single)), llama(0).config, torch.float32)


def test_families_whose_heads_are_not_read_are_named(checkpoints: Path, tmp_path: Path) -> None:
    """Catches a head that 'auto' takes and that then does not load."""
    folder = edited(checkpoints / "deepseek", tmp_path / "other", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "hy_v4"}))
    assert not ships_mtp(str(folder))
    message = error_of(folder, CapabilityError)
    assert (
        "MTP heads of hy_v4 are not read, which have a layer without the target's hyper-connections"
        in message
    )


PARTS = {  # by layout, a tensor's name and what it is called
    "deepseek": ("model.layers.2.enorm.weight", "embed_norm.weight of layer 0"),
    "mimo": ("model.mtp_layers.0.hidden_layernorm.weight", "hidden_norm.weight of layer 0"),
}  # fmt: skip


@pytest.mark.parametrize("layout", PARTS)
def test_a_part_that_is_missing_is_named(checkpoints: Path, tmp_path: Path, layout: str) -> None:
    name, called = PARTS[layout]
    folder = edited(checkpoints / layout, tmp_path / "damaged", lambda tensors: tensors.pop(name))
    assert f"is incomplete: it lacks the {called}." in error_of(folder)
    assert not ships_mtp(str(folder))


def as_kind(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(dtype)


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no norm": (lambda t: t.pop("mtp.norm.weight"), "is incomplete: it lacks the norm.weight of layer 0"),
    "no layer": (lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.layers")], "it lacks the decoder layer 0"),
    "fp8 without scales": (lambda t: as_kind(t, torch.float8_e4m3fn), "its scales 'mtp.fc.weight_scale_inv' are missing"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_before_loading(
    checkpoints: Path, tmp_path: Path, damage: str
) -> None:
    """Catches heads that would draft and never be right. 'auto' leaves them out."""
    change, expected = DAMAGES[damage]
    folder = edited(checkpoints / "qwen", tmp_path / "damaged", change)
    assert expected in error_of(folder)
    assert not ships_mtp(str(folder))


def test_integers_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = edited(checkpoints / "qwen", tmp_path / "int", lambda t: as_kind(t, torch.int8))
    assert "'mtp.fc.weight' is stored as I8" in error_of(folder)


MLP = "mtp.layers.0.mlp"
MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "wider projection": (lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 256)}), "trained for another target"),
    "wider layer": (lambda t: t.update({f"{MLP}.up_proj.weight": torch.zeros(96, 128)}), r"shape \[96, 128\], expected \[96, 64"),
    "no up_proj": (lambda t: t.pop(f"{MLP}.up_proj.weight"), "no layer of LlamaForCausalLM: it lacks 'mlp.up_proj.weight'"),
    "more than a layer": (lambda t: t.update({"mtp.layers.0.sinks": torch.zeros(4)}), "has 'sinks', which is no part"),
    "NaN": (lambda t: t["mtp.norm.weight"].fill_(float("nan")), "NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_head_of_another_target_is_refused(
    checkpoints: Path, tmp_path: Path, misfit: str
) -> None:
    change, expected = MISFITS[misfit]
    with pytest.raises(CheckpointError, match=expected):
        load(edited(checkpoints / "qwen", tmp_path / "misfit", change))


@pytest.mark.parametrize("scale", ["blocks", "rows", "whole"])
def test_fp8_is_widened_by_its_scales(checkpoints: Path, tmp_path: Path, scale: str) -> None:
    """Catches scales of the wrong block: blocks of 32 cut at the edge of a (48, 64) matrix."""
    names = {"blocks": "weight_scale_inv", "rows": "weight_scale", "whole": "weight_scale"}
    name = "mtp.layers.0.self_attn.k_proj."
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    scales = {
        "blocks": torch.rand(2, 4) + 0.5,
        "rows": torch.rand(32, 1) + 0.5,
        "whole": torch.tensor(0.7),
    }[scale]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}weight"] = codes
        tensors[name + names[scale]] = scales

    head = load(edited(checkpoints / "qwen", tmp_path / "fp8", change))
    each = scales.repeat_interleave(16, 0).repeat_interleave(16, 1) if scale == "blocks" else scales
    assert torch.equal(head.layer(0).body.layers[0].self_attn.k_proj.weight, codes.float() * each)


def test_auto_prefers_the_head_to_look_ups(checkpoints: Path) -> None:
    """But not to what --draft names."""
    assert named_drafter(Options(target=str(checkpoints / "deepseek")), None).drafter == "mtp"
    assert named_drafter(Options(target=str(checkpoints / "none")), None).drafter == "suffix"
    assert (
        named_drafter(Options(target=str(checkpoints / "deepseek"), draft="other"), None).drafter
        == "draft-model"
    )
    assert named_drafter(Options(target="demo"), None).drafter == "draft-model"


def test_a_whole_model_with_a_head_is_no_head(checkpoints: Path, tmp_path: Path) -> None:
    """Catches a draft model that is taken for its own MTP head."""
    assert head_kind(resolve(str(checkpoints / "qwen"))) is None
    save_with_mtp(tmp_path / "alone", llama, "deepseek", alone=True)
    assert head_kind(resolve(str(tmp_path / "alone"))) == "mtp"


def test_the_layer_has_the_kind_that_the_config_names() -> None:
    """Catches full attention where a config (Mellum's) says that the head's layer is windowed."""
    config = AutoConfig.for_model(
        "mellum", layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2
    )
    config.mtp_layer_types = None
    assert one_layer_config(config, has_experts=True).layer_types == ["full_attention"]
    config.mtp_layer_types = ["sliding_attention", "full_attention"]
    kinds = [
        one_layer_config(config, has_experts=True, index=index).layer_types for index in range(3)
    ]
    assert kinds == [["sliding_attention"], ["full_attention"], ["full_attention"]]


@pytest.mark.parametrize(
    "name",
    [
        "model.mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.enorm.m.weight",
        "model.mtp_linear_proj.0.weight",
        "model.mtp.layers.0.input_proj.weight",
        "mtp.fc_hidden.weight",
    ],
)
def test_layouts_that_are_not_read_are_named(checkpoints: Path, tmp_path: Path, name: str) -> None:
    """Of MiMo-V2, MiniMax M3, LongCat, ERNIE, Inkling and Qwen3.8-Flash-Next. 'auto' leaves such a
    head."""
    folder = edited(
        checkpoints / "none",
        tmp_path / "other",
        lambda tensors: tensors.update({name: torch.zeros(2)}),
    )
    assert (
        f"an MTP head of a layout that is not read (tensor '{name}'). Use --drafter ngram"
        in error_of(folder)
    )
    assert named_drafter(Options(target=str(folder)), None).drafter == "suffix"


def test_a_head_with_sparse_attention_drafts_on_a_cpu_alone(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = edited(checkpoints / "deepseek", tmp_path / "sparse", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "index_topk": 8}))
    assert ships_mtp(str(folder), "cpu")
    assert not ships_mtp(str(folder), "cuda:0")


def test_a_layer_that_our_cache_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sparse attention is on CUDA, where its indexers do not ask us."""
    monkeypatch.setattr(mtp_body, "keep_choices", lambda module: None)
    save_with_mtp(tmp_path, lambda seed: make("deepseek_v32"), "deepseek")
    with pytest.raises(
        CapabilityError,
        match=r"its layer does not run on Outrider's cache: .*more than keys and values",
    ):
        load(tmp_path)
