"""Names of the tensors of MTP heads in the checkpoints of each family (multi-token prediction,
DeepSeek-V3 2412.19437).

A layer is a projection of a token's embedding and a hidden state, each normed, one more decoder
layer of the family, and a norm. Layouts are tables in `models/families/`; the names on their right
are ours:

    {layer}.projection.weight, {layer}.embed_norm.weight ...     parts of one layer
    projection.weight ...                                        parts that all layers share
    {layer}.block.{rest}                                         of the decoder layer
    copy                                                         a copy of a table of the target's, which is not read

Names there stand without the prefixes `model.` and `language_model.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outrider.models.heads.names import Names, expression

# parts of a layer
EMBED_NORM = "embed_norm"
HIDDEN_NORM = "hidden_norm"
PROJECTION = "projection"
NORM = "norm"
BLOCK = "block"
OUTER = re.compile(r"^(model\.|language_model\.)+")
COPY = "copy"
NUMBERED = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True)
class MtpLayout:
    """A family's names, and by what else its heads differ."""

    name: str
    names: Names
    sign: str  # a tensor by which the layout is recognised
    # the projection's input begins with the hidden state, not with the embedding
    hidden_first: bool = False
    counts_on: bool = False  # layers are numbered after the target's
    under: str = ""  # the prefix with which its names are written
    kinds: str = ""  # of a layer of several blocks: the list of their kinds in the config
    gguf: tuple[str, ...] = ()  # architectures whose GGUF files hold such heads
    # beginnings of a GGUF file's names that belong to the second block
    second_block: re.Pattern[str] | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether a layer is several blocks of the family."""
        return bool(self.kinds)

    def written(self, name: str, layer: int, last: int) -> str:
        """The name of a layer's tensor. `layer`: its number; `last`: that of the last of its
        blocks."""
        shared = self.names.theirs(name, last=last)
        return self.under + (self.names.theirs(f"{layer}.{name}") if shared == name else shared)

    def looked_for(self, num_layers: int) -> str:
        """The tensor by which the head of a target with this many layers is recognised."""
        return self.under + self.sign.replace("{layer}", str(num_layers if self.counts_on else 0))


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors. Of each layer, their names in the checkpoint by ours."""

    layout: MtpLayout
    layers: tuple[Mapping[str, str], ...]
    copies: tuple[str, ...] = ()  # of the target's tables

    @property
    def names(self) -> list[str]:
        """All names in the checkpoint that make the head."""
        return list(dict.fromkeys(there for layer in self.layers for there in layer.values()))

    @property
    def lacking(self) -> list[str]:
        """Parts that a layer must have and that are not there."""
        parts = [
            f"{part}.weight of layer {index}"
            for index, layer in enumerate(self.layers)
            for part in (EMBED_NORM, HIDDEN_NORM, PROJECTION, NORM)
            if f"{part}.weight" not in layer
        ]
        blocks = [
            f"decoder layer {index}"
            for index, layer in enumerate(self.layers)
            if not any(map(_is_block, layer))
        ]
        return parts + blocks


def find_tensors(
    layouts: Iterable[MtpLayout], names: Iterable[str], num_layers: int
) -> MtpTensors | None:
    """The head among a checkpoint's tensors; None where there is none of these layouts.
    `num_layers`: of the target."""
    there = {OUTER.sub("", name): name for name in names}
    return next((match for layout in layouts if (match := _find(layout, there, num_layers))), None)


def strangers(names: Iterable[str]) -> list[str]:
    """Tensors that seem to be of an MTP head, whatever its layout."""
    return [name for name in names if re.search(r"(^|[._])(mtp|nextn)([._]|$)|mtp_", name)]


def _find(layout: MtpLayout, there: Mapping[str, str], num_layers: int) -> MtpTensors | None:
    """`there`: names in the checkpoint by those without their prefixes."""
    signs = [match for name in there if (match := expression(layout.sign).fullmatch(name))]
    begins = [layout.sign.split(".")[0] + "."]
    if layout.counts_on:
        numbers = {int(match["layer"]) for match in signs if int(match["layer"]) >= num_layers}
        begins = [f"{begins[0]}{number}." for number in numbers]
    if not signs or not begins:
        return None
    shared = dict[str, str]()
    layers = dict[int, dict[str, str]]()
    copies = list[str]()
    for name, stored in there.items():
        if not name.startswith(tuple(begins)):
            continue
        ours = layout.names.ours(name)
        if ours == COPY:
            copies.append(stored)
        elif match := NUMBERED.fullmatch(ours):
            layers.setdefault(int(match[1]), {})[match[2]] = stored
        elif ours != name:
            shared[ours] = stored
    in_order = [{**shared, **layers[number]} for number in sorted(layers)]
    return MtpTensors(layout, tuple(in_order or [shared]), tuple(copies))


def _is_block(name: str) -> bool:
    return name.startswith(BLOCK)
