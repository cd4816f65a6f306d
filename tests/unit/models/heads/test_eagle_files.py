"""Published EAGLE folders by their tensors, under any name; and what does not fit is refused with
the tensor and both shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.heads.eagle import EagleHead, Kind
from outrider.models.heads.eagle_files import (
    TargetSizes,
    default_signals,
    load_eagle,
    raw_config,
    raw_tensors,
)
from outrider.models.heads.source import HeadSource
from outrider.train.export_eagle import FP8, LAYOUTS, export_eagle
from tests.heads import random_eagle
from tests.helpers import tiny_llama

VOCAB = 40
TARGET = tiny_llama(VOCAB, num_hidden_layers=8).config
SIZES = TargetSizes.of(TARGET)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, binary: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    if binary:
        torch.save(held, folder / "pytorch_model.bin")
    else:
        save_file(held, str(folder / "model.safetensors"))
    return folder


def same(one: EagleHead, other: EagleHead) -> None:
    assert one.config == other.config
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_without_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a quantised head that drafts, and none of whose drafts is kept. Its headers tell
    before anything is loaded."""
    tensors = raw_tensors(random_eagle("eagle3", TARGET, draft_vocab=15, signals=(2, 4, 5)))
    name = next(name for name, tensor in tensors.items() if name.endswith("up_proj.weight"))
    folder = write(tmp_path / "head", {}, {**tensors, name: tensors[name].to(dtype)})
    for outline in (False, True):
        held = HeadSource.open(folder, outline=outline)
        with pytest.raises(
            CheckpointError, match=r"is quantised: tensor '.*up_proj.weight' is stored as"
        ):
            held.take(name, *held.shape(name))


RENAMED: dict[str, Callable[[str], str]] = {
    "original": lambda name: name,
    "vllm": lambda name: name.replace("midlayer.", "layers.0."),
    "sglang": lambda name: (
        f"model.{name}" if name not in ("lm_head.weight", "d2t", "t2d") else name
    ),
}


@pytest.mark.parametrize("names", RENAMED)
@pytest.mark.parametrize("binary", [False, True])
def test_eagle3_under_every_name(names: str, binary: bool, tmp_path: Path) -> None:
    head = random_eagle("eagle3", TARGET, draft_vocab=15, signals=(2, 4, 5))
    tensors = {RENAMED[names](name): tensor for name, tensor in raw_tensors(head).items()}
    # computed, not learned: old folders hold it
    tensors["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    same(
        load_eagle(write(tmp_path, raw_config(head), tensors, binary=binary), "eagle3", SIZES), head
    )


@pytest.mark.parametrize("prefix", ["", "model."])
def test_several_layers_by_the_names_of_sglang(prefix: str, tmp_path: Path) -> None:
    """Layers behind the first are `additional_layers`, and their norm before attention is a
    `hidden_norm`."""
    head = random_eagle("eagle3", TARGET, draft_vocab=15, signals=(2, 4, 5), num_layers=3)
    tensors = {}
    for name, tensor in raw_tensors(head).items():
        named = name.replace("layers.0.", "midlayer.")
        for number in (1, 2):
            named = named.replace(
                f"layers.{number}.input_layernorm", f"additional_layers.{number - 1}.hidden_norm"
            )
            named = (
                named.replace(f"layers.{number}.", f"additional_layers.{number - 1}.")
                if "additional" not in named
                else named
            )
        tensors[named if named in ("lm_head.weight", "d2t", "t2d") else prefix + named] = tensor
    assert f"{prefix}additional_layers.1.hidden_norm.weight" in tensors
    found = load_eagle(write(tmp_path, raw_config(head), tensors), "eagle3", SIZES)
    assert found.config.num_layers == 3
    same(found, head)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@torch.inference_mode()
