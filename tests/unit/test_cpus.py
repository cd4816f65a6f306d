"""How many processors a container leaves us, from files of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outrider import build, cpus
from outrider.cpus import cgroup_quota, usable_cpus


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A mount with these files ("a__b" is a/b, "_cpu" stands for "cpu."), and what the process says
    of itself."""
    (folder / "self").write_text(own)
    for name, text in files.items():
        path = folder / "mount" / name.replace("__", "/").replace("cpu_", "cpu.", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "mount", folder / "self"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        (
            "0::/\n",
            {"cpu_max": "150000 100000\n"},
            1.5,
        ),  # a container sees its own group as the root
        ("0::/\n", {"cpu_max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a__cpu_max": "200000 100000\n", "a__b__cpu_max": "max 100000\n"}, 2.0),
        ("0::/a/b\n", {"a__cpu_max": "200000 100000\n", "a__b__cpu_max": "50000 100000\n"}, 0.5),
        (
            "1:cpu:/c\n0::/\n",
            {"cpu/c__cpu_cfs_quota_us": "300000\n", "cpu/c__cpu_cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "4:cpuacct,cpu:/\n",
            {"cpu,cpuacct__cpu_cfs_quota_us": "-1\n", "cpu,cpuacct__cpu_cfs_period_us": "100000\n"},
            None,
        ),
        (
            "4:memory:/c\n",
            {"cpu/c__cpu_cfs_quota_us": "300000\n", "cpu/c__cpu_cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", {"cpu_max": "some text\n"}, None),
    ],
)
def test_quotas(own: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """Catches a limit of a group above that is forgotten, "max" or -1 taken for a number, and other
    controllers' groups."""
    assert cgroup_quota(*groups(tmp_path, own, **files)) == quota


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path, tmp_path / "missing") is None


def test_the_lower_of_affinity_and_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for quota, expected in ((None, 6), (2.5, 3), (0.2, 1), (64.0, 6)):
        monkeypatch.setattr(cpus, "cgroup_quota", lambda quota=quota: quota)
        assert usable_cpus() == expected


def test_no_more_threads_are_taken_than_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches threads that a container's quota stops together for most of each period."""
    monkeypatch.setattr(build, "usable_cpus", lambda: 2)
    before = torch.get_num_threads()
    try:
        for torchs, asked, taken in ((3, None, 2), (1, None, 1), (2, 3, 3)):
            torch.set_num_threads(torchs)
            build._set_threads(asked)
            assert torch.get_num_threads() == taken
    finally:
        torch.set_num_threads(before)
