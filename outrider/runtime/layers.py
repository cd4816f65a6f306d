"""Single layers on the native library, for modules that torch runs: one call each, and nothing is
compiled for them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.cache import cache_folder
from outrider.errors import CapabilityError
from outrider.models.gguf.linear import WeightPanels
from outrider.models.linear.panel import KernelLayer, Kernels, PanelLinear
from outrider.runtime import library
from outrider.runtime.matrices import matrix_of
from outrider.runtime.structures import OpStruct, WeightFormat


class Kernel:
    """The weights of one layer as the library reads them: a `LayerKernel`."""

    def __init__(self, layer: KernelLayer, path: Path, num_threads: int) -> None:
        self._library = library.load(path)
        self._op = OpStruct()
        self._workers = library.workers(self._library, num_threads)
        if isinstance(layer, PanelLinear):
            panels: Tensor = layer.panels.detach()
            self._op.format = int(WeightFormat.PANELS_BF16)
            self._op.N = layer.out_features
            self._op.K = layer.in_features
        else:
            matrix = matrix_of(layer)
            panels = matrix.panels
            self._op.format = int(matrix.format)
            self._op.form = matrix.form.number
            self._op.group = matrix.form.group
            self._op.N, self._op.K = matrix.shape
        bias = getattr(layer, "bias", None)
        self._kept = (
            panels,
            None if bias is None else bias.detach().to(torch.bfloat16).contiguous(),
        )
        self._op.weight, self._op.bias = (
            None if one is None else one.data_ptr() for one in self._kept
        )
        self._op.out.is_bf16 = 1

    def __call__(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._op.N)
        self._library.outrider_runtime_linear(
            ctypes.addressof(self._op),
            x.data_ptr(),
            x.numel() // self._op.K,
            out.data_ptr(),
            self._workers,
        )
        return out

    def rows(self, tokens: Tensor) -> Tensor:
        """(...) token ids -> (..., in). Raises IndexError beyond the table."""
        tokens = tokens.contiguous()
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._op.N:
            raise IndexError(
                f"token ids from {int(tokens.min())} to {int(tokens.max())} beyond {self._op.N} "
                "rows"
            )
        out = torch.empty(*tokens.shape, self._op.K, dtype=torch.bfloat16)
        self._library.outrider_runtime_rows(
            ctypes.addressof(self._op), tokens.data_ptr(), tokens.numel(), out.data_ptr()
        )
        return out


def use_kernels(module: nn.Module, path: Path, num_threads: int | None = None) -> ctypes.CDLL:
    """Put every layer of a module that keeps such weights, and computes in bf16, on the library at
    `path`, which is returned.

    `num_threads` multiply, whatever torch has when they do; None: as many as torch has now.
    """
    num_threads = num_threads or torch.get_num_threads()
    for layer in module.modules():
        if isinstance(layer, KernelLayer) and not (
            isinstance(layer, WeightPanels) and layer.dtype != torch.bfloat16
        ):
            layer.kernel = Kernel(layer, path, num_threads)
    return library.load(path)


def layer_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """A function that puts layers on the library; None where the library does not serve."""
    if device.type != "cpu" or dtype != torch.bfloat16 or library.why_missing() is not None:
        return None
    return partial(
        use_kernels, path=library.find(cache_folder()), num_threads=torch.get_num_threads()
    )


class ReleasedLinear(nn.Module):
    """A linear layer in name alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features = layer.out_features
        self.in_features = layer.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Never called, because code that runs the module itself must not release its layers."""
        raise AssertionError("this layer's weights are in the native runtime's panels alone")


def release_linears(module: nn.Module, kept_modules: Collection[nn.Module | None] = ()) -> None:
    """Drop the weights of the module's linear layers, but for those inside
    `kept_modules`."""
    stay = {id(layer) for part in kept_modules if part is not None for layer in part.modules()}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and id(child) not in stay:
                setattr(parent, name, ReleasedLinear(child))


def refuse_rounding(
    label: str, method: str | None, device: torch.device, dtype: torch.dtype, asked: str
) -> None:
    """Raises CapabilityError where a model's weights cannot be rounded on loading, or no kernel
    multiplies them then.

    `method`: how they are quantised already; `dtype`: of passes, for which `asked` was given.
    """
    if device.type != "cpu":
        raise CapabilityError(
            f"--quantise rounds weights for the CPU's kernels, and the device here is {device}. "
            "Leave it out, or use --device cpu."
        )
    if method is not None:
        raise CapabilityError(
            f"'{label}' is quantised already ({method}). Leave --quantise out, or give the "
            "checkpoint that it was made from."
        )
    if layer_kernels(device, dtype) is None:
        if dtype != torch.bfloat16 and asked != "auto":
            raise CapabilityError(
                f"--quantise multiplies in bfloat16, and --dtype {asked} was asked for. Leave one "
                "out."
            )
        why = library.why_missing() or "they take a CPU with AVX2 or AVX-512"
        raise CapabilityError(
            f"--quantise needs the native kernels, which do not serve here: {why}. Leave it out."
        )
