"""Block heads on disk: DFlash and DSpark folders, read and written.

What a head is made of is read off its tensors (sizes, layers, Markov and confidence heads, own
tables), since architecture names differ per engine; what tensors cannot say comes from config.json,
in the raw form (`dflash_config`) or speculators' nested one (`transformer_layer_config`,
`aux_hidden_state_layer_ids`). What we cannot honour is refused by name.

Published `target_layer_ids` count layer OUTPUTS, -1 the embeddings (transformers' hidden_states[id
+ 1], whose last entry is after the final norm); speculators' `aux_hidden_state_layer_ids` count
layer INPUTS, as `models/signals.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError, ConfigError, did_you_mean
from outrider.models.derived.derive import weight_of
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.names import Names
from outrider.models.heads.source import HeadSource, write_head
from outrider.models.signals import AFTER_NORM

KIND = "a block head (DFlash, DFlash2, DSpark)"
LAYER = "layers.0.self_attn."
NAMES = Names(
    aliases=(
        ("model.{rest}", "{rest}"),
        ("midlayer.{rest}", "layers.0.{rest}"),
        (
            "candidate_selector.predecessor_codebook.weight",
            "candidate_selector.predecessor_codebook",
        ),
        ("candidate_selector.successor_codebook.weight", "candidate_selector.successor_codebook"),
        ("encoder.fc.{rest}", "fc.{rest}"),  # transformers' MuseGlimmerAssistantModel
        ("encoder.output_norm_enc.{rest}", "hidden_norm.{rest}"),
    )
)
# types of layers
FULL = "full_attention"
SLIDING = "sliding_attention"
LAYOUTS = ("raw", "speculators")
TITLES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
MUSE = "muse_glimmer_assistant"  # transformers' own, in which blocks are never causal


def load_block(
    folder: Path | str,
    target_hidden: int,
    vocab_size: int,
    num_target_layers: int,
    *,
    outline: bool = False,
) -> BlockHead:
    """A head for a target with these sizes, still to be bound to its tables; an outline has no
    weights (torch's meta device).

    Raises CheckpointError when it does not fit the target, CapabilityError when it has a part that
    we do not know.
    """
    source = HeadSource.open(folder, NAMES, outline=outline)
    source.drop(["rotary_emb.inv_freq", "t2d"])
    if "fc.weight" not in source or f"{LAYER}q_proj.weight" not in source:
        raise CheckpointError(
            f"{source.what()} is no {KIND.removeprefix('a ')}: it has "
            f"{', '.join(sorted(source.names)[:6])}"
        )
    with source.making(KIND):
        token_ids = _token_ids(source, vocab_size)
        config = _config(
            source,
            target_hidden,
            vocab_size,
            num_target_layers,
            None if token_ids is None else len(token_ids),
        )
        if config.num_guesses < 1:
            raise ValueError(f"block_size {config.block_size} leaves nothing to guess")
        with torch.device(source.device):
            head = BlockHead(config, token_ids)
    return source.fill(head, KIND)


class _Values:
    """The values of a config, wherever they stand: in `dflash_config`, at the top, or in
    `transformer_layer_config`."""

    def __init__(self, config: dict[str, Any], what: str) -> None:
        self._tables = [
            config.get("dflash_config") or {},
            config,
            config.get("transformer_layer_config") or {},
        ]
        self.what = what

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that has one."""
        matches = (
            table[name] for name in names for table in self._tables if table.get(name) is not None
        )
        return next(matches, default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.what}: config.json does not say '{name}', which {KIND} needs"
            )
        return value


