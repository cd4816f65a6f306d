"""`make wheels`: what is in each wheel, what is compiled again, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from outrider.instructions import ARCHITECTURES, INSTRUCTIONS, of_this_cpu
from outrider.runtime import building
from tools import wheels
from tools.wheels import TARGETS, WheelError

SOURCE = wheels.ROOT / "tests/unit/runtime/one_pass.cpp"
TOOLS = "build/wheels/venv/.installed"  # of the Makefile
LINUX = "manylinux_2_31_x86_64"
PROCESSORS = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "arm64", "amd64": "AMD64"}


def names(tag: str) -> list[str]:
    """The libraries of a wheel, as the installed package looks for them."""
    return [building.file_name(kind, TARGETS[tag].system) for kind in TARGETS[tag].instructions]


def stub(folder: Path, tag: str, leave_out: str = "", add: str = "") -> Path:
    """A wheel without code."""
    content = [f"outrider/runtime/lib/{name}" for name in names(tag)]
    content += [f"outrider/runtime/native/{path.name}" for path in building.SOURCES]
    content += [f"outrider/demo/models/{model}/model.safetensors" for model in wheels.UNPACKED]
    content += [add] if add else []
    path = folder / f"outrider-1-py3-none-{tag}.whl"
    with ZipFile(path, "w") as archive:
        for name in content:
            if not leave_out or leave_out not in name:
                archive.writestr(name, "")
    return path


@pytest.mark.parametrize("tag", TARGETS)
def test_a_system_gets_the_libraries_that_it_looks_for(tag: str) -> None:
    """A library under another name would never be loaded, and nobody would notice but by speed."""
    target = TARGETS[tag]
    (processor,) = [name for end, name in PROCESSORS.items() if tag.endswith(f"_{end}")]
    assert tuple(target.instructions) == ARCHITECTURES[target.system, processor]
    endings = {Path(name).suffix for name in names(tag)}
    assert endings == {{"linux": ".so", "darwin": ".dylib", "win32": ".dll"}[target.system]}


@pytest.mark.parametrize("tag", TARGETS)
def test_contents(tag: str, tmp_path: Path) -> None:
    wheels.check_contents(stub(tmp_path, tag), tag)
    for part, said in [
        (names(tag)[0], "instead of"),
        ("executor.cpp", "lacks outrider/runtime/native/executor.cpp"),
        ("model.safetensors", "lacks outrider/demo"),
    ]:
        with pytest.raises(WheelError, match=said):
            wheels.check_contents(stub(tmp_path, tag, leave_out=part), tag)
    with pytest.raises(WheelError, match="instead of"):
        wheels.check_contents(stub(tmp_path, tag, add="outrider/runtime/lib/runtime-x.so"), tag)


@pytest.mark.slow
def test_a_wheel_around_libraries_of_another_system(tmp_path: Path) -> None:
    """What hatchling makes: the name says the system, and nothing of this machine is in it."""
    pytest.importorskip("hatchling")
    tag = "win_amd64"
    (folder := tmp_path / tag).mkdir()
    for name in names(tag):
        (folder / name).write_bytes(b"a library")
    wheel = wheels.build_wheel(folder, tmp_path / "dist")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    wheels.check_contents(wheel, tag)
    with ZipFile(wheel) as archive:
        assert archive.read(f"{wheels.INSIDE}{names(tag)[0]}") == b"a library"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which sources a stand-in for zig was called with; two of them, and a header."""
    calls: list[str] = []

    def zig(target: wheels.Target, *arguments: str) -> None:
        calls.extend(Path(one).name for one in arguments if one.endswith(".cpp"))
        Path(arguments[-1]).write_text("compiled")

    sources = [tmp_path / name for name in ("a.cpp", "b.cpp", "c.h")]
    for source in sources:
        source.write_text(f"int {source.stem};")
    monkeypatch.setattr(building, "SOURCES", tuple(sources))
    monkeypatch.setattr(wheels, "BUILD", tmp_path / "build")
    monkeypatch.setattr(wheels, "_zig", zig)
    monkeypatch.setattr(wheels, "_zig_version", lambda: "0")
    return calls


