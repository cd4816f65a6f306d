"""Outrider: speculative decoding that proves itself.

The public names below are imported when first used, so that `import outrider` and `outrider --help` stay instant.
"""

from __future__ import annotations

import importlib
from typing import Any

from outrider.version import __version__

_PUBLIC = {
    "LLM": "outrider.llm",
    "SamplingParams": "outrider.sampling.params",
    "StructuredOutputsParams": "outrider.sampling.structured",
    "Completion": "outrider.outputs",
    "StreamChunk": "outrider.outputs",
    "DecodeStats": "outrider.stats",
    "OutriderError": "outrider.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
