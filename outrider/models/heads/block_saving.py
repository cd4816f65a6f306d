"""Block heads written to disk, as DFlash and DSpark folders are published (`block_files.py` reads them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, did_you_mean
from outrider.models.derived.derive import weight_of
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import FULL, SLIDING
from outrider.models.heads.tensors import write_head
from outrider.models.signals import AFTER_NORM

LAYOUTS = ("raw", "speculators")
NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}


def save_block(head: BlockHead, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The raw layout; weights as they are, or in `dtype`. Raises OSError when the disk is full."""
    write_head(folder, "model.safetensors", _raw_config(head.config), _tensors(head), dtype)


def export_block(head: BlockHead, folder: Path, layout: str, *, tables: bool = False) -> None:
    """The head as other engines read it: "raw" or "speculators". `tables`: with the target's embedding and output layer, for
    engines that do not share them. Raises ConfigError for another layout."""
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout '{layout}' of block heads.{did_you_mean(layout, LAYOUTS)}")
    config = _raw_config(head.config) if layout == "raw" else _speculators_config(head.config)
    tensors = _tensors(head)
    if tables:
        embedding, output = head.tables()
        tensors |= {"embed_tokens.weight": embedding.weight, "lm_head.weight": weight_of(output)}
    write_head(folder, "model.safetensors", config, tensors)


def _tensors(head: BlockHead) -> dict[str, Tensor]:
    found = dict(head.state_dict())
    if head.token_ids is not None:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.token_ids.cpu()] = True
        found |= {"d2t": head.token_ids.cpu() - torch.arange(len(head.token_ids)), "t2d": known}
    return found


def _layer_config(config: BlockConfig) -> dict[str, Any]:
    """The transformer's part, in the words of transformers' Qwen3."""
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.rope,
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "layer_types": [SLIDING if layer in config.window_layers else FULL for layer in range(config.num_layers)],
        **({"sliding_window": config.window, "use_sliding_window": True} if config.window_layers else {}),
        "tie_word_embeddings": False,
    }


def _stored_causal(config: BlockConfig) -> bool | None:
    """None: the layers' types say it."""
    return None if config.causal_windows and not config.causal else config.causal


def _algorithm(config: BlockConfig) -> str:
    if config.selector_rank:
        return "dflash2"
    return "dspark" if config.markov_rank or config.confidence else "dflash"


def _dflash2(config: BlockConfig) -> dict[str, Any]:
    if not config.selector_rank:
        return {}
    return {
        "conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group_size, "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }  # fmt: skip


def _head_config(config: BlockConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "rnn" if config.markov_recurrent else "gated" if config.markov_gated else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_dflash2(config),
        "outrider": {"head": "block", "target": config.trained_for, "temperatures": list(config.temperatures)},
    }


def _raw_config(config: BlockConfig) -> dict[str, Any]:
    flags = {
        "mask_token_id": config.mask_token_id,
        "causal": _stored_causal(config),
        **({"causal_head": True} if config.causal else {}),  # JetSpec's word
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.softcap,
    }
    before_norm = config.num_target_layers in config.target_layers  # only the other numbering has a word for it
    layers = {"aux_hidden_state_layer_ids": list(config.target_layers)} if before_norm else {
        "target_layer_ids": [(config.num_target_layers if key == AFTER_NORM else key) - 1 for key in config.target_layers]
    }  # fmt: skip
    return {
        **_layer_config(config),
        **_head_config(config),
        "architectures": [f"{NAMES[_algorithm(config)]}DraftModel"],
        "base_model_name_or_path": config.trained_for,
        **layers,
        "dflash_config": {**flags, **layers, **_dflash2(config)},
    }


def _speculators_config(config: BlockConfig) -> dict[str, Any]:
    if AFTER_NORM in config.target_layers:
        raise ConfigError("the speculators layout cannot describe a state taken after the final norm; export this head as 'raw'")
    algorithm = _algorithm(config)
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.num_guesses, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        **_head_config(config),
        "architectures": [NAMES[algorithm] + ("DraftModel" if algorithm == "dflash2" else "Speculator")],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "sliding_window_non_causal": not (config.causal or config.causal_windows),  # vLLM reads it without a window, too
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.trained_for, "architectures": []},
        },
        "dflash_config": {"causal": _stored_causal(config), "input_embedding_scale": config.embedding_scale,
                          "output_multiplier": config.logit_scale, "final_logit_softcapping": config.softcap},
    }  # fmt: skip