def _config(
    source: HeadSource,
    target_hidden: int,
    vocab_size: int,
    num_target_layers: int,
    draft_vocab: int | None,
) -> BlockConfig:
    values = _Values(source.config, source.what())
    _refuse_unknown(source, values)
    hidden, width = source.shape("fc.weight")
    layers = _target_layers(values, num_target_layers)
    if width != len(layers) * target_hidden:
        raise CheckpointError(
            f"{source.what()}: tensor 'fc.weight' reads {width} numbers, but {len(layers)} layers "
            "of this target have "
            f"{len(layers) * target_hidden} ({target_hidden} each)"
        )
    own_embedding = "embed_tokens.weight" in source
    if hidden != target_hidden and not own_embedding:
        raise CheckpointError(
            f"{source.what()} is {hidden} wide and has no embedding of its own; the target's is "
            f"{target_hidden} wide"
        )
    norms = f"{LAYER}q_norm.weight" in source
    num_queries = source.shape(f"{LAYER}q_proj.weight")[0]
    asked = values.get("head_dim") or hidden // int(values.get("num_attention_heads", default=1))
    head_dim = source.shape(f"{LAYER}q_norm.weight")[0] if norms else int(asked)
    corrections = _corrections(source, hidden)
    named = any("DSpark" in str(name) for name in source.config.get("architectures") or [])
    is_dspark = named or bool(corrections["markov_rank"]) or corrections["confidence"]
    settings = source.config.get("outrider") or {}
    num_layers = len({name.split(".")[1] for name in source.names if name.startswith("layers.")})
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=source.shape("layers.0.mlp.gate_proj.weight")[0],
        num_layers=num_layers,
        num_heads=num_queries // head_dim,
        num_kv_heads=source.shape(f"{LAYER}k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocab_size=vocab_size,
        block_size=int(values.need("block_size")),
        target_hidden_size=target_hidden,
        target_layers=layers,
        num_target_layers=num_target_layers,
        mask_token_id=_mask_token(source, values, vocab_size),
        sample_from_anchor=bool(values.get("sample_from_anchor", default=is_dspark)),
        **_sights(values, num_layers),
        norm_eps=float(values.get("rms_norm_eps", default=1e-6)),
        rope=_rope(values),
        max_positions=int(values.get("max_position_embeddings", default=40960)),
        attention_bias=f"{LAYER}q_proj.bias" in source,
        qk_norm=norms,
        **corrections,
        **_dflash2(source, values, vocab_size),
        draft_vocab_size=draft_vocab,
        own_embedding=own_embedding,
        own_output="lm_head.weight" in source,
        embedding_scale=float(values.get("input_embedding_scale", default=1.0)),
        logit_scale=float(values.get("output_multiplier", default=1.0)),
        softcap=values.get("final_logit_softcapping"),
        temperatures=tuple(float(value) for value in settings.get("temperatures", ())),
        trained_for=source.trained_for,
    )


def _refuse_unknown(source: HeadSource, values: _Values) -> None:
    activation = values.get("hidden_act", default="silu")
    if activation != "silu":
        raise CapabilityError(
            f"{source.what()}: hidden_act '{str(activation)[:40]}' is not known, only 'silu'"
        )
    projector = values.get("projector_type", default="dflash")
    if projector not in ("dflash", "dflash2"):
        raise CapabilityError(
            f"{source.what()}: projector_type '{projector}' is not known; 'dflash' and 'dflash2' "
            "are"
        )


def _corrections(source: HeadSource, hidden: int) -> dict[str, Any]:
    """The settings of DSpark's Markov and confidence heads, from the shapes of their tensors."""
    markov = "markov_head.markov_w1.weight"
    confidence = "confidence_head.proj.weight"
    return {
        "markov_rank": source.shape(markov)[1] if markov in source else 0,
        "markov_gated": "markov_head.gate_proj.weight" in source,
        "markov_recurrent": "markov_head.joint_proj.weight" in source,
        "confidence": confidence in source,
        "confidence_with_markov": confidence in source and source.shape(confidence)[1] > hidden,
    }


def _dflash2(source: HeadSource, values: _Values, vocab_size: int) -> dict[str, Any]:
    """Sizes of the convolutions and the selector: a head has both or neither."""
    conv = "layers.0.attention_conv."
    selector = "candidate_selector."
    if not any(name.startswith((conv, selector)) for name in source.names):
        return {}
    _, taps, hidden = source.shape(f"{conv}base_kernel")
    groups = source.shape(f"{conv}kernel_projection.weight")[0] // (2 * taps)
    top_k = int(values.need("selector_top_k"))
    block_size = int(values.need("block_size"))
    if not 1 <= top_k <= vocab_size:
        raise CheckpointError(
            f"{source.what()}: selector_top_k is {top_k}; this target has {vocab_size} tokens"
        )
    if taps > block_size or not groups or hidden % groups:
        raise CheckpointError(
            f"{source.what()}: convolutions of {taps} taps and {groups} groups do not fit blocks "
            f"of {block_size}, {hidden} wide"
        )
    return {
        "conv_taps": taps,
        "conv_group_size": hidden // groups,
        "selector_top_k": top_k,
        "selector_rank": source.shape(f"{selector}predecessor_codebook")[1],
    }


