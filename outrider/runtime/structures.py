"""The executor's structures in ctypes, field by field as in `native/program.h`."""

from __future__ import annotations

import ctypes
from enum import IntEnum

Number = ctypes.c_int64
Pointer = ctypes.c_void_p
Real = ctypes.c_double


def _numbers(names: str) -> list[tuple[str, type]]:
    return [(name, Number) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, Pointer) for name in names.split()]


class WeightFormat(IntEnum):
    """How a weight lies, as in `native/program.h`."""

    PANELS_BF16 = 0
    PANELS_FP32 = 1
    BLOCKS = 2  # integers with scales
    TABLE = 3  # as torch has it: of embeddings alone
    FLOATS = 4  # fp8 with scales
    PANELS_CODED = 5  # bf16 in 12 bits a number


class OperandStruct(ctypes.Structure):
    _fields_ = _numbers("source at token_step offset row_step col_step is_bf16")


class OpStruct(ctypes.Structure):
    _fields_ = [
        *_numbers("code rows cols"), ("out", OperandStruct), ("inputs", OperandStruct * 5), ("numbers", Real * 2),
        *_numbers("format form group"), *_pointers("weight bias"), *_numbers("K N experts by_position layer is_value"),
        *_numbers("heads kv_heads size value_size values_in_keys window sees_all is_short chosen"), ("scale", Real),
        ("softcap", Real),
    ]  # fmt: skip


class PhaseStruct(ctypes.Structure):
    _fields_ = _numbers("kind begin end is_head")


class ProgramStruct(ctypes.Structure):
    _fields_ = [
        *_numbers("num_ops num_phases"), *_pointers("ops phases"), *_numbers("body_bytes head_bytes"),
        ("logits", OperandStruct), *_numbers("vocab_size hidden_bytes is_bf16"),
    ]  # fmt: skip


class PassStruct(ctypes.Structure):
    _fields_ = [
        *_numbers("rows tokens capacity"),
        *_pointers("ids positions starts depths paths"),
        *_numbers("known"),
        *_pointers("keys values tables inputs states records moves"),
        *_numbers("num_records"),
        *_pointers("signals columns"),
        *_numbers("num_columns rows_differ"),
        *_pointers("bases"),
        *_numbers("short_capacity"),
        *_pointers("logits arena experts_read"),
    ]  # fmt: skip


class DraftingStruct(ctypes.Structure):
    _fields_ = [
        *_numbers("nodes vocab last_position"), *_pointers("sources"), *_numbers("feeds_sources"), ("outside", Real),
        *_pointers("options uniforms noise laws found carried"), *_numbers("carried_bytes"),
    ]  # fmt: skip


class GrowingStruct(ctypes.Structure):
    _fields_ = [
        *_numbers("nodes top_k max_depth"), ("min_gain", Real), *_numbers("width last_position"),
        *_pointers("budgets temperatures noise known carried"), *_numbers("carried_bytes"),
        *_pointers("lengths tokens parents values fed"),
    ]  # fmt: skip


class LevelsStruct(ctypes.Structure):
    _fields_ = _pointers("context unread block pass_ correction corrected drafting")


# as `outrider_runtime_sizes` tells them
_UNITS = {
    GrowingStruct: 10**15,
    LevelsStruct: 10**12,
    DraftingStruct: 10**9,
    OpStruct: 10**6,
    PhaseStruct: 10**4,
    PassStruct: 1,
}
SIZES = sum(ctypes.sizeof(kind) * unit for kind, unit in _UNITS.items())
