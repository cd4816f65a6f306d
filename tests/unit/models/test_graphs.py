"""Recording and replaying, on a simulated device; and the simulation itself, which must refuse what CUDA refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.errors import CapabilityError
from outrider.models import graphs as graphs_module
from outrider.models.graphs import GraphedPass, Graphs
from outrider.models.lm import ModuleRun
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.simulated_cuda import SimulatedCuda


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as device, torch.inference_mode():
        yield device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_llama(257, sharpness=2.0), byte_tokenizer())


def options(folder: Path, mode: str) -> Options:
    return Options(target=str(folder), dtype="float32", device="cuda", compile=mode, drafter="none")


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device="cuda:0")


class TestSimulation:
    def test_host_and_device_do_not_mix(self, cuda: SimulatedCuda) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            on_device(1.0, 2.0) + torch.ones(2)
        assert (on_device(1.0, 2.0) + torch.tensor(1.0)).tolist() == [2.0, 3.0]  # one number may come along, as on CUDA
        with pytest.raises(TypeError, match="numpy"):
            on_device(1.0).numpy()

    def test_waiting_is_counted(self, cuda: SimulatedCuda) -> None:
        numbers = on_device(1.0, 2.0)
        cuda.syncs.clear()
        assert numbers.sum().item() == 3.0
        assert numbers.tolist() == [1.0, 2.0]
        assert bool((numbers > 0).all())
        assert cuda.syncs.total() == 3

    def test_a_recording_freezes_what_python_computed(self, cuda: SimulatedCuda) -> None:
        graph, place, factor = torch.cuda.CUDAGraph(), on_device(1.0, 2.0), 10
        with torch.cuda.graph(graph):
            out = place * factor
        factor = 100
        place.copy_(on_device(3.0, 4.0))
        graph.replay()
        assert out.tolist() == [30.0, 40.0]

    @pytest.mark.parametrize("wait", [lambda t: t.tolist(), lambda t: t.sum().item(), lambda t: t + torch.ones(2).to("cuda")])
    def test_a_recording_must_not_wait(self, cuda: SimulatedCuda, wait: object) -> None:
        place, graph = on_device(1.0, 2.0), torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
            wait(place)  # type: ignore[operator]


class TestGraphs:
    def test_recorded_at_the_second_use(self, cuda: SimulatedCuda) -> None:
        graphs, calls = Graphs(), []

        def call(numbers: Tensor) -> list[Tensor]:
            calls.append(None)
            return [numbers * 2]

        found = [graphs.run("double", call, [on_device(float(n))])[0].tolist() for n in range(5)]
        assert found == [[0.0], [2.0], [4.0], [6.0], [8.0]]
        assert len(calls) == 1 + graphs_module.WARM_UPS + 1  # as it is, warming up, recording; from then on not at all
        assert len(graphs) == 1

    def test_results_outlive_the_next_replay(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        kept = [graphs.run("double", lambda t: [t * 2], [on_device(float(n))])[0] for n in range(4)]
        assert [t.tolist() for t in kept] == [[0.0], [2.0], [4.0], [6.0]]

    def test_other_shapes_and_keys_are_other_recordings(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        for size in (1, 2, 1, 2, 1):
            assert graphs.run("add", lambda t: [t + 1], [torch.zeros(size, device="cuda")])[0].tolist() == [1.0] * size
        assert graphs.run("subtract", lambda t: [t - 1], [on_device(0.0)])[0].tolist() == [-1.0]
        assert len(graphs) == 2

    def test_bounded(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs(most=3)
        for size in [*range(1, 9), *range(1, 9)]:
            for _ in range(2):
                graphs.run("add", lambda t: [t + 1], [torch.zeros(size, device="cuda")])
        assert len(graphs) == 3

    def test_usable_in_and_out_of_inference_mode(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        for n in range(3):
            graphs.run("double", lambda t: [t * 2], [on_device(float(n))])
        with torch.inference_mode(False):
            assert graphs.run("double", lambda t: [t * 2], [on_device(7.0)])[0].tolist() == [14.0]


class TestPasses:
    """Against the plain run of the same model: other tokens, other lengths, a tree, a cache that grew, hidden states."""

    def test_same_logits(self, folder: Path) -> None:
        with SimulatedCuda() as cuda, torch.inference_mode():
            lm = build(options(folder, "on")).target.lm
            assert isinstance(lm.run, GraphedPass)
            plain = build(options(folder, "off")).target.lm
            assert isinstance(plain.run, ModuleRun)
            generator = torch.Generator().manual_seed(1)
            for one in (lm, plain):
                one.kv.add_row()
                one.kv.add_row()
            parents = torch.tensor([[-1, 0, 0], [-1, -1, 1]], device="cuda")
            for step in range(16):
                lm.capture = plain.capture = (0, -1) if step % 4 < 2 else ()
                tokens = torch.randint(257, (2, 4), generator=generator).to("cuda")
                tree = parents if step % 2 else None
                assert torch.equal(lm.forward(tokens, tree), plain.forward(tokens, tree)), step
                for layer, states in plain.hidden.items():
                    assert torch.equal(lm.hidden[layer], states), (step, layer)
                for one in (lm, plain):
                    for row in range(2):
                        one.kv.keep(row, [0, row + 1])
                    if step == 5:
                        one.kv.reserve(2, 1500)  # moves: what was recorded must not write to where the cache was
            assert sum(graph.num_replays for graph in cuda.graphs) > 10

    def test_long_passes_are_not_recorded(self, folder: Path) -> None:
        with SimulatedCuda() as cuda, torch.inference_mode():
            lm = build(options(folder, "on")).target.lm
            recorded = len(cuda.graphs)
            lm.kv.add_row()
            for _ in range(3):
                lm.forward(torch.zeros(1, graphs_module.MAX_TOKENS + 8, dtype=torch.int64, device="cuda"))
            assert len(cuda.graphs) == recorded


class TestModelsThatCannotBeRecorded:
    @pytest.fixture
    def waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model that looks at its own numbers, as experts that count their tokens do."""
        plain = ModuleRun.__call__

        def call(self: ModuleRun, ids: Tensor, *rest: object) -> Tensor:
            assert ids.sum().item() >= 0
            return plain(self, ids, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(ModuleRun, "__call__", call)

    @pytest.mark.usefixtures("waiting")
    def test_auto_says_so_and_runs(self, folder: Path) -> None:
        with SimulatedCuda():
            built = build(options(folder, "auto"))
        (note,) = built.notes
        assert note.startswith("running without CUDA graphs: ")
        assert "operation not permitted when stream is capturing: _local_scalar_dense" in note
        assert isinstance(built.target.lm.run, ModuleRun)
        assert built.config()["compile"] == "off"

    @pytest.mark.usefixtures("waiting")
    def test_on_refuses(self, folder: Path) -> None:
        refused = r"does not run as CUDA graphs: operation not permitted.*--compile off"
        with SimulatedCuda(), pytest.raises(CapabilityError, match=refused):
            build(options(folder, "on"))

    def test_wrong_numbers_are_noticed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a check that compares nothing: replays that give other logits than the model."""
        replay = graphs_module._Recording.replay
        monkeypatch.setattr(
            graphs_module._Recording, "replay", lambda self, inputs: [out.flip(-1) for out in replay(self, inputs)]
        )
        with SimulatedCuda(), pytest.raises(CapabilityError, match="differ by"):
            build(options(folder, "on"))
