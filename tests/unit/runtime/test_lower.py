"""Lowering: programs of many families, run by torch, against the modules they were made of."""

from __future__ import annotations

import pytest
import torch

from outrider.models.loading.load import build_lm
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.lower import lower
from outrider.runtime.strides import Strided, collapse, dense, reshape
from tests.reference_run import ReferenceRun
from tests.unit.runtime.families import FAMILIES, NOT_LOWERED, make, states_of
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lowered_pass_is_the_modules(family: str, dtype: torch.dtype) -> None:
    """Catches a lost scale, a norm computed otherwise, a rotation of the wrong halves, a window or
    soft cap that is lost."""
    module = make(family, dtype)
    lm = build_lm(module, family, dtype, CPU)
    capture = states_of(family)
    expected = every_pass(lm, capture)
    lm.run = ReferenceRun(module, lower(module))
    worst = differences(every_pass(lm, capture), expected)
    assert max(worst.values()) < TOLERANCE[dtype], worst


def test_a_llama_is_lowered_to_what_it_computes() -> None:
    """Catches operations that nobody needs, such as those of transformers' masks, and copies for
    shapes alone."""
    counts = lower(make("llama")).counts()
    layers = 2
    assert counts.pop("SIGNAL") == layers + 2
    assert counts == {
        "EMBED": 1,
        "LINEAR": 7 * layers + 1,
        "ATTENTION": layers,
        "STORE": 2 * layers,
        "SILU": layers,
        "GATHER": 1,
        "SQUARE": 2 * layers + 1,
        "MEAN": 2 * layers + 1,
        "RSQRT": 2 * layers + 1,  # norms
        "NEG": 2 * layers,
        "COPY": 4 * layers,  # halves turned, of queries and keys
        "ADD": (2 * layers + 1) + 2 * layers + 2 * layers,
        "MUL": 2 * (2 * layers + 1) + 4 * layers + layers,
    }


class RepeatedHeads(torch.nn.Module):
    """Every other head of four, twice: lies in three directions, as queries of Qwen3.5 did in
    transformers 5.17."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (4, -1))[..., ::2, :].repeat_interleave(2, dim=-2).flatten(-2)


def test_numbers_in_three_directions_are_copied_in_parts() -> None:
    module = make("llama")
    module.model.layers[0].mlp.act_fn = RepeatedHeads()
    lm = build_lm(module, "llama", torch.float32, CPU)
    expected = every_pass(lm, ())
    lm.run = ReferenceRun(module, lower(module))
    assert max(differences(every_pass(lm, ()), expected).values()) < TOLERANCE[torch.float32]


def test_only_the_head_runs_for_the_rows_that_are_asked_for() -> None:
    program = lower(make("gemma2"))
    assert [op.code.name for op in program.head] == ["GATHER", "LINEAR", "DIV", "TANH", "MUL"]


@pytest.mark.parametrize("family", NOT_LOWERED)
def test_what_has_no_operation_is_refused_by_name(family: str) -> None:
    """Catches a model whose tokens meet outside attention (experts), or a function unknown here,
    lowered to something else."""
    reason, _ = NOT_LOWERED[family]
    with pytest.raises(NotLoweredError, match=reason):
        lower(make(family))


class LargestOfAll(torch.nn.Module):
    """Calls torch in a form of `max` that no rule knows, as DBRX did in transformers 5.17."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.max(x)


def test_a_form_of_a_call_that_no_rule_knows_is_refused_by_name() -> None:
    module = make("llama")
    module.model.layers[0].mlp.act_fn = LargestOfAll()
    with pytest.raises(NotLoweredError, match="torch's 'max' in a form that is unknown here"):
        lower(module)


def test_tables_that_change_with_the_text_are_refused() -> None:
    module = make("llama")
    module.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(NotLoweredError, match="length"):
        lower(module)


def test_the_module_is_left_as_it_was() -> None:
    """Catches a rotary module that stays patched, or an attention that stays the recording's."""
    module = make("llama")
    lm = build_lm(module, "llama", torch.float32, CPU)
    before = every_pass(lm)
    lower(module)
    assert "forward" not in vars(module.model.rotary_emb)
    assert differences(every_pass(lm), before) == dict.fromkeys(before, 0.0)


def test_steps_are_reshaped_where_they_can_be() -> None:
    half = Strided(0, (4, 8), (16, 1), 8)  # the second half of each of four heads
    assert reshape(half, (4, 2, 4)) == Strided(0, (4, 2, 4), (16, 4, 1), 8)
    assert reshape(half, (32,)) is None
    assert reshape(dense(0, (4, 16)), (64,)) == dense(0, (64,))


def test_even_walks_are_taken_together() -> None:
    views = collapse([dense(0, (2, 3, 4)), dense(1, (2, 3, 4))])
    assert views is not None
    assert (views[0].rows, views[0].cols) == (1, 24)
    views = collapse([dense(0, (2, 3, 4)), Strided(1, (2, 3, 4), (0, 0, 1))])
    assert views is not None
    assert (views[1].rows, views[1].cols, views[1].row_step, views[1].col_step) == (6, 4, 0, 1)
    assert collapse([Strided(0, (2, 3, 4), (1, 100, 20))]) is None


def test_a_model_is_lowered_in_inference_mode_too() -> None:
    """There torch hands over operations whole that are made of others, which no rule knows."""
    module = make("llama")
    with torch.inference_mode():
        inside = lower(module).counts()
    assert inside == lower(module).counts()
