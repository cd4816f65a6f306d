"""The tracked files stay small enough to be cloned and copied to another machine at each call."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MAX_MB = 60  # all of it
MAX_MB_OF_RESULTS = 1.6
NUM_NAMED = 8


def tracked(root: Path) -> dict[Path, int]:
    """Bytes of every file that git tracks and that is there; skips the test where `root` is no
    checkout of its own."""
    try:
        top = subprocess.run(
            ["git", "rev-parse", "--show-toplevel"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout")
    if Path(top.strip()).resolve() != root:
        pytest.skip("not a checkout of its own")
    files = {root / name for name in names.split("\0") if name}
    return {file: file.lstat().st_size for file in files if file.exists()}


def complaint(sizes: dict[Path, int], max_mb: float, root: Path) -> str:
    """The limit that is passed, with the biggest files; empty where the tree is small enough."""
    total = sum(sizes.values()) / 1e6
    if total <= max_mb:
        return ""
    biggest = sorted(sizes, key=lambda file: -sizes[file])[:NUM_NAMED]
    listed = "\n".join(
        f"  {sizes[file] / 1e6:6.2f} MB  {file.relative_to(root)}" for file in biggest
    )
    return (
        f"{total:.1f} MB are tracked, at most {max_mb:g} are allowed; the biggest files:\n{listed}"
    )


def test_all_tracked_files_are_small_together() -> None:
    message = complaint(tracked(ROOT), MAX_MB, ROOT)
    assert not message, message


def test_results_are_small_together() -> None:
    """Catches results of measurements that pile up, which models and code would hide: keep the
    newest, or compress them."""
    sizes = {file: size for file, size in tracked(ROOT).items() if file.is_relative_to(RESULTS)}
    message = complaint(sizes, MAX_MB_OF_RESULTS, ROOT)
    assert not message, message


def test_the_biggest_files_are_named(tmp_path: Path) -> None:
    sizes = {tmp_path / "small": 100, tmp_path / "results" / "large.json": 2_000_000}
    assert complaint(sizes, 3, tmp_path) == ""
    first, *files = complaint(sizes, 1.5, tmp_path).splitlines()
    assert first == "2.0 MB are tracked, at most 1.5 are allowed; the biggest files:"
    assert files == ["    2.00 MB  results/large.json", "    0.00 MB  small"]
