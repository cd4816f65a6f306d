"""What "exact" rests on: a row's logits have the same bits in every pass the engine makes.

`find_pass_limits` measures on each model which passes agree. These tests check its answer on other
models: every width of pass up to a long draft, every number of rows, every slot of the batch, and
neighbours of any length (so that keys come in more blocks). They cover packed and plain linears,
bf16, fp32 and fp64, fused attention and the written-out one with softcap.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.models import attention
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm, finish
from outrider.models.pass_plan import QUERY_BLOCK
from tests.contract.test_architectures import GPT2, GROUPED, make_module

FAMILIES = {
    "llama": ("Llama", {**GROUPED, "hidden_size": 96, "intermediate_size": 136}),
    "gpt2": ("GPT2", GPT2),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 16}),
    "gemma2-softcap": (
        "Gemma2",
        {**GROUPED, "head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 2.0},
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
CASES = [("llama", "fp64"), *((family, "fp32") for family in FAMILIES)] + [
    pytest.param((family, "bf16"), marks=pytest.mark.slow) for family in FAMILIES
]
TEXT = [5 + (7 * i + i * i) % 90 for i in range(640)]
PREFIX = 21


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def lm(request: pytest.FixtureRequest) -> Iterator[LM]:
    """A model as the engine runs it: packed where that is possible, limits measured."""
    family, name = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    attention.register()
    kind, options = FAMILIES[family]
    module = make_module(kind, {**options, **LONG[kind], "initializer_range": 0.1}, DTYPES[name])
    made = build_lm(module, family, DTYPES[name], torch.device("cpu"))
    finish(made, module)
    yield made
    torch.set_num_threads(threads)


LONG = {"GPT2": {"n_positions": 1024}} | {
    name: {"max_position_embeddings": 1024} for name in ("Llama", "Mistral", "Gemma2")
}


@torch.inference_mode()
def logits_of(lm: LM, prefixes: list[int], width: int, row: int) -> Tensor:
    """Logits (width, V) of one row of a pass; row b's text is TEXT from b's own start, with
    prefixes[b] tokens before it."""
    while lm.kv.num_rows:
        lm.kv.swap_remove(0)
    starts = [0 if index == row else 11 * (index % 40 + 1) for index in range(len(prefixes))]
    for _ in prefixes:
        lm.kv.add_row()
    lm.catch_up(
        [TEXT[start : start + length + 1] for start, length in zip(starts, prefixes, strict=True)]
    )
    tokens = [
        TEXT[start + length :][:width] for start, length in zip(starts, prefixes, strict=True)
    ]
    return lm.forward(torch.tensor(tokens)).logits[row]


def same_bits(lm: LM, reference: Tensor, prefixes: list[int], width: int, row: int) -> None:
    found = logits_of(lm, prefixes, width, row)
    common = min(width, reference.shape[0])
    assert torch.equal(found[:common], reference[:common]), (
        f"rows of {prefixes}, {width} tokens, row {row}"
    )


def test_the_width_of_a_pass(lm: LM) -> None:
    """Catches kernels that sum in another order for one token than for six: greedy text would
    depend on the draft length."""
    reference = logits_of(lm, [PREFIX], 8, 0)
    for width in (*range(1, 18), 23, 33, 64):
        same_bits(lm, reference, [PREFIX], width, 0)


def test_rows_beside(lm: LM) -> None:
    """Catches arithmetic that depends on how many rows share the pass, or on which slot a row has."""
    reference = logits_of(lm, [PREFIX], 8, 0)
    for num_rows in (2, 3, 5, 7, 9):
        for row in {0, num_rows - 1}:
            for width in (1, 4, 6):
                same_bits(lm, reference, [PREFIX] * num_rows, width, row)


def test_one_row_more_than_a_pass_holds(lm: LM) -> None:
    """Catches a last row that is left to a pass of its own, where a single token takes other
    kernels."""
    reference = logits_of(lm, [PREFIX], 8, 0)
    max_rows = lm.limits.max_tokens_per_pass
    same_bits(lm, reference, [PREFIX] * (max_rows + 1), 1, max_rows)


def test_a_long_neighbour(lm: LM) -> None:
    """Catches sums over masked keys that are cut differently when a neighbour makes the pass look
    at more key blocks."""
    reference = logits_of(lm, [PREFIX], 6, 0)
    for neighbours in ([PREFIX, 600], [600, PREFIX], [3, PREFIX, 505]):
        same_bits(lm, reference, neighbours, 6, neighbours.index(PREFIX))


def test_a_wider_cache(lm: LM) -> None:
    """Catches bits that change when the cache has grown."""
    reference = logits_of(lm, [PREFIX], 6, 0)
    lm.kv.reserve(4, 3000)
    same_bits(lm, reference, [PREFIX], 6, 0)


def test_experts_are_not_called_exact() -> None:
    """Catches a promise that a mixture of experts cannot keep in fp32: an expert's sums depend on
    how many tokens it is given."""
    attention.register()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    module = make_module(
        "Qwen3Moe", {**GROUPED, "hidden_size": 96, **experts, "initializer_range": 0.1}
    )
    made = build_lm(module, "experts", torch.float32, torch.device("cpu"))
    finish(made, module)
    assert not made.limits.exact_rows


def test_limits_are_claimed_only_when_measured(lm: LM) -> None:
    """Catches limits that no pass can keep, or that never allow a second row."""
    assert lm.limits.granularity in (2, QUERY_BLOCK)
    assert lm.limits.max_tokens_per_pass >= QUERY_BLOCK
    assert lm.limits.exact_rows
