"""Outrider's look-up drafters inside vLLM: `Proposer` for its method `custom_class`,
`plugin.register` for its plug-in loader.

    vllm serve MODEL --speculative-config
        '{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer",
        "num_speculative_tokens": 8}'

vLLM loads plug-ins in every process, so nothing is imported here until `Proposer` is asked for.
docs/vllm.md is for operators.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {"Proposer": "outrider.integrations.vllm.proposer"}

__all__ = ["Proposer"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'outrider.integrations.vllm' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
