"""Block heads on disk: DFlash and DSpark folders in, the same out.

What a head is made of is read off its tensors (sizes, layers, Markov and confidence heads, own tables), since architecture names
differ per engine; what tensors cannot say comes from config.json, in the raw form (`dflash_config`) or speculators' nested one
(`transformer_layer_config`, `aux_hidden_state_layer_ids`). What we cannot honour is refused by name.

Published `target_layer_ids` count layer OUTPUTS, -1 the embeddings (transformers' hidden_states[id + 1], whose last entry is
behind the final norm); speculators' `aux_hidden_state_layer_ids` count layer INPUTS, as `models/signals.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError, ConfigError, did_you_mean
from outrider.models.derive import weight_of
from outrider.models.heads.block import BlockConfig, BlockHead
from outrider.models.heads.tensors import HeadTensors, write_head
from outrider.models.signals import AFTER_NORM

KIND = "a block head (DFlash, DSpark)"
LAYER = "layers.0.self_attn."
LAYOUTS = ("raw", "speculators")


def load_block(folder: Path | str, target_hidden: int, vocab_size: int, num_target_layers: int) -> BlockHead:
    """A head for a target with these sizes, still to be bound to its tables. Raises CheckpointError when it does not fit the
    target, CapabilityError when it has a part that we do not know."""
    head, weights = _fitted(HeadTensors.read(folder), target_hidden, vocab_size, num_target_layers, "cpu")
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def outline_block(folder: Path | str, target_hidden: int, vocab_size: int, num_target_layers: int) -> BlockHead:
    """A head without its weights (on torch's meta device): what it is and how large, before anything is loaded. Raises as
    `load_block`."""
    return _fitted(HeadTensors.outline(folder), target_hidden, vocab_size, num_target_layers, "meta")[0]


def _fitted(
    files: HeadTensors, target_hidden: int, vocab_size: int, num_target_layers: int, device: str
) -> tuple[BlockHead, dict[str, Tensor]]:
    """A fresh head of these files on `device`, and what belongs into it."""
    files.rename("model.")
    files.drop(["rotary_emb.inv_freq", "t2d"])
    if "fc.weight" not in files or f"{LAYER}q_proj.weight" not in files:
        raise CheckpointError(f"{files.what()} is no {KIND.removeprefix('a ')}: it has {', '.join(sorted(files.names)[:6])}")
    with files.making(KIND):
        token_ids = _token_ids(files, vocab_size)
        config = _config(files, target_hidden, vocab_size, num_target_layers, None if token_ids is None else len(token_ids))
        if config.num_guesses < 1:
            raise ValueError(f"block_size {config.block_size} leaves nothing to guess")
        with torch.device(device):
            head = BlockHead(config, token_ids)
    weights = {name: files.take(name, *tensor.shape) for name, tensor in head.state_dict().items()}
    files.finish(KIND)
    return head, weights


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


# ---------------------------------------------------------------- reading


class _Values:
    """The values of a config, wherever they stand: in `dflash_config`, at the top, or in `transformer_layer_config`."""

    def __init__(self, config: dict[str, Any], what: str) -> None:
        self._places = [config.get("dflash_config") or {}, config, config.get("transformer_layer_config") or {}]
        self.what = what

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that has one."""
        found = (place[name] for name in names for place in self._places if place.get(name) is not None)
        return next(found, default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.what}: config.json does not say '{name}', which {KIND} needs")
        return value


def _config(
    files: HeadTensors, target_hidden: int, vocab_size: int, num_target_layers: int, draft_vocab: int | None
) -> BlockConfig:
    values = _Values(files.config, files.what())
    _refuse_unknown(files, values)
    hidden, width = files.shape("fc.weight")
    layers = _target_layers(values, num_target_layers)
    if width != len(layers) * target_hidden:
        raise CheckpointError(
            f"{files.what()}: tensor 'fc.weight' reads {width} numbers, but {len(layers)} layers of this target have "
            f"{len(layers) * target_hidden} ({target_hidden} each)"
        )
    own_embedding = "embed_tokens.weight" in files
    if hidden != target_hidden and not own_embedding:
        raise CheckpointError(
            f"{files.what()} is {hidden} wide and has no embedding of its own; the target's is {target_hidden} wide"
        )
    norms = f"{LAYER}q_norm.weight" in files
    num_queries = files.shape(f"{LAYER}q_proj.weight")[0]
    asked = values.get("head_dim") or hidden // int(values.get("num_attention_heads", default=1))
    head_dim = files.shape(f"{LAYER}q_norm.weight")[0] if norms else int(asked)
    markov = "markov_head.markov_w1.weight" in files
    rank = files.shape("markov_head.markov_w1.weight")[1] if markov else 0
    confidence = "confidence_head.proj.weight" in files
    is_dspark = markov or confidence or any("DSpark" in str(name) for name in files.config.get("architectures") or [])
    own = files.config.get("outrider") or {}
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=files.shape("layers.0.mlp.gate_proj.weight")[0],
        num_layers=len({name.split(".")[1] for name in files.names if name.startswith("layers.")}),
        num_heads=num_queries // head_dim,
        num_kv_heads=files.shape(f"{LAYER}k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocab_size=vocab_size,
        block_size=int(values.need("block_size")),
        target_hidden_size=target_hidden,
        target_layers=layers,
        num_target_layers=num_target_layers,
        mask_token_id=_mask_token(files, values, vocab_size),
        sample_from_anchor=bool(values.get("sample_from_anchor", default=is_dspark)),
        causal=bool(values.get("causal", "is_causal", default=False)),
        norm_eps=float(values.get("rms_norm_eps", default=1e-6)),
        rope=_rope(values),
        max_positions=int(values.get("max_position_embeddings", default=40960)),
        attention_bias=f"{LAYER}q_proj.bias" in files,
        qk_norm=norms,
        markov_rank=rank,
        markov_gated="markov_head.gate_proj.weight" in files,
        confidence=confidence,
        confidence_with_markov=confidence and files.shape("confidence_head.proj.weight")[1] > hidden,
        draft_vocab_size=draft_vocab,
        own_embedding=own_embedding,
        own_output="lm_head.weight" in files,
        embedding_scale=float(values.get("input_embedding_scale", default=1.0)),
        logit_scale=float(values.get("output_multiplier", default=1.0)),
        softcap=values.get("final_logit_softcapping"),
        temperatures=tuple(float(value) for value in own.get("temperatures", ())),
        trained_for=files.trained_for,
    )


def _refuse_unknown(files: HeadTensors, values: _Values) -> None:
    if "markov_head.joint_proj.weight" in files:
        raise CapabilityError(f"{files.what()}: its Markov head is of type 'rnn'; known are 'vanilla' and 'gated'")
    sliding = [kind for kind in values.get("layer_types", default=[]) if kind != "full_attention"]
    if sliding:
        raise CapabilityError(f"{files.what()} has layers of type '{sliding[0]}'; only full attention is known")
    activation = values.get("hidden_act", default="silu")
    if activation != "silu":
        raise CapabilityError(f"{files.what()}: hidden_act '{activation}' is not known, only 'silu'")
    if values.get("projector_type", default="dflash") != "dflash":
        raise CapabilityError(f"{files.what()}: projector_type '{values.get('projector_type')}' is not known, only 'dflash'")


def _target_layers(values: _Values, num_layers: int) -> tuple[int, ...]:
    outputs, inputs = values.get("target_layer_ids"), values.get("aux_hidden_state_layer_ids")
    if outputs is not None:
        keys = [int(layer) + 1 for layer in outputs]
        keys = [AFTER_NORM if key == num_layers else key for key in keys]  # transformers' last entry is behind the norm
    elif inputs is not None:
        keys = [int(layer) for layer in inputs]
    else:
        raise CheckpointError(f"{values.what}: config.json names no 'target_layer_ids', so it is no {KIND.removeprefix('a ')}")
    trained_on = int(values.get("num_target_layers", default=num_layers))
    wrong = [key for key in keys if not AFTER_NORM <= key <= num_layers]
    if wrong or trained_on != num_layers:
        raise CheckpointError(
            f"{values.what} reads layers {', '.join(map(str, outputs or inputs))} of a target with {trained_on} layers; this one "
            f"has {num_layers}. It was trained for another target."
        )
    return tuple(keys)


def _mask_token(files: HeadTensors, values: _Values, vocab_size: int) -> int:
    token = int(values.need("mask_token_id"))
    if not 0 <= token < vocab_size:
        raise CheckpointError(f"{files.what()}: mask_token_id {token} is no token of this target, which has {vocab_size}")
    return token


def _rope(values: _Values) -> dict[str, Any]:
    found = values.get("rope_parameters")
    if found is not None:
        return dict(found)
    scaling = dict(values.get("rope_scaling", default={}))
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": float(values.get("rope_theta", default=10000.0)), **scaling}


def _token_ids(files: HeadTensors, vocab_size: int) -> Tensor | None:
    """d2t holds, for every draft token, how far the target's id is from its own."""
    if "d2t" not in files:
        return None
    size = files.shape("d2t")[0]
    ids = files.take("d2t", size).long() + torch.arange(size)
    if size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CheckpointError(f"{files.what()}: d2t names token {int(ids.max())}, the target has {vocab_size} tokens")
    if "lm_head.weight" not in files:
        raise CheckpointError(f"{files.what()} has a reduced vocabulary (d2t) but no 'lm_head.weight' for it")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids


# ---------------------------------------------------------------- writing


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
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
    }


