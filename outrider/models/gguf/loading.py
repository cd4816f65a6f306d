"""Puts the tensors of a GGUF file into a module of transformers', which has been made without
storage.

Names are those of gguf's tables, and what the row of the file's architecture adds. What its
rearrangement does to a matrix is found out on row numbers: where it only reorders outputs, blocks
are reordered as they are and stay blocks; weights of any other kind, and formats that no layout of
ours holds, are widened, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf import library
from outrider.models.gguf.architectures import Architecture, arranging, row_of
from outrider.models.gguf.config import rope_factors
from outrider.models.gguf.experts import SAME, Experts, experts_in
from outrider.models.gguf.formats import FORMS
from outrider.models.gguf.header import ORIGINAL, GgufFile, TensorInfo
from outrider.models.gguf.linear import (
    BlockEmbedding,
    BlockExperts,
    BlockLinear,
    ReorderedLinear,
    WeightPanels,
    put_experts,
)
from outrider.models.gguf.packing import Packer, panels_in
from outrider.models.gguf.rearranging import is_unused, joined_latents, order_of, other_paths
from outrider.models.linear.panel import is_plain, is_transposed

HEAD_NORM = re.compile(
    r"\.layers\.(?P<layer>\d+)\.self_attn\.(?P<kind>[qk])_layernorm\.norms\.\d+\.weight$"
)
ALTUP = re.compile(r"\.altup_(?P<back>unembed_)?projections\.\d+\.weight$")
CORRECTION = ".moe_statics.e_score_correction_bias"  # ERNIE's, and Ling's has none
# queries, keys and values in one tensor, where transformers has three
JOINED = re.compile(r"\.attn_qkv\.(weight|bias)$")
LATENT = re.compile(r"\.attn_[kv]_b\.weight$")
FREQUENCIES = "rope_freqs.weight"
USED_ELSEWHERE = (FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class StoredTensor:
    """The tensors of a file that something was made of, one next to the other. `order`: which stored
    row each output is."""

    tensors: tuple[str, ...]
    order: np.ndarray


def make_buffers(module: Any) -> None:
    """Rotary tables and the like, which no file has: transformers' own code fills them."""
    for part in module.modules():
        absent = {
            name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta
        }
        for name, buffer in absent.items():
            part._buffers[name] = torch.empty_like(buffer, device="cpu")
        if absent:
            # a model's own part may be one itself
            getattr(part, "_init_weights", module._init_weights)(part)


def divide_frequencies(module: nn.Module, file: GgufFile) -> None:
    """Llama 3's scaled positions: the file has a divisor for each rotary frequency."""
    factors = rope_factors(file)
    if factors is None or FREQUENCIES in row_of(file).in_config:
        return
    parts: list[Any] = [
        part for part in module.modules() if isinstance(getattr(part, "inv_freq", None), Tensor)
    ]
    if not parts or any(part.inv_freq.shape != factors.shape for part in parts):
        raise CapabilityError(
            f"'{file.path}' scales its rotary frequencies (rope_freqs), which this architecture "
            f"does not take. {ORIGINAL}"
        )
    for part in parts:
        part.inv_freq.div_(factors)
        if isinstance(getattr(part, "original_inv_freq", None), Tensor):
            part.original_inv_freq.copy_(part.inv_freq)


