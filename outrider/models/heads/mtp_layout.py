"""Which tensors of a checkpoint are its MTP head's, by their names (multi-token prediction, DeepSeek-V3 2412.19437).

    deepseek   model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm} and a decoder layer's, N >= num_hidden_layers;
               DeepSeek V3 and later, GLM 4.5 and later, Ling, Hunyuan 3
    qwen       mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm}, mtp.layers.K.*: Qwen3-Next, Qwen3.5 and later, Mellum
    mimo       model.mtp_layers.K.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}: MiMo
    nemotron   mtp.layers.B, blocks of the family (attention, experts) that make one layer: the first block has enorm, hnorm and
               eh_proj beside its own tensors, the last one final_layernorm: Nemotron-H

They differ in names and in what comes first in the projection's input. All read the state that the target's output head reads,
and take their own such state back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

EMBED_NORM, HIDDEN_NORM, PROJECTION, NORM, BLOCK = "embed_norm", "hidden_norm", "projection", "norm", "block"  # parts of a layer
ROLES = {
    **dict.fromkeys(("enorm", "pre_fc_norm_embedding", "token_layernorm"), EMBED_NORM),
    **dict.fromkeys(("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"), HIDDEN_NORM),
    **dict.fromkeys(("eh_proj", "fc", "input_proj"), PROJECTION),
    **dict.fromkeys(("shared_head.norm", "norm", "final_layernorm"), NORM),
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's tables
OUTER = re.compile(r"^(model\.|language_model\.)+")
LOOKED_FOR = "mtp.fc, mtp.layers.0.eh_proj, model.layers.{next}.eh_proj, model.mtp_layers.0.input_proj"
_DEEPSEEK = re.compile(r"layers\.(\d+)\.(.+)")
_QWEN_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_NEMOTRON = {"enorm": EMBED_NORM, "hnorm": HIDDEN_NORM, "eh_proj": PROJECTION, "final_layernorm": NORM}
_QWEN_SHARED = re.compile(r"mtp\.((?:fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.\w+)")
_MIMO = re.compile(r"mtp_layers\.(\d+)\.(.+)")
_PART = re.compile(rf"({'|'.join(map(re.escape, ROLES))})\.(\w+)")


@dataclass(frozen=True)
class MtpLayout:
    """The names of a head's tensors. Of each layer, names in the checkpoint by names here, such as `projection.weight` and
    `block.self_attn.q_proj.weight`."""

    name: str
    layers: tuple[Mapping[str, str], ...]
    hidden_first: bool = False  # the projection's input begins with the hidden state, not with the embedding
    stacked: bool = False  # a layer is several blocks of the family, by their numbers: `block.0.mixer.q_proj.weight`
    copies: tuple[str, ...] = field(default=(), compare=False)  # of the target's tables

    @property
    def tensors(self) -> list[str]:
        """All names in the checkpoint that make the head."""
        return list(dict.fromkeys(there for layer in self.layers for there in layer.values()))

    @property
    def lacking(self) -> list[str]:
        """Parts that a layer must have and that are not there."""
        needed = (EMBED_NORM, HIDDEN_NORM, PROJECTION, NORM)
        lacking = [
            f"{part}.weight of layer {index}"
            for index, layer in enumerate(self.layers)
            for part in needed
            if not any(name.startswith(f"{part}.") and name.endswith(".weight") for name in layer)
        ]
        return lacking + [
            f"decoder layer {index}"
            for index, layer in enumerate(self.layers)
            if not any(name.startswith(BLOCK) for name in layer)
        ]


def find_layout(names: Iterable[str], num_layers: int) -> MtpLayout | None:
    """The head among a checkpoint's tensors; None where there is none of a layout that is known.

    `num_layers`: decoder layers of the target.
    """
    short = {OUTER.sub("", name): name for name in names}
    for find in (_qwen, _nemotron, _deepseek, _mimo):
        found = find(short, num_layers)
        if found is not None:
            return found
    return None


def strangers(names: Iterable[str]) -> list[str]:
    """Tensors that seem to be of an MTP head, whatever its layout."""
    return [name for name in names if re.search(r"(^|[._])(mtp|nextn)([._]|$)|mtp_", name)]


def _qwen(short: Mapping[str, str], num_layers: int) -> MtpLayout | None:
    if "mtp.fc.weight" not in short:
        return None
    layers, shared = _Layers(), dict[str, str]()
    for name, there in short.items():
        if match := _QWEN_LAYER.fullmatch(name):
            layers.add(int(match[1]), f"{BLOCK}.{match[2]}", there)
        elif match := _QWEN_SHARED.fullmatch(name):
            shared[_in_our_words(match[1])] = there
    return MtpLayout("qwen", tuple({**shared, **layer} for layer in layers.in_order() or [{}]))


def _nemotron(short: Mapping[str, str], num_layers: int) -> MtpLayout | None:
    if "mtp.layers.0.eh_proj.weight" not in short or "mtp.layers.0.norm.weight" not in short:
        return None
    own = {}
    for name, there in short.items():
        if match := _QWEN_LAYER.fullmatch(name):
            part, _, kind = match[2].rpartition(".")
            own[f"{_NEMOTRON[part]}.{kind}" if part in _NEMOTRON else f"{BLOCK}.{match[1]}.{match[2]}"] = there
    return MtpLayout("nemotron", (own,), stacked=True)


def _deepseek(short: Mapping[str, str], num_layers: int) -> MtpLayout | None:
    found = [(int(match[1]), match[2], there) for name, there in short.items() if (match := _DEEPSEEK.fullmatch(name))]
    heads = {index for index, rest, _ in found if rest == "eh_proj.weight" and index >= num_layers}
    return _per_layer("deepseek", [each for each in found if each[0] in heads])


def _mimo(short: Mapping[str, str], num_layers: int) -> MtpLayout | None:
    found = [(int(match[1]), match[2], there) for name, there in short.items() if (match := _MIMO.fullmatch(name))]
    return _per_layer("mimo", found, hidden_first=True) if any(rest == "input_proj.weight" for _, rest, _ in found) else None


def _per_layer(name: str, found: list[tuple[int, str, str]], *, hidden_first: bool = False) -> MtpLayout | None:
    """A layout in which each layer holds its parts beside those of the decoder layer."""
    layers = _Layers()
    for index, rest, there in found:
        if rest not in COPIES:
            layers.add(index, _in_our_words(rest), there)
    copies = tuple(there for _, rest, there in found if rest in COPIES)
    return MtpLayout(name, tuple(layers.in_order()), hidden_first, copies=copies) if found else None


def _in_our_words(name: str) -> str:
    """A tensor's name in its layer, in ours."""
    match = _PART.fullmatch(name)
    return f"{BLOCK}.{name}" if match is None else f"{ROLES[match[1]]}.{match[2]}"


class _Layers:
    """Layers by their numbers, which may begin anywhere."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, str]] = {}

    def add(self, index: int, name: str, there: str) -> None:
        self._found.setdefault(index, {})[name] = there

    def in_order(self) -> list[dict[str, str]]:
        return [self._found[index] for index in sorted(self._found)]
