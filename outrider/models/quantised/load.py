"""From a folder of quantised weights to transformers' module whose linear layers keep their
integers or small floats."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf.linear import BlockEmbedding, put_experts, runs_on_kernels
from outrider.models.gguf.loading import make_buffers
from outrider.models.loading.multimodal import auto_classes
from outrider.models.loading.weight_files import weight_files
from outrider.models.quantised.floats import SmallFloats, mxfp4
from outrider.models.quantised.formats import Codes, MalformedError
from outrider.models.quantised.layers import experts_of, joined, layer_of
from outrider.models.quantised.scheme import KNOWN, Scheme
from outrider.models.quantised.tensor_targets import WEIGHT, ExpertPart, TensorTargets
from outrider.models.source import ModelSource, weights_folder

# attribute of a module: how many of its layers no layout of integers holds exactly
WIDENED = "widened_layers"
# endings of the tensors of mxfp4
BLOCKS = "_blocks"
BLOCK_SCALES = "_scales"
SCALES = "F8_E8M0"  # scales that are powers of two


def quantised_module(
    source: ModelSource, config: Any, dtype: torch.dtype, scheme: Scheme
) -> nn.Module:
    """transformers' module on the CPU. Raises CheckpointError for weights that are missing,
    malformed or of another shape."""
    folder = weights_folder(source)
    assert folder is not None
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with torch.device("meta"):
        module = auto_classes(plain)[0].from_config(plain, dtype=dtype)
    with torch.no_grad(), ExitStack() as stack:
        make_buffers(module)
        _Loading(source.name, module, scheme, _Tensors(folder, stack)).run(dtype)
    with suppress(OSError):  # it may have none
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module


def quantised_note(module: Any, scheme: Scheme, label: str) -> str:
    """A note for the user about such a model, in a line."""
    widened = getattr(module, WIDENED, 0)
    how = scheme.rounded
    if not runs_on_kernels(module):
        how = "the native kernels do not serve here (they take bfloat16 and a CPU with AVX2): slow"
    note = f"'{label}' keeps {scheme.note}" + (f"; {how}" if how else "")
    return note + (
        f"; {widened} layers are widened, no layout of ours holds their values exactly"
        if widened
        else ""
    )


class _Tensors:
    """The tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = weight_files(folder)
        if any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(
                f"'{folder}' has pickled weights; quantised ones are read from safetensors files "
                "only."
            )
        self._files: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, "pt"))
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def scheme_of(self, name: str, schemes: Sequence[Scheme]) -> Scheme | None:
        """The scheme of a tensor's codes, if it holds any. Raises CheckpointError for floats of 8
        bits that are of none."""
        dtype = str(self._files[name].get_slice(name).get_dtype())
        scheme = next(
            (each for each in schemes if name.endswith(f".{each.main}") and dtype in each.dtypes),
            None,
        )
        if (
            scheme is None
            and dtype.startswith("F8_E")
            and dtype != SCALES
            and name.endswith("weight")
        ):
            raise CheckpointError(
                f"'{name}' is stored as {dtype}, which cannot be read. What can: {KNOWN}."
            )
        return scheme


