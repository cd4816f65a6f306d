"""Kernel texts as Triton functions, one for each text: layers that do the same share it."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

HEAD = "@triton.jit(do_not_specialize=['num_columns', 'num_tokens'])\n"


@functools.cache
def compiled(text: str) -> Any:
    """The function `kernel` of this text. Triton reads its source again, by way of `linecache`."""
    source = HEAD + text + "\n"
    name = f"<outrider kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    found: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "outrider.runtime.gpu.written"}
    exec(compile(source, name, "exec"), found)
    return found["kernel"]
