"""Programs of parts that are no model of their own, such as trained heads: made once per machine, then kept beside the others.

A drafter asks its workshop for the program of some weights. Whether one is made, or only taken where it was made before, is
what the user said with --compile. There is a workshop only where the target itself runs compiled; elsewhere, and for all that
a program cannot do, drafters run their modules as they are, which is also what programs are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from outrider.models.compile import program_path
from outrider.models.program import load_program

Mode = Literal["on", "auto"]


class Workshop:
    """`mode`: "on" makes missing programs, "auto" only takes those that are there; `status` is told what takes long; `notes`
    gets a line where something runs slower than it could. Programs stay loaded: decoders on the same models share them."""

    def __init__(self, mode: Mode, status: Callable[[str], None], notes: list[str]) -> None:
        self._mode, self._status, self._notes = mode, status, notes
        self._loaded: dict[Path, Callable[..., Any]] = {}

    def program(
        self, purpose: str, facts: tuple[object, ...], tensors: Mapping[str, Tensor], label: str, make: Callable[[Path], None],
    ) -> Callable[..., Any] | None:  # fmt: skip
        """The program for these facts and weights, made first by `make(path)` where that is allowed; None where it is missing.

        `purpose` begins its file's name; `facts` (compared by their repr) and `tensors` are all that its code depends on
        beside our source files; `label` is what a person calls the part. Raises what `make` raises.
        """
        path = program_path(purpose, facts, tensors)
        if path not in self._loaded:
            if not path.exists():
                if self._mode == "auto":
                    self.note(f"{label} runs uncompiled; --compile on is faster (compiles once, a minute or so)")
                    return None
                self._status(f"compiling {label}: once per machine, a minute or so")
                make(path)
            self._loaded[path] = load_program(path)
        return self._loaded[path]

    def note(self, line: str) -> None:
        """Something runs slower than it could: said once."""
        if line not in self._notes:
            self._notes.append(line)
