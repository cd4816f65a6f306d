"""How many processors this process may really use: its affinity, and the quota of its control group
(a container's limit)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
V1_MOUNTS = ("cpu,cpuacct", "cpuacct,cpu", "cpu")


def usable_cpus() -> int:
    """Processors that threads of this process can keep busy, at least 1; a part of one counts as
    one."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cgroup_quota(mount: Path = CGROUPS, group: Path = OWN) -> float | None:
    """Processors' worth of time that this process's control groups allow together, None for no
    limit. Both versions of them."""
    quotas = [quota for folder in _folders(mount, group) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(mount: Path, group: Path) -> Iterator[Path]:
    """Folders that may hold a limit of this process: those of its own control groups and all above
    them."""
    try:
        lines = group.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in (
            [mount / name for name in V1_MOUNTS] if controllers else [mount, mount / "unified"]
        ):
            folder = root / path.lstrip("/")
            yield from (
                parent
                for parent in (folder, *folder.parents)
                if parent == root or root in parent.parents
            )


def _quota(folder: Path) -> float | None:
    """The limit in one folder: version 2 has "QUOTA PERIOD" or "max PERIOD" in one file, version 1
    two files, -1 for none."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{what}_us").read_text(encoding="utf-8")
                for what in ("quota", "period")
            )
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit here, or a file in another form
        return None
