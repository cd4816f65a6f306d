"""From a folder of quantised weights to transformers' module whose linear layers keep their integers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.lazy import huggingface_hub, transformers
from outrider.models import hub
from outrider.models.gguf.linear import BlockEmbedding, block_layers
from outrider.models.gguf.weights import make_buffers
from outrider.models.memory import weight_files
from outrider.models.quantised.formats import MalformedError
from outrider.models.quantised.layers import layer_of
from outrider.models.quantised.scheme import Scheme

WIDENED = "widened_layers"  # attribute of a module: how many of its layers no layout of integers holds exactly


def quantised_module(name: str, config: Any, dtype: torch.dtype, scheme: Scheme, revision: str | None = None) -> nn.Module:
    """transformers' module on the CPU. Raises CheckpointError for weights that are missing, malformed or of another shape."""
    folder = _folder(name, revision)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(plain, dtype=dtype)
    with torch.no_grad(), ExitStack() as stack:
        make_buffers(module)
        _Loading(name, module, scheme, _Tensors(folder, stack)).run(dtype)
    with suppress(OSError):  # it may have none
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module


def quantised_note(module: Any, scheme: Scheme, label: str) -> str:
    """What a person should know of such a model, in a line."""
    widened, layers = getattr(module, WIDENED, 0), list(block_layers(module))
    how = "activations are rounded to 8 bits"
    if not all(layer.kernel is not None for layer in layers):
        how = "the native kernels do not serve here (they take bfloat16 and a CPU with AVX2): slow"
    note = f"'{label}' keeps its weights in {scheme.bits} bits, as {scheme.method} stores them; {how}"
    return note + (f"; {widened} layers are widened, no layout of ours holds their values exactly" if widened else "")


def _folder(name: str, revision: str | None) -> Path:
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    patterns = ["*.json", "*.safetensors"]
    offline = hub.only_cached(name)
    return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=offline))


class _Tensors:
    """The tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = weight_files(folder)
        if any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(f"'{folder}' has pickled weights; quantised ones are read from safetensors files only.")
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

    def is_integer(self, name: str) -> bool:
        return self._files[name].get_slice(name).get_dtype() in ("I8", "U8", "I32")


class _Loading:
    """The way of each tensor to its place in one module."""

    def __init__(self, name: str, module: Any, scheme: Scheme, tensors: _Tensors) -> None:
        self._name, self._module, self._scheme, self._tensors = name, module, scheme, tensors

    def run(self, dtype: torch.dtype) -> None:
        main, widened = f".{self._scheme.main}", 0
        layers = [name.removesuffix(main) for name in self._tensors if name.endswith(main) and self._tensors.is_integer(name)]
        beside = tuple(f".{each}" for each in self._scheme.beside)
        for path in layers:
            made = self._layer(path, dtype)
            widened += isinstance(made, nn.Linear)
            self._module.set_submodule(path, made)
        for name in self._tensors:
            path = name.rpartition(".")[0]
            if path not in layers:
                if name.endswith(beside):
                    raise CheckpointError(f"'{self._name}': '{name}' belongs to a layer whose '{path}{main}' is missing.")
                self._put(name)
        self._tie()
        absent = sorted(name for name, parameter in self._module.named_parameters() if parameter.is_meta)
        if absent:
            raise CheckpointError(f"'{self._name}' lacks {len(absent)} weights, first '{absent[0]}': incomplete checkpoint.")
        setattr(self._module, WIDENED, widened)

    def _layer(self, path: str, dtype: torch.dtype) -> nn.Module:
        try:
            layer = self._module.get_submodule(path)
        except AttributeError:
            layer = None
        if type(layer) is not nn.Linear:
            code = type(self._module).__name__
            raise CheckpointError(f"'{self._name}': {code} has no linear layer '{path}', which the weights are of.")
        names = (self._scheme.main, *self._scheme.beside)
        parts = {each: self._tensors[f"{path}.{each}"] for each in names if f"{path}.{each}" in self._tensors}
        try:
            found = self._scheme.read(parts)
        except MalformedError as error:
            raise CheckpointError(f"'{self._name}': layer '{path}' cannot be read: {error}.") from error
        if found.codes.shape != layer.weight.shape:
            raise CheckpointError(
                f"'{self._name}': '{path}' has shape {tuple(found.codes.shape)} in the file, {tuple(layer.weight.shape)} by "
                "config.json. Weights and config.json are of different models."
            )
        bias = f"{path}.bias"
        return layer_of(found, dtype, self._tensors[bias].to(dtype) if bias in self._tensors else None)

    def _put(self, name: str) -> None:
        """A plain tensor; one that the module has no place for is left out, as transformers does."""
        path, _, last = name.rpartition(".")
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
        if values.shape != there.shape:
            raise CheckpointError(
                f"'{self._name}': '{name}' has shape {tuple(values.shape)} in the file, {tuple(there.shape)} by config.json. "
                "Weights and config.json are of different models."
            )
        owner._parameters[last] = nn.Parameter(values.to(there.dtype), requires_grad=False)

    def _tie(self) -> None:
        table, output = self._module.get_input_embeddings(), self._module.get_output_embeddings()
        is_plain = isinstance(output, nn.Linear) and not isinstance(table, BlockEmbedding)
        if is_plain and getattr(self._module.config.get_text_config(), "tie_word_embeddings", False):
            output.weight = table.weight