def test_what_has_not_changed_is_not_compiled_again(compiled: list[str], tmp_path: Path) -> None:
    def build() -> list[str]:
        compiled.clear()
        folder = wheels.build_libraries("macosx_11_0_arm64", lambda line: None)
        assert [path.name for path in folder.iterdir()] == names("macosx_11_0_arm64")
        return sorted(compiled)

    assert build() == ["a.cpp", "b.cpp"]
    assert build() == []
    (tmp_path / "b.cpp").write_text("int y;")
    assert build() == ["b.cpp"]
    (tmp_path / "c.h").write_text("int z;")
    assert build() == ["a.cpp", "b.cpp"]


def test_what_the_compiler_says_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    monkeypatch.setattr(wheels, "ZIG", ("false",))
    monkeypatch.setattr(wheels, "_zig_version", lambda: "0")
    assert wheels.main(["--only", "manylinux_2_17_aarch64"]) == 1
    assert capsys.readouterr().err.startswith("error: zig could not build for aarch64-linux-gnu")


def test_a_library_of_another_system_is_refused(library_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("lief")
    if of_this_cpu() not in ("avx2", "avx512"):
        pytest.skip("reads a library for x86-64")
    assert "ELF X86_64" in wheels.check_library(library_path, LINUX)
    with pytest.raises(WheelError, match="is for X86_64, not for AARCH64"):
        wheels.check_library(library_path, "manylinux_2_17_aarch64")
    changed = tmp_path / "changed.so"
    changed.write_bytes(library_path.read_bytes().replace(b"outrider_noise", b"outrider_voice"))
    with pytest.raises(WheelError, match="does not export outrider_noise"):
        wheels.check_library(changed, LINUX)
    changed.write_bytes(b"text")
    with pytest.raises(WheelError, match=r"changed\.so is no library"):
        wheels.check_library(changed, LINUX)


@pytest.mark.nightly
def test_all_wheels_are_built(tmp_path: Path) -> None:
    """The whole of `make wheels`; what was compiled before is used again."""
    if subprocess.run(["make", TOOLS], cwd=wheels.ROOT, capture_output=True).returncode:
        pytest.skip("the tools that build wheels cannot be installed here")
    done = subprocess.run(["make", "wheels"], cwd=wheels.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for tag in TARGETS:
        (wheel,) = wheels.DIST.glob(f"outrider-*-py3-none-{tag}.whl")
        assert wheels.libraries_of(wheel) == sorted(names(tag))
    assert len(list(wheels.DIST.glob("outrider-*.tar.gz"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tag", "kind", "emulator"),
    [
        ("manylinux_2_17_aarch64", "neon", "qemu-aarch64-static -L /usr/aarch64-linux-gnu"),
        ("win_amd64", "avx2", "wine"),
    ],
)
def test_a_library_of_another_system_gives_the_same_bits(
    tag: str, kind: str, emulator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small passes on one thread and on three, a layer, noise. Debian: qemu-user-static and
    libc6-arm64-cross, or wine."""
    if shutil.which(emulator.split()[0]) is None:
        pytest.skip(f"needs {emulator.split()[0]}")
    if not (wheels.ROOT / TOOLS).exists() or building.compiler() is None:
        pytest.skip("needs `make wheels`, and a C++ compiler")
    monkeypatch.setattr(
        wheels, "ZIG", (str((wheels.ROOT / TOOLS).with_name("bin") / "python"), "-m", "ziglang")
    )
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    monkeypatch.setenv("WINEDEBUG", "-all")
    include = f"-I{building.HERE / 'native'}"

    def lines(program: Path, library: Path, run_by: list[str]) -> list[str]:
        command = [*run_by, str(program), str(library)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )

    own = tmp_path / "own"
    building.build(tmp_path / "own.so", "avx2")
    command = [str(building.compiler()), *wheels.COMPILED, *INSTRUCTIONS["avx2"], include]
    subprocess.run([*command, str(SOURCE), "-o", str(own), "-ldl"], check=True)
    target = TARGETS[tag]
    other = tmp_path / ("other.exe" if target.system == "win32" else "other")
    flags = [flag for flag in wheels.COMPILED if target.system != "win32" or flag != "-fPIC"]
    wheels._zig(target, *flags, *target.instructions[kind], include, str(SOURCE), "-o", str(other))
    library = wheels.build_libraries(tag) / building.file_name(kind, target.system)
    found = lines(other, library, emulator.split())
    assert len(found) > 4
    assert found == lines(own, tmp_path / "own.so", [])
