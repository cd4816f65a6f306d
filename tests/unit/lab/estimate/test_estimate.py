"""The calculator: by hand, from results of `bench`, and the sizes of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import CheckpointError, ConfigError
from outrider.lab.estimate.estimate import LONGEST, costs_of, estimate, model_size, read_bench
from outrider.train.train_result import ExportResult
from tests.helpers import tiny_llama
from tests.unit.report import results


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Two cells: the look-up in the second one is the fastest chain, the tree faster than all."""
    plain = results.measured(0)
    tree = results.measured(3, results.interval(9, 8, 10))
    model = results.measured(1, results.interval(2, 1.9, 2.1))
    lookup = results.measured(
        2, results.interval(3, 2.9, 3.1), step_s={0: 0.010, 1: 0.015, 5: 0.02}
    )
    labels = ("none", "draft-model k=5", "ngram k=5", "draft-model k=7 tree=best-first")
    infos = [results.ConfigurationInfo(label=label, arguments={}, baseline=0) for label in labels]
    cells = [
        results.cell(plain, model, tree),
        results.cell(plain, model, lookup, task="code", temperature=1.0),
    ]
    path = tmp_path / "bench.json"
    results.bench(*cells, configurations=infos).write(path)
    return path


def test_by_hand() -> None:
    """alpha 0.8, c 0.1, k = 2: (1 + 0.8 + 0.64) / 1.2."""
    result = estimate([0.8], costs_of(0.1, {}), "c")
    assert len(result.lengths) == LONGEST + 1
    assert result.lengths[0].speedup == 1
    assert result.lengths[2].speedup == pytest.approx(2.44 / 1.2)
    assert result.lengths[result.best].speedup == max(length.speedup for length in result.lengths)
    assert result.best == 6
    assert result.by_alpha[0.8] == pytest.approx([length.speedup for length in result.lengths])
    assert result.lengths[1].break_even_alpha == pytest.approx(0.1)
    assert not any(length.extrapolated for length in result.lengths)


def test_wide_passes_cost_what_was_given() -> None:
    result = estimate([0.9, 0.8], costs_of(0.1, {4: 1.0, 9: 1.5}), "c")
    assert [result.lengths[k].step_cost for k in (3, 8)] == pytest.approx([1.3, 2.3])
    assert result.lengths[4].step_cost == pytest.approx(1.1 + 0.4)
    assert [length.extrapolated for length in result.lengths] == [False] * 9 + [True] * 4


def test_where_nothing_pays_the_best_is_not_to_speculate() -> None:
    assert estimate([0.5], costs_of(0.6, {}), "c").best == 0


@pytest.mark.parametrize(
    ("c", "passes"), [(-0.1, {}), (float("nan"), {}), (0.1, {1: 1.2}), (0.1, {4: 0.5})]
)
def test_what_is_no_cost_is_refused(c: float, passes: dict[int, float]) -> None:
    with pytest.raises(ConfigError):
        costs_of(c, passes)


def test_the_fastest_chain_of_a_result(bench: Path) -> None:
    """A tree tells nothing about other lengths."""
    chain = read_bench(bench)
    assert chain.source == "ngram k=5, code, T = 1; measured there: 3.00x [2.90, 3.10]"
    points = [(point.num_tokens, point.seconds) for point in chain.costs.target.points]
    assert points == [(1, 0.010), (2, 0.015), (6, 0.02)]
    assert chain.acceptance == pytest.approx([25 / 30, 20 / 25, 1 / 2])


def test_other_results_have_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ExportResult(drafter="medusa", layout="vllm", source="run", target="demo", checks=[]).write(
        path
    )
    with pytest.raises(ConfigError, match="result of export"):
        read_bench(path)
    results.bench(results.cell(results.measured(0))).write(path)
    with pytest.raises(ConfigError, match="no chain of drafts was timed"):
        read_bench(path)


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    model = tiny_llama(50)
    model.save_pretrained(tmp_path)
    size = model_size("draft", str(tmp_path))
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert (size.role, size.weights_bytes, size.kv_bytes_per_token) == (
        "draft",
        num_bytes,
        2 * 2 * 16 * 2 * 4,
    )


def test_the_demo_pair_has_sizes() -> None:
    target = model_size("target", "demo")
    draft = model_size("draft", "demo")
    assert 12 < target.weights_bytes / draft.weights_bytes < 14  # 14.2M and 1.1M parameters


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        model_size("target", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_size("target", str(tmp_path))
