"""Whether a start that was kept goes together: its program, its tables and what is known of the
model's shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.models.lm import LMShape
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.ops import Code, Program, Source
from outrider.runtime.rotary import Wave


def check_start(
    program: Program, waves: Sequence[Wave], ends: Sequence[int], shape: LMShape
) -> None:
    """Raises NotLoweredError for a whole model's program that does not go with its tables, or with
    what is known of its shape.

    `ends`: tokens that end a text.
    """
    assert program.logits is not None
    if not all(0 <= token < shape.vocab_size for token in ends):
        raise NotLoweredError("tokens that end a text and are none of the model's")
    if tuple(program.states) != shape.states or program.logits.cols != shape.vocab_size:
        raise NotLoweredError("a program of another shape than its model's")
    stored = {op.layer for op in program.body if op.code == Code.STORE}
    if stored != {number for number, layer in enumerate(shape.layers) if layer.num_kv_heads}:
        raise NotLoweredError("a program that stores keys of other layers than its model's")
    for value in program.values:
        if value.source == Source.INPUT:
            raise NotLoweredError("a program that is given more than tokens")
        if value.source == Source.ROTARY:
            wave = waves[int(value.name)]
            if not all(type(number) is float for number in (wave.scale, *wave.frequencies)):
                raise NotLoweredError("a program with rotary tables of no numbers")
            if wave.times not in (1, 2) or wave.times * len(wave.frequencies) != value.size:
                raise NotLoweredError("a program with rotary tables of another size")
            if getattr(torch, wave.dtype) != value.dtype:
                raise NotLoweredError("a program with rotary tables of another type")