@dataclass
class GgufLoading:
    """Loads each tensor into its parameter of one module."""

    file: GgufFile
    module: Any
    config: Any
    dtype: torch.dtype
    stay: Collection[str]  # names of tensors that keep their blocks, where the module can
    pack: Packer
    # in blocks: path, order of outputs
    kept: list[tuple[tuple[TensorInfo, ...], str, np.ndarray]] = field(default_factory=list)
    # by path: which input each stored one is, where out of order
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    # by layer in blocks, or parameter
    stored: dict[str, StoredTensor] = field(default_factory=dict)

    @cached_property
    def row(self) -> Architecture:
        return row_of(self.file)

    @cached_property
    def arrange(self) -> Callable[[np.ndarray, str], np.ndarray]:
        return arranging(self.file, self.config)

    def run(self) -> None:
        experts = experts_in(self.module, self.file.tensor_names)
        of_experts = {name for expert in experts for name in expert.tensors}
        latents = {
            tensor.name: tensor for tensor in self.file.tensors if LATENT.search(tensor.name)
        }
        halves = self._halves()
        elsewhere = {
            *of_experts,
            *latents,
            *USED_ELSEWHERE,
            *(tensor.name for pair in halves.values() for tensor in pair),
        }
        paths = self._paths(elsewhere)
        unknown: list[str] = []
        text = self.config.get_text_config()
        for tensor in self.file.tensors:
            if tensor.name in elsewhere or is_unused(tensor.name, text):
                continue
            if (
                tensor.name not in paths
                and JOINED.search(tensor.name)
                and self._split(tensor, paths)
            ):
                continue
            if tensor.name in self.stay and self._keep_blocks(tensor, paths.get(tensor.name)):
                continue
            if not self._widen(tensor, paths):
                unknown.append(tensor.name)
        for expert in experts:
            self._put_experts(expert)
        self._put_latents(latents, paths)
        for name, pair in halves.items():
            self._put_halves(paths[name].removesuffix(".weight"), pair)
        self._make_blocks()
        if unknown:
            raise CapabilityError(
                f"'{self.file.path}' has {len(unknown)} tensors that transformers' "
                f"{type(self.module).__name__} has no place "
                f"for, first '{unknown[0]}': it is another model than its architecture "
                f"'{self.file.architecture}' says. "
                f"{ORIGINAL}"
            )
        self._tie()
        self._correct_nothing()
        absent = sorted(
            name for name, parameter in self.module.named_parameters() if parameter.is_meta
        )
        if absent:
            raise CheckpointError(
                f"'{self.file.path}' lacks {len(absent)} weights, first '{absent[0]}': "
                "incomplete, or of another architecture. "
                "Fetch it again, or convert the model again."
            )

    def _paths(self, others: Collection[str]) -> dict[str, str]:
        """The path of each tensor in the module, but for `others`, by its name in the file.

        transformers also asks every submodule under its own name, for models that were converted
        without their head, and makes gguf's table of names for each (397 times, 8 s, for 30
        layers): done only where a tensor has no path otherwise.
        """
        named = self.file.architecture  # gguf's name, which transformers' own is not always
        known = transformers.modeling_gguf_pytorch_utils
        find = known.get_gguf_hf_weights_map
        same = known.TensorProcessor()
        whole = SimpleNamespace(
            config=self.module.config, state_dict=self.module.state_dict, named_children=tuple
        )
        try:
            own = other_paths(self.module.state_dict(), self.row.names)
            paths = _with_endings(find(whole, same, named)) | own
            names = (tensor.name for tensor in self.file.tensors if not JOINED.search(tensor.name))
            if all(name in paths or name in others for name in names):
                return paths
            return _with_endings(find(self.module, same, named)) | own
        except NotImplementedError as error:
            raise CapabilityError(
                f"'{self.file.path}': the installed gguf package does not know the tensors of "
                f"'{self.config.model_type}'. "
                "A newer one may (pip install -U gguf)."
            ) from error

    def _keep_blocks(self, tensor: TensorInfo, path: str | None) -> bool:
        """Note a matrix for a layer that keeps its blocks; whether that is possible."""
        if path is None or not path.endswith(".weight"):
            return False
        layer = self.module.get_submodule(path.removesuffix(".weight"))
        if not is_plain(layer) and not isinstance(layer, nn.Embedding):
            return False
        outputs, inputs = tensor.shape
        order = order_of(tensor, self.arrange, is_transposed=is_transposed(layer))
        columns: np.ndarray | None = SAME
        if self.row.moved_inputs and self.row.moved_inputs in tensor.name:
            columns = order_of(
                tensor, self.arrange, is_transposed=is_transposed(layer), of_inputs=True
            )
        if order is None or columns is None:
            return False
        self._check_shape(
            path,
            (inputs, outputs) if is_transposed(layer) else (outputs, inputs),
            layer.weight.shape,
        )
        if (
            isinstance(layer, nn.Embedding)
            and type(layer) is not nn.Embedding
            and not hasattr(layer, "embed_scale")
        ):
            return False  # a class of its own, which may do more than look up
        path = path.removesuffix(".weight")
        if columns is not SAME:
            if isinstance(layer, nn.Embedding):
                return False
            self.columns[path] = np.argsort(columns)
        self.kept.append(((tensor,), path, order))
        return True

    def _split(self, tensor: TensorInfo, paths: Mapping[str, str]) -> bool:
        """Load queries, keys and values of one tensor into three layers, in blocks where it may
        stay so; whether there are."""
        parts = [paths.get(tensor.name.replace("attn_qkv", f"attn_{part}")) for part in "qkv"]
        if None in parts:
            return False
        start = 0
        for path in (path for path in parts if path is not None):
            shape = self.module.get_parameter(path).shape
            rows = np.arange(start, start := start + shape[0], dtype=np.int64)
            if tensor.name in self.stay:
                self._check_shape(path, (shape[0], tensor.shape[1]), shape)
                self.kept.append(((tensor,), path.removesuffix(".weight"), rows))
            else:
                self._put(path, torch.from_numpy(plain_values(tensor)[rows[0] : start].copy()))
        self._check_shape(tensor.name, tensor.shape[:1], (start,))
        return True

    def _put_experts(self, experts_module: Experts) -> None:
        """A parameter of all experts, in blocks where they may stay so."""
        tensors = tuple(
            tensor
            for name in experts_module.tensors
            for tensor in self.file.tensors
            if tensor.name == name
        )
        if experts_module.tensors[0] in self.stay:
            sizes = (
                len(tensors[0].read()),
                sum(tensor.shape[1] for tensor in tensors),
                tensors[0].shape[2],
            )
            there = self.module.get_parameter(experts_module.path).shape
            self._check_shape(
                experts_module.path,
                sizes,
                (there[0], there[2], there[1]) if experts_module.is_transposed else there,
            )
            self.kept.append((tensors, experts_module.path, experts_module.order(sizes[1])))
            return
        values = torch.from_numpy(
            np.concatenate([plain_values(tensor) for tensor in tensors], axis=1)
        )
        order = experts_module.order(values.shape[1])
        values = values if order is SAME else values[:, torch.from_numpy(order)]
        self._put(
            experts_module.path,
            values.transpose(1, 2).contiguous() if experts_module.is_transposed else values,
        )
        self.stored[experts_module.path] = StoredTensor(experts_module.tensors, order)

    def _halves(self) -> dict[str, tuple[TensorInfo, TensorInfo]]:
        """Two tensors that transformers has as one, by its name: Qwen3-Next's projections, and
        Granite 4's gate and up."""
        tensors = {tensor.name: tensor for tensor in self.file.tensors}
        halves = self.row.halves
        if halves is None:
            return {}
        names = [name for name in tensors if re.search(halves.first, name)]
        return {
            re.sub(halves.first, halves.whole, name): (
                tensors[name],
                tensors[re.sub(halves.first, halves.second, name)],
            )
            for name in names
        }

    def _put_halves(self, path: str, pair: tuple[TensorInfo, TensorInfo]) -> None:
        """One matrix of two, in blocks where both may stay so."""
        order = (
            SAME
            if self.row.halves is None or self.row.halves.order is None
            else self.row.halves.order(self.config)
        )
        sizes = (sum(tensor.shape[0] for tensor in pair), pair[0].shape[1])
        self._check_shape(path, sizes, self.module.get_submodule(path).weight.shape)
        if pair[0].kind == pair[1].kind and pair[0].name in self.stay:
            self.kept.append((pair, path, order))
            return
        rows = np.concatenate([plain_values(tensor) for tensor in pair])
        self._put(f"{path}.weight", torch.from_numpy(rows if order is SAME else rows[order]))

    def _put_latents(self, latents: Mapping[str, TensorInfo], paths: dict[str, str]) -> None:
        """The matrices that make keys and values of latents, which newer files have in two parts."""
        for name in latents:
            whole = name.replace("attn_k_b.", "attn_kv_b.")
            other = name.replace("attn_k_b.", "attn_v_b.")
            if "attn_k_b." in name and other in latents and whole in paths:
                values = joined_latents(plain_values(latents[name]), plain_values(latents[other]))
                self._put(paths[whole], torch.from_numpy(values))

    def _make_blocks(self) -> None:
        """The layers of `kept`."""
        found = panels_in([(tensors, order) for tensors, _, order in self.kept], self.pack)
        for (tensors, path, order), panels in zip(self.kept, found, strict=True):
            self._put_blocks(tensors, path, order, panels)
            path = f"{path}.inner" if path in self.columns else path
            self.stored[path] = StoredTensor(tuple(tensor.name for tensor in tensors), order)

    def _put_blocks(
        self, tensors: Sequence[TensorInfo], path: str, order: np.ndarray, panels: Tensor
    ) -> None:
        form = FORMS[tensors[0].kind.name]
        inputs = tensors[0].shape[-1]
        outputs = sum(tensor.shape[-2] for tensor in tensors) if order is SAME else len(order)
        if panels.dim() == 3:
            owner, _, name = path.rpartition(".")
            part: Any = self.module.get_submodule(owner)
            experts = BlockExperts(
                panels, form, outputs, inputs, self.dtype, is_transposed=part.is_transposed
            )
            put_experts(part, name, experts)
            return
        layer = self.module.get_submodule(path)
        replacement: nn.Module
        if isinstance(layer, nn.Embedding):
            replacement = BlockEmbedding(
                panels, form, outputs, inputs, self.dtype, getattr(layer, "embed_scale", None)
            )
        else:
            replacement = linear = BlockLinear(
                panels, form, outputs, inputs, self.dtype, layer.bias
            )
            if path in self.columns:
                replacement = ReorderedLinear(linear, torch.from_numpy(self.columns[path]))
        self.module.set_submodule(path, replacement)

    def _widen(self, tensor: TensorInfo, paths: dict[str, str]) -> bool:
        """Load a tensor as plain numbers; whether the module has a parameter for it."""
        values = torch.from_numpy(np.array(self.arrange(plain_values(tensor), tensor.name)))
        if tensor.name in paths:
            self._put(paths[tensor.name], values)
            self.stored[paths[tensor.name]] = StoredTensor((tensor.name,), SAME)
            return True
        rows = self._rows.get(tensor.name, [])
        if rows:
            self._check_shape(tensor.name, values.shape[:1], (len(rows),))
            for path, row in zip(rows, values, strict=True):
                self._put(path, row)
        return bool(rows)

    def _correct_nothing(self) -> None:
        """Choices of experts that transformers corrects and a file does not are corrected by zeros."""
        for name, parameter in [*self.module.named_parameters()]:
            if parameter.is_meta and name.endswith(CORRECTION):
                self._put(name, torch.zeros(parameter.shape))

    @cached_property
    def _rows(self) -> dict[str, list[str]]:
        """The parameters that a tensor has a row for each of: StableLM 2's norms of heads, Gemma
        3n's projections."""
        groups: dict[str, list[str]] = {}
        for path, _ in self.module.named_parameters():
            if norm := HEAD_NORM.search(path):
                groups.setdefault(
                    f"blk.{norm['layer']}.attn_{norm['kind']}_norm.weight", []
                ).append(path)
            if altup := ALTUP.search(path):
                groups.setdefault(
                    f"altup_{'unembd_' if altup['back'] else ''}proj.weight", []
                ).append(path)
        return groups

    def _put(self, path: str, values: Tensor) -> None:
        owner_name, _, name = path.rpartition(".")
        owner = self.module.get_submodule(owner_name)
        there = getattr(owner, name)
        self._check_shape(path, values.shape, there.shape)
        values = values.to(there.dtype)
        if isinstance(there, nn.Parameter):
            setattr(owner, name, nn.Parameter(values, requires_grad=False))
        else:
            owner._buffers[name] = values

    def _check_shape(self, path: str, shape: Any, wanted: Any) -> None:
        if tuple(shape) != tuple(wanted):
            raise CheckpointError(
                f"'{self.file.path}': '{path}' has shape {tuple(shape)}, by its metadata it "
                f"should have {tuple(wanted)}: "
                "damaged, or of another architecture."
            )

    def _tie(self) -> None:
        """An output layer that the file has not is the table of embeddings."""
        table = self.module.get_input_embeddings()
        output = self.module.get_output_embeddings()
        if isinstance(output, WeightPanels) or output is None or not output.weight.is_meta:
            return
        if not getattr(self.config.get_text_config(), "tie_word_embeddings", False):
            return
        if not isinstance(table, BlockEmbedding):
            output.weight = table.weight
            return
        shared = BlockLinear(
            table.panels, table.form, table.outputs, table.inputs, self.dtype, output.bias
        )
        name = next(name for name, part in self.module.named_modules() if part is output)
        self.module.set_submodule(name, shared)
        self.stored[name] = next(
            self.stored[path] for path, part in self.module.named_modules() if part is table
        )


def _with_endings(paths: dict[str, str]) -> dict[str, str]:
    """Paths of parameters that transformers names without an ending, and files with one (attention
    sinks), under both names."""
    return {
        f"{name}.weight": path
        for name, path in paths.items()
        if not name.endswith((".weight", ".bias"))
    } | paths


def plain_values(tensor: TensorInfo) -> np.ndarray:
    """The weights in fp32, as gguf widens them."""
    if tensor.kind.name == "F64":
        return tensor.read().view(np.float64).astype(np.float32)
    try:
        return library.dequantize(tensor.read(), tensor.kind)
    except NotImplementedError as error:
        raise CapabilityError(
            f"'{tensor.path}': the tensor '{tensor.name}' is stored as {tensor.kind.name}, which "
            "gguf cannot widen. "
            "Use a file in another quantisation (Q4_K_M, Q8_0)."
        ) from error
