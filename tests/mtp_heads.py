"""Tiny random checkpoints with an MTP head, in every published layout, and what such a head drafts, worked out plainly.

A head's decoder layer is one of a second random model of the target's family, so its tensors have the names that checkpoints give
them. `MtpReference` applies it without any cache: each draft token is read off a pass over the whole text.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.runtime.rotary import positions_for

MTP_LAYOUTS = ("qwen", "deepseek", "mimo", "ernie", "megatron")  # of one layer like the target's
WEIGHTS = "model.safetensors"
SHIPPED = {  # by family, the layout of the head in its checkpoints, where that is read
    "bailing_hybrid": "deepseek", "deepseek_v3": "deepseek", "deepseek_v32": "deepseek", "ernie4_5_moe": "ernie",
    "exaone_moe": "qwen", "glm4_moe": "deepseek", "glm4_moe_lite": "deepseek", "glm_moe_dsa": "deepseek", "hy_v3": "deepseek",
    "inkling_text": "inkling", "longcat_flash": "megatron", "mellum": "qwen", "mimo_v2_flash": "megatron",
    "minimax_m3_vl_text": "megatron", "nemotron_h": "nemotron", "qwen3_5_moe_text": "qwen", "qwen3_5_text": "qwen",
    "qwen3_next": "qwen", "qwen4_exp_text": "streams",
}  # fmt: skip


@dataclass
class MtpReference:
    """A head as the papers write it down, for one text at a time."""

    target: Any
    layers: list[dict[str, Any]]  # blocks, rotary, embed_norm, hidden_norm, projection, norm
    layout: str

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """The greedy tokens behind a text, and the logits (count, V) they are the best of."""
        model = self.target.get_decoder()
        heard: list[Tensor] = []
        hook = model.layers[-1].register_forward_hook(lambda part, args, made: heard.append(_first(made)))
        normed = model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        hook.remove()
        features = (heard[0] if self.layout in UNNORMED else normed)[:, :-1]
        tokens, drafted, scores = text[1:], [], []
        for step in range(count):
            layer = self.layers[step % len(self.layers)]
            states = self._states(layer, tokens, features)
            output = layer.get("output") or self.target.get_output_embeddings()
            divisor = getattr(self.target.config.get_text_config(), "logits_mup_width_multiplier", 1.0)
            logits = output(layer["norm"](states[:, -1:]) / divisor)[0, 0]
            drafted.append(int(logits.argmax()))
            scores.append(logits)
            carried = states if self.layout in UNNORMED else layer["norm"](states)
            if len(self.layers) == 1:  # the same layer goes on one position further
                tokens, features = tokens + drafted[-1:], torch.cat([features, carried[:, -1:]], dim=1)
            else:  # the next layer reads what this one made of the same positions
                tokens, features = tokens[1:] + drafted[-1:], carried
        return drafted, torch.stack(scores)

    def _states(self, layer: dict[str, Any], tokens: list[int], features: Tensor) -> Tensor:
        table = self.target.get_input_embeddings()
        embeds = table(torch.tensor([tokens])) if self.layout != "inkling" else F.embedding(torch.tensor([tokens]), table.weight)
        embeds = layer["embed_norm"](embeds)
        pair = [embeds, layer["hidden_norm"](features)]
        if self.layout == "streams":
            every = pair[1].unflatten(-1, (-1, embeds.shape[-1]))
            x = (layer["projection"](every) + layer["embed_projection"](embeds)[:, :, None]).flatten(-2)
        else:
            x = layer["projection"](torch.cat(pair[::-1] if self.layout in ("mimo", "inkling") else pair, dim=-1))
        count = x.shape[1]
        positions = torch.arange(count)[None]
        for block in layer["blocks"]:
            attention = getattr(block, "self_attn", None)
            window = getattr(attention, "sliding_window", None)
            unseen = torch.ones(count, count).triu(1) if window is None else 1 - torch.ones(count, count).tril().triu(1 - window)
            mask = torch.zeros(count, count).masked_fill(unseen.bool(), torch.finfo(x.dtype).min)[None, None]
            rotation = None if layer["rotary"] is None else _rotation(layer["rotary"], x, positions, attention)
            x = _first(block(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions, use_cache=False))
        return x


def _rotation(rotary: Any, x: Tensor, positions: Tensor, attention: Any) -> Any:
    """What a rotary embedding gives, some of them by the kind of attention."""
    by_kind, positions = "layer_type" in inspect.signature(rotary.forward).parameters, positions_for(rotary, positions)
    return rotary(x, positions, attention.config.layer_types[attention.layer_idx]) if by_kind else rotary(x, positions)


class FirstHalf(nn.Module):
    """A block of LongCat Flash's MTP layer, which is the first half of the family's own, without experts."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm[0], layer.post_attention_layernorm[0]

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def _first(made: Any) -> Tensor:
    return made if torch.is_tensor(made) else made[0]