def test_layers_behind_the_first_are_ordinary_ones() -> None:
    """The residual goes on from layer to layer, as SpecForge and speculators train them. Catches
    one that begins anew."""
    head = random_eagle("eagle3", TARGET, draft_vocab=15, signals=(2, 4, 5), num_layers=3)
    sizes = (
        "hidden_size",
        "intermediate_size",
        "rms_norm_eps",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    config = LlamaConfig(
        **{name: getattr(head.config, name) for name in sizes}, attn_implementation="eager"
    )
    embeds, features = torch.randn(
        2, 1, 7, head.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    positions = torch.arange(7)[None]
    rotation = head.rotary(features, positions)
    first: Any = head.layers[0]
    expected = first(features, embeds, rotation, causal)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    for number in (1, 2):
        ordinary = LlamaDecoderLayer(config, number)
        ordinary.load_state_dict(head.layers[number].state_dict())
        expected = ordinary(expected, attention_mask=mask, position_embeddings=rotation)
    torch.testing.assert_close(
        head.states(embeds, features, positions, causal), expected, rtol=1e-4, atol=1e-5
    )


def test_the_smallest_config_of_the_original_code(tmp_path: Path) -> None:
    """The first published folders say little: no layer ids, no flags, no head size, a theta at the
    top."""
    head = random_eagle("eagle3", TARGET, draft_vocab=15, signals=(2, 4, 5))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": 15,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    found = load_eagle(write(tmp_path, config, raw_tensors(head)), "eagle3", SIZES).config
    assert found.signals == (2, 4, 5)
    assert found.head_dim == 16
    assert found.rope == {"rope_type": "default", "rope_theta": 500000.0}
    assert found.rms_norm_eps == 1e-5
    assert not found.norm_before_residual


def test_speculators_nested_config(tmp_path: Path) -> None:
    """Catches numbers that are looked for at the top only."""
    head = random_eagle("eagle3", TARGET, signals=(1, 3, 7), norm_before_residual=True)
    flat = raw_config(head)
    moved = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
    )
    inner = {name: flat.pop(name) for name in moved}
    flat.pop("outrider")
    nested = {
        **flat,
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**inner, "rope_theta": 1234.0},
        "speculators_config": {"verifier": {"name_or_path": "someone/target"}},
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in raw_tensors(head).items()
    }
    found = load_eagle(write(tmp_path, nested, tensors), "eagle3", SIZES).config
    assert (found.signals, found.norm_before_residual, found.trained_for) == (
        (1, 3, 7),
        True,
        "someone/target",
    )
    assert found.rope["rope_theta"] == 1234.0


@pytest.mark.parametrize(
    "scaling",
    [{"type": "mrope"}, {"rope_type": "mrope"}, {"type": "default", "rope_type": "default"}],
)
def test_rotary_embeddings_beside_pictures(scaling: dict[str, str], tmp_path: Path) -> None:
    """Catches heads of Qwen-VL that are refused: their targets' texts are served, in which a token
    has one position."""
    head = random_eagle("eagle3", TARGET, rope={"rope_type": "default", "rope_theta": 1e6})
    config = {
        **raw_config(head),
        "rope_theta": 1e6,
        "rope_scaling": {**scaling, "mrope_section": [2, 3, 3]},
    }
    found = load_eagle(write(tmp_path, config, raw_tensors(head)), "eagle3", SIZES)
    positions = torch.arange(9)[None]
    for ours, theirs in zip(
        found.rotary(torch.ones(1), positions), head.rotary(torch.ones(1), positions), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("behind", [False, True])
def test_biases_of_attention(kind: Kind, behind: bool, tmp_path: Path) -> None:
    """Catches heads of Qwen2 that are refused: `qkv_bias` of EAGLE's own code leaves out the bias
    behind attention."""
    head = random_eagle(kind, TARGET, attention_bias=True, output_bias=behind)
    assert ("layers.0.self_attn.o_proj.bias" in head.state_dict()) is behind
    folder = write(tmp_path, raw_config(head), raw_tensors(head))
    same(load_eagle(folder, kind, SIZES), head)
    config = json.loads((folder / "config.json").read_text())
    assert (config["attention_bias"], config["qkv_bias"]) == (behind, True)


def test_layer_ids_for_sglang_count_outputs(tmp_path: Path) -> None:
    """Catches ids of `eagle_config`, to which SGLang adds one, that are read or written as layer
    inputs like others."""
    head = random_eagle("eagle3", TARGET, signals=(1, 3, 7))
    config = raw_config(head)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 6]
    del config["eagle_aux_hidden_state_layer_ids"]  # as SpecForge and ModelOpt write it
    same(load_eagle(write(tmp_path, config, raw_tensors(head)), "eagle3", SIZES), head)


def test_only_t2d_and_padded_tables(tmp_path: Path) -> None:
    """Some folders hold the mask alone; embeddings may be padded to another length than the
    target's."""
    head = random_eagle("eagle3", TARGET, draft_vocab=15, own_embedding=True)
    tensors = raw_tensors(head)
    del tensors["d2t"]
    tensors["embed_tokens.weight"] = torch.cat([tensors["embed_tokens.weight"], torch.ones(24, 64)])
    same(load_eagle(write(tmp_path, raw_config(head), tensors), "eagle3", SIZES), head)


def test_a_head_without_a_map_for_a_padded_target(tmp_path: Path) -> None:
    """Families pad their tables to different lengths around one vocabulary: ids agree, the rest has
    q = 0."""
    head = random_eagle("eagle3", TARGET)
    folder = write(tmp_path, raw_config(head), raw_tensors(head))
    wider = load_eagle(
        folder, "eagle3", TargetSizes(SIZES.hidden_size, VOCAB + 8, SIZES.num_layers)
    )
    assert wider.draft_ids is not None
    assert wider.draft_ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize("field", ["pard_token", "ptd_token_id", "mask_token_id"])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192)], ids=str)
