"""Attention sinks of tests' families weigh enough that a wrong one is seen;
`tests/contract/test_our_cache.py` compares texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.models.loading.load import build_lm
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op
from tests.reference_run import ReferenceRun
from tests.unit.runtime.families import make
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
SINKS = ("gpt_oss", "mimo_v2_flash")
TOLERANCE = 1e-4


def lost(op: Op) -> Op:
    """BUG: without its sinks."""
    return replace(op, inputs=op.inputs[:1])


def of_one_head(op: Op) -> Op:
    """BUG: with the first head's for all."""
    return replace(
        op, inputs=(op.inputs[0], *(replace(view, col_step=0) for view in op.inputs[1:]))
    )


@pytest.mark.parametrize("bug", [lost, of_one_head])
@pytest.mark.parametrize("name", SINKS)
def test_wrong_sinks_are_found(name: str, bug: Any) -> None:
    """Fails for sinks so small, or passes so long, that the families' tests would not see them."""
    module = make(name)
    lm = build_lm(module, name, torch.float32, CPU)
    program = lower(module)
    expected = every_pass(lm)
    program.body = [bug(op) if op.code == Code.ATTENTION else op for op in program.body]
    lm.run = ReferenceRun(module, program)
    assert min(differences(every_pass(lm), expected).values()) > 10 * TOLERANCE
