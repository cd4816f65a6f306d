"""The three models side by side, and what is refused before they are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CapabilityError, ConfigError
from outrider.lab.estimate.curves import CostPoints, StepCosts
from outrider.lab.estimate.estimate import estimate
from outrider.lab.estimate.estimate_result import EstimateInput, EstimateResult, ModelEstimate
from outrider.lab.estimate.roofline import Machine, ModelSize, size_of
from outrider.lab.result import read_result
from outrider.sampling.theory import predicted_speedup, survival_of, tau

BENT = StepCosts(target=CostPoints.of({1: 0.020, 6: 0.024, 9: 0.035}), draft_s_per_token=0.002, overhead_s=0.001)
EIGHT, ONE = size_of("8B", 8 * 10**9, "bfloat16"), size_of("1B", 10**9, "bfloat16")
KNOWN = [model.model_copy(update={"kv_bytes_per_token": size}) for model, size in ((EIGHT, 131072), (ONE, 32768))]
MACHINE = Machine(bandwidth=900e9, flops=300e12)


def answer(**asked: Any) -> EstimateResult:
    return estimate(EstimateInput(**asked))


def model(result: EstimateResult, name: str) -> ModelEstimate:
    return next(one for one in result.models if one.name == name)


def speedups(one: Any) -> list[float]:
    return [one.leviathan_speedup, one.envelope_speedup, one.curve.speedup]


@given(alpha=st.floats(0, 1), c=st.floats(0, 1.5))
def test_alpha_and_c_are_leviathan(alpha: float, c: float) -> None:
    """With nothing else known the curve is the formula, and the envelope always below it."""
    result = answer(alpha=alpha, c=c)
    assert [one.num_draft_tokens for one in result.lengths] == list(range(13))
    for one in result.lengths:
        leviathan, envelope, curve = speedups(one)
        assert leviathan == pytest.approx(predicted_speedup(alpha, one.num_draft_tokens, c))
        assert curve == pytest.approx(leviathan)
        assert envelope == pytest.approx(leviathan - (one.num_draft_tokens > 0) / (one.num_draft_tokens * c + 1))
    assert predicted_speedup(alpha, model(result, "leviathan").best_num_draft_tokens, c) == pytest.approx(
        max(predicted_speedup(alpha, length, c) for length in range(13))
    )
    assert result.pays == (model(result, "curve").speedup > 1)
    assert not result.is_timed


def test_acceptance_by_position() -> None:
    """tau from the positions; Leviathan gets accepted / tested over those given; the rest accepts like the last."""
    result = answer(acceptance=[0.9, 0.5], c=0.1, max_draft_tokens=4)
    assert result.survival == pytest.approx([0.9, 0.45, 0.225, 0.1125])
    assert result.alpha == pytest.approx(1.35 / 1.9)
    two = result.lengths[2]
    assert two.curve.tau == pytest.approx(2.35)
    assert two.effective_gamma == pytest.approx(1.35)
    assert two.leviathan_tau == pytest.approx(tau(1.35 / 1.9, 2))
    assert speedups(two) == pytest.approx([tau(1.35 / 1.9, 2) / 1.2, 1.35 / 1.2, 2.35 / 1.2])
    assert any("positions 3 to 4" in note for note in result.notes)
    assert not any("position" in note for note in answer(acceptance=[0.9, 0.5], c=0.1, max_draft_tokens=2).notes)


def test_the_equivalent_alpha_gives_the_same_tau() -> None:
    result = answer(acceptance=[0.9, 0.5, 0.7], c=0.1, num_draft_tokens=3)
    assert tau(result.equivalent_alpha, 3) == pytest.approx(result.lengths[3].curve.tau)
    point = next(
        point for point in result.sensitivity if point.alpha == pytest.approx(result.equivalent_alpha, abs=1e-6)
    )
    assert point.curve == pytest.approx(result.lengths[3].curve.speedup, abs=1e-4)


def test_measured_costs() -> None:
    result = answer(alpha=0.7, costs=BENT)
    assert (result.cost_source, result.is_timed, result.c) == ("measured", True, pytest.approx(0.1))
    three = result.lengths[3].curve
    assert three.step_s == pytest.approx(0.0224 + 0.006 + 0.001)
    assert three.tokens_per_s == pytest.approx(tau(0.7, 3) / 0.0294)
    assert (result.num_draft_tokens, model(result, "leviathan").best_num_draft_tokens) == (3, 4)
    notes = "\n".join(result.notes)
    assert "γ = 9-12 reach beyond" in notes
    assert "overhead" in notes
    assert "γ = " not in "\n".join(answer(alpha=0.7, costs=BENT, max_draft_tokens=8).notes)


def test_whole_steps() -> None:
    """c is then what a step grows by per draft token."""
    result = answer(alpha=0.8, costs=StepCosts.of_steps({0: 0.02, 5: 0.03}, num_rows=2), max_draft_tokens=5)
    assert result.c == pytest.approx(0.1)
    assert result.num_rows == 2
    assert result.lengths[5].curve.tokens_per_s == pytest.approx(2 * tau(0.8, 5) / 0.03)


def test_noisy_measurements_are_reported() -> None:
    noisy = StepCosts(target=CostPoints.of({1: 0.020, 4: 0.024, 13: 0.022}))
    assert any("taken for noise" in note for note in answer(alpha=0.8, costs=noisy).notes)


def test_sizes_and_bandwidth() -> None:
    """16 GB and 2 GB at 900 GB/s."""
    result = answer(alpha=0.8, target=EIGHT, draft=ONE, hardware=MACHINE, num_rows=32)
    assert result.cost_source == "roofline"
    assert result.c == pytest.approx(1 / 8)
    assert result.lengths[0].curve.step_s == pytest.approx(16 / 900)
    assert result.lengths[4].curve.step_s == pytest.approx(16 / 900 + 4 * 2 / 900)
    assert result.lengths[12].curve.step_s == pytest.approx(
        2 * 8e9 * 13 * 32 / 300e12 + 12 * 2 / 900
    )  # bound by arithmetic
    assert result.lengths[4].curve.tokens_per_s == pytest.approx(32 * tau(0.8, 4) / (24 / 900))
    assert not any(one.curve.cost_extrapolated for one in result.lengths)
    assert result.roof is not None
    assert result.roof.free_tokens == pytest.approx((16 / 900) / (2 * 8e9 * 32 / 300e12))
    assert result.roof.draft_pass_s == pytest.approx(2 / 900)


def test_the_context_is_read_too() -> None:
    target, draft = KNOWN
    result = answer(alpha=0.8, target=target, draft=draft, hardware=MACHINE, num_rows=4, context=1000)
    kv = 4 * 1000 * 131072
    assert result.lengths[0].curve.step_s == pytest.approx((16e9 + kv) / 900e9)
    assert result.c == pytest.approx((2e9 + kv / 4) / (16e9 + kv))
    assert result.memory is not None
    assert (result.memory.draft_kv_bytes, result.memory.target_kv_bytes) == (kv // 4, kv)
    assert result.memory.share == pytest.approx((2e9 + kv / 4) / (16e9 + kv))


def test_sizes_alone_give_the_ratio() -> None:
    result = answer(alpha=0.8, target=EIGHT, draft=ONE)
    assert (result.c, result.is_timed, result.context) == (pytest.approx(1 / 8), False, None)
    assert result.memory is not None
    assert (result.memory.share, result.memory.draft_kv_bytes) == (pytest.approx(1 / 8), None)
    assert any("keys and values of 8B and 1B" in note for note in result.notes)


@pytest.mark.parametrize(
    ("asked", "c", "plain_s"),
    [
        ({"draft_token_s": 0.002, "target_pass_s": 0.020}, 0.1, 0.020),
        ({"c": 0.2, "target_pass_s": 0.020}, 0.2, 0.020),
        ({"draft": ONE, "target": EIGHT, "target_pass_s": 0.020}, 0.125, 0.020),
        ({"c": 0.2, "target": EIGHT, "hardware": MACHINE}, 0.2, 16 / 900),
        ({"draft_token_s": 0.002, "target": EIGHT, "hardware": MACHINE}, 0.1125, 16 / 900),
        ({"draft": size_of("0", 0, "bfloat16"), "target": EIGHT, "hardware": MACHINE}, 0.0, 16 / 900),
    ],
)
def test_costs_from_several_sources(asked: dict[str, Any], c: float, plain_s: float) -> None:
    result = answer(alpha=0.8, max_draft_tokens=4, **asked)
    assert result.c == pytest.approx(c)
    assert result.lengths[0].curve.step_s == pytest.approx(plain_s)
    assert result.lengths[4].curve.speedup == pytest.approx(predicted_speedup(0.8, 4, c))


def test_break_even_is_where_the_sensitivity_crosses_one() -> None:
    result = answer(alpha=0.7, costs=BENT, num_draft_tokens=4)
    for one in result.models:
        assert one.break_even_alpha is not None
        point = next(
            point for point in result.sensitivity if point.alpha == pytest.approx(one.break_even_alpha, abs=1e-6)
        )
        assert getattr(point, one.name) == pytest.approx(1, abs=1e-4)
        assert one.lowest_break_even_alpha is not None
        assert one.lowest_break_even_alpha <= one.break_even_alpha
    yours = next(point for point in result.sensitivity if point.alpha == pytest.approx(0.7))
    assert [yours.leviathan, yours.envelope, yours.curve] == pytest.approx(speedups(result.lengths[4]))
    alphas = [point.alpha for point in result.sensitivity]
    assert alphas == sorted(set(alphas))
    assert (alphas[0], alphas[-1]) == (0, 1)


def test_what_does_not_pay() -> None:
    result = answer(alpha=0.7, c=0.83)
    assert (result.pays, result.num_draft_tokens) == (False, 1)  # the least bad length
    curve = model(result, "curve")
    assert curve.break_even_alpha == pytest.approx(0.83)
    assert (curve.best_num_draft_tokens, curve.best_speedup) == (0, 1.0)
    expensive = answer(alpha=1.0, c=1.5)
    assert (model(expensive, "curve").break_even_alpha, model(expensive, "curve").lowest_break_even_alpha) == (None, None)


def test_lengths() -> None:
    assert len(answer(alpha=0.8, c=0.1, num_draft_tokens=20).lengths) == 21
    assert len(answer(alpha=0.8, c=0.1, max_draft_tokens=3).lengths) == 4
    assert answer(alpha=0.8, c=0.1, num_draft_tokens=2).num_draft_tokens == 2


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    target, draft = KNOWN
    result = answer(acceptance=[0.9, 0.8], target=target, draft=draft, hardware=MACHINE)
    result.write(tmp_path / "estimate.json")
    assert read_result(tmp_path / "estimate.json") == result


SMALL = {"alpha": 0.8, "c": 0.1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, r"--alpha 0\.8.*--acceptance"),
    ({"c": 0.1}, r"--alpha 0\.8"),
    ({"alpha": 0.8}, r"--c 0\.1.*--draft-ms.*--target-params.*--costs"),
    ({"alpha": 0.8, "acceptance": [0.8], "c": 0.1}, "give one of them"),
    ({"alpha": 1.2, "c": 0.1}, "between 0 and 1"),
    ({"acceptance": [], "c": 0.1}, "no acceptance given"),
    ({"alpha": 0.8, "c": -0.1}, "--c must be"),
    ({"alpha": 0.8, "c": float("inf")}, "--c must be"),
    ({"alpha": 0.8, "draft_token_s": -1, "target_pass_s": 1}, "--draft-ms must be"),
    ({"alpha": 0.8, "draft_token_s": 1, "target_pass_s": 0}, "--target-ms must be"),
    ({"alpha": 0.8, "draft_token_s": 0.1}, "add --target-ms"),
    ({"alpha": 0.8, "target_pass_s": 0.1}, "what a draft token costs"),
    ({**SMALL, "draft_token_s": 0.1, "target_pass_s": 1}, "give one of them"),
    ({**SMALL, "target_pass_s": 0.1, "target": EIGHT, "hardware": MACHINE}, "give one of them"),
    ({**SMALL, "hardware": MACHINE}, "--bandwidth needs"),
    ({**SMALL, "target": EIGHT}, "changes nothing"),
    ({"alpha": 0.8, "draft": ONE}, "beside the target's"),
    ({"alpha": 0.8, "target": size_of("0", 0, "int8"), "draft": ONE}, "--target-params must be"),
    ({**SMALL, "costs": BENT}, "leave out --c"),
    ({"alpha": 0.8, "costs": BENT, "target_pass_s": 1.0, "hardware": MACHINE}, "leave out --target-ms, --bandwidth"),
    ({"alpha": 0.8, "costs": BENT, "target": EIGHT}, "changes nothing"),
    ({"alpha": 0.8, "costs": BENT, "num_rows": 2}, r"costs are of 1 row\(s\)"),
    ({**SMALL, "num_rows": 2}, "--batch-size changes nothing"),
    ({**SMALL, "context": 100}, "--set context changes nothing"),
    ({"alpha": 0.8, "target": EIGHT, "draft": ONE, "context": 100}, "--set context changes nothing"),
    ({"alpha": 0.8, "target": KNOWN[0], "draft": ONE, "num_rows": 0}, "--batch-size must be"),
    ({"alpha": 0.8, "target": KNOWN[0], "draft": ONE, "context": -1}, "--set context must be"),
    ({**SMALL, "num_draft_tokens": 0}, "--num-draft-tokens must be"),
    ({**SMALL, "max_draft_tokens": 0}, "--max-draft-tokens must be"),
    ({**SMALL, "num_draft_tokens": 5, "max_draft_tokens": 4}, "--max-draft-tokens must be at least 5"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_missing_twice_or_without_effect_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(**asked)


def test_mixtures_of_experts_need_measured_times() -> None:
    mixture = ModelSize(name="moe", num_params=10**9, params_per_pass=10**9, dtype="int8", is_mixture=True)
    with pytest.raises(CapabilityError, match="mixture"):
        answer(alpha=0.8, target=mixture, draft=ONE, hardware=MACHINE)
    with pytest.raises(CapabilityError, match="mixture"):
        answer(alpha=0.8, target=mixture, draft=ONE)
    assert answer(alpha=0.8, target=mixture, draft=ONE, c=0.1).memory is not None


def test_sensitivity_is_at_the_length_judged() -> None:
    result = answer(acceptance=[0.9, 0.3], c=0.1, num_draft_tokens=6)
    half = next(point for point in result.sensitivity if point.alpha == 0.5)
    assert half.curve == pytest.approx((1 + sum(survival_of([0.5], 6))) / 1.6)
