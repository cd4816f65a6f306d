"""Checkpoints that take pictures, too: their text part runs, as transformers runs it, and nothing else stays loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.loading.load import build_lm, load_config, load_module
from outrider.models.loading.multimodal import text_part
from outrider.sampling.params import SamplingParams
from tests.contract.own_cache_families import DELTA
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.runtime.families import EXPERTS, HALF_WINDOWED, SIZES

TEXT = {key: value for key, value in SIZES.items() if key not in ("bos_token_id", "pad_token_id")}
PICTURES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
MARKS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "aya_vision": ("AyaVisionConfig", {  # without the scale of Cohere 2's logits
        "text_config": {**TEXT, **HALF_WINDOWED, "model_type": "cohere2"}, "image_token_index": 90,
        "vision_config": {**PICTURES, "model_type": "siglip_vision_model"}, "adapter_layer_norm_eps": 1e-6}),
    "gemma3": ("Gemma3Config", {
        "text_config": {**TEXT, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
        "vision_config": {**PICTURES, "vision_use_head": False}, "mm_tokens_per_image": 4, "image_token_index": 90,
        "boi_token_index": 91, "eoi_token_index": 92}),
    "gemma4": ("Gemma4Config", {
        "text_config": {
            **TEXT, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**PICTURES, "head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 2}, "audio_config": None,
        "image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 93, "video_token_id": 94}),
    "emu3": ("Emu3Config", {
        "text_config": {**TEXT, "pad_token_id": 0}, "vocabulary_map": {"<image>": 5}, "vq_config": {
            "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [], "latent_channels": 4,
            "embed_dim": 4, "codebook_size": 16}}),
    "granite4_vision": ("Granite4VisionConfig", {
        "text_config": TEXT, "image_token_index": 90, "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]],
        "vision_config": {**PICTURES, "hidden_size": 64, "model_type": "clip_vision_model"}, "qformer_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
            "encoder_hidden_size": 64}}),
    "kosmos-2.5": ("Kosmos2_5Config", {  # positions begin behind the padding token's
        "text_config": {
            "vocab_size": 97, "embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4, "init_std": 0.2,
            "max_position_embeddings": 2048, "eos_token_id": 1},
        "vision_config": {**PICTURES, "d_ff": 48, "d_kv": 16, "patch_embed_hidden_size": 48}, "latent_query_num": 4}),
    "llama4": ("Llama4Config", {
        "text_config": {**TEXT, **EXPERTS, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 64},
        "vision_config": {**PICTURES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "boi_token_index": 91, "eoi_token_index": 92, "image_token_index": 90}),
    "mistral3": ("Mistral3Config", {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "vision_config": {**PICTURES, "model_type": "pixtral", "head_dim": 16}, "image_token_index": 90}),
    "molmo2": ("Molmo2Config", {
        "text_config": {**TEXT, "head_dim": 16}, "image_patch_id": 90,
        "vision_config": {
            **{key: size for key, size in PICTURES.items() if key != "image_size"}, "num_key_value_heads": 2, "head_dim": 16,
            "image_size": [28, 28]},
        "adapter_config": {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
            "text_hidden_size": 64, "vision_feature_layer": [-1]}}),
    "muse_spark": ("MuseSparkConfig", {
        "text_config": {
            **TEXT, **EXPERTS, "head_dim": 16, "sliding_window": 16, "moe_hidden_size": 64,
            "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {key: size for key, size in PICTURES.items() if key != "image_size"}, "audio_config": {
            "patch_sizes": (16, 6), "hidden_sizes": (16, 32), "depths": (1, 1), "num_hidden_layers": 2, "out_hidden_size": 64},
        "out_hidden_size": 32, "projector_hidden_size": 32, "image_token_id": 90, "video_token_id": 91, "audio_token_id": 92}),
    "qwen3_5": ("Qwen3_5Config", {
        "text_config": {**TEXT, **DELTA}, "vision_config": {**TOWER, "deepstack_visual_indexes": []}, **MARKS}),
    "qwen3_vl": ("Qwen3VLConfig", {
        "text_config": {**TEXT, **THREE_AXES, "head_dim": 16},
        "vision_config": {**TOWER, "deepstack_visual_indexes": [0]}, **MARKS}),
}  # fmt: skip


def random_whole(name: str) -> Any:
    """A random model with all its senses."""
    kind, options = CONFIGS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, kind)(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])(config).eval()


def saved(name: str, folder: Path) -> nn.Module:
    """A random checkpoint in `folder`; returns the whole model."""
    model: nn.Module = random_whole(name)
    save_checkpoint(folder, model, word_tokenizer(TEXT["vocab_size"]))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_part_runs(name: str, tmp_path: Path) -> None:
    """Catches a checkpoint that is refused for its vision tower, one that keeps it, and text weights that are left out."""
    whole = saved(name, tmp_path)
    module: Any = load_module(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
    assert not [key for key, _ in module.named_parameters() if any(word in key for word in ("vision", "visual", "projector"))]
    lm = build_lm(module, name, torch.float32, torch.device("cpu"))
    tokens = torch.randint(3, 80, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        theirs: Tensor = whole(input_ids=tokens, use_cache=False).logits[0]
        lm.kv.add_row()
        ours = [lm.forward(tokens[:, :7])[0]]
        lm.kv.advance(0, 7)
        ours.append(lm.forward(tokens[:, 7:])[0])
    assert (torch.cat(ours) - theirs).abs().max() <= 2e-4 * theirs.abs().max()


def test_prompts_read_in_both_directions_are_refused_by_name(tmp_path: Path) -> None:
    """Its passes differ with transformers' kernel for attention, so that comparing them with one of these shows nothing."""
    text, vision = {**TEXT, "model_type": "gemma", "head_dim": 16}, {**PICTURES, "model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=90, projection_dim=64)
    folder = save_checkpoint(tmp_path, transformers.PaliGemmaForConditionalGeneration(config), word_tokenizer(97))
    with pytest.raises(CapabilityError, match=r"tokens of a prompt also attend to later ones") as caught:
        LLM(folder, drafter="none", dtype="float32", threads=1)
    assert len(str(caught.value).splitlines()) == 1


def test_it_generates(tmp_path: Path) -> None:
    """Mistral Small's class is none of transformers' language models."""
    whole: Any = saved("mistral3", tmp_path)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    expected = whole.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    llm = LLM(tmp_path, drafter="ngram", dtype="float32", runtime="eager", threads=1)
    found = llm.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0].token_ids
    assert found == expected[0, len(prompt) :].tolist()


def test_one_layer_tells_whether_the_logits_are_the_same() -> None:
    """Catches two passes over a whole model, a layer lost on the way, and a full device taken for code that needs a picture."""
    whole = random_whole("gemma3")
    layers, called = whole.model.language_model.layers, list[int]()
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: called.append(index))
    assert text_part(whole).model.layers is layers
    assert set(called) == {0}
    whole = random_whole("gemma3")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    whole.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        text_part(whole)
    assert len(whole.model.language_model.layers) == len(layers)


def test_a_language_model_stays_as_it_is() -> None:
    module = tiny_llama(97)
    assert text_part(module) is module
