"""Outrider: speculative decoding that proves itself.

The public names below are imported when first used, so that `import outrider` and `outrider --help`
stay instant. Type checkers and editors see the imports themselves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from outrider.version import __version__

if TYPE_CHECKING:
    from outrider.async_llm import AsyncLLM
    from outrider.errors import OutriderError
    from outrider.llm import LLM
    from outrider.outputs import Completion, StreamChunk
    from outrider.sampling.params import SamplingParams
    from outrider.sampling.structured import StructuredOutputsParams
    from outrider.stats import DecodeStats

__all__ = [
    "LLM", "AsyncLLM", "Completion", "DecodeStats", "OutriderError", "SamplingParams", "StreamChunk", "StructuredOutputsParams",
    "__version__",
]  # fmt: skip

_HOMES = {
    "AsyncLLM": "outrider.async_llm",
    "LLM": "outrider.llm",
    "SamplingParams": "outrider.sampling.params",
    "StructuredOutputsParams": "outrider.sampling.structured",
    "Completion": "outrider.outputs",
    "StreamChunk": "outrider.outputs",
    "DecodeStats": "outrider.stats",
    "OutriderError": "outrider.errors",
}

if not TYPE_CHECKING:  # else every misspelt name would be there

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'outrider' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
