"""Mixtures in the calculator: distinct experts and bytes of passes by hand, and configs of families."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from outrider.lab.estimate.estimate import costs_of, estimate
from outrider.lab.estimate.estimate_result import Mixture
from outrider.lab.estimate.experts import mixture_in
from tests.unit.runtime.families import FAMILIES, SIZES

DOCS = Path(__file__).parents[4] / "docs" / "algorithms" / "estimate.md"
MIXTURE = Mixture(experts=8, active=2, expert_share=0.8)


def test_distinct_experts_by_hand() -> None:
    """Two tokens miss an expert with chance (3/4)^2; a plain pass reads a fifth of 0.8 and 0.2."""
    assert [MIXTURE.distinct(n) for n in (1, 2)] == pytest.approx([2.0, 3.5])
    assert MIXTURE.plain_share == pytest.approx(0.5)
    assert MIXTURE.pass_cost(2) == pytest.approx((0.2 + 0.8 * 3.5 / 8) / 0.4)


def test_experts_decide_whether_to_draft() -> None:
    """An acceptance that pays where passes are flat does not where each token reads its own."""
    assert estimate([0.5], costs_of(0.1, {}), "").best > 0
    many = Mixture(experts=256, active=8, expert_share=0.98)
    result = estimate([0.5], costs_of(0.1, {}, many), "", mixture=many)
    assert result.best == 0
    assert result.lengths[4].experts == pytest.approx(many.distinct(5))
    assert costs_of(0.1, {5: 1.0}, many).step_s(4)[0] == pytest.approx(1.4), "what is given counts"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "ernie4_5_moe"])
def test_configs_of_families(family: str) -> None:
    found = mixture_in(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}))
    assert found is not None
    assert (found.experts, found.active) == (4, 2)
    assert 0 < found.expert_share < 1


def test_what_is_no_mixture_has_none() -> None:
    assert mixture_in(AutoConfig.for_model("llama", num_hidden_layers=1)) is None


SHAPES: dict[str, tuple[str, dict[str, int]]] = {  # what the published configs say, defaults aside
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "Mixtral-8x7B": ("mixtral", {}),
}


def documented() -> dict[str, str]:
    """The rows of the page's table of mixtures, by model."""
    _, _, table = DOCS.read_text(encoding="utf-8").partition("| E, a |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return {row[2:].partition(":")[0]: row for row in rows}


def test_the_page_has_a_row_for_every_shape() -> None:
    assert list(documented()) == list(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_the_page(name: str) -> None:
    """Every number of it, from the shapes of the published models."""
    family, values = SHAPES[name]
    found = mixture_in(AutoConfig.for_model(family, **values))
    assert found is not None
    costs = " | ".join(f"{found.pass_cost(count):.2f}" for count in (2, 3, 5, 9))
    row = f"| {name}: {found.experts}, {found.active} | {found.plain_share:.0%} | {costs} |"
    assert documented()[name] == row
