"""What the native runtime keeps of a model: panels of its own, and of the module only what is read as it lies."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from outrider.models.load import build_lm
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.unit.runtime.families import make


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_weights_that_lie_in_panels_are_not_kept_beside_them(family: str, library_path: Path) -> None:
    """Catches a binding, a recording or a registry of transformers that holds on to them: they are as large as the model."""
    module: Any = make(family, torch.bfloat16)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    weights = {name: ref(one) for name, one in module.named_parameters() if one.dim() > 1 and id(one) not in tables}
    assert len(weights) >= 8
    run = NativeRun(build_lm(module, family, torch.bfloat16, torch.device("cpu")), module, lower(module), library_path)
    del module
    gc.collect()
    assert [name for name, one in weights.items() if one() is not None] == []
    assert run.executor.program.body
