"""Modules that take seconds to import, and that many starts never need: imported when something of
them is used.

from outrider.lazy import transformers
transformers.AutoConfig
transformers.pytorch_utils.Conv1D
"""

from __future__ import annotations

import importlib
from typing import Any


class Package:
    """Stands for a package until it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self._name)
        try:
            return getattr(module, name)
        except AttributeError:
            return importlib.import_module(f"{self._name}.{name}")


scipy: Any = Package("scipy")
torch: Any = Package("torch")
transformers: Any = Package("transformers")
huggingface_hub: Any = Package("huggingface_hub")
pydantic: Any = Package("pydantic")
pydantic_core: Any = Package("pydantic_core")
filelock: Any = Package("filelock")
