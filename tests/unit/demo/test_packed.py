"""Packed weights come back bit for bit, once, wherever the folder lies."""

import os
import platform
import runpy
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.demo import packed
from outrider.demo.packed import PACKED, WEIGHTS, pack, with_weights
from outrider.errors import CheckpointError
from outrider.runtime import building

ROOT = Path(__file__).resolve().parents[3]
TARGET = "outrider/demo/models/target"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights of an odd number of bytes, their archive and a config."""
    target = tmp_path / TARGET
    target.mkdir(parents=True)
    weights = torch.randn(300, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"weights": weights, "flags": torch.zeros(3, dtype=torch.uint8)}, target / WEIGHTS)
    (target / "config.json").write_text("{}")
    pack(target)
    return target


def block(folder: Path) -> None:
    """Nothing can be written where the weights belong, not even by root: a folder is there."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_weights_come_back_bit_for_bit_from_fewer_bytes(folder: Path) -> None:
    original = (folder / WEIGHTS).read_bytes()
    assert len(original) % 2 == 1
    (folder / WEIGHTS).unlink()
    assert with_weights(folder) == folder
    assert (folder / WEIGHTS).read_bytes() == original
    assert (folder / PACKED).stat().st_size < 0.75 * len(original)
    assert names(folder) == ["config.json", WEIGHTS, PACKED]


def test_the_same_weights_give_the_same_archive(folder: Path) -> None:
    before = (folder / PACKED).read_bytes()
    os.utime(folder / WEIGHTS, (0, 0))
    assert pack(folder).read_bytes() == before


def test_weights_are_unpacked_once(folder: Path) -> None:
    with_weights(folder)
    before = (folder / WEIGHTS).stat()
    with_weights(folder)
    assert (folder / WEIGHTS).stat() == before


def test_another_archive_replaces_the_weights(folder: Path) -> None:
    """An updated checkout, with a file of the same size: neither size nor a later time may be taken
    for the same weights."""
    with_weights(folder)
    save_file({"one": torch.ones(4)}, folder / WEIGHTS)
    pack(folder)
    save_file({"one": torch.zeros(4)}, folder / WEIGHTS)
    written = (folder / PACKED).stat().st_mtime
    os.utime(folder / WEIGHTS, (written + 9, written + 9))
    with_weights(folder)
    assert load_file(folder / WEIGHTS)["one"].tolist() == [1, 1, 1, 1]


def test_a_folder_from_a_wheel_is_taken_as_it_is(folder: Path) -> None:
    (folder / PACKED).unlink()
    before = (folder / WEIGHTS).read_bytes()
    assert with_weights(folder) == folder
    assert (folder / WEIGHTS).read_bytes() == before


