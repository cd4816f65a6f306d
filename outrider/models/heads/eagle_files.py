"""EAGLE and EAGLE-3 heads on disk: published folders in, the original layout out.

Sizes, biases, layers, the draft vocabulary and what is shared with the target are read off the
tensors; what tensors cannot say (rotary embedding, flags, which hidden states) comes from
config.json, flat as in the original layout or nested as in speculators'
(`transformer_layer_config`). P-EAGLE's mask token is `mask_token_id` there, `pard_token` or
`ptd_token_id` in flat ones; its tensor `mask_hidden` is of a feature before `fc`.

Two defaults that are not obvious. A missing `norm_before_residual` means False, as in the original
code and in speculators' own class (vLLM reads speculators' folders otherwise, so we always write
it). Missing layer ids mean the inputs of layers 2, L / 2 and L - 3 of the target's L. Layer ids at
the top count INPUTS, as in vLLM and `models/signals.py`; those in `eagle_config`, which SGLang
reads, count the layers' OUTPUTS.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from outrider.errors import CheckpointError
from outrider.models.heads.eagle import EagleConfig, EagleHead, Kind
from outrider.models.heads.names import Names
from outrider.models.heads.source import HeadSource, write_head
from outrider.models.signals import AFTER_NORM
from outrider.models.tokens.vocabulary import MASK_TOKENS, mask_token_in

KINDS: dict[Kind, str] = {"eagle": "an EAGLE head", "eagle3": "an EAGLE-3 head"}
NAMES = Names(
    aliases=(
        ("model.{rest}", "{rest}"),
        ("midlayer.{rest}", "layers.0.{rest}"),
        # SGLang's, after `midlayer`; their one norm before attention is a `hidden_norm`
        ("additional_layers.{layer}.hidden_norm.{rest}", "layers.{layer+1}.input_layernorm.{rest}"),
        ("additional_layers.{layer}.{rest}", "layers.{layer+1}.{rest}"),
    )
)
# speculators' and the other fields that name P-EAGLE's mask token
HEAD_MASK_TOKENS = (*MASK_TOKENS, "mask_token_id")
# the target's own, or computed
NO_INFORMATION = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
# rows by which tables of one vocabulary differ between checkpoints of one family
MAX_PADDING = 4096


@dataclass(frozen=True)
class TargetSizes:
    """The sizes that a head must fit."""

    hidden_size: int
    vocab_size: int  # width of the logits
    num_layers: int

    @classmethod
    def of(cls, config: Any, vocab_size: int | None = None) -> TargetSizes:
        """From a transformers config; `vocab_size` where the output head is known to be wider."""
        text = config.get_text_config()
        return cls(text.hidden_size, vocab_size or text.vocab_size, text.num_hidden_layers)


def default_signals(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads by default.

    In a target of fewer than seven layers the paper's coincide or do not exist; there these are
    spread over what there is.
    """
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, max(1, num_layers // 2), max(1, num_layers - 1)}))


def load_eagle(
    folder: Path | str, kind: Kind, target: TargetSizes, *, outline: bool = False
) -> EagleHead:
    """A head for this target, still to be bound to its tables; an outline has no weights (torch's
    meta device).

    Raises CheckpointError when it is none, or does not fit.
    """
    source = HeadSource.open(folder, NAMES, outline=outline)
    source.drop(
        [*NO_INFORMATION, *(name for name in source.names if name.endswith("rotary_emb.inv_freq"))]
    )
    _check_kind(source, kind)
    with source.making(KINDS[kind]):
        config = _config(source, kind, target)
        draft_ids = _draft_ids(source, config, target)
        with torch.device(source.device):
            head = EagleHead(config, draft_ids)
    given = {} if draft_ids is None else {"draft_ids": draft_ids}
    if head.mask_hidden is not None:
        given["mask_hidden"] = _mask_hidden(source, len(head.mask_hidden))
    if head.embed_tokens is not None:
        given["embed_tokens.weight"] = _table(source, head.embed_tokens.weight.shape)
    return source.fill(head, KINDS[kind], given)


def save_eagle(head: EagleHead, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The original layout, every choice written out; weights as they are, or in `dtype`. Raises
    OSError when the disk is full."""
    write_head(
        folder, "model.safetensors", raw_config(head), raw_tensors(head), dtype or head.dtype
    )


# ---------------------------------------------------------------- reading


def _check_kind(source: HeadSource, kind: Kind) -> None:
    missing = [
        name for name in ("fc.weight", "layers.0.self_attn.q_proj.weight") if name not in source
    ]
    if missing:
        held = ", ".join(sorted(source.names)[:6])
        raise CheckpointError(
            f"{source.what()} is not {KINDS[kind]}: it lacks '{missing[0]}' and has {held}"
        )
    actual: Kind = "eagle3" if "layers.0.hidden_norm.weight" in source else "eagle"
    if actual != kind:
        raise CheckpointError(
            f"{source.what()} is {KINDS[actual]}, not {KINDS[kind]}: use --drafter {actual}"
        )


def _config(source: HeadSource, kind: Kind, target: TargetSizes) -> EagleConfig:
    layer = source.config.get("transformer_layer_config") or source.config
    size, inputs = source.shape("fc.weight")
    signals = _signals(source.config, kind, target, source.what())
    _check_features(source, kind, target, inputs - (size if kind == "eagle" else 0), len(signals))
    own_embedding = "embed_tokens.weight" in source
    own_output = "lm_head.weight" in source
    if size != target.hidden_size and not (own_embedding and own_output):
        raise CheckpointError(
            f"{source.what()} is {size} wide and shares tables with its target, but this target "
            f"is {target.hidden_size} wide"
        )
    head_dim = layer.get("head_dim") or size // _number(source, layer, "num_attention_heads")
    heads, kv_heads = (
        source.shape(f"layers.0.self_attn.{name}_proj.weight")[0] // head_dim for name in "qk"
    )
    _check_flags(source)
    known = layer.get("max_position_embeddings")
    return EagleConfig(
        kind=kind,
        hidden_size=size,
        target_hidden_size=target.hidden_size,
        intermediate_size=source.shape("layers.0.mlp.gate_proj.weight")[0],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=source.shape("lm_head.weight")[0] if own_output else target.vocab_size,
        num_layers=1
        + max(
            int(match[1]) for name in source.names if (match := re.match(r"layers\.(\d+)\.", name))
        ),
        signals=signals,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        hidden_act=layer.get("hidden_act") or "silu",
        rope=_rope(layer),
        max_position_embeddings=int(known) if known else None,
        fc_bias="fc.bias" in source,
        attention_bias="layers.0.self_attn.q_proj.bias" in source,
        output_bias="layers.0.self_attn.o_proj.bias" in source,
        mlp_bias="layers.0.mlp.gate_proj.bias" in source,
        qk_norm="layers.0.self_attn.q_norm.weight" in source,
        norm_before_residual=bool(source.config.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in source,
        fc_norm="fc_norm.0.weight" in source,
        norm_output=bool(source.config.get("norm_output", False)),
        own_embedding=own_embedding,
        own_output=own_output,
        mask_token=_mask_token(source, target.vocab_size),
        logit_scale=float(source.config.get("logit_scale", 1.0)),
        trained_for=source.trained_for,
    )


def _signals(config: dict[str, Any], kind: Kind, target: TargetSizes, what: str) -> tuple[int, ...]:
    if kind == "eagle":
        return (AFTER_NORM,)
    inputs, outputs = (
        table.get("eagle_aux_hidden_state_layer_ids") or ()
        for table in (config, config.get("eagle_config") or {})
    )
    signals = (
        tuple(map(int, inputs))
        or tuple(int(layer) + 1 for layer in outputs)
        or default_signals(target.num_layers)
    )
    wrong = [layer for layer in signals if not 0 <= layer <= target.num_layers]
    if wrong:
        raise CheckpointError(
            f"{what} reads the hidden states entering layers {list(signals)}, but this target has "
            f"{target.num_layers} layers: "
            "it was trained for another one"
        )
    return signals


def _check_features(
    source: HeadSource, kind: Kind, target: TargetSizes, width: int, count: int
) -> None:
    """`fc.weight` must read as many hidden states as are named, of this target's width."""
    if width != count * target.hidden_size:
        rows, columns = source.shape("fc.weight")
        expected = count * target.hidden_size + (rows if kind == "eagle" else 0)
        raise CheckpointError(
            f"{source.what()}: tensor 'fc.weight' has shape [{rows}, {columns}], expected "
            f"[{rows}, {expected}] for {count} "
            f"hidden states of {target.hidden_size} numbers each: it was trained for another target"
        )


def _check_flags(source: HeadSource) -> None:
    """Check that the tensors which config.json promises are there."""
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if source.config.get(flag) and tensor not in source:
            raise CheckpointError(
                f"{source.what()}: config.json says {flag}, but tensor '{tensor}' is missing"
            )


def _mask_token(source: HeadSource, vocab_size: int) -> int | None:
    """P-EAGLE's mask token, which `mask_hidden` is the feature of: either both are there or none."""
    token = mask_token_in(source.config, vocab_size, source.what(), HEAD_MASK_TOKENS)
    if (token is None) == ("mask_hidden" not in source):
        return token
    if token is None:
        raise CheckpointError(
            f"{source.what()} has a tensor 'mask_hidden', as P-EAGLE, but config.json names no mask "
            f"token ({', '.join(HEAD_MASK_TOKENS)})"
        )
    raise CheckpointError(
        f"{source.what()}: config.json names mask token {token}, as P-EAGLE, but tensor "
        "'mask_hidden' is missing"
    )


def _mask_hidden(source: HeadSource, size: int) -> Tensor:
    """P-EAGLE's feature of masks, (size,): in files with one or two leading dimensions of 1."""
    shape = source.shape("mask_hidden")
    if shape[-1] != size or math.prod(shape) != size:
        return source.take("mask_hidden", size)  # says what is wrong
    return source.take("mask_hidden", *shape).flatten()


def _draft_ids(source: HeadSource, config: EagleConfig, target: TargetSizes) -> Tensor | None:
    """The target's ids of the tokens the head knows: d2t holds target id - own id, t2d marks them."""
    size = config.draft_vocab_size
    vocab = target.vocab_size
    offsets = source.take("d2t", size) if "d2t" in source else None
    mask = source.take("t2d", source.shape("t2d")[0]).bool() if "t2d" in source else None
    if offsets is not None:
        ids = torch.arange(size) + offsets.long()
    elif mask is not None and int(mask.sum()) == size:
        ids = mask.nonzero()[:, 0]
    elif size == vocab:
        return None
    elif vocab - MAX_PADDING < size < vocab and _declared_vocab(source) == size:
        return torch.arange(size)  # the same vocabulary, but the target's table is padded
    else:
        raise CheckpointError(
            f"{source.what()} knows {size} tokens and has no 'd2t' that says which of the "
            f"target's {vocab}"
        )
    if len(ids.unique()) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        highest = int(ids.max())
        raise CheckpointError(
            f"{source.what()}: 'd2t' names tokens twice, or beyond the target's {vocab}: highest "
            f"{highest}"
        )
    if (
        mask is not None
        and offsets is not None
        and not (len(mask) > int(ids.max()) and mask[ids].all() and mask.sum() == size)
    ):
        raise CheckpointError(f"{source.what()}: 't2d' and 'd2t' name different tokens")
    return None if size == vocab and torch.equal(ids, torch.arange(size)) else ids


def _declared_vocab(source: HeadSource) -> int | None:
    """The size of the target's vocabulary as the head's config has it."""
    return (source.config.get("transformer_layer_config") or source.config).get("vocab_size")


def _table(source: HeadSource, shape: torch.Size) -> Tensor:
    """The table of embeddings in this shape; in the files it may be padded to another length."""
    name = "embed_tokens.weight"
    rows = source.shape("embed_tokens.weight")[0]
    if abs(rows - shape[0]) >= MAX_PADDING:
        return source.take(name, *shape)  # says what is wrong
    table = source.take(name, rows, shape[1])[: shape[0]]
    return F.pad(table, (0, 0, 0, shape[0] - len(table)))


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding in transformers' present form, from its present or its earlier fields.
    Of the three positions that tokens have besides pictures, texts need one."""
    known = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")
    rope = dict(
        LlamaConfig(
            **{name: layer[name] for name in known if layer.get(name) is not None}
        ).rope_parameters
    )
    return {**rope, "rope_type": "default"} if rope["rope_type"] == "mrope" else rope


def _number(source: HeadSource, layer: dict[str, Any], name: str) -> int:
    if not isinstance(layer.get(name), int) or layer[name] < 1:
        raise CheckpointError(
            f"{source.what()}: config.json must say {name}, got {layer.get(name)}"
        )
    return layer[name]


# ---------------------------------------------------------------- writing


def layer_config(head: EagleHead) -> dict[str, Any]:
    """The layer's settings that every layout states, under Llama's names."""
    config = head.config
    rope = dict(config.rope)
    theta = rope.pop("rope_theta", 10000.0)
    kind = rope.get("rope_type", "default")
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        # Llama's word for all four; EAGLE's for the other three:
        "attention_bias": config.output_bias,
        **({"qkv_bias": True} if config.attention_bias else {}),
        "mlp_bias": config.mlp_bias,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        **(
            {"max_position_embeddings": config.max_position_embeddings}
            if config.max_position_embeddings
            else {}
        ),
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }


def flags(head: EagleHead) -> dict[str, Any]:
    """Every choice of an EAGLE-3 head, so that no reader's default decides."""
    config = head.config
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.signals),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **({} if config.mask_token is None else {"pard_token": config.mask_token}),
    }


def raw_config(head: EagleHead) -> dict[str, Any]:
    """config.json of the original layout."""
    config = head.config
    fields = {
        "logit_scale": config.logit_scale,
        "outrider": {"head": config.kind, "target": config.trained_for},
    }
    if config.kind == "eagle":
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            "bias": config.fc_bias,
            **layer_config(head),
            **fields,
        }
    nested = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.signals],
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(head),
        **flags(head),
        "eagle_config": nested,
        **fields,
    }


def head_tensors(head: EagleHead) -> dict[str, Tensor]:
    """The head's own tensors and its draft vocabulary, by the names `layers.N`."""
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_ids"}
    if head.draft_ids is not None:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(
            0, ids, True
        )
    return tensors


def raw_tensors(head: EagleHead) -> dict[str, Tensor]:
    """By the names of the original layout, which calls EAGLE-3's one layer `midlayer`."""
    rename = head.config.kind == "eagle3" and head.config.num_layers == 1
    return {
        name.replace("layers.0.", "midlayer.", 1)
        if rename and name.startswith("layers.0.")
        else name: tensor
        for name, tensor in head_tensors(head).items()
    }
