"""Writes tokenwise operations as lines of Triton: tiles of rows x columns, registers, and memory
behind barriers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.runtime.gpu.value_offsets import ValueOffset
from outrider.runtime.ops import Code, Op, Program, Source, View

SPLIT = 1024  # columns of a program where a phase is elementwise and wide
UNARY = {
    Code.COPY: "{0}", Code.NEG: "-{0}", Code.SQUARE: "{0} * {0}", Code.RSQRT: "1.0 / tl.sqrt({0})", Code.SQRT: "tl.sqrt({0})",
    Code.TANH: "2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0", Code.SIGMOID: "1.0 / (1.0 + tl.exp(-{0}))",
    Code.SILU: "{0} / (1.0 + tl.exp(-{0}))", Code.GELU: "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    Code.GELU_TANH: "{0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0})))",
    Code.RELU: "tl.maximum({0}, 0.0)", Code.RECIPROCAL: "1.0 / {0}", Code.EXP: "tl.exp({0})", Code.LOG: "tl.log({0})",
    Code.NOT: "tl.where({0} == 0.0, 1.0, 0.0)",
    Code.EXPM1: "tl.where(tl.abs({0}) < 0.01, {0} + {0} * {0} * (0.5 + {0} / 6.0), tl.exp({0}) - 1.0)",
    Code.LOG1P: "tl.where(tl.abs({0}) < 0.01, {0} - {0} * {0} * (0.5 - {0} / 3.0), tl.log(1.0 + {0}))",
}  # fmt: skip
BINARY = {
    Code.ADD: "{0} + {1}", Code.SUB: "{0} - {1}", Code.MUL: "{0} * {1}", Code.DIV: "{0} / {1}",
    Code.LARGER: "tl.maximum({0}, {1})", Code.SMALLER: "tl.minimum({0}, {1})",
    Code.GREATER: "tl.where({0} > {1}, 1.0, 0.0)", Code.AT_LEAST: "tl.where({0} >= {1}, 1.0, 0.0)",
    Code.EQUAL: "tl.where({0} == {1}, 1.0, 0.0)",
}  # fmt: skip
ELEMENTWISE = frozenset({*UNARY, *BINARY, Code.CLAMP, Code.SOFTPLUS, Code.WHERE})
REDUCED = frozenset({Code.MEAN, Code.SUM})
NORMS = frozenset({Code.LAYER_NORM, Code.RMS_NORM, Code.SOFTMAX})
MOVES = frozenset({Code.EMBED, Code.GATHER, Code.STORE, Code.SIGNAL})
PICKS = frozenset({Code.TOP, Code.TAKE, Code.PUT})
KNOWN = ELEMENTWISE | REDUCED | NORMS | MOVES | PICKS
DTYPES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16"}

# what a pointer of the kernel is: ("tensor", number), ("constant", name), ("keys", layer) ...
Argument = tuple[str, int | str]


@dataclass
class Writer:
    """Writes chains of operations line by line, and remembers what registers hold."""

    program: Program
    offsets: Mapping[int, ValueOffset]
    needed: Collection[int]  # values that are written to memory
    arguments: list[Argument] = field(default_factory=list)
    split: bool = False
    missed: set[int] = field(default_factory=set)  # values that were to be read from memory
    barriers: int = 0
    tile: int = 1

    def chain(self, ops: Sequence[Op], number: int) -> list[str]:
        """The lines of one chain. Names hold its number: Triton wants a name to be of one type in
        all branches."""
        self.number = number
        self.lines = ["t = tl.program_id(0).to(tl.int64)"]
        self.held: dict[object, str] = {}  # the register of a view
        # rows and columns in which a stretch of a value is held
        self.tiled: dict[object, tuple[int, int]] = {}
        self.unread: set[int] = set()  # values written since the last barrier
        self.grids: set[tuple[int, int]] = set()
        self.count = 0
        self.made = {op.output.value for op in ops if op.output is not None}
        self.has_position = False
        self.cache_indices: dict[int, str] = {}  # by layer: short slots have others than whole ones
        for op in ops:
            self._op(op)
        return self.lines

    # ------------------------------------------------------------------ operations

    def _op(self, op: Op) -> None:
        if op.code == Code.EMBED:
            self._embed(op)
        elif op.code == Code.GATHER:
            self._gather(op)
        elif op.code == Code.STORE:
            self._store(op)
        elif op.code in PICKS:
            self._pick(op)
        elif op.code in ELEMENTWISE:
            self._elementwise(self._retiled(op))
        else:
            self._reduce(op)

    def _elementwise(self, op: Op) -> None:
        assert op.output is not None
        inputs = [self._read(view) for view in op.inputs]
        if op.code == Code.CLAMP:
            low, high = (_number(number) for number in op.numbers)
            text = f"tl.minimum(tl.maximum({inputs[0]}, {low}), {high})"
        elif op.code == Code.SOFTPLUS:
            factor, threshold = (_number(number) for number in op.numbers)
            x = f"({inputs[0]} * {factor})"
            text = f"tl.where({x} > {threshold}, {inputs[0]}, tl.log(1.0 + tl.exp({x})) / {factor})"
        elif op.code == Code.WHERE:
            text = f"tl.where({inputs[0]} != 0.0, {inputs[1]}, {inputs[2]})"
        else:
            text = (UNARY | BINARY)[op.code].format(*inputs)
        shape = _extent(op.output)
        full = {_extent(view) for view in op.inputs}
        rows = max(r for r, _ in full)
        cols = max(c for _, c in full)
        if (rows, cols) != shape:
            text = f"tl.broadcast_to({text}, [{_padded(shape[0])}, {self._width(shape[1])}])"
        self._made(op.output, text)

    def _reduce(self, op: Op) -> None:
        assert op.output is not None
        view = op.inputs[0]
        x = self._read(view)
        mask = self._mask((view.rows, view.cols))
        if _extent(view) != (view.rows, view.cols):
            x = self._let(f"tl.broadcast_to({x}, [{_padded(view.rows)}, {_padded(view.cols)}])")
        if op.code == Code.SOFTMAX:
            x = self._let(f"tl.where({mask}, {x}, float('-inf'))")
            x = self._let(f"tl.exp({x} - tl.max({x}, axis=1)[:, None])")
            self._made(op.output, f"{x} / tl.sum({x}, axis=1)[:, None]")
            return
        x = self._let(f"tl.where({mask}, {x}, 0.0)")
        if op.code in REDUCED:
            total = f"tl.sum({x}, axis=1)[:, None]" + (
                f" / {view.cols}.0" if op.code == Code.MEAN else ""
            )
            self._made(replace(op.output, cols=1), total)
            return
        if op.code == Code.LAYER_NORM:
            x = self._let(
                f"tl.where({mask}, {x} - tl.sum({x}, axis=1)[:, None] / {view.cols}.0, 0.0)"
            )
        scale = f"tl.sqrt(tl.sum({x} * {x}, axis=1)[:, None] / {view.cols}.0 + {_number(op.numbers[0])})"
        weights = [self._read(each) for each in op.inputs[1:]]
        text = f"{x} / {scale}"
        if weights:
            text += f" * {weights[0]}"
        if len(weights) > 1:
            text += f" + {weights[1]}"
        self._made(op.output, text)

    def _embed(self, op: Op) -> None:
        assert op.output is not None
        index = self._let(
            f"tl.load({self._pointer(('positions' if op.by_position else 'ids', 0))} + t) + "
            f"{op.layer}"
        )
        if op.bound:
            index = self._let(f"tl.where({index} < {op.bound}, {index}, 0)")
        # its last row stands for all after it
        if (constant := self.program.constants.get(op.weight)) is not None:
            index = self._let(f"tl.minimum({index}, {len(constant) - 1})")
        r, c = self._grid((1, op.output.cols))
        table = self._pointer(("constant", op.weight))
        mask = self._mask((1, op.output.cols))
        self._made(
            op.output,
            f"tl.load({table} + {index} * {op.output.cols} + {r} + {c}, mask={mask}, "
            "other=0.0).to(tl.float32)",
        )

    def _gather(self, op: Op) -> None:
        assert op.output is not None
        view = op.inputs[0]
        offset = self.offsets[op.inputs[0].value]
        source = self._let(
            f"(t // num_columns) * num_tokens + tl.load({self._pointer(('columns', 0))} + t % "
            "num_columns)"
        )
        at = f"{self._pointer(('tensor', offset.tensor))} + {source} * {offset.width} + {offset.offset + view.offset}"
        r, c = self._grid((1, view.cols))
        mask = self._mask((1, view.cols))
        self._made(op.output, f"tl.load({at} + {r} + {c}, mask={mask}, other=0.0).to(tl.float32)")

    def _store(self, op: Op) -> None:
        view = op.inputs[0]
        x = self._read(view)
        if op.layer not in self.cache_indices:
            self.cache_indices[op.layer] = self._let(
                f"tl.load({self._pointer(('indices', op.layer))} + t)"
            )
        r, c = self._grid((view.rows, view.cols))
        pointer = self._pointer(("values" if op.is_value else "keys", op.layer))
        mask = self._mask((view.rows, view.cols))
        dtype = DTYPES[self.program.values[view.value].dtype]
        at = f"{pointer} + {self.cache_indices[op.layer]} * {view.rows * view.cols} + {r} * {view.cols} + {c}"
        self.lines.append(f"tl.store({at}, {x}.to({dtype}), mask={mask})")

    def _pick(self, op: Op) -> None:
        assert op.output is not None
        view = op.inputs[0]
        if op.code == Code.TOP:
            x = self._read(view)
            mask = self._mask((view.rows, view.cols))
            _, c = self._grid((view.rows, view.cols))
            x = self._let(f"tl.where({mask}, {x}, float('-inf'))")
            for column in range(op.output.cols):
                best = self._let(f"tl.max({x}, axis=1)[:, None]")
                index = self._let(
                    f"tl.min(tl.where(({x} == {best}) & {mask}, {c}, {view.cols}), axis=1)[:, None]"
                )
                piece = replace(
                    op.output, offset=op.output.offset + column * op.output.col_step, cols=1
                )
                self._made(piece, f"{index}.to(tl.float32)")
                x = self._let(f"tl.where({c} == {index}, float('-inf'), {x})")
            return
        index = self._let(f"{self._read(op.inputs[1])}.to(tl.int64)")
        chosen = (op.inputs[1].rows, op.inputs[1].cols)
        r, _ = self._grid(chosen)
        mask = self._mask(chosen)
        if op.code == Code.TAKE:
            at = self._address(view, fresh=True)
            steps = f"{r} * {view.row_step} + {index} * {view.col_step}"
            self._made(op.output, f"tl.load({at} + {steps}, mask={mask}, other=0.0).to(tl.float32)")
            return
        new = self._read(op.inputs[2])
        whole = self._read(view)
        self.missed.add(op.output.value)
        self._made(op.output, whole)
        self._barrier()
        at = self._address(op.output, fresh=False)
        steps = f"{r} * {op.output.row_step} + {index} * {op.output.col_step}"
        dtype = DTYPES[self.program.values[op.output.value].dtype]
        self.lines.append(f"tl.store({at} + {steps}, {new}.to({dtype}), mask={mask})")
        self.unread.add(op.output.value)
        self._forget(op.output.value)

    # ------------------------------------------------------------------ registers and memory

    def _retiled(self, op: Op) -> Op:
        """An operation over one stretch, in the rows and columns in which registers hold one of its
        inputs."""
        assert op.output is not None
        views = (*op.inputs, op.output)
        if any(view.rows != 1 or (view.cols > 1 and view.col_step not in (0, 1)) for view in views):
            return op
        wanted = (
            _stretch(view)
            for view in op.inputs
            if view.cols == op.output.cols and view.col_step == 1
        )
        tile = next((self.tiled[each] for each in wanted if each in self.tiled), None)
        if tile is None:
            return op
        rows, cols = tile

        def moved(view: View) -> View:
            if view.col_step == 0 or view.cols == 1:
                return replace(view, rows=rows, cols=cols, row_step=0, col_step=0)
            return replace(view, rows=rows, cols=cols, row_step=cols)

        return replace(op, inputs=tuple(moved(view) for view in op.inputs), output=moved(op.output))

    def _read(self, view: View) -> str:
        """The register (rows, columns), or with one of them 1 where the view repeats it."""
        key = _key(view)
        if key not in self.held:
            at = self._address(view, fresh=True)
            rows, cols = _extent(view)
            r, c = self._grid((rows, cols))
            steps = (
                "".join(
                    f" + {axis} * {step}"
                    for axis, step, size in ((r, view.row_step, rows), (c, view.col_step, cols))
                    if size > 1
                )
                or f" + {r} + {c}"
            )
            self.held[key] = self._let(
                f"tl.load({at}{steps}, mask={self._mask((rows, cols))}, other=0.0).to(tl.float32)"
            )
        return self.held[key]

    def _made(self, view: View, text: str) -> None:
        """The result of an operation: rounded, held, and written where memory must have it."""
        dtype = self.program.values[view.value].dtype
        name = self._let(
            text if dtype == torch.float32 else f"({text}).to(tl.bfloat16).to(tl.float32)"
        )
        self._forget(view.value, view)
        self.held[_key(view)] = name
        if view.rows > 1 and view.col_step == 1 and view.row_step == view.cols:
            self.tiled[_stretch(view)] = (view.rows, view.cols)
        if view.value in self.needed:
            rows, cols = _extent(view)
            r, c = self._grid((rows, cols))
            steps = f"{r} * {view.row_step if rows > 1 else 0} + {c} * {view.col_step if cols > 1 else 0}"
            at = self._address(view, fresh=False)
            self.lines.append(
                f"tl.store({at} + {steps}, {name}.to({DTYPES[dtype]}), "
                f"mask={self._mask((rows, cols))})"
            )
            self.unread.add(view.value)

    def _forget(self, value: int, written: View | None = None) -> None:
        """Registers that a write to a value may have made stale: all of them but parts that do not
        overlap."""
        for key in [key for key in self.held if key[0] == value]:  # type: ignore[index]
            if written is None or not _apart(key, _key(written)):  # type: ignore[arg-type]
                del self.held[key]

    def _address(self, view: View, *, fresh: bool) -> str:
        """A view's first number. `fresh`: it is read, so that what was written must have arrived."""
        value = self.program.values[view.value]
        if value.source == Source.CONSTANT:
            return f"{self._pointer(('constant', value.name))} + {view.offset}"
        if value.source in (Source.ROTARY, Source.INPUT):
            kind = "rotary" if value.source == Source.ROTARY else "input"
            return f"{self._pointer((kind, int(value.name)))} + {self._position(kind)} * {value.size} + {view.offset}"
        if fresh and view.value in self.made:
            self.missed.add(view.value)
            if view.value in self.unread:
                self._barrier()
        offset = self.offsets[view.value]
        return f"{self._pointer(('tensor', offset.tensor))} + t * {offset.width} + {offset.offset + view.offset}"

    def _position(self, kind: str) -> str:
        if kind == "input":
            return "t"
        if not self.has_position:
            self.has_position = True
            self.lines.append(f"position = tl.load({self._pointer(('positions', 0))} + t)")
        return "position"

    def _barrier(self) -> None:
        self.barriers += 1
        self.lines.append("tl.debug_barrier()")
        self.unread.clear()

    def _pointer(self, argument: Argument) -> str:
        if argument not in self.arguments:
            self.arguments.append(argument)
        return f"p{self.arguments.index(argument)}"

    def _let(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"x{self.number}_{self.count} = {text}")
        return f"x{self.number}_{self.count}"

    def _width(self, cols: int) -> int:
        return SPLIT if self.split and cols > 1 else _padded(cols)

    def _grid(self, size: tuple[int, int]) -> tuple[str, str]:
        """Names of the row and column numbers of a tile."""
        rows, cols = size
        names = f"r{self.number}_{rows}", f"c{self.number}_{cols}"
        self.tile = max(self.tile, _padded(rows) * self._width(cols))
        if (rows, -1) not in self.grids:
            self.grids.add((rows, -1))
            self.lines.append(f"{names[0]} = tl.arange(0, {_padded(rows)})[:, None]")
        if (-1, cols) not in self.grids:
            self.grids.add((-1, cols))
            begin = f"tl.program_id(1) * {SPLIT} + " if self.split and cols > 1 else ""
            self.lines.append(f"{names[1]} = {begin}tl.arange(0, {self._width(cols)})[None, :]")
        return names

    def _mask(self, size: tuple[int, int]) -> str:
        r, c = self._grid(size)
        if size not in self.grids:
            self.grids.add(size)
            self.lines.append(
                f"m{self.number}_{size[0]}_{size[1]} = ({r} < {size[0]}) & ({c} < {size[1]})"
            )
        return f"m{self.number}_{size[0]}_{size[1]}"