def test_processes_that_unpack_at_once_all_find_the_weights(folder: Path) -> None:
    original = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / "original").write_bytes(original)
    script = (
        "import sys, pathlib, outrider.demo.packed as packed; folder = packed.with_weights(pathlib.Path(sys.argv[1])); "
        "assert (folder / packed.WEIGHTS).read_bytes() == (folder / 'original').read_bytes()"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with ThreadPoolExecutor() as several:
        runs = [
            several.submit(
                subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60
            )
            for _ in range(4)
        ]
        done = [run.result() for run in runs]
    assert [one.returncode for one in done] == [0] * 4, done[0].stderr
    assert names(folder) == ["config.json", WEIGHTS, "original", PACKED]


def test_threads_that_unpack_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a file of its own: one that another still writes is never taken for whole."""
    original = (folder / WEIGHTS).read_bytes()
    unpacked = packed._unpacked
    both = Barrier(2)
    (folder / WEIGHTS).unlink()

    def together(archive: Path) -> bytearray:
        both.wait(30)
        return unpacked(archive)

    monkeypatch.setattr(packed, "_unpacked", together)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(with_weights, [folder, folder])) == [folder, folder]
    assert (folder / WEIGHTS).read_bytes() == original
    assert names(folder) == ["config.json", WEIGHTS, PACKED]


def test_a_folder_that_cannot_be_written_is_copied_until_the_program_ends(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "original").write_bytes((folder / WEIGHTS).read_bytes())
    block(folder)
    script = (
        "import sys, pathlib, outrider.demo.packed as packed; folder = pathlib.Path(sys.argv[1])\n"
        "copy = packed.with_weights(folder); assert packed.with_weights(folder) == copy != folder\n"
        "assert (copy / packed.WEIGHTS).read_bytes() == pathlib.Path(sys.argv[2]).read_bytes()\n"
        "print(copy, *sorted(file.name for file in copy.iterdir()))"
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "original")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    copy, *held = done.stdout.split()
    assert held == ["config.json", WEIGHTS]
    assert Path(copy).parent == tmp_path
    assert not Path(copy).exists()
    assert names(folder) == ["config.json", WEIGHTS, PACKED]


def test_where_nothing_can_be_written_the_error_says_what_helps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="TMPDIR"):
        with_weights(folder)


@pytest.mark.parametrize("point", [0.1, 0.9, -10])
def test_a_damaged_archive_is_recognised(folder: Path, point: float) -> None:
    """Catches a flipped byte of either half, or of the table of contents."""
    data = bytearray((folder / PACKED).read_bytes())
    data[int(point * len(data)) if point > 0 else int(point)] ^= 255
    (folder / PACKED).write_bytes(data)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"is damaged .* git checkout"):
        with_weights(folder)
    assert not (folder / WEIGHTS).exists()


@pytest.mark.parametrize("can_compile", [True, False])
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the native runtime is written for x86-64"
)
def test_a_wheel_gets_the_native_runtime(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_compile: bool
) -> None:
    """A wheel with compiled parts says for which system it is; without a compiler it is pure as
    before, and reports that."""
    lines: list[str] = []

    class Interface:
        def __init__(self, root: str) -> None:
            self.root = root
            self.app = SimpleNamespace(display_info=lines.append)

    module = ModuleType("hatchling.builders.hooks.plugin.interface")
    module.__dict__["BuildHookInterface"] = Interface
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "outrider/runtime").mkdir()
    (tmp_path / "outrider/runtime/building.py").touch()
    if can_compile:
        monkeypatch.setattr(building, "build_all", lambda status: status("compiling"))
    else:
        monkeypatch.setattr(building, "compiler", lambda: None)
        monkeypatch.setattr(building, "PREBUILT", tmp_path / "lib")
    data: dict[str, Any] = {"force_include": {}, "artifacts": []}
    runpy.run_path(str(ROOT / "hatch_build.py"))["UnpackDemo"](str(tmp_path)).initialize(
        "standard", data
    )
    if can_compile:
        assert data["pure_python"] is False
        assert data["tag"].startswith("py3-none-linux")
        assert data["artifacts"] == ["/outrider/runtime/lib/runtime-*"]
        assert lines == ["compiling"]
    else:
        assert "pure_python" not in data
        assert not data["artifacts"]
        assert len(lines) == 1
        assert "without the native runtime: no C++ compiler" in lines[0]


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_wheel_gets_the_weights_unpacked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    """Runs hatch_build.py as hatchling does, which is no dependency of ours."""

    class Interface:
        def __init__(self, root: str) -> None:
            self.root = root

    module = ModuleType("hatchling.builders.hooks.plugin.interface")
    module.__dict__["BuildHookInterface"] = Interface
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    original = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink() if is_writable else block(folder)
    data: dict[str, Any] = {"force_include": {}}
    runpy.run_path(str(ROOT / "hatch_build.py"))["UnpackDemo"](str(tmp_path)).initialize(
        "standard", data
    )
    if is_writable:
        assert not data["force_include"]
        assert (folder / WEIGHTS).read_bytes() == original
    else:
        ((source, destination),) = data["force_include"].items()
        assert destination == f"{TARGET}/{WEIGHTS}"
        assert Path(source).read_bytes() == original

    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]
    assert f"{TARGET}/{WEIGHTS}" in built["wheel"]["artifacts"]
    assert "custom" in built["wheel"]["hooks"]
    assert {"build_backend.py", "hatch_build.py"} < set(built["sdist"]["include"])
