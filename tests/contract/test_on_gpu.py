"""Every drafter on a real CUDA device, in fp32: with CUDA graphs and without, texts are the CPU's.
Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.errors import CapabilityError
from outrider.models.graphs import GraphedPass
from tests.contract.test_drafters import PLAIN, Bench, Case, name_of, save_models
from tests.contract.test_on_cuda import CASES, batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    """Equal models on the CPU, on the device with graphs, and there without; the device by its
    number."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    threads = torch.get_num_threads()
    here = Bench(root)
    here.predict()
    there = {
        mode: Bench(root, device="cuda:0", runtime=mode, predictions=here.predictions)
        for mode in ("graphs", "eager")
    }
    yield {"cpu": here, **there}
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_texts_are_those_of_the_cpu(benches: dict[str, Bench], case: Case, mode: str) -> None:
    expected = batch(benches["cpu"], case)
    found = batch(benches[mode], case)
    assert [row.output for row in found] == [row.output for row in expected]
    assert [row.stats.accepted for row in found] == [row.stats.accepted for row in expected]


def test_passes_are_recorded_with_graphs_alone(benches: dict[str, Bench]) -> None:
    """Catches a comparison of graphs with graphs, or of no graphs with none."""
    for bench in benches.values():
        batch(bench, PLAIN)
    runs = {mode: bench.models(None).target.lm.run for mode, bench in benches.items()}
    assert isinstance(runs["graphs"], GraphedPass)
    assert len(runs["graphs"].graphs) > 0
    assert not isinstance(runs["eager"], GraphedPass)


def test_what_runs_on_the_cpu_alone_says_so(benches: dict[str, Bench]) -> None:
    with pytest.raises(CapabilityError, match="quantised drafts run on CPU kernels"):
        benches["graphs"].decoder(("quantised", None, 0))
