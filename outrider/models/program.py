"""A stored program, called with as little Python as it can be.

torch's own way in (`AOTICompiledModel`) flattens arguments by their recorded structure, some 20 to 40 microseconds a call: a lot
beside a small head's pass. Ours are tensors and lists of tensors, in the order in which they were exported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_flat_program(path: Path) -> Callable[..., Any]:
    """The program at `path`, which returns a tuple. Arguments are tensors and lists of tensors (no deeper), by
    position. A program of one output returns a tuple of one."""
    run = torch._inductor.aoti_load_package(str(path)).loader.boxed_run
    os.utime(path)  # last use, for `compile.drop_old`

    def program(*arguments: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
        flat: list[Tensor] = []
        for argument in arguments:
            if isinstance(argument, list):
                flat.extend(argument)
            else:
                flat.append(argument)
        return tuple(run(flat))

    return program
