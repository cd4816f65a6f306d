"""The native kernels (`native/`) as torch operations: callable eagerly, by torch.export and by AOTInductor programs.

    outrider::panel_linear(x, panels, bias, out_features)          y = x W^T + b
    outrider::block_linear(x, panels, bias, out_features, form, group)    the same, W in integers (`gguf/formats.py`)
    outrider::block_rows(tokens, panels, size, form, group)        single rows of such a W, widened
    outrider::cache_attention(query, keys, values, mask, scale)    attention over the cache's own layout

The operations are always defined; they run once `enable` has loaded the built library.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from outrider.models import native

_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("panel_linear(Tensor x, Tensor panels, Tensor? bias, int out_features) -> Tensor")
_LIBRARY.define("block_linear(Tensor x, Tensor panels, Tensor? bias, int out_features, int form, int group) -> Tensor")
_LIBRARY.define("block_rows(Tensor tokens, Tensor panels, int size, int form, int group) -> Tensor")
_LIBRARY.define("cache_attention(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor")

# What a compiled program calls instead of going through the dispatcher.
_TENSOR, _RESULT = "AtenTensorHandle", "AtenTensorHandle* result"
C_SHIMS = {
    torch.ops.outrider.panel_linear.default: [
        f"AOTITorchError aoti_torch_cpu_panel_linear({_TENSOR} x, {_TENSOR} panels, {_TENSOR}* bias, "
        f"int64_t out_features, {_RESULT})"
    ],
    torch.ops.outrider.block_linear.default: [
        f"AOTITorchError aoti_torch_cpu_block_linear({_TENSOR} x, {_TENSOR} panels, {_TENSOR}* bias, "
        f"int64_t out_features, int64_t form, int64_t group, {_RESULT})"
    ],
    torch.ops.outrider.block_rows.default: [
        f"AOTITorchError aoti_torch_cpu_block_rows({_TENSOR} tokens, {_TENSOR} panels, int64_t size, int64_t form, "
        f"int64_t group, {_RESULT})"
    ],
    torch.ops.outrider.cache_attention.default: [
        f"AOTITorchError aoti_torch_cpu_cache_attention({_TENSOR} query, {_TENSOR} keys, {_TENSOR} values, "
        f"{_TENSOR} mask, double scale, {_RESULT})"
    ],
}


def _linear_result(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _block_result(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, form: int, group: int) -> Tensor:
    return _linear_result(x, panels, bias, out_features)


def _rows_result(tokens: Tensor, panels: Tensor, size: int, form: int, group: int) -> Tensor:
    return tokens.new_empty((*tokens.shape, size), dtype=torch.bfloat16)


def _attention_result(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    rows, heads, queries, _ = query.shape
    return query.new_empty((rows, queries, heads, values.shape[3]))


torch.library.register_fake("outrider::panel_linear", _linear_result, lib=_LIBRARY)
torch.library.register_fake("outrider::block_linear", _block_result, lib=_LIBRARY)
torch.library.register_fake("outrider::block_rows", _rows_result, lib=_LIBRARY)
torch.library.register_fake("outrider::cache_attention", _attention_result, lib=_LIBRARY)


def enable(path: Path) -> None:
    """Load the built library and make the operations run on it. Idempotent."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("outrider::panel_linear", "CPU"):
        return
    library = native.load(path)

    def panel_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        x = x.contiguous()
        out, num_inputs = _linear_result(x, panels, bias, out_features), x.shape[-1]
        library.outrider_panel_linear(
            x.data_ptr(), x.numel() // num_inputs, num_inputs, panels.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), out_features,
        )  # fmt: skip
        return out

    def block_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, form: int, group: int) -> Tensor:
        x = x.contiguous()
        out, num_inputs = _linear_result(x, panels, bias, out_features), x.shape[-1]
        library.outrider_block_linear(
            x.data_ptr(), x.numel() // num_inputs, num_inputs, panels.data_ptr(), form, group,
            None if bias is None else bias.data_ptr(), out.data_ptr(), out_features,
        )  # fmt: skip
        return out

    def block_rows(tokens: Tensor, panels: Tensor, size: int, form: int, group: int) -> Tensor:
        tokens = tokens.contiguous()
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < 32 * panels.shape[0]:
            raise IndexError(f"token ids from {int(tokens.min())} to {int(tokens.max())} beyond {32 * panels.shape[0]} rows")
        out = _rows_result(tokens, panels, size, form, group)
        library.outrider_block_rows(tokens.data_ptr(), tokens.numel(), size, panels.data_ptr(), form, group, out.data_ptr())
        return out

    def cache_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        query = query if query.stride(3) == 1 else query.contiguous()
        mask = mask.contiguous()
        out = _attention_result(query, keys, values, mask, scale)
        numbers = (
            *query.shape, values.shape[3], keys.shape[2], keys.shape[1], mask.shape[3], mask.shape[2], *query.stride()[:3],
        )  # fmt: skip
        library.outrider_cache_attention(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), mask.data_ptr(),
            (ctypes.c_int64 * len(numbers))(*numbers), scale, out.data_ptr(),
        )  # fmt: skip
        return out

    _LIBRARY.impl("panel_linear", panel_linear, "CPU")
    _LIBRARY.impl("block_linear", block_linear, "CPU")
    _LIBRARY.impl("block_rows", block_rows, "CPU")
    _LIBRARY.impl("cache_attention", cache_attention, "CPU")
