"""Tiny random checkpoints with an MTP head, in every published layout, and what such a head drafts,
worked out plainly.

A head's decoder layer is one of a second random model of the target's family, so its tensors have
the names that checkpoints give them. `MtpReference` applies it without any cache: each draft token
is read off a pass over the whole text.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.runtime.rotary import positions_for

MTP_LAYOUTS = ("qwen", "deepseek", "mimo")  # of one layer like the target's
WEIGHTS = "model.safetensors"
SHIPPED = {  # by family, the layout of the head in its checkpoints, where that is read
    "bailing_hybrid": "deepseek", "deepseek_v3": "deepseek", "deepseek_v32": "deepseek", "exaone_moe": "qwen",
    "glm4_moe": "deepseek", "glm4_moe_lite": "deepseek", "glm_moe_dsa": "deepseek", "glm_ocr": "deepseek", "hy_v3": "deepseek",
    "mellum": "qwen", "nemotron_h": "nemotron", "qwen3_5_moe_text": "qwen", "qwen3_5_text": "qwen", "qwen3_next": "qwen",
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
        features = model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[:, :-1]
        tokens = text[1:]
        drafted = []
        scores = []
        for step in range(count):
            layer = self.layers[step % len(self.layers)]
            states = self._states(layer, tokens, features)
            logits = self.target.get_output_embeddings()(layer["norm"](states[:, -1:]))[0, 0]
            drafted.append(int(logits.argmax()))
            scores.append(logits)
            carried = layer["norm"](states)
            if len(self.layers) == 1:  # the same layer goes on one position further
                tokens = tokens + drafted[-1:]
                features = torch.cat([features, carried[:, -1:]], dim=1)
            else:  # the next layer reads what this one made of the same positions
                tokens = tokens[1:] + drafted[-1:]
                features = carried
        return drafted, torch.stack(scores)

    def _states(self, layer: dict[str, Any], tokens: list[int], features: Tensor) -> Tensor:
        embeds = self.target.get_input_embeddings()(torch.tensor([tokens]))
        pair = [layer["embed_norm"](embeds), layer["hidden_norm"](features)]
        x = layer["projection"](torch.cat(pair[::-1] if self.layout == "mimo" else pair, dim=-1))
        count = x.shape[1]
        positions = torch.arange(count)[None]
        for block in layer["blocks"]:
            attention = getattr(block, "self_attn", None)
            window = getattr(attention, "sliding_window", None)
            unseen = (
                torch.ones(count, count).triu(1)
                if window is None
                else 1 - torch.ones(count, count).tril().triu(1 - window)
            )
            mask = torch.zeros(count, count).masked_fill(unseen.bool(), torch.finfo(x.dtype).min)[
                None, None
            ]
            rotation = (
                None
                if layer["rotary"] is None
                else _rotation(layer["rotary"], x, positions, attention)
            )
            x = _first(
                block(
                    x,
                    position_embeddings=rotation,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=False,
                )
            )
        return x


def _rotation(rotary: Any, x: Tensor, positions: Tensor, attention: Any) -> Any:
    """The result of a rotary embedding, some of them by the kind of attention."""
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    positions = positions_for(rotary, positions)
    return (
        rotary(x, positions, attention.config.layer_types[attention.layer_idx])
        if by_kind
        else rotary(x, positions)
    )


def _first(made: Any) -> Tensor:
    return made if torch.is_tensor(made) else made[0]


def save_with_mtp(
    folder: Path,
    make: Callable[[int], Any],
    layout: str,
    *,
    num_layers: int = 1,
    echoes: bool = False,
    alone: bool = False,
) -> MtpReference:
    """A checkpoint of `make(0)` with a head; `make(seed)` gives random models of one family.

    `echoes`: the projection hands the embedding on, so that the head is another first layer of the
    target. `alone`: the folder holds nothing but the head.
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
        count = target.config.get_text_config().num_hidden_layers
        block = _block_tensors(donor, folder, layout)
        tensors |= _published(donor.config.model_type, _named(layout, index, count, parts, block))
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, folder / WEIGHTS, metadata={"format": "pt"})
    field = "mtp_num_hidden_layers" if layout == "qwen" else "num_nextn_predict_layers"
    config = (
        {"outrider": {"head": "mtp"}}
        if alone
        else json.loads((folder / "config.json").read_text()) | {field: num_layers}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def _parts(
    donor: Any, target: Any, layout: str, shared: dict[str, Any], *, seed: int, echoes: bool
) -> dict[str, Any]:
    """A layer's modules; in Qwen's layout all layers share all but the block."""
    decoder = donor.get_decoder()
    size = target.config.get_text_config().hidden_size
    block = {
        "blocks": decoder.layers[-_num_blocks(layout) :],
        "rotary": getattr(decoder, "rotary_emb", None),
    }
    norm = getattr(decoder, "norm", None) or decoder.norm_f
    donor.set_attn_implementation("eager")
    if layout == "qwen" and shared:
        return {**shared, **block}
    generator = torch.Generator().manual_seed(seed)
    norms = {}
    for name in ("embed_norm", "hidden_norm", "norm"):
        norms[name] = copy.deepcopy(norm)
        norms[name].weight.data.copy_(
            norm.weight + 0.2 * (not echoes) * torch.randn(size, generator=generator)
        )
    projection = nn.Linear(2 * size, size, bias=False)
    projection.weight.data.copy_(
        torch.eye(size, 2 * size)
        if echoes
        else torch.randn(size, 2 * size, generator=generator) * size**-0.5
    )
    made: dict[str, Any] = {**norms, "projection": projection}
    if layout == "qwen":
        shared |= made
    return {**made, **block}


def _num_blocks(layout: str) -> int:
    """Modules in a decoder's list that make a layer."""
    return 2 if layout == "nemotron" else 1


def _block_tensors(donor: Any, folder: Path, layout: str) -> dict[str, Tensor]:
    """A donor's last layer as checkpoints have it (experts one by one); of several blocks, with
    their numbers."""
    donor.save_pretrained(folder / "donor")
    many = _num_blocks(layout)
    found = dict[str, Tensor]()
    with safe_open(folder / "donor" / WEIGHTS, "pt") as file:
        for block in range(many):
            here = f"layers.{len(donor.get_decoder().layers) - many + block}."
            for name in file.keys():  # noqa: SIM118
                if here in name:
                    found[f"{block}." * (many > 1) + name.partition(here)[2]] = file.get_tensor(
                        name
                    )
    for file_made in (folder / "donor").iterdir():
        file_made.unlink()
    (folder / "donor").rmdir()
    return found


# the parts beside the block, named in each layout:
BESIDE = ("embed_norm", "hidden_norm", "projection", "norm")
NAMES = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "deepseek": tuple(
        f"model.layers.{{n}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ),
    "mimo": tuple(
        f"model.mtp_layers.{{k}}.{part}"
        for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
    "nemotron": (
        *(f"mtp.layers.0.{part}" for part in ("enorm", "hnorm", "eh_proj")),
        "mtp.layers.1.final_layernorm",
    ),
}
BLOCKS = {
    "qwen": "mtp.layers.{k}.", "deepseek": "model.layers.{n}.", "mimo": "model.mtp_layers.{k}.", "nemotron": "mtp.layers.",
}  # fmt: skip


def _published(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors as a family's checkpoints name them: Hunyuan's last norm has another name."""
    other = "final_layernorm" if family == "hy_v3" else "shared_head.norm"
    return {name.replace("shared_head.norm", other): tensor for name, tensor in tensors.items()}


def _named(
    layout: str, index: int, num_layers: int, parts: dict[str, Any], block: dict[str, Tensor]
) -> dict[str, Tensor]:
    numbers = {"k": index, "n": num_layers + index}
    beside = zip(BESIDE, NAMES[layout], strict=True)
    found: dict[str, Tensor] = {}
    for part, name in beside:
        found |= {
            f"{name.format(**numbers)}.{own}": tensor
            for own, tensor in parts[part].state_dict().items()
        }
    found |= {BLOCKS[layout].format(**numbers) + name: tensor for name, tensor in block.items()}
    if layout == "deepseek":  # copies of the target's tables, as DeepSeek V3 has them
        found[f"model.layers.{num_layers + index}.embed_tokens.weight"] = torch.zeros(3, 3)
    return found
