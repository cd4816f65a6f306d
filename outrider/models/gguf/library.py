"""The package `gguf`, imported when a GGUF file is read: everything else starts without it, and
works where it is absent.

    from outrider.models.gguf import library
    library.dequantize(...)
"""

from __future__ import annotations

import importlib
from typing import Any

from outrider.errors import CapabilityError


def __getattr__(name: str) -> Any:
    """The attribute of the package gguf with this name. Raises CapabilityError where the package is
    missing."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(importlib.import_module("gguf"), name)
    except ImportError as error:
        raise CapabilityError("GGUF files need the package gguf: pip install gguf") from error
