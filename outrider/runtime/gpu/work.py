"""The state that the steps of one GPU pass share."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.pass_plan import PassPlan


@dataclass
class Work:
    """One pass: what is given, and the tensors made so far by the value that gives each its number."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,)
    plan: PassPlan
    columns: Tensor
    rotary: Sequence[Tensor]
    num_rows: int
    num_tokens: int
    tensors: dict[int, Tensor] = field(default_factory=dict)  # (tokens, width)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # by index of the signal

    @cached_property
    def parents(self) -> Tensor | None:
        """The token of the pass that each one follows (B, T), -1: none, of a tree over running
        states."""
        given = self.plan.parents
        return None if given is None else F.pad(given + 1, (1, 0), value=-1)

    @property
    def count(self) -> int:
        return self.num_rows * self.num_tokens


HEAD = "@triton.jit(do_not_specialize=['num_columns', 'num_tokens'])\n"


@functools.cache
def compiled(text: str) -> Any:
    """The function `kernel` of this text. Triton reads its source again, by way of `linecache`."""
    source = HEAD + text + "\n"
    name = f"<outrider kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "__name__": "outrider.runtime.gpu.written",
    }
    exec(compile(source, name, "exec"), namespace)
    return namespace["kernel"]
