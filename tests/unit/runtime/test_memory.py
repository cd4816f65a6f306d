"""What the native runtime keeps of a model: panels of its own, and of the module only what is read
as it lies."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from outrider import LLM, SamplingParams
from outrider.models.loading.load import build_lm
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.heads import HEADS
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.runtime.families import make

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_weights_that_lie_in_panels_are_not_kept_beside_them(
    family: str, library_path: Path
) -> None:
    """Catches a binding, a recording or a registry of transformers that holds on to them: they are
    as large as the model."""
    module: Any = make(family, torch.bfloat16)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    weights = {
        name: ref(one)
        for name, one in module.named_parameters()
        if one.dim() > 1 and id(one) not in tables
    }
    assert len(weights) >= 8
    run = NativeRun(
        build_lm(module, family, torch.bfloat16, torch.device("cpu")),
        module,
        lower(module),
        library_path,
    )
    del module
    gc.collect()
    assert [name for name, one in weights.items() if one() is not None] == []
    assert run.executor.program.body


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_weights_are_not_kept_beside_its_panels(
    kind: str, tmp_path: Path, library_path: Path
) -> None:
    """But for a block head's confidence, which torch computes."""
    module = tiny_llama(257)
    HEADS[kind](module, tmp_path / "head")
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    llm = LLM(
        target, draft=tmp_path / "head", drafter=kind, dtype="bfloat16", runtime="native", threads=1
    )
    drafter: Any = llm._built.decoder.drafter
    head = (
        drafter.lm.head
        if kind.startswith(("eagle", "mtp"))
        else drafter.heads
        if kind == "medusa"
        else drafter.head
    )
    left = [name for name, part in head.named_modules() if isinstance(part, nn.Linear)]
    assert left == (["confidence_head.proj"] if kind == "block" else [])
    assert (
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0].stats.drafted
        > 0
    )
