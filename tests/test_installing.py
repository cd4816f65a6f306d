"""An environment that has an engine already: pip adds Outrider and changes nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# what a fresh environment of an engine has where that differs from ours, by what its own package asks for
ENGINES = {
    "vllm 0.32": {"torch": "2.13.0", "transformers": "5.19.0", "llguidance": "1.7.6"},
    "vllm 0.33": {"torch": "2.14.0", "transformers": "5.20.0", "llguidance": "1.7.6"},
    "sglang 0.5.23": {"torch": "2.14.1", "transformers": "5.19.0", "tokenizers": "0.23.2"},
}


def dependencies() -> list[Requirement]:
    """Of the base installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def write_metadata(folder: Path, name: str, number: str, extras: list[str]) -> None:
    """An installed package that is nothing but its description."""
    info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def wheel_of(folder: Path) -> Path:
    """A wheel of Outrider without files: its name and its dependencies."""
    path = folder / "outrider-9.9-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in dependencies())
    with ZipFile(path, "w") as archive:
        info = "outrider-9.9.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: outrider\nVersion: 9.9\n{needs}"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_keeps_its_packages(engine: str, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    for requirement in dependencies():
        try:
            number = ENGINES[engine].get(requirement.name) or version(requirement.name)
        except PackageNotFoundError:
            pytest.skip(f"{requirement.name} is not installed here")
        write_metadata(packages, requirement.name, number, sorted(requirement.extras))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install"]
    command += ["--dry-run", "--no-index", "--quiet", "--report", str(report)]
    subprocess.run([*command, str(wheel_of(tmp_path))], check=True)
    changes = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert changes == ["outrider"]