def _head_config(config: BlockConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "gated" if config.markov_gated else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "outrider": {"head": "block", "target": config.trained_for, "temperatures": list(config.temperatures)},
    }


def _raw_config(config: BlockConfig) -> dict[str, Any]:
    flags = {
        "mask_token_id": config.mask_token_id,
        "causal": config.causal,
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.softcap,
    }
    before_norm = config.num_target_layers in config.target_layers  # only the other numbering has a word for it
    layers = {"aux_hidden_state_layer_ids": list(config.target_layers)} if before_norm else {
        "target_layer_ids": [(config.num_target_layers if key == AFTER_NORM else key) - 1 for key in config.target_layers]
    }  # fmt: skip
    is_dspark = bool(config.markov_rank) or config.confidence
    return {
        **_layer_config(config),
        **_head_config(config),
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "base_model_name_or_path": config.trained_for,
        **layers,
        "dflash_config": {**flags, **layers},
    }


def _speculators_config(config: BlockConfig) -> dict[str, Any]:
    if AFTER_NORM in config.target_layers:
        raise ConfigError("the speculators layout cannot describe a state taken after the final norm; export this head as 'raw'")
    algorithm = "dspark" if config.markov_rank or config.confidence else "dflash"
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.num_guesses, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        **_head_config(config),
        "architectures": ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "sliding_window_non_causal": not config.causal,  # vLLM reads here what its masks see, without a window, too
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.trained_for, "architectures": []},
        },
        "dflash_config": {"causal": config.causal, "input_embedding_scale": config.embedding_scale,
                          "output_multiplier": config.logit_scale, "final_logit_softcapping": config.softcap},
    }  # fmt: skip

