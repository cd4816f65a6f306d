"""Every drafter on a simulated CUDA device: no operation mixes host and device, passes are replayed
as graphs, texts are the CPU's. What a real device would add is in the simulation's own docstring.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.drafters import DRAFTERS
from outrider.errors import CapabilityError
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from tests.contract.test_drafters import PLAIN, Bench, Case, drafts_for, name_of, save_models
from tests.helpers import run_to_end
from tests.simulated_cuda import SimulatedCuda

# what of its drafts is there in time is never the same twice; and nothing of it is on a device
BY_CLOCK = ("remote",)
CPU_ONLY = ("quantised",)  # kernels of torch's CPU library; refused elsewhere, by name
WITHOUT_SETTINGS: list[Case] = [
    (name, None if drafts_for(name, 0) == (None,) else "near", 0)
    for name in DRAFTERS.names()
    if name not in (*CPU_ONLY, *BY_CLOCK)
]
CASES: list[Case] = [
    *WITHOUT_SETTINGS,
    ("draft-model", "near", 1),  # a tree of fixed widths
    ("draft-model", "near", 5),  # a stop rule
    ("eagle3", None, 2),  # a best-first tree
    ("block", None, 1),
]
KINDS = (
    SamplingParams(max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=12),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, max_tokens=9),
)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Bench]]:
    """(on the CPU, on the device) with the same models."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    threads = torch.get_num_threads()
    here = Bench(root)
    here.predict()
    there = Bench(root, device="cuda", runtime="graphs", predictions=here.predictions)
    yield here, there
    torch.set_num_threads(threads)


def batch(bench: Bench, case: Case, kinds: tuple[SamplingParams, ...] = KINDS) -> list[Row]:
    """Rows of these kinds, decoded together."""
    decoder = bench.decoder(case)
    for number, params in enumerate(kinds):
        decoder.add(bench.row(number, params))
    return sorted(run_to_end(decoder), key=lambda row: row.request)


@pytest.fixture(autouse=True)
def _honest_distributions() -> None:
    """Not checked here: waits and launches are counted as they are in production."""


# the others need seconds each: of the slow kind
BY_HAND = ("none", "draft-model", "eagle3", "suffix")
MARKED = [
    pytest.param(case, marks=() if case[0] in BY_HAND else pytest.mark.slow) for case in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MARKED, ids=map(name_of, CASES))
def test_texts_are_those_of_the_cpu(benches: tuple[Bench, Bench], case: Case) -> None:
    here, there = benches
    expected = batch(here, case)
    with SimulatedCuda():
        found = batch(there, case)
    assert [row.output for row in found] == [row.output for row in expected]
    assert [row.stats.accepted for row in found] == [row.stats.accepted for row in expected]
    assert found[0].stats.time_s["target"] > 0


def test_a_plain_step_waits_seldom_and_launches_little(benches: tuple[Bench, Bench]) -> None:
    """Catches a pass that is not replayed, and anything that asks the device for a number once per
    layer, row or token."""
    _, there = benches
    greedy = (SamplingParams(max_tokens=40),)
    with SimulatedCuda() as cuda:
        batch(there, PLAIN, greedy)  # its shapes are recorded
        cuda.launches = 0
        cuda.syncs.clear()
        steps = batch(there, PLAIN, greedy)[0].stats.steps
    laps = cuda.syncs.pop("synchronize")
    assert laps <= 7 * steps
    assert cuda.syncs.total() <= 10 * steps
    # planning the pass, copies and verification; a pass alone is twice that
    assert cuda.launches <= 100 * steps


@pytest.mark.slow
def test_a_sampled_step_waits_and_launches_little_more(benches: tuple[Bench, Bench]) -> None:
    """Catches a verdict that is not replayed: it takes forty launches and eight waits."""
    _, there = benches
    sampled = (SamplingParams(temperature=1.0, max_tokens=40),)
    with SimulatedCuda() as cuda:
        batch(there, PLAIN, sampled)
        cuda.launches = 0
        cuda.syncs.clear()
        steps = batch(there, PLAIN, sampled)[0].stats.steps
    cuda.syncs.pop("synchronize")
    assert cuda.syncs.total() <= 4 * steps
    assert cuda.launches <= 50 * steps


@pytest.mark.slow
def test_a_drafting_loop_is_one_launch(benches: tuple[Bench, Bench]) -> None:
    """Two replays a step, whatever the draft's length: the loop and the target's pass."""
    here, _ = benches
    with SimulatedCuda() as cuda:
        fresh = Bench(here.root, device="cuda", runtime="graphs", predictions=here.predictions)
        fresh.prompt(0)
        fresh.models("near")
        before = _replays(cuda)
        recorded = len(cuda.graphs)
        (row,) = batch(fresh, ("draft-model", "near", 0), (SamplingParams(max_tokens=30),))
    # a shape's first use is not replayed
    assert 2 * row.stats.steps - 3 <= _replays(cuda) - before <= 2 * row.stats.steps + 3
    assert len(cuda.graphs) - recorded <= 4


def _replays(cuda: SimulatedCuda) -> int:
    return sum(graph.num_replays for graph in cuda.graphs)


@pytest.mark.slow
def test_what_runs_on_the_cpu_alone_says_so(benches: tuple[Bench, Bench]) -> None:
    _, there = benches
    with (
        SimulatedCuda(),
        pytest.raises(CapabilityError, match="quantised drafts run on CPU kernels"),
    ):
        there.decoder(("quantised", None, 0))