def test_p_eagle(field: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Its mask token under every name, its feature in every shape, and what we write ourselves."""
    head = random_eagle("eagle3", TARGET, draft_vocab=15, num_layers=2, mask_token=7)
    config = raw_config(head)
    config[field] = config.pop("pard_token")
    tensors = raw_tensors(head)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(shape)
    same(head, load_eagle(write(tmp_path / "theirs", config, tensors), "eagle3", SIZES))
    for layout in LAYOUTS:
        export_eagle(head, tmp_path / layout, layout, tables=False)
        again = load_eagle(tmp_path / layout, "eagle3", SIZES)
        if layout == FP8:  # rounds matrices, which the mask's feature is none of
            assert again.config.mask_token == 7
            assert torch.equal(again.mask_hidden, head.mask_hidden)
        else:
            same(head, again)
    exported = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert (exported["speculators_model_type"], exported["mask_token_id"]) == ("peagle", 7)


def broken(
    change: Callable[[dict[str, Any], dict[str, Tensor]], None], kind: Kind = "eagle3"
) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        head = random_eagle(
            kind, TARGET, draft_vocab=15 if kind == "eagle3" else None, trained_for="someone/else"
        )
        config = raw_config(head)
        tensors = raw_tensors(head)
        change(config, tensors)
        return write(folder, config, tensors)

    return written


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (broken(lambda c, t: t.update({"fc.weight": torch.ones(64, 96)})), r"fc\.weight.*\[64, 96\].*\[64, 192\]"),
    "a missing tensor": (broken(lambda c, t: t.pop("midlayer.mlp.up_proj.weight")), r"lacks tensor 'layers\.0\.mlp\.up_proj"),
    "a wrong shape": (
        broken(lambda c, t: t.update({"midlayer.mlp.down_proj.weight": torch.ones(64, 47)})),
        r"someone/else.*down_proj.*\[64, 47\].*\[64, 48\]",
    ),
    "a tensor too many": (
        broken(lambda c, t: t.update({"more.weight": torch.ones(1)})), "no part of an EAGLE-3 head: more.weight",
    ),
    "P-EAGLE's feature alone": (
        broken(lambda c, t: t.update({"mask_hidden": torch.ones(192)})), "no mask token .pard_token, ptd_token_id, mask_token_id",
    ),
    "P-EAGLE's token alone": (broken(lambda c, t: c.update({"ptd_token_id": 7})), "mask token 7.*'mask_hidden' is missing"),
    "a mask token outside the vocabulary": (
        broken(lambda c, t: (c.update({"pard_token": VOCAB}), t.update({"mask_hidden": torch.ones(192)}))),
        r"mask token 40 \(pard_token\).*ids 0 to 39",
    ),
    "a mask of another width": (
        broken(lambda c, t: (c.update({"pard_token": 1}), t.update({"mask_hidden": torch.ones(1, 1, 64)}))),
        r"mask_hidden.*\[1, 1, 64\].*\[192\]",
    ),
    "a deeper target": (
        broken(lambda c, t: c.update({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]})), r"\[2, 16, 29\].*8 layers",
    ),
    "no map": (broken(lambda c, t: (t.pop("d2t"), t.pop("t2d"))), "knows 15 tokens and has no 'd2t'"),
    "a broken map": (broken(lambda c, t: t.update({"d2t": torch.zeros(15, dtype=torch.int64) + 90})), "beyond the target's 40"),
    "maps that differ": (broken(lambda c, t: t.update({"t2d": torch.ones(VOCAB, dtype=torch.bool)})), "different tokens"),
    "a flag without its tensor": (broken(lambda c, t: c.update({"fc_norm": True})), r"fc_norm.*fc_norm\.0\.weight"),
    "another kind": (broken(lambda c, t: None, "eagle"), "use --drafter eagle"),
    "no number of heads": (
        broken(lambda c, t: (c.pop("head_dim"), c.pop("num_attention_heads"))), "must say num_attention_heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_eagle(make(tmp_path), "eagle3", SIZES)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_rotary_embeddings_that_follow_the_length_are_refused(tmp_path: Path) -> None:
    folder = broken(
        lambda c, t: c.update({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    )(tmp_path)
    with pytest.raises(CapabilityError, match="dynamic"):
        load_eagle(folder, "eagle3", SIZES)


def test_rotary_frequencies_stay_precise() -> None:
    """Catches a head in bfloat16 whose far positions are rotated by rounded frequencies."""
    head = random_eagle("eagle3", TARGET)
    before = head.rotary.inv_freq.clone()
    assert head.to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(head.rotary.inv_freq, before)


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 6, 7, 32])
def test_default_layers_exist_and_differ(num_layers: int) -> None:
    found = default_signals(num_layers)
    assert len(set(found)) == len(found)
    assert all(0 < layer < num_layers for layer in found)
    assert num_layers < 7 or found == (2, num_layers // 2, num_layers - 3)
