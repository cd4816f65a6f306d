"""The GPU script's own logic, and its small form on this machine's processor and on a simulated
device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.simulated_cuda import SimulatedCuda

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
Run = Callable[[Any], dict[str, Any]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu")


@pytest.fixture
def stages(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts functions in the place of stages; the others are missing."""

    def put(**runs: Run) -> None:
        for name in gpu.STAGES:
            module = None
            if name in runs:
                module = SimpleNamespace(
                    MINUTES=1.0,
                    run=runs[name],
                    table=lambda result: [["what", str(result), "", ""]],
                )
            monkeypatch.setitem(sys.modules, f"gpu_stages.{name}", module)

    return put


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "found.json"


def tiny(gpu: ModuleType, out: Path, *arguments: str) -> int:
    return gpu.main(["--tiny", "--device", "cpu", "--out", str(out), *arguments])


def read(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text(encoding="utf-8"))


def nothing(context: Any) -> dict[str, Any]:
    return {}


def breaks(context: Any) -> dict[str, Any]:
    context.keep({"before": 1})
    raise ValueError("no such kernel\nand more")


@pytest.mark.slow
def test_a_stage_that_raises_is_recorded_and_the_next_one_runs(
    gpu: ModuleType, stages: Any, out: Path
) -> None:
    stages(right=breaks, roof=lambda context: {"found": 2})
    assert tiny(gpu, out, "--only", "right,roof") == 1
    found = read(out)["stages"]
    assert (found["right"]["status"], found["right"]["reason"]) == (
        "failed",
        "ValueError: no such kernel",
    )
    assert found["right"]["result"]["before"] == 1
    assert any("test_gpu.py" in line for line in found["right"]["result"]["traceback"])
    assert (found["roof"]["status"], found["roof"]["result"]) == ("ok", {"found": 2})
    assert found["gain"]["status"] == "skipped"


def test_the_file_is_written_after_each_result(gpu: ModuleType, stages: Any, out: Path) -> None:
    seen = []

    def run(context: Any) -> dict[str, Any]:
        for number in range(3):
            context.keep({str(number): number})
            seen.append(read(out)["stages"]["roof"])
        return {"end": True}

    stages(roof=run)
    assert tiny(gpu, out, "--only", "roof") == 0
    assert [len(entry["result"]) for entry in seen] == [1, 2, 3]
    assert {entry["status"] for entry in seen} == {"running"}
    found = read(out)
    assert found["stages"]["roof"]["result"] == {"0": 0, "1": 1, "2": 2, "end": True}
    assert {
        "schema",
        "command",
        "date",
        "card",
        "driver",
        "torch",
        "transformers",
        "missing",
    } <= found.keys()
    assert "\n" not in out.read_text(encoding="utf-8").strip()


