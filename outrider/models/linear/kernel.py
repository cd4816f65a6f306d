"""Layers that keep their weights as the native library reads them, in modules that torch runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor, nn


class LayerKernel(Protocol):
    """One layer on the native library (`runtime/layers.py`). bf16 in and out."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self, tokens: Tensor) -> Tensor: ...


class KernelLayer(nn.Module):
    """A layer that the library may multiply; without a kernel it widens its weights for each call: the reference, and slow."""

    kernel: LayerKernel | None = None


Kernels: TypeAlias = Callable[[nn.Module], ctypes.CDLL]  # puts all such layers of a module on the library, and gives it
