"""Block heads read from disk: DFlash and DSpark folders.

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

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_names import rename_parts
from outrider.models.heads.tensors import HeadTensors
from outrider.models.signals import AFTER_NORM

KIND = "a block head (DFlash, DFlash2, DSpark)"
LAYER = "layers.0.self_attn."
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers
MUSE = "muse_glimmer_assistant"  # transformers' own, in which blocks are never causal


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
    rename_parts(files)
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


class _Values:
    """The values of a config, wherever they stand: in `dflash_config`, at the top, or in `transformer_layer_config`."""

    def __init__(self, config: dict[str, Any], what: str) -> None:
        self._tables = [config.get("dflash_config") or {}, config, config.get("transformer_layer_config") or {}]
        self.what = what

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that has one."""
        found = (table[name] for name in names for table in self._tables if table.get(name) is not None)
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
    corrections = _corrections(files, hidden)
    named = any("DSpark" in str(name) for name in files.config.get("architectures") or [])
    is_dspark = named or bool(corrections["markov_rank"]) or corrections["confidence"]
    own = files.config.get("outrider") or {}
    num_layers = len({name.split(".")[1] for name in files.names if name.startswith("layers.")})
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=files.shape("layers.0.mlp.gate_proj.weight")[0],
        num_layers=num_layers,
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
        **_sights(values, num_layers),
        norm_eps=float(values.get("rms_norm_eps", default=1e-6)),
        rope=_rope(values),
        max_positions=int(values.get("max_position_embeddings", default=40960)),
        attention_bias=f"{LAYER}q_proj.bias" in files,
        qk_norm=norms,
        **corrections,
        **_dflash2(files, values, vocab_size),
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
    activation = values.get("hidden_act", default="silu")
    if activation != "silu":
        raise CapabilityError(f"{files.what()}: hidden_act '{str(activation)[:40]}' is not known, only 'silu'")
    projector = values.get("projector_type", default="dflash")
    if projector not in ("dflash", "dflash2"):
        raise CapabilityError(f"{files.what()}: projector_type '{projector}' is not known; 'dflash' and 'dflash2' are")


def _corrections(files: HeadTensors, hidden: int) -> dict[str, Any]:
    """What DSpark's Markov and confidence heads are, from their tensors."""
    markov, confidence = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
    return {
        "markov_rank": files.shape(markov)[1] if markov in files else 0,
        "markov_gated": "markov_head.gate_proj.weight" in files,
        "markov_recurrent": "markov_head.joint_proj.weight" in files,
        "confidence": confidence in files,
        "confidence_with_markov": confidence in files and files.shape(confidence)[1] > hidden,
    }


def _dflash2(files: HeadTensors, values: _Values, vocab_size: int) -> dict[str, Any]:
    """Sizes of the convolutions and the selector: a head has both or neither."""
    conv, selector = "layers.0.attention_conv.", "candidate_selector."
    if not any(name.startswith((conv, selector)) for name in files.names):
        return {}
    _, taps, hidden = files.shape(f"{conv}base_kernel")
    groups = files.shape(f"{conv}kernel_projection.weight")[0] // (2 * taps)
    top_k, block_size = int(values.need("selector_top_k")), int(values.need("block_size"))
    if not 1 <= top_k <= vocab_size:
        raise CheckpointError(f"{files.what()}: selector_top_k is {top_k}; this target has {vocab_size} tokens")
    if taps > block_size or not groups or hidden % groups:
        raise CheckpointError(
            f"{files.what()}: convolutions of {taps} taps and {groups} groups do not fit blocks of {block_size}, {hidden} wide"
        )
    return {
        "conv_taps": taps, "conv_group_size": hidden // groups, "selector_top_k": top_k,
        "selector_rank": files.shape(f"{selector}predecessor_codebook")[1],
    }  # fmt: skip


def _sights(values: _Values, num_layers: int) -> dict[str, Any]:
    """What tokens see in each layer. Unless a config says otherwise, blocks are causal in layers named sliding, as in vLLM."""
    is_muse, slide_all = values.get("model_type") == MUSE, bool(values.get("use_swa", default=False))
    kinds = list(values.get("layer_types", default=[SLIDING if is_muse else FULL] * num_layers))
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise CapabilityError(f"{values.what} has layers of type '{str(unknown[0])[:40]}'; known are {FULL} and {SLIDING}")
    if len(kinds) < num_layers:
        raise CheckpointError(f"{values.what}: config.json names the types of {len(kinds)} layers, the weights have {num_layers}")
    named = tuple(index for index, kind in enumerate(kinds[:num_layers]) if kind == SLIDING)
    layers = tuple(range(num_layers)) if slide_all and not named else named
    causal = values.get("is_causal", "causal", "causal_head")
    found: dict[str, Any] = {"causal": bool(causal), "window_layers": layers}
    if layers:
        bidirectional = values.get("sliding_window_non_causal", default=is_muse or not named)
        found |= {"window": _window(values, is_muse), "causal_windows": causal is None and not bidirectional}
    return found


def _window(values: _Values, is_muse: bool) -> int:
    window, block_size = values.get("swa_window_size", "sliding_window"), int(values.need("block_size"))
    if window is None:
        raise CheckpointError(f"{values.what}: config.json names sliding layers but no 'sliding_window'")
    if int(window) < block_size:
        raise CheckpointError(f"{values.what}: sliding_window {window} is smaller than a draft, block_size {block_size}")
    return int(window) + is_muse  # transformers' bidirectional mask reaches `window` positions back beside the token's own


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