def _sights(values: _Values, num_layers: int) -> dict[str, Any]:
    """The attention pattern of each layer. Unless a config says otherwise, blocks are causal in
    layers named sliding, as in vLLM."""
    is_muse = values.get("model_type") == MUSE
    slide_all = bool(values.get("use_swa", default=False))
    kinds = list(values.get("layer_types", default=[SLIDING if is_muse else FULL] * num_layers))
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise CapabilityError(
            f"{values.what} has layers of type '{str(unknown[0])[:40]}'; known are {FULL} and "
            f"{SLIDING}"
        )
    if len(kinds) < num_layers:
        raise CheckpointError(
            f"{values.what}: config.json names the types of {len(kinds)} layers, the weights have "
            f"{num_layers}"
        )
    named = tuple(index for index, kind in enumerate(kinds[:num_layers]) if kind == SLIDING)
    layers = tuple(range(num_layers)) if slide_all and not named else named
    causal = values.get("is_causal", "causal", "causal_head")
    sight: dict[str, Any] = {"causal": bool(causal), "window_layers": layers}
    if layers:
        bidirectional = values.get("sliding_window_non_causal", default=is_muse or not named)
        sight |= {
            "window": _window(values, is_muse),
            "causal_windows": causal is None and not bidirectional,
        }
    return sight


def _window(values: _Values, is_muse: bool) -> int:
    window = values.get("swa_window_size", "sliding_window")
    block_size = int(values.need("block_size"))
    if window is None:
        raise CheckpointError(
            f"{values.what}: config.json names sliding layers but no 'sliding_window'"
        )
    if int(window) < block_size:
        raise CheckpointError(
            f"{values.what}: sliding_window {window} is smaller than a draft, block_size "
            f"{block_size}"
        )
    # transformers' bidirectional mask reaches `window` positions back besides the token's own
    return int(window) + is_muse


def _target_layers(values: _Values, num_layers: int) -> tuple[int, ...]:
    outputs = values.get("target_layer_ids")
    inputs = values.get("aux_hidden_state_layer_ids")
    if outputs is not None:
        keys = [int(layer) + 1 for layer in outputs]
        # transformers' last entry is after the norm
        keys = [AFTER_NORM if key == num_layers else key for key in keys]
    elif inputs is not None:
        keys = [int(layer) for layer in inputs]
    else:
        raise CheckpointError(
            f"{values.what}: config.json names no 'target_layer_ids', so it is no "
            f"{KIND.removeprefix('a ')}"
        )
    trained_on = int(values.get("num_target_layers", default=num_layers))
    wrong = [key for key in keys if not AFTER_NORM <= key <= num_layers]
    if wrong or trained_on != num_layers:
        raise CheckpointError(
            f"{values.what} reads layers {', '.join(map(str, outputs or inputs))} of a target "
            f"with {trained_on} layers; this one "
            f"has {num_layers}. It was trained for another target."
        )
    return tuple(keys)


def _mask_token(source: HeadSource, values: _Values, vocab_size: int) -> int:
    token = int(values.need("mask_token_id"))
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{source.what()}: mask_token_id {token} is no token of this target, which has "
            f"{vocab_size}"
        )
    return token


def _rope(values: _Values) -> dict[str, Any]:
    rope = values.get("rope_parameters")
    if rope is not None:
        return dict(rope)
    scaling = dict(values.get("rope_scaling", default={}))
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {
        "rope_type": kind,
        "rope_theta": float(values.get("rope_theta", default=10000.0)),
        **scaling,
    }