class _Loading:
    """Loads each tensor into its parameter of one module."""

    def __init__(self, name: str, module: Any, scheme: Scheme, tensors: _Tensors) -> None:
        self._name = name
        self._module = module
        self._tensors = tensors
        self._targets = TensorTargets(module)
        self._schemes = (scheme, *scheme.others)
        self._coded: dict[str, Scheme] = {}  # by the paths of layers whose weights are codes

    def run(self, dtype: torch.dtype) -> None:
        mains = {f".{each.main}" for each in self._schemes}
        widened = 0
        names = [name for name in self._tensors if not self._targets.is_unused(name)]
        for name in names:
            if (scheme := self._tensors.scheme_of(name, self._schemes)) is not None:
                self._coded[name.removesuffix(f".{scheme.main}")] = scheme
        coded = self._coded
        ends = {*mains, WEIGHT}
        merged = self._targets.merged(
            name.removesuffix(end) for end in ends for name in names if name.endswith(end)
        )
        beside = {f".{part}": f".{each.main}" for each in self._schemes for part in each.beside}
        of_experts = {part.path for parts in merged.values() for part in parts}
        for target, parts in merged.items():
            widened += self._experts(
                target, parts, dtype, in_codes=any(part.path in coded for part in parts)
            )
        for path in coded:
            if path not in of_experts:
                widened += self._put_layer(path, dtype)
        for name in names:
            path, _, last = name.rpartition(".")
            if last.endswith(BLOCKS):
                widened += self._stacked(name.removesuffix(BLOCKS), dtype)
            elif path not in coded and path not in of_experts:
                if (main := beside.get(f".{last}")) is not None:
                    raise CheckpointError(
                        f"'{self._name}': '{name}' belongs to a layer whose '{path}{main}' is "
                        "missing."
                    )
                self._put(name)
        self._tie()
        absent = sorted(
            name for name, parameter in self._module.named_parameters() if parameter.is_meta
        )
        if absent:
            raise CheckpointError(
                f"'{self._name}' lacks {len(absent)} weights, first '{absent[0]}': incomplete "
                "checkpoint."
            )
        setattr(self._module, WIDENED, widened)

    def _put_layer(self, path: str, dtype: torch.dtype) -> bool:
        """Load a layer; whether it was widened."""
        target = self._targets.of(path + WEIGHT).removesuffix(WEIGHT)
        try:
            layer = self._module.get_submodule(target)
        except AttributeError:
            layer = None
        if type(layer) is not nn.Linear:
            code = type(self._module).__name__
            raise CheckpointError(
                f"'{self._name}': {code} has no linear layer '{path}', which the weights are of."
            )
        codes = self._read(path)
        self._check_shape(path, codes.codes.shape, layer.weight.shape)
        bias = f"{path}.bias"
        made = layer_of(
            codes, dtype, self._tensors[bias].to(dtype) if bias in self._tensors else None
        )
        self._module.set_submodule(target, made)
        return isinstance(made, nn.Linear)

    def _read(self, path: str) -> Codes | SmallFloats:
        """A layer's codes."""
        scheme = self._coded.get(path, self._schemes[0])
        names = (scheme.main, *scheme.beside)
        parts = {
            each: self._tensors[f"{path}.{each}"]
            for each in names
            if f"{path}.{each}" in self._tensors
        }
        try:
            return scheme.read(parts)
        except MalformedError as error:
            raise CheckpointError(
                f"'{self._name}': layer '{path}' cannot be read: {error}."
            ) from error

    def _experts(
        self, target: str, parts: list[ExpertPart], dtype: torch.dtype, *, in_codes: bool
    ) -> bool:
        """Load the layers of several experts into their one parameter; whether they were widened."""
        experts = len({part.expert for part in parts})
        if in_codes:
            try:
                codes = joined([self._read(part.path) for part in parts])
            except MalformedError as error:
                raise CheckpointError(
                    f"'{self._name}': experts '{target}' cannot be read: {error}."
                ) from error
            return self._put_experts(target, experts, codes, dtype)
        plain = [self._tensors[part.path + WEIGHT].to(dtype) for part in parts]
        owner, last, there = self._parameter(target)
        values = torch.cat(plain).view(experts, -1, plain[0].shape[1])
        self._check_shape(target, values.shape, there.shape)
        owner._parameters[last] = nn.Parameter(values, requires_grad=False)
        return False

    def _stacked(self, name: str, dtype: torch.dtype) -> bool:
        """Put the layers of several experts that are one tensor (mxfp4); whether they were widened."""
        blocks = f"{name}{BLOCKS}"
        scales = f"{name}{BLOCK_SCALES}"
        target = self._targets.of(name)
        if scales not in self._tensors:
            raise CheckpointError(
                f"'{self._name}': the scales of '{blocks}' ('{scales}') are missing."
            )
        codes = self._tensors[blocks]
        try:
            found = mxfp4(codes, self._tensors[scales])
        except MalformedError as error:
            raise CheckpointError(f"'{self._name}': '{target}' cannot be read: {error}.") from error
        return self._put_experts(target, len(codes), found, dtype)

    def _put_experts(
        self, target: str, experts: int, codes: Codes | SmallFloats, dtype: torch.dtype
    ) -> bool:
        """`codes`: the rows of all experts, one after the other. Whether they were widened."""
        owner, last, there = self._parameter(target)
        outputs = len(codes.codes) // experts
        inputs = codes.codes.shape[1]
        is_transposed = getattr(owner, "is_transposed", False)
        shape = (experts, inputs, outputs) if is_transposed else (experts, outputs, inputs)
        self._check_shape(target, shape, there.shape)
        module = (
            experts_of(codes, experts, dtype, is_transposed=is_transposed)
            if hasattr(owner, "has_gate")
            else None
        )
        if module is None:
            values = codes.values().to(dtype).view(experts, outputs, inputs)
            values = values.transpose(1, 2).contiguous() if is_transposed else values
            owner._parameters[last] = nn.Parameter(values, requires_grad=False)
            return True
        put_experts(owner, last, module)
        return False

    def _parameter(self, target: str) -> tuple[Any, str, Tensor]:
        """A parameter's module, its name there and itself."""
        path, _, last = target.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
            return owner, last, owner._parameters[last]
        except (AttributeError, KeyError) as error:
            code = type(self._module).__name__
            raise CheckpointError(
                f"'{self._name}': {code} has no experts '{target}', which the weights are of."
            ) from error

    def _check_shape(self, name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
        if tuple(shape) != tuple(wanted):
            raise CheckpointError(
                f"'{self._name}': '{name}' has shape {tuple(shape)} in the file, {tuple(wanted)} "
                "by config.json. "
                "Weights and config.json are of different models."
            )

    def _put(self, name: str) -> None:
        """A plain tensor; one that the module has no parameter for is left out, as transformers
        does."""
        path, _, last = self._targets.of(name).rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return
        there = owner._parameters.get(last)
        if there is None:
            if owner._buffers.get(last) is not None:
                owner._buffers[last] = self._tensors[name].to(owner._buffers[last].dtype)
            return
        values = self._tensors[name]
        self._check_shape(name, values.shape, there.shape)
        owner._parameters[last] = nn.Parameter(values.to(there.dtype), requires_grad=False)

    def _tie(self) -> None:
        """Share the embeddings with the output layer, unless the files have another one, as
        transformers does."""
        table = self._module.get_input_embeddings()
        output = self._module.get_output_embeddings()
        whole = self._module.config
        is_plain = isinstance(output, nn.Linear) and not isinstance(table, BlockEmbedding)
        is_tied = is_plain and any(
            getattr(each, "tie_word_embeddings", False) for each in (whole, whole.get_text_config())
        )
        if is_tied and (
            output.weight.is_meta
            or (not table.weight.is_meta and torch.equal(output.weight, table.weight))
        ):
            output.weight = table.weight
