"""Ways to look at a token's block of numbers: sizes and steps of any number of dimensions, brought
down to rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from outrider.runtime.ops import View


@dataclass(frozen=True)
class Strided:
    """Number (i, j, ...) of the view is number offset + i * steps[0] + j * steps[1] + ... of the
    value."""

    value: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int = 0

    @property
    def count(self) -> int:
        return prod(self.sizes)


def dense(value: int, sizes: Sequence[int], offset: int = 0) -> Strided:
    """All numbers of a value, the last dimension side by side."""
    steps = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return Strided(value, tuple(sizes), tuple(steps), offset)


def stretch(view: Strided, dim: int, begin: int, end: int) -> Strided:
    """Numbers [begin, end) of one dimension."""
    sizes = (*view.sizes[:dim], end - begin, *view.sizes[dim + 1 :])
    return replace(view, sizes=sizes, offset=view.offset + begin * view.steps[dim])


def reshape(view: Strided, sizes: Sequence[int]) -> Strided | None:
    """The numbers of `view` in their order, with other sizes; None where steps cannot say that."""
    groups: list[tuple[int, int]] = []  # (size, step) of stretches that are walked evenly
    for size, step in zip(view.sizes, view.steps, strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * step:
            groups[-1] = (groups[-1][0] * size, step)
        else:
            groups.append((size, step))
    steps: list[int] = []
    rest = list(groups)
    for size in sizes:
        if size == 1:
            steps.append(0)
            continue
        if not rest or rest[0][0] % size:
            return None
        whole, step = rest[0]
        steps.append(step * (whole // size))
        rest[0] = (whole // size, step)
        if rest[0][0] == 1:
            rest.pop(0)
    return None if rest else Strided(view.value, tuple(sizes), tuple(steps), view.offset)


def collapse(views: Sequence[Strided], *, keep_last: bool = False) -> list[View] | None:
    """Views of equal sizes as rows and columns, dimensions that all walk evenly taken together;
    None where three are left.

    `keep_last`: the columns are the last dimension alone.
    """
    sizes = list(views[0].sizes)
    steps = [list(view.steps) for view in views]
    assert all(list(view.sizes) == sizes for view in views), "operands of different sizes"
    for dim in range(len(sizes) - (2 if keep_last else 1), -1, -1):
        if sizes[dim] == 1:  # no direction at all
            del sizes[dim]
            for step in steps:
                del step[dim]
    if not keep_last and len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
        for step in steps:
            step.pop()
    for dim in range(len(sizes) - 2, -1, -1):
        if keep_last and dim == len(sizes) - 2:
            continue
        if all(step[dim] == sizes[dim + 1] * step[dim + 1] for step in steps):
            sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
            for step in steps:
                del step[dim]
    if len(sizes) > 2:
        return None
    rows, cols = [1, 1, *sizes][-2:]
    dims = []
    for view, step in zip(views, steps, strict=True):
        row_step, col_step = [0, 0, *step][-2:]
        dims.append(View(view.value, rows, cols, view.offset, row_step, col_step))
    return dims
