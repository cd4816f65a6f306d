"""Recording and replaying, on simulated devices; and the simulation itself, which must refuse what
CUDA refuses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.engine import step_costs, warmup
from outrider.errors import CapabilityError
from outrider.models import graphs as graphs_module
from outrider.models.graphs import GraphedPass, Graphs
from outrider.models.lm import PREFILL_CHUNK, ModuleRun
from outrider.models.loading.load import resolve_device
from outrider.step import Clock
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.simulated_cuda import SimulatedCuda, SimulatedGraph


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as device, torch.inference_mode():
        yield device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("model"), tiny_llama(257, sharpness=2.0), byte_tokenizer()
    )


def options(folder: Path, mode: str, device: str = "cuda", **more: Any) -> Options:
    return Options(
        target=str(folder),
        dtype="float32",
        device=device,
        runtime=mode,
        **{"drafter": "none", **more},
    )


def on_device(*numbers: float, device: str = "cuda:0") -> Tensor:
    return torch.tensor(numbers, device=device)


def in_a_thread(cuda: SimulatedCuda, call: Callable[[], Any]) -> Any:
    """What it returns or raises."""

    def run() -> Any:
        with cuda:
            return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class TestSimulation:
    def test_host_and_device_do_not_mix(self, cuda: SimulatedCuda) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            on_device(1.0, 2.0) + torch.ones(2)
        # one number may come along, as on CUDA
        assert (on_device(1.0, 2.0) + torch.tensor(1.0)).tolist() == [2.0, 3.0]
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
        graph = torch.cuda.CUDAGraph()
        buffer = on_device(1.0, 2.0)
        factor = 10
        with torch.cuda.graph(graph):
            out = buffer * factor
        factor = 100
        buffer.copy_(on_device(3.0, 4.0))
        graph.replay()
        assert out.tolist() == [30.0, 40.0]

    @pytest.mark.parametrize(
        "wait",
        [lambda t: t.tolist(), lambda t: t.sum().item(), lambda t: t + torch.ones(2).to("cuda")],
    )
    def test_a_recording_must_not_wait(self, cuda: SimulatedCuda, wait: object) -> None:
        """And like torch it says so twice: where it waits, and, less telling, where it ends."""
        buffer = on_device(1.0, 2.0)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="previous error during capture") as caught,
            torch.cuda.graph(graph),
        ):
            wait(buffer)  # type: ignore[operator]
        assert "not permitted when stream is capturing" in str(caught.value.__context__)

    def test_two_devices_do_not_mix(self, cuda: SimulatedCuda) -> None:
        first = on_device(1.0)
        second = on_device(2.0, device="cuda:1")
        with pytest.raises(RuntimeError, match="same device"):
            first + second
        assert (first.to("cuda:1") + second).tolist() == [3.0]
        assert str((second * 2).device) == "cuda:1"

    def test_a_recording_is_of_one_device(self, cuda: SimulatedCuda) -> None:
        """What runs on another is not recorded, but done at once: torch warns of an empty graph."""
        graph = torch.cuda.CUDAGraph()
        buffer = on_device(1.0, device="cuda:1")
        with torch.cuda.graph(graph):
            out = buffer * 2
        buffer.copy_(on_device(5.0))
        graph.replay()
        assert out.tolist() == [2.0]
        assert not graph.steps

    def test_waiting_for_a_device_breaks_what_any_thread_records(self, cuda: SimulatedCuda) -> None:
        """Waiting for one's own stream does not."""
        buffer = on_device(1.0)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer * 2
            in_a_thread(cuda, lambda: torch.cuda.current_stream().synchronize())

        def record() -> None:
            with (
                torch.cuda.graph(torch.cuda.CUDAGraph()),
                pytest.raises(RuntimeError, match="synchronize"),
            ):
                in_a_thread(cuda, torch.cuda.synchronize)

        with pytest.raises(RuntimeError, match="previous error"):
            record()