def _number(value: float) -> str:
    """A number in Triton's words."""
    return f"float('{value}')" if value in (float("inf"), float("-inf")) else repr(float(value))


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _extent(view: View) -> tuple[int, int]:
    """Rows and columns that differ from one another."""
    return (view.rows if view.row_step or view.rows == 1 else 1), (
        view.cols if view.col_step or view.cols == 1 else 1
    )


def _key(view: View) -> tuple[int, int, int, int, int, int]:
    rows, cols = _extent(view)
    return (
        view.value,
        view.offset,
        rows,
        view.row_step if rows > 1 else 0,
        cols,
        view.col_step if cols > 1 else 0,
    )


def _stretch(view: View) -> tuple[int, int, int]:
    return view.value, view.offset, view.rows * view.cols


def _apart(
    span: tuple[int, int, int, int, int, int], other: tuple[int, int, int, int, int, int]
) -> bool:
    """Whether two views of one value share no number: tiles of the same steps whose columns do not
    overlap."""
    (_, a, rows, step, cols, unit), (_, b, other_rows, other_step, other_cols, other_unit) = (
        span,
        other,
    )
    if unit not in (0, 1) or other_unit not in (0, 1):
        return False
    if step == other_step and step and rows == other_rows:
        return (
            a + cols <= b < b + other_cols <= a + step or b + other_cols <= a < a + cols <= b + step
        )
    return a + (rows - 1) * step + cols <= b or b + (other_rows - 1) * other_step + other_cols <= a
