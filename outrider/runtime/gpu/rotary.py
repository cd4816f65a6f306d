"""Cosines and sines of a whole context on the device, by position: recorded passes read them at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.runtime.ops import Program, Source
from outrider.runtime.rotary import positions_for, real_tables

CHUNK = 1 << 16  # positions made at once


class DeviceRotary:
    """Tables (positions, size) of a program's rotary modules, made once: recordings hold their addresses."""

    def __init__(self, module: Any, program: Program, context_length: int, device: torch.device) -> None:
        dtypes = {value.name: value.dtype for value in program.values if value.source == Source.ROTARY}
        self.tables: list[Tensor] = []
        for index, (path, further, which) in enumerate(program.rotary):
            part, like = module.get_submodule(path), torch.empty(1, dtype=dtypes[str(index)], device=device)
            chunks = []
            for start in range(0, context_length, CHUNK):
                positions = torch.arange(start, min(start + CHUNK, context_length), device=device)[None]
                out = part(like, positions_for(part, positions), *further)
                chunks.append(real_tables(out)[which][0])
            self.tables.append(torch.cat(chunks).contiguous())