class TestGraphs:
    def test_recorded_at_the_second_use(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        calls = []

        def call(numbers: Tensor) -> list[Tensor]:
            calls.append(None)
            return [numbers * 2]

        found = [graphs.run("double", call, [on_device(float(n))])[0].tolist() for n in range(5)]
        assert found == [[0.0], [2.0], [4.0], [6.0], [8.0]]
        # as it is, warming up, recording; from then on not at all
        assert len(calls) == 1 + graphs_module.WARM_UPS + 1
        assert len(graphs) == 1

    def test_results_outlive_the_next_replay(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        kept = [graphs.run("double", lambda t: [t * 2], [on_device(float(n))])[0] for n in range(4)]
        assert [t.tolist() for t in kept] == [[0.0], [2.0], [4.0], [6.0]]

    def test_other_shapes_and_keys_are_other_recordings(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs()
        for size in (1, 2, 1, 2, 1):
            assert (
                graphs.run("add", lambda t: [t + 1], [torch.zeros(size, device="cuda")])[0].tolist()
                == [1.0] * size
            )
        assert graphs.run("subtract", lambda t: [t - 1], [on_device(0.0)])[0].tolist() == [-1.0]
        assert len(graphs) == 2

    def test_bounded(self, cuda: SimulatedCuda) -> None:
        graphs = Graphs(max_graphs=3)
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

    def test_on_a_device_that_is_not_the_threads_own(self, cuda: SimulatedCuda) -> None:
        """Streams and recordings go by the current device: a recording there would hold nothing,
        and give the first result for ever."""
        for device in ("cuda:0", "cuda:1"):
            graphs = Graphs()
            for n in range(4):
                (out,) = graphs.run(
                    "double", lambda t: [t * 2], [on_device(float(n), device=device)]
                )
                assert out.tolist() == [2.0 * n], device
                assert str(out.device) == device
            assert cuda.graphs[-1].num_replays == 3
            assert cuda.graphs[-1].steps
        assert torch.cuda.current_device() == 0

    def test_a_recording_that_breaks_leaves_all_as_it_was(self, cuda: SimulatedCuda) -> None:
        """The thread on its own stream, the others' recordings at work, and the next one possible."""
        graphs = Graphs()
        stream = torch.cuda.current_stream()

        def double(n: float) -> list[float]:
            return graphs.run("double", lambda t: [t * 2], [on_device(n)])[0].tolist()

        def look() -> Tensor:
            return graphs.run("look", lambda t: [t * float(t.sum())], [on_device(3.0)])[0]

        assert [double(1.0), double(2.0)] == [[2.0], [4.0]]
        look()
        with pytest.raises(RuntimeError, match="previous error"):
            look()
        assert torch.cuda.current_stream() is stream
        assert double(3.0) == [6.0]
        for n in range(3):
            assert graphs.run("add", lambda t: [t + 1], [on_device(float(n))])[0].tolist() == [
                n + 1.0
            ]
        assert len(graphs) == 2

    def test_without_memory_for_a_recording(
        self, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The pass runs all the same; older recordings make room, and fewer are kept from then on."""
        graphs = Graphs()

        def add(size: int) -> None:
            assert (
                graphs.run("add", lambda t: [t + 1], [torch.zeros(size, device="cuda")])[0].tolist()
                == [1.0] * size
            )

        for size in (1, 1, 2, 2, 3, 3, 4, 4, 5):
            add(size)
        assert len(graphs) == 4

        def full() -> SimulatedGraph:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with (
            monkeypatch.context() as patch,
            caplog.at_level(logging.WARNING, logger="outrider.models"),
        ):
            patch.setattr(torch.cuda, "CUDAGraph", full)
            add(5)
        assert "no memory for another CUDA graph" in caplog.text
        assert len(graphs) == 0
        for size in (1, 1, 2, 2, 3, 3, 4, 4):
            add(size)
        assert len(graphs) == 2

    def test_two_models_never_record_at_once(self, cuda: SimulatedCuda) -> None:
        """A recording begins by waiting for the device, which breaks whatever another thread is
        recording."""
        inside = threading.Event()

        def slow(numbers: Tensor) -> list[Tensor]:
            if torch.cuda.is_current_stream_capturing():
                inside.set()
                time.sleep(0.2)  # for the other one to come in
            return [numbers * 2]

        def second() -> list[float]:
            graphs = Graphs()
            inside.wait(10)
            with cuda:
                return [
                    graphs.run("add", lambda t: [t + 1], [on_device(float(n))])[0].item()
                    for n in range(3)
                ]

        first = Graphs()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(second)
            found = [first.run("double", slow, [on_device(float(n))])[0].item() for n in range(3)]
            assert other.result(10) == [1.0, 2.0, 3.0]
        assert found == [0.0, 2.0, 4.0]


class TestPasses:
    """Against the plain run of the same model: other tokens, other lengths, a tree, a cache that
    grew, hidden states."""

    @pytest.mark.slow
    def test_same_logits(self, folder: Path) -> None:
        """On a device that is not the thread's own; `contract/test_on_cuda.py` has the first one."""
        device = "cuda:1"
        with SimulatedCuda() as cuda, torch.inference_mode():
            lm = build(options(folder, "graphs", device)).target.lm
            assert isinstance(lm.run, GraphedPass)
            plain = build(options(folder, "eager", device)).target.lm
            assert isinstance(plain.run, ModuleRun)
            generator = torch.Generator().manual_seed(1)
            for one in (lm, plain):
                one.kv.add_row()
                one.kv.add_row()
            parents = torch.tensor([[-1, 0, 0], [-1, -1, 1]], device=device)
            for step in range(16):
                capture = (0, -1) if step % 4 < 2 else ()
                tokens = torch.randint(257, (2, 4), generator=generator).to(device)
                tree = parents if step % 2 else None
                output = lm.forward(tokens, tree, capture=capture)
                expected = plain.forward(tokens, tree, capture=capture)
                assert torch.equal(output.logits, expected.logits), step
                for layer in capture:
                    assert torch.equal(output.hidden[layer], expected.hidden[layer]), (step, layer)
                for one in (lm, plain):
                    for row in range(2):
                        one.kv.keep(row, [0, row + 1])
                    if step == 5:
                        # moves: what was recorded must not write to where the cache was
                        one.kv.reserve(2, 1500)
            assert sum(graph.num_replays for graph in cuda.graphs) > 10

    @pytest.mark.slow
    def test_long_passes_and_chunks_of_a_prompt_are_not_recorded(self, folder: Path) -> None:
        """Two chunks have the same shapes in every prompt, and in the next one, too."""
        with SimulatedCuda() as cuda, torch.inference_mode():
            lm = build(options(folder, "graphs")).target.lm
            recorded = len(cuda.graphs)
            lm.kv.add_row()
            lm.catch_up([[7] * (6 * PREFILL_CHUNK + 1)])
            assert lm.kv.lengths == [6 * PREFILL_CHUNK]
            assert len(cuda.graphs) == recorded
            for _ in range(3):
                lm.forward(
                    torch.zeros(1, graphs_module.MAX_TOKENS + 8, dtype=torch.int64, device="cuda")
                )
            assert len(cuda.graphs) == recorded


class TestTiming:
    def test_a_clock_breaks_no_other_models_recording(self, cuda: SimulatedCuda) -> None:
        buffer = on_device(1.0)
        clock = Clock(torch.device("cuda", 0))

        def measure() -> None:
            with clock("target"):
                pass

        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer * 2
            in_a_thread(cuda, measure)
        assert cuda.syncs["synchronize"] == 2  # before recording, and the phase

    @pytest.mark.slow
    def test_steps_are_timed_once_they_are_replayed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first of a shape runs as it is, the second one is recorded: neither is what a step
        costs."""
        recorded: set[int] = set()
        observe = step_costs.Sweep.observe

        def spy(timer: step_costs.Sweep, *rest: Any) -> None:
            timed = sum(map(len, timer.seconds.values()))
            observe(timer, *rest)
            if sum(map(len, timer.seconds.values())) > timed:
                recorded.add(len(cuda.graphs))

        monkeypatch.setattr(step_costs.Sweep, "observe", spy)
        with SimulatedCuda() as cuda:
            built = build(
                options(
                    folder,
                    "graphs",
                    drafter="draft-model",
                    draft=str(folder),
                    num_draft_tokens="auto:3",
                )
            )
            seconds, _ = warmup._times(built.decoder, built, None, 1, [3, 0, 1], 600.0)
        assert set(seconds) == {0, 1, 3}
        assert len(recorded) == 1


class TestDevices:
    def test_what_is_not_there(self, cuda: SimulatedCuda) -> None:
        assert resolve_device("cuda") == torch.device("cuda", 0)
        assert resolve_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(CapabilityError, match=r"last CUDA device here is cuda:1"):
            resolve_device("cuda:2")

    def test_what_we_cannot_use(self) -> None:
        with pytest.raises(
            CapabilityError, match=r"'mps' is not supported. Use auto, cpu, cuda or cuda:N"
        ):
            resolve_device("mps")


@pytest.mark.slow
def test_a_batch_is_one_pass(folder: Path) -> None:
    """Catches limits made for a CPU's bits: 40 rows in several passes, each of which reads all
    weights."""
    with SimulatedCuda(), torch.inference_mode():
        built = build(options(folder, "eager"))
        lm = built.target.lm
        calls = []
        plain = built.target.lm.run
        lm.run = lambda ids, *rest: calls.append(ids.shape[0]) or plain(ids, *rest)  # type: ignore[assignment,func-returns-value]
        for _ in range(40):
            lm.kv.add_row()
        lm.forward(torch.zeros(40, 6, dtype=torch.int64, device="cuda"))
    assert calls == [40]
    assert lm.limits.exact_rows or any(
        "kernels there differ with the size of a pass" in note for note in built.notes
    )


class TestModelsThatCannotBeRecorded:
    @pytest.fixture
    def waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model that looks at its own numbers, as experts that count their tokens do."""
        plain = ModuleRun.__call__

        def call(self: ModuleRun, ids: Tensor, *rest: object) -> Tensor:
            assert ids.sum().item() >= 0
            return plain(self, ids, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(ModuleRun, "__call__", call)

    @pytest.mark.slow
    @pytest.mark.usefixtures("waiting")
    def test_auto_says_so_and_runs(self, folder: Path) -> None:
        with SimulatedCuda():
            built = build(options(folder, "auto"))
        (note,) = [one for one in built.notes if "runs eagerly" in one]
        assert note.startswith(
            f"{folder} runs eagerly, which is slower: its passes cannot be recorded as CUDA "
            "graphs: "
        )
        assert "operation not permitted when stream is capturing: _local_scalar_dense" in note
        assert isinstance(built.target.lm.run, ModuleRun)
        assert built.config()["runtime"] == "eager"

    @pytest.mark.slow
    @pytest.mark.usefixtures("waiting")
    def test_graphs_refuses(self, folder: Path) -> None:
        refused = r"does not run on runtime 'graphs': .*operation not permitted.*--runtime eager"
        with SimulatedCuda(), pytest.raises(CapabilityError, match=refused):
            build(options(folder, "graphs"))

    @pytest.mark.slow
    def test_wrong_numbers_are_noticed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a check that compares nothing: replays that give other logits than the model."""
        replay = graphs_module._Recording.replay
        monkeypatch.setattr(
            graphs_module._Recording,
            "replay",
            lambda self, inputs: [out.flip(-1) for out in replay(self, inputs)],
        )
        with SimulatedCuda(), pytest.raises(CapabilityError, match="differ from the plain ones by"):
            build(options(folder, "graphs"))

    @pytest.mark.slow
    def test_recordings_of_nothing_are_noticed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their results are those of the pass that was recorded, whatever is asked."""
        monkeypatch.setattr(SimulatedGraph, "replay", lambda self: None)
        with SimulatedCuda(), pytest.raises(CapabilityError, match="differ from the plain ones by"):
            build(options(folder, "graphs"))
