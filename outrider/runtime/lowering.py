"""The state that the rules of lowering share: known facts about recorded tensors, and the
operations that make them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from outrider.kv.state_slots import StateShape
from outrider.runtime.blocks import (
    DTYPES,
    Block,
    Complex,
    Folded,
    Index,
    Known,
    NotLoweredError,
    Unknown,
)
from outrider.runtime.matrices import matrix_of
from outrider.runtime.ops import Code, Op, Program, Source, Value, View
from outrider.runtime.positional import MAX_NUMBERS, Positional
from outrider.runtime.record import Recording
from outrider.runtime.strides import Strided, collapse, dense, reshape, stretch


def _has_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)))


class Lowering:
    """Known facts about the tensors of a recording so far, and the operations that make them. Rules
    are called with it."""

    def __init__(self, module: Any, recording: Recording, reach: int = 0) -> None:
        """`reach`: positions that texts may have, 0 where nobody says."""
        self._recording = recording
        self._names = {
            id(tensor): name
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        self._known: dict[int, Known] = {
            id(recording.ids): Index(False),
            id(recording.positions): Index(True),
        }
        self._constants: dict[int, int] = {}
        self._transposed: dict[int, Tensor] = {}
        self._spread: dict[int, Tensor] = {}
        self._numbers: dict[float, Tensor] = {}
        self._made = Program(signals=tuple(recording.signals))
        self._ops: list[Op] = []
        self._positional = {
            id(recording.positions): Positional(("B", "T"), lambda positions: positions)
        }
        self._reach = reach
        self._kept: list[Tensor] = []
        self._unfilled: dict[int, int] = {}  # numbers of values that are written part by part
        # known tensors by the memory that they lie in, and identity
        self._sharing: dict[int, dict[int, Tensor]] = {}
        self._rotary: dict[object, int] = {}
        for index, tensor in enumerate(recording.inputs):
            size = tensor.shape[2]
            given = self._add(Value(size, tensor.dtype, Source.INPUT, str(index)))
            self._known[id(tensor)] = Block(("B", "T", ""), dense(given, (size,)))

    def find(self, tensor: Tensor) -> Known:
        """The facts about a tensor; one that no event made is a constant."""
        known = self._known.get(id(tensor))
        return known if known is not None else self._constant(tensor)

    def block(self, tensor: Tensor | float) -> Block:
        """A tensor or number that must be numbers of one token. Raises NotLoweredError with the
        reason why it is not."""
        if not isinstance(tensor, Tensor):
            tensor = self._numbers.setdefault(float(tensor), torch.tensor([float(tensor)]))
        known = self.find(tensor)
        if isinstance(known, Block):
            return known
        if id(tensor) in self._positional and tensor.is_floating_point():
            self._known[id(tensor)] = block = self._looked_up(tensor, self._positional[id(tensor)])
            return block
        if isinstance(known, Complex):
            raise NotLoweredError("complex numbers combined with real ones")
        if isinstance(known, Folded):
            raise NotLoweredError("a shape that mixes tokens")
        raise NotLoweredError(
            known.why if isinstance(known, Unknown) else "numbers made of token ids or positions"
        )

    def _looked_up(self, tensor: Tensor, positional: Positional) -> Block:
        """Numbers that follow from the position, out of a table for all positions."""
        sizes = tuple(
            size for size, axis in zip(tensor.shape, positional.axes, strict=True) if not axis
        )
        dtype = tensor.dtype
        length = self._reach
        if dtype not in DTYPES or not 0 < length * prod(sizes) <= MAX_NUMBERS:
            raise NotLoweredError("a table of positions that is too large")
        result = self.value(sizes, dtype)
        out = View(result.value, 1, result.count, 0, result.count)
        self._ops.append(
            Op(Code.EMBED, (), out, weight=self._named(positional.table(length)), by_position=True)
        )
        return Block(positional.axes, result)

    def _constant(self, tensor: Tensor) -> Block:
        number = self._constants.get(id(tensor))
        if number is None:
            dtype = tensor.dtype if tensor.dtype in DTYPES else torch.float32
            name = self.name(tensor) if tensor.dtype in DTYPES else self._named(tensor)
            if name not in self._made.constants and not tensor.is_contiguous():
                raise NotLoweredError(f"{name} is not contiguous")
            number = self._add(Value(tensor.numel(), dtype, Source.CONSTANT, name))
            self._constants[id(tensor)] = number
        return Block(("",) * tensor.dim(), dense(number, tuple(tensor.shape)))

    def weight(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """The weight that is the second factor of a matrix product, and whether it is stored (in,
        out)."""
        plain = self._transposed.get(id(tensor))
        return (tensor, True) if plain is None else (plain, False)

    def spread(self, tensor: Tensor) -> Tensor | None:
        """The weight that a tensor is a view of, for all rows the same; None where it is none."""
        return self._spread.get(id(tensor))

    def name(self, weight: Tensor | None) -> str:
        """The name of a parameter, or of what was made of parameters alone; "" for none. Raises
        NotLoweredError for others."""
        if weight is None:
            return ""
        if id(weight) in self._known:
            raise NotLoweredError("a matrix product of something else than a weight")
        return self._names[id(weight)] if id(weight) in self._names else self._named(weight)

    def _named(self, tensor: Tensor) -> str:
        """The name, from now on, of a constant that is no parameter."""
        dtype = tensor.dtype if tensor.dtype in DTYPES else torch.float32
        weight = tensor.detach().to(dtype).contiguous().clone()
        same = (name for name, known in self._made.constants.items() if _has_bits(known, weight))
        # layers may make the same table, each for itself
        name = next(same, f"constant.{len(self._made.constants)}")
        self._made.constants[name] = weight
        self._names[id(tensor)] = name
        self._kept.append(tensor)  # as long as it lives no other tensor has its identity
        return name

    def matrix(self, path: str, layer: Any) -> str:
        """The name of weights that a layer keeps in integers."""
        self._made.matrices[path] = matrix_of(layer)
        return path

    def bias(self, path: str, bias: Tensor | None) -> str:
        """The name of such a layer's bias, which may be no parameter of its module; "" for none."""
        if bias is None or id(bias) in self._names:
            return self.name(bias)
        name = f"{path}.bias"
        self._made.constants[name] = bias
        return name

    def state(self, shape: StateShape) -> int:
        """The number of a running state of this shape."""
        self._made.states.append(shape)
        return len(self._made.states) - 1

    def new(self, size: int, dtype: torch.dtype) -> View:
        """A value to be made."""
        if dtype not in DTYPES:
            raise NotLoweredError(f"numbers of type {str(dtype).removeprefix('torch.')}")
        return View(self._add(Value(size, dtype)), 1, size, 0, size)

    def _add(self, value: Value) -> int:
        self._made.values.append(value)
        return len(self._made.values) - 1

    def opened(self, sizes: Sequence[int], dtype: torch.dtype) -> Strided:
        """A value that is yet to be filled, part by part."""
        result = self.value(sizes, dtype)
        self._unfilled[result.value] = result.count
        return result

    def fill(self, part: Strided) -> None:
        """Before a part of such a value is written. Raises NotLoweredError where it may have been
        written or read before."""
        self._unfilled[part.value] = self._unfilled.get(part.value, 0) - part.count
        if self._unfilled[part.value] < 0 or any(
            view.value == part.value for op in self._ops for view in op.inputs
        ):
            raise NotLoweredError("a tensor that is written in place")

    def rotary(
        self, key: object, path: str, further: tuple[object, ...], which: int, like: Tensor
    ) -> int:
        """The value of a rotary module's output, one for each way that it is called."""
        if key not in self._rotary:
            if like.dim() != 3 or like.dtype not in DTYPES:
                raise NotLoweredError("rotary embeddings of an unusual shape")
            name = str(len(self._made.rotary))
            self._rotary[key] = self._add(Value(like.shape[2], like.dtype, Source.ROTARY, name))
            self._made.rotary.append((path, further, which))
        return self._rotary[key]

    def dtype(self, value: int) -> torch.dtype:
        return self._made.values[value].dtype

    def is_made(self, value: int) -> bool:
        return self._made.values[value].source == Source.MADE

    def flat(self, block: Block) -> View:
        """The whole block as one dense row, copied where it is scattered."""
        flat = reshape(block.own, (block.own.count,))
        if flat is None or (flat.steps != (1,) and flat.count > 1) or not self.is_made(flat.value):
            return self.copied(block.own)
        return View(flat.value, 1, flat.count, flat.offset, flat.count)

    def whole(self, block: Block) -> View:
        """The block as a value of its own, so that those of all tokens are one stretch: what linear
        layers read."""
        flat = self.flat(block)
        return flat if flat.cols == self._made.values[flat.value].size else self.copied(block.own)

    def copied(self, strided: Strided) -> View:
        """A dense copy."""
        result = self.new(strided.count, self.dtype(strided.value))
        self.emit(Code.COPY, [strided], dense(result.value, strided.sizes))
        return result

    def emit(
        self,
        code: Code,
        inputs: Sequence[Strided],
        output: Strided,
        numbers: tuple[float, ...] = (),
        *,
        keep_last: bool = False,
    ) -> None:
        """An operation on numbers of one token, operands of the output's sizes. What lies in too
        many directions for rows and columns is divided along the shortest of them."""
        views = collapse([output, *inputs], keep_last=keep_last)
        if views is not None:
            self._ops.append(Op(code, tuple(views[1:]), views[0], numbers))
            return
        size, dim = min((size, dim) for dim, size in enumerate(output.sizes[:-1]) if size > 1)
        for index in range(size):
            parts = [stretch(view, dim, index, index + 1) for view in (output, *inputs)]
            self.emit(code, parts[1:], parts[0], numbers, keep_last=keep_last)

    def add(self, op: Op) -> None:
        """An operation of another kind."""
        self._ops.append(op)

    def value(self, sizes: Sequence[int], dtype: torch.dtype) -> Strided:
        """A value to be made, dense, of these sizes."""
        return dense(self.new(prod(sizes), dtype).value, sizes)
