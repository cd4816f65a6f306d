"""A stored program, called with as little Python as it can be.

torch's own way in (`AOTICompiledModel`) flattens arguments by their recorded structure, some 20 to 40 microseconds a call: a lot
beside the pass of a small draft. Ours are tensors and lists of tensors, in the order in which they were exported.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Program = Callable[..., tuple[Any, ...]]


def load_program(path: Path, shared: Mapping[str, Tensor] | None = None) -> Program:
    """The program at `path`, which returns a tuple. Arguments are tensors and lists of tensors (no deeper), by
    position. A program of one output returns a tuple of one.

    `shared`: tensors that it uses in place of its own constants of these names. Programs of one model that take turns then read
    one copy of its weights: what the first has brought into the caches serves the next. (Constants that the compiler made anew,
    such as weights packed for oneDNN, have other names and stay.)
    """
    # `torch._inductor.aoti_load_package` ends here, too, but first tries this machine's C++ compiler, to compare processors: a
    # second, ten in a fresh container. The names of our files tell processors apart (`compile.package_path`).
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    _delete_unpacked(path)
    os.utime(path)  # last use, for `compile.drop_old`
    run, own = loader.boxed_run, set(loader.get_constant_fqns())
    kept = {name: tensor for name, tensor in (shared or {}).items() if name in own}
    if kept:
        loader.load_constants(kept, use_inactive=False, check_full_update=False, user_managed=True)

    def program(*arguments: Tensor | list[Tensor], _kept: object = kept) -> tuple[Tensor, ...]:  # the loader does not keep them
        flat: list[Tensor] = []
        for argument in arguments:
            if isinstance(argument, list):
                flat.extend(argument)
            else:
                flat.append(argument)
        return tuple(run(flat))

    return program


def _delete_unpacked(package: Path) -> None:
    """torch unpacks a program into the temporary folder, NAME/data/aotinductor/model, and deletes that with the loader; a process
    that is killed, or ends with a model alive, would leave it there, weights and all. What is mapped needs its file no more."""
    with zipfile.ZipFile(package) as archive:
        libraries = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
    maps = Path("/proc/self/maps")  # Linux has it
    for line in maps.read_text().splitlines() if maps.exists() else ():
        mapped = Path(line.split(maxsplit=5)[-1])
        if mapped.name in libraries and mapped.parent.parent.name == "aotinductor":
            shutil.rmtree(mapped.parent, ignore_errors=True)