def _token_ids(source: HeadSource, vocab_size: int) -> Tensor | None:
    """d2t holds, for every draft token, how far the target's id is from its own."""
    if "d2t" not in source:
        return None
    size = source.shape("d2t")[0]
    ids = source.take("d2t", size).long() + torch.arange(size)
    if size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CheckpointError(
            f"{source.what()}: d2t names token {int(ids.max())}, the target has {vocab_size} tokens"
        )
    if "lm_head.weight" not in source:
        raise CheckpointError(
            f"{source.what()} has a reduced vocabulary (d2t) but no 'lm_head.weight' for it"
        )
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids


# ---------------------------------------------------------------- writing


def save_block(head: BlockHead, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The raw layout; weights as they are, or in `dtype`. Raises OSError when the disk is full."""
    write_head(folder, "model.safetensors", _raw_config(head.config), _tensors(head), dtype)


def export_block(head: BlockHead, folder: Path, layout: str, *, tables: bool = False) -> None:
    """The head as other engines read it: "raw" or "speculators". `tables`: with the target's
    embedding and output layer, for engines that do not share them. Raises ConfigError for another
    layout."""
    if layout not in LAYOUTS:
        raise ConfigError(
            f"unknown layout '{layout}' of block heads.{did_you_mean(layout, LAYOUTS)}"
        )
    config = _raw_config(head.config) if layout == "raw" else _speculators_config(head.config)
    tensors = _tensors(head)
    if tables:
        embedding, output = head.tables()
        tensors |= {"embed_tokens.weight": embedding.weight, "lm_head.weight": weight_of(output)}
    write_head(folder, "model.safetensors", config, tensors)


def _tensors(head: BlockHead) -> dict[str, Tensor]:
    tensors = dict(head.state_dict())
    if head.token_ids is not None:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.token_ids.cpu()] = True
        tensors |= {"d2t": head.token_ids.cpu() - torch.arange(len(head.token_ids)), "t2d": known}
    return tensors


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
        "layer_types": [
            SLIDING if layer in config.window_layers else FULL for layer in range(config.num_layers)
        ],
        **(
            {"sliding_window": config.window, "use_sliding_window": True}
            if config.window_layers
            else {}
        ),
        "tie_word_embeddings": False,
    }


def _stored_causal(config: BlockConfig) -> bool | None:
    """None: the layers' types say it."""
    return None if config.causal_windows and not config.causal else config.causal


def _algorithm(config: BlockConfig) -> str:
    if config.selector_rank:
        return "dflash2"
    return "dspark" if config.markov_rank or config.confidence else "dflash"


def _dflash2_config(config: BlockConfig) -> dict[str, Any]:
    if not config.selector_rank:
        return {}
    return {
        "conv_kernel_size": config.conv_taps,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }


def _head_config(config: BlockConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "rnn"
        if config.markov_recurrent
        else "gated"
        if config.markov_gated
        else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_dflash2_config(config),
        "outrider": {
            "head": "block",
            "target": config.trained_for,
            "temperatures": list(config.temperatures),
        },
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
    # only the other numbering has a word for it
    before_norm = config.num_target_layers in config.target_layers
    layers = (
        {"aux_hidden_state_layer_ids": list(config.target_layers)}
        if before_norm
        else {
            "target_layer_ids": [
                (config.num_target_layers if key == AFTER_NORM else key) - 1
                for key in config.target_layers
            ]
        }
    )
    return {
        **_layer_config(config),
        **_head_config(config),
        "architectures": [f"{TITLES[_algorithm(config)]}DraftModel"],
        "base_model_name_or_path": config.trained_for,
        **layers,
        "dflash_config": {**flags, **layers, **_dflash2_config(config)},
    }


def _speculators_config(config: BlockConfig) -> dict[str, Any]:
    if AFTER_NORM in config.target_layers:
        raise ConfigError(
            "the speculators layout cannot describe a state taken after the final norm; export "
            "this head as 'raw'"
        )
    algorithm = _algorithm(config)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_guesses,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **_head_config(config),
        "architectures": [
            TITLES[algorithm] + ("DraftModel" if algorithm == "dflash2" else "Speculator")
        ],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        # vLLM reads it without a window, too
        "sliding_window_non_causal": not (config.causal or config.causal_windows),
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.trained_for, "architectures": []},
        },
        "dflash_config": {
            "causal": _stored_causal(config),
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.logit_scale,
            "final_logit_softcapping": config.softcap,
        },
    }