def test_missing_stages_and_packages_are_named(
    gpu: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs_more(context: Any) -> dict[str, Any]:
        return {"found": import_module("a_package_nobody_has")}

    monkeypatch.setattr(gpu, "STAGES", ("right", "absent"))
    monkeypatch.setitem(
        sys.modules, "gpu_stages.right", SimpleNamespace(MINUTES=1.0, run=needs_more)
    )
    assert tiny(gpu, out) == 1
    found = read(out)["stages"]
    assert (found["absent"]["status"], found["absent"]["reason"]) == (
        "skipped",
        "benchmarks/gpu_stages/absent.py is missing",
    )
    assert (found["right"]["status"], found["right"]["reason"]) == (
        "failed",
        "package 'a_package_nobody_has' is missing here",
    )
    assert "absent.py is missing" in capsys.readouterr().out


@pytest.mark.slow
def test_skip_leaves_out(gpu: ModuleType, stages: Any, out: Path) -> None:
    stages(**dict.fromkeys(gpu.STAGES, nothing))
    assert tiny(gpu, out, "--skip", "right, peers") == 0
    found = read(out)["stages"]
    assert {name for name, entry in found.items() if entry["status"] == "ok"} == {*gpu.STAGES} - {
        "right",
        "peers",
    }
    assert found["peers"]["reason"] == "not asked for"


@pytest.mark.slow
def test_time_that_is_left_goes_to_later_stages(gpu: ModuleType, stages: Any, out: Path) -> None:
    left = {}

    def run(name: str) -> Run:
        return lambda context: left.update({name: context.left_s()}) or {}

    stages(right=run("right"), roof=run("roof"))
    assert tiny(gpu, out, "--only", "right,roof", "--minutes", "1") == 0
    assert 28 < left["right"] <= 30
    assert 55 < left["roof"] <= 60


def test_stages_without_time_are_not_begun(
    gpu: ModuleType, stages: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(context: Any) -> dict[str, Any]:
        context.keep({"half": 1})
        context.check_time(1e6)
        return {}

    monkeypatch.setattr(gpu, "LEAST_S", 1.0)
    stages(right=cut, roof=lambda context: time.sleep(0.3) or {}, overhead=nothing)
    assert tiny(gpu, out, "--only", "right,roof,overhead", "--minutes", "0.02") == 1
    found = read(out)["stages"]
    assert (found["right"]["status"], found["right"]["result"]) == ("out of time", {"half": 1})
    assert (found["overhead"]["status"], found["overhead"]["result"]) == ("out of time", {})
    assert "0.02 minutes were used up" in found["overhead"]["reason"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_known(gpu: ModuleType, stages: Any, out: Path) -> None:
    def interrupted(context: Any) -> dict[str, Any]:
        context.keep({"known": 1})
        raise KeyboardInterrupt

    stages(right=nothing, roof=interrupted, overhead=nothing)
    assert tiny(gpu, out, "--only", "right,roof,overhead") == 130
    found = read(out)["stages"]
    assert [found[name]["status"] for name in ("right", "roof", "overhead")] == [
        "ok",
        "skipped",
        "skipped",
    ]
    assert (found["roof"]["reason"], found["roof"]["result"]) == ("interrupted", {"known": 1})


@pytest.mark.parametrize(
    ("row", "status"),
    [(["a", "b", "1", "below"], 1), (["a", "b", "1", "ok"], 0), (["a", "b", "", ""], 0)],
)
def test_a_missed_floor_is_in_the_exit_status(
    gpu: ModuleType,
    stages: Any,
    out: Path,
    row: list[str],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages(roof=lambda context: {"found": 1})
    sys.modules["gpu_stages.roof"].table = lambda result: [row]  # type: ignore[attr-defined]
    assert tiny(gpu, out, "--only", "roof") == status
    assert "  ".join(row).strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this torch sees no CUDA device"),
        (["--tiny"], "--tiny --device cpu"),
        (["--device", "cpu"], "the full form needs a CUDA device"),
        (["--device", "nonsense"], "unknown device 'nonsense'"),
        (["--tiny", "--device", "cpu", "--only", "rooof"], "no stage 'rooof'. Stages: right, roof"),
        (["--tiny", "--device", "cpu", "--only", "roof", "--skip", "roof"], "leave no stage"),
        (
            ["--tiny", "--device", "cpu", "--out", str(BENCHMARKS / "results" / "x.json")],
            "does not belong",
        ),
    ],
)
def test_what_cannot_be_run_says_so(
    gpu: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x"])
def test_minutes_are_a_positive_number(gpu: ModuleType, minutes: str) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--tiny", "--device", "cpu", "--minutes", minutes])
    assert ended.value.code == 2


def test_small_runs_go_to_a_temporary_file(
    gpu: ModuleType, stages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stages(roof=nothing)
    assert gpu.main(["--tiny", "--device", "cpu", "--only", "roof"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("results in "))
    assert path.is_file()
    assert not path.is_relative_to(BENCHMARKS)


def whole(out: Path, only: str) -> dict[str, Any]:
    """The script as a person runs it, small."""
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--tiny",
        "--device",
        "cpu",
        "--only",
        only,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(out)["stages"]


@pytest.mark.slow
def test_roof_and_overhead_run_small(out: Path) -> None:
    found = whole(out, "roof,overhead")
    for model in found["roof"]["result"]["models"].values():
        assert len(model["cells"]) == 6
        assert all(cell["seconds"] > 0 for cell in model["cells"])
    assert len(found["overhead"]["result"]["steps"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_signal_ends_the_script_and_its_tests(out: Path, number: signal.Signals) -> None:
    """Catches a test run that outlives the script, and a file that is lost or says that the stage
    still runs."""
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--tiny",
        "--device",
        "cpu",
        "--only",
        "right",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    children = []
    while not children and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
        children = [
            child for child in psutil.Process(process.pid).children() if "pytest" in child.cmdline()
        ]
    assert children, "the tests were never begun"
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert not any(child.is_running() for child in children)
    assert (read(out)["stages"]["right"]["status"], read(out)["stages"]["right"]["reason"]) == (
        "skipped",
        "interrupted",
    )


@pytest.mark.slow
def test_tests_that_hang_are_killed_and_the_stage_is_out_of_time(
    gpu: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = import_module("gpu_stages.right")
    monkeypatch.setattr(right, "TESTS_SHARE", 0.01)
    for name in ("texts", "graphs", "bits", "law"):
        monkeypatch.setattr(
            f"gpu_stages.right_texts.{name}",
            lambda context: {"right": True, "told": "put in its place"},
        )
    monkeypatch.setattr(
        right, "server", lambda context: {"right": True, "told": "put in its place"}
    )
    assert tiny(gpu, out, "--only", "right", "--minutes", "1.5") == 1
    found = read(out)["stages"]["right"]
    assert (found["status"], found["reason"]) == ("out of time", "tests: killed after 1 s")
    assert found["result"]["server"]["right"]


@pytest.mark.nightly
def test_right_runs_small(out: Path) -> None:
    found = whole(out, "right")["right"]["result"]
    assert {name for name, answer in found.items() if answer["right"]} == {
        "tests",
        "texts",
        "law",
        "server",
    }
    assert {name for name, answer in found.items() if answer["right"] is None} == {"graphs", "bits"}


class _Event:
    """torch.cuda.Event by the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def simulated(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for stage in ("roof", "overhead"):  # imported before torch.cuda is replaced
        import_module(f"gpu_stages.{stage}")
    import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    with SimulatedCuda():
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(total_memory=80 << 30),
        )
        yield


@pytest.mark.nightly
@pytest.mark.usefixtures("simulated")
def test_stages_run_on_a_simulated_device_with_graphs(gpu: ModuleType, out: Path) -> None:
    """Catches host tensors among the device's, and passes that are not replayed. The simulation
    lacks a kernel of experts."""
    assert (
        gpu.main(["--tiny", "--device", "cuda:1", "--only", "roof,overhead", "--out", str(out)])
        == 0
    )
    found = read(out)["stages"]
    models = found["roof"]["result"]["models"]
    for name in ("Llama-3.1-8B", "SmolLM2-135M"):
        assert models[name]["graphs"]
        assert len(models[name]["cells"]) == 6
    assert found["overhead"]["result"]["draft_token"]["graphs"]
    assert len(found["overhead"]["result"]["steps"]) == 4