def save_with_mtp(
    folder: Path, make: Callable[[int], Any], layout: str, *, num_layers: int = 1, echoes: bool = False, alone: bool = False
) -> MtpReference:
    """A checkpoint of `make(0)` with a head; `make(seed)` gives random models of one family.

    `echoes`: the projection hands the embedding on, so that the head is another first layer of the target. `alone`: the folder
    holds nothing but the head.
    """
    target = make(0)
    if not alone:
        target.save_pretrained(folder)
    tensors: dict[str, Tensor] = {} if alone else load_file(folder / WEIGHTS)
    shared: dict[str, Any] = {}
    reference = MtpReference(target, [], layout)
    for index in range(num_layers):
        donor = make(11 + index)
        parts = _parts(donor, target, layout, shared, seed=index, echoes=echoes)
        reference.layers.append(parts)
        count, block = target.config.get_text_config().num_hidden_layers, _block_tensors(donor, folder, layout)
        tensors |= _published(donor.config.model_type, _named(layout, index, count, parts, block))
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, folder / WEIGHTS, metadata={"format": "pt"})
    field = "mtp_num_hidden_layers" if layout == "qwen" else "num_nextn_predict_layers"
    config = {"outrider": {"head": "mtp"}} if alone else json.loads((folder / "config.json").read_text()) | {field: num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def _parts(donor: Any, target: Any, layout: str, shared: dict[str, Any], *, seed: int, echoes: bool) -> dict[str, Any]:
    """A layer's modules; in Qwen's layout all layers share all but the block."""
    decoder, size = donor.get_decoder(), target.config.get_text_config().hidden_size
    block = {"blocks": decoder.layers[-_num_blocks(layout) :], "rotary": getattr(decoder, "rotary_emb", None)}
    if donor.config.model_type == "longcat_flash":
        block["blocks"] = [FirstHalf(decoder.layers[-1])]
    if layout == "streams":
        return {**block, **_parts_of_streams(decoder, size, seed)}
    norm = getattr(decoder, "norm", None) or decoder.norm_f
    donor.set_attn_implementation("eager")
    if layout == "qwen" and shared:
        return {**shared, **block}
    generator = torch.Generator().manual_seed(seed)
    norms = {}
    for name in ("embed_norm", "hidden_norm", "norm"):
        norms[name] = copy.deepcopy(norm)
        norms[name].weight.data.copy_(norm.weight + 0.2 * (not echoes) * torch.randn(size, generator=generator))
    if layout == "ernie":
        norms["norm"] = target.get_decoder().norm
    projection = nn.Linear(2 * size, size, bias=False)
    projection.weight.data.copy_(
        torch.eye(size, 2 * size) if echoes else torch.randn(size, 2 * size, generator=generator) * size**-0.5
    )
    made: dict[str, Any] = {**norms, "projection": projection}
    if donor.config.model_type in OWN_OUTPUT:
        made["output"] = copy.deepcopy(donor.get_output_embeddings())
    if layout == "qwen":
        shared |= made
    return {**made, **block}


def _parts_of_streams(decoder: Any, size: int, seed: int) -> dict[str, Any]:
    """Norms of one stream and of all, two projections, and a mixer."""
    generator, kind = torch.Generator().manual_seed(seed), type(decoder.hyper_connection_mixer.hc_norm)
    made: dict[str, Any] = {"norm": decoder.hyper_connection_mixer}
    for name, width in (("embed_norm", size), ("hidden_norm", len(decoder.hyper_connection_mixer.hc_norm.weight))):
        made[name] = kind(width, eps=decoder.config.rms_norm_eps)
        made[name].weight.data.copy_(0.2 * torch.randn(width, generator=generator))
    for name in ("projection", "embed_projection"):
        made[name] = nn.Linear(size, size, bias=False)
        made[name].weight.data.copy_(torch.randn(size, size, generator=generator) * size**-0.5)
    return made


def _num_blocks(layout: str) -> int:
    """Modules in a decoder's list that make a layer."""
    return 2 if layout == "nemotron" else 1


def _block_tensors(donor: Any, folder: Path, layout: str) -> dict[str, Tensor]:
    """A donor's last layer as checkpoints have it (experts one by one); of several blocks, with their numbers."""
    family = donor.config.model_type
    whole = {"minimax_m3_vl_text": "minimax_m3_vl", "inkling_text": "inkling_mm_model"}  # by whose rules its names change
    donor.config.model_type = whole.get(family, family)
    donor.save_pretrained(folder / "donor")
    donor.config.model_type = family
    many, found = _num_blocks(layout), dict[str, Tensor]()
    with safe_open(folder / "donor" / WEIGHTS, "pt") as file:
        for block in range(many):
            here = f"layers.{len(donor.get_decoder().layers) - many + block}."
            for name in file.keys():  # noqa: SIM118
                if here in name:
                    found[f"{block}." * (many > 1) + name.partition(here)[2]] = file.get_tensor(name)
    for file_made in (folder / "donor").iterdir():
        file_made.unlink()
    (folder / "donor").rmdir()
    return found


UNNORMED = ("ernie", "streams")  # layouts that read and carry states before the last norm
BESIDE = ("embed_norm", "hidden_norm", "projection", "norm")  # the parts beside the block, named in each layout:
NAMES = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "streams": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc_hidden", "mtp.hyper_connection_mixer"),
    "deepseek": tuple(f"model.layers.{{n}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": tuple(
        f"model.mtp_layers.{{k}}.{part}" for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
    "ernie": (*(f"model.mtp_{part}.{{k}}" for part in ("emb_norm", "hidden_norm", "linear_proj")), "model.norm"),
    "megatron": tuple(f"model.mtp.layers.{{k}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
    "inkling": (
        *(f"model.mtp.layers.{{k}}.{part}" for part in ("embed_norm", "hidden_norm", "input_proj")), "model.mtp.chain_norm"
    ),
    "nemotron": (*(f"mtp.layers.0.{part}" for part in ("enorm", "hnorm", "eh_proj")), "mtp.layers.1.final_layernorm"),
}
BLOCKS = {
    "qwen": "mtp.layers.{k}.", "deepseek": "model.layers.{n}.", "mimo": "model.mtp_layers.{k}.", "ernie": "model.mtp_block.{k}.",
    "nemotron": "mtp.layers.", "streams": "mtp.layers.{k}.", "megatron": "model.mtp.layers.{k}.",
    "inkling": "model.mtp.layers.{k}.transformer_block.",
}  # fmt: skip


OWN_OUTPUT = ("step3p7",)  # families whose layers have an output head of their own
RENAMED: dict[str, list[tuple[str, str]]] = {  # what else is named otherwise in the checkpoints of a family
    "hy_v3": [("shared_head.norm", "final_layernorm")],
    "minimax_m3_vl_text": [(r"(mtp\.layers\.\d+)\.(?!enorm|hnorm|eh_proj|final_layernorm)", r"\1.transformer_layer.")],
    "mimo_v2_flash": [("post_attention_layernorm", "pre_mlp_layernorm")],
    "step3p7": [("shared_head", "transformer.shared_head")],
    "longcat_flash": [
        (r"layers\.0\.(mlp\.|\w+\.1\.).*", ""), (r"(norm|attn)\.0\.", r"\1."), (r"mlps\.0\.", "transformer_layer.mlp."),
        (r"([eh]norm)\.", r"\1.m."), (r"layers\.0\.final_layernorm", "norm"),
    ],
}  # fmt: skip


def _published(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors as a family's checkpoints name them."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, other in RENAMED.get(family, []):
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return {name: tensor for name, tensor in found.items() if not name.endswith("mtp.")}


def _named(layout: str, index: int, num_layers: int, parts: dict[str, Any], block: dict[str, Tensor]) -> dict[str, Tensor]:
    numbers = {"k": index, "n": num_layers + index}
    beside = zip(BESIDE, NAMES[layout], strict=True)
    found: dict[str, Tensor] = {}
    for part, name in beside:
        found |= {f"{name.format(**numbers)}.{own}": tensor for own, tensor in parts[part].state_dict().items()}
    if "embed_projection" in parts:
        found["mtp.fc_embedding.weight"] = parts["embed_projection"].weight
        found["mtp.hyper_connection_mixer.block_inject_weight.weight"] = torch.zeros(2)  # of no use there
    if "output" in parts:
        found[f"model.layers.{num_layers + index}.shared_head.output.weight"] = parts["output"].weight
    found |= {BLOCKS[layout].format(**numbers) + name: tensor for name, tensor in block.items()}
    if layout == "deepseek":  # copies of the target's tables, as DeepSeek V3 has them
        found[f"model.layers.{num_layers + index}.embed_tokens.weight"] = torch.zeros(3, 3)
    return found
