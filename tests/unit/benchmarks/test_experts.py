"""The mixtures' benchmark: a widened demo says what the demo says, and ratios and floors by hand."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.demo import demo_paths

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def run(prompt: int, setting: str, rate: float, plain: float) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "workload": "gsm8k",
        "setting": setting,
        "tokens_per_s": rate,
        "tau": 1.5,
        "experts": 5.0,
        "drafted": 4,
        "steps": 10,
        "plain_tokens_per_s": plain,
        "is_plain_text": True,
    }


def test_verdicts_by_hand(part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A length that loses asks more of `auto` than plain does; one that wins does not."""
    experts = part("experts")
    rates = {
        "none": (100, 200),
        "suffix k=4": (50, 100),
        "suffix k=auto:8": (99, 198),
        "eagle3 k=4": (120, 240),
        "eagle3 k=auto:8": (90, 180),
    }
    runs = [
        run(n, name, rate, rates["none"][n])
        for name, both in rates.items()
        for n, rate in enumerate(both)
    ]
    found = {what: (ratio, said) for what, ratio, said in experts.verdicts(runs, list(rates))}
    assert found == {
        "suffix k=auto:8 / plain": (pytest.approx(0.99), "met"),
        "suffix k=auto:8 / k=4": (pytest.approx(1.98), "met"),
        "eagle3 k=auto:8 / plain": (pytest.approx(0.9), "not met"),
    }
    experts.show({"shapes": {"8 experts, 4 active": {"plain_share": 0.5, "runs": runs}}})
    assert "50% of a plain pass" in capsys.readouterr().out


def test_an_interval_by_hand(part: Any) -> None:
    """Logarithms 0 and 0.02: a deviation of 0.02 / sqrt(2), over sqrt(2)."""
    interval = part("experts").interval
    assert interval([1.0, math.exp(0.02)]) == pytest.approx(1.96 * 0.01)
    assert interval([1.0]) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_widened_demo_says_what_the_demo_says(part: Any, tmp_path: Path, times: int) -> None:
    """Catches heads, experts or routers that add something, and routers that name the same experts
    for all tokens."""
    widened = part("widened")
    folder = widened.widened(widened.Shape(8, 2, 9, times), tmp_path / "wide")
    tokens = torch.tensor([[0, 45, 318, 2000, 77, 1234, 9, 600]])
    named: list[torch.Tensor] = []
    with torch.inference_mode():
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        small = AutoModelForCausalLM.from_pretrained(demo_paths().target, dtype=torch.float32)
        assert wide.config.intermediate_size == times * small.config.intermediate_size
        for layer in wide.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, given, out: named.append(out[2]))
        assert (wide(tokens).logits - small(tokens).logits).abs().max() < 1e-3
    assert min(len(each.unique()) for each in named) > 3
