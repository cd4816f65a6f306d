"""Tiny random models of the families that also take pictures or sounds: transformers' own configs
with every size made small.

A name in a config says what its number counts, so one table makes nearly all of them small. What is
left stands by family.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.models.loading.multimodal import text_part
from tests.contract import own_cache_families
from tests.older_transformers import skip_unless_lowered
from tests.unit.runtime import families

VOCAB = families.SIZES["vocab_size"]
TEXTS = {**families.FAMILIES, **own_cache_families.FAMILIES}  # by the text's model_type
WORDS_OF_TEXT = ("text", "llm", "thinker")  # in the names of configs that are of a language model
NO_SIZES = (
    "id2label",
    "label2id",
    "per_layer_config",
    "number_of_conv_states",
    "transformers_version",
    "_name_or_path",
)
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# numbers, for texts and for other senses, by what their names end with
SMALL: dict[str, tuple[int, ...]] = {
    "vocab_size": (VOCAB,), "hidden_size": (64, 32), "d_model": (64, 32), "embed_dim": (64, 32), "hidden_dim": (64, 32),
    "width": (64, 32), "mm_hidden_size": (64, 32), "out_hidden_size": (64,), "text_hidden_size": (64,),
    "projector_hidden_size": (64,), "output_dim": (64,), "projection_dim": (64,), "moe_intermediate_size": (32,),
    "shared_intermediate_size": (32,), "shared_expert_intermediate_size": (32,), "intermediate_size": (96,),
    "mlp_hidden_size": (96,), "intermediate_size_mlp": (96,), "ffn_dim": (96,), "mlp_dim": (96,), "d_ff": (96,),
    "dense_intermediate_size": (96,), "num_layers": (2,), "num_hidden_layers": (2,), "num_global_layers": (2,), "n_layer": (2,),
    "layers": (2,), "depth": (2,), "attention_heads": (4, 2), "num_heads": (4, 2), "n_head": (4, 2), "n_heads": (4, 2),
    "num_key_value_heads": (2,), "num_kv_heads": (2,), "head_dim": (16,), "num_experts": (4,), "num_local_experts": (4,),
    "n_routed_experts": (4,), "num_experts_per_tok": (2,), "moe_topk": (2,), "moe_k": (2,), "top_k_experts": (2,),
    "n_group": (1,), "topk_group": (1,), "image_size": (28,), "patch_size": (14,), "sliding_window": (16,), "window_size": (16,),
    "lora_rank": (16,), "qk_rope_head_dim": (8,), "qk_nope_head_dim": (8,), "v_head_dim": (8,),
    "max_position_embeddings": (2048,),
}  # fmt: skip
TINY_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "latent_channels": 4,
}
SPARSE = {"num_key_value_heads": 4, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
FEW_FILTERS = {"num_filters": 2, "depths": [1] * 7}
OMNI = {"vision_start_token_id": 192, "vision_end_token_id": 193, "audio_start_token_id": 194}
SILENT = {"enable_audio_output": False, "thinker_config": OMNI}

# What differs from the small config, by family. All that are served
FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {}, "aya_vision": {}, "blip": {}, "blip-2": {},
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": {
        **TINY_VQ, "embed_dim": 4, "num_embeddings": 16, "resolution": 28, "attn_type": "none"}},
    "cohere2_vision": {}, "cohere_compass": {}, "cosmos3_edge": {}, "cosmos3_omni": {},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}, "vision_config": {
            "sam_config": {"downsample_channels": [16, 32], "mlp_dim": 64, "global_attn_indexes": [1], "output_channels": 16}}},
    "deepseek_vl": {}, "deepseek_vl_hybrid": {},
    "emu3": {"vocabulary_map": {"<image>": 5}, "vq_config": {**TINY_VQ, "embed_dim": 4, "codebook_size": 16}},
    "ernie4_5_vl_moe": {"text_config": {
        "moe_intermediate_size": [32, 32], "rope_parameters": {**THREE_AXES, "mrope_section": [3, 3, 2]}}},
    "exaone4_5": {},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "fuyu": {}, "gemma3": {},
    "gemma4": {"text_config": {"pad_token_id": 0}}, "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "glm46v": {}, "glm4v": {},
    "glm4v_moe": {"text_config": {"rope_parameters": {**THREE_AXES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}},
    "glm5_next": {"text_config": {**own_cache_families.DELTA, **SPARSE, "qk_rope_head_dim": 0, "index_kpool": 2}},
    "glm_ocr": {}, "glmasr": {}, "glmga": {}, "got_ocr2": {},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "vision_config": {"hidden_size": 64},
        "qformer_config": {"num_attention_heads": 4, "encoder_hidden_size": 64}},
    "granite_docling": {}, "granite_speech": {}, "granite_speech_plus": {},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {
        "rope_type": "xdrope", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "mrope_section": [2, 2, 2, 2]}}},
    "hyperclovax_vision_v2": {}, "idefics2": {}, "idefics3": {}, "inkling_mm_model": {}, "instructblip": {},
    "instructblipvideo": {}, "internvl": {},
    "janus": {"vq_config": {**TINY_VQ, "embed_dim": 4, "num_embeddings": 16}},
    "kimi_k25": {"text_config": {"head_dim": 8}},
    "lfm2_vl": {}, "lfm3_vl": {}, "lighton_ocr": {}, "llama4": {}, "llava": {},
    "llava_next": {}, "llava_next_video": {}, "llava_onevision": {}, "minicpm_ocr": {}, "minicpmv4_6": {}, "minicpmv4_7": {},
    "minimax_m3_vl": {}, "mistral3": {},
    "mistral4": {"num_key_value_heads": 4},
    "mistral_large4": {"text_config": {
        **SPARSE, "kv_source_layers": [0, 1], "no_rope_layers": [1, 0], "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "sparse"]}},
    "mllama": {},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1]}},
    "moss_transcribe_diarize": {}, "muse_glimmer": {},
    "muse_spark": {"audio_config": {
        "patch_sizes": (16, 6), "hidden_sizes": (16, 32), "depths": (1, 1), "num_hidden_layers": 2, "out_hidden_size": 64}},
    "nemotron_h_omni": {}, "ovis2": {}, "paddleocr_vl": {}, "phi4_multimodal": {}, "pp_chart2table": {}, "qianfan_ocr": {},
    "qwen2_5_omni": SILENT, "qwen2_5_omni_thinker": OMNI, "qwen2_5_vl": {}, "qwen2_audio": {}, "qwen2_vl": {}, "qwen3_5": {},
    "qwen3_5_moe": {}, "qwen3_asr": {}, "qwen3_omni_moe": SILENT, "qwen3_omni_moe_thinker": OMNI, "qwen3_vl": {},
    "qwen3_vl_moe": {}, "qwen4_exp": {}, "smolvlm": {},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "unlimited_ocr": {},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": FEW_FILTERS, "semantic_tokenizer_encoder_config": FEW_FILTERS},
    "video_llama_3": {}, "video_llava": {}, "vipllava": {}, "voxtral": {},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {  # that a small model can be made of
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "evolla": {}, "idefics": {}, "inkling2": {}, "paligemma": {}, "pi0": {}, "pix2struct": {}, "voxtral_realtime": {},
}  # fmt: skip
# the whole takes no text without one
PICTURES_FIRST = ("blip", "blip-2", "instructblip", "instructblipvideo")


def make_config(family: str, **changes: Any) -> Any:
    """A small config of this family."""
    skip_unless_lowered(family)
    kind = CONFIG_MAPPING[family]
    named = _small(kind().to_dict(), of_text=True)
    return kind.from_dict(_changed(_changed(named, {**FAMILIES, **REFUSED}[family]), changes))


def make_whole(family: str, **changes: Any) -> Any:
    """A random model with all its senses, in eval mode."""
    config = make_config(family, **changes)
    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = getattr(transformers, next(table[family] for table in tables if family in table))(
            config
        )
        module = module.eval().float().requires_grad_(False)
        for tensor in module.parameters():  # norms and biases that are not ones and zeros
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            elif not tensor.any():
                tensor += 0.2 * torch.randn_like(tensor)
    return module


def make_text(family: str) -> Any:
    """The part of a random model that writes texts."""
    whole = make_whole(family)
    return text_part(getattr(whole, "thinker", whole))


def _small(config: Mapping[str, Any], *, of_text: bool) -> dict[str, Any]:
    """A config with the sizes of `SMALL`. Tokens of pictures and sounds stay beyond its vocabulary,
    so no text has them."""
    made: dict[str, Any] = {}
    for name, value in config.items():
        if name in NO_SIZES:
            continue  # they follow from the others
        if isinstance(value, Mapping) and name.endswith("config"):
            made[name] = _small(value, of_text=any(word in name for word in WORDS_OF_TEXT))
        elif (
            name in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
            and value
        ):
            made[name] = (list(dict.fromkeys(value)) * 2)[:2]  # one layer of each of two kinds
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            made[name] = (
                {**value, "mrope_section": [2, 3, 3]} if "rope_type" in value and of_text else value
            )
        else:
            made[name] = _size(name, value, of_text=of_text)
    if of_text and (own := TEXTS.get(made.get("model_type", ""))) is not None:
        made |= {**families.SIZES, **own}
        if made["num_hidden_layers"] is None:
            del made["num_hidden_layers"]
    if (
        "rope_parameters" in made
        and of_text
        and not made["rope_parameters"]
        and made["model_type"] not in TEXTS
    ):
        made["rope_parameters"] = THREE_AXES
    return made | ({"initializer_range": 0.2} if "initializer_range" in made else {})


def _size(name: str, value: Any, *, of_text: bool) -> Any:
    if name.endswith("eos_token_id") and value is not None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in ("bos_token_id", "pad_token_id", "decoder_start_token_id"):
        return min(value, 2)
    ending = max((ending for ending in SMALL if name.endswith(ending)), key=len, default=None)
    return value if ending is None or not value else SMALL[ending][0 if of_text else -1]


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        is_nested = isinstance(value, Mapping) and name.endswith("config")
        config[name] = (
            _changed(config.get(name) or {}, value) if is_nested else copy.deepcopy(value)
        )
    return config
