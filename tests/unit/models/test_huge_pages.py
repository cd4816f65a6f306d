"""Advice to the kernel: it must name the right memory, and never fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider.models.huge_pages import _anonymous_blocks, advise_huge_pages

MAPS = """\
55a000000000-55a000400000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0020000000-7f0030000000 r--p 00000000 00:00 0
7f0040000000-7f0050000000 rw-p 00001000 fe:00 4711                       /usr/lib/libtorch_cpu.so
7f0060000000-7f0070000000 rw-s 00000000 00:01 9                          /dev/shm/x
7ffd00000000-7ffd00100000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_private_anonymous_memory_is_named() -> None:
    """Catches advice on a mapped file, a shared segment or the stack."""
    assert list(_anonymous_blocks(MAPS)) == [(0x55A000000000, 0x400000), (0x7F0000000000, 0x10000000)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_contents_stay() -> None:
    weights = torch.arange(8 << 20, dtype=torch.int32)  # 32 MiB
    assert advise_huge_pages() >= 32 << 20
    assert Path("/proc/self/smaps_rollup").exists()
    assert torch.equal(weights, torch.arange(8 << 20, dtype=torch.int32))
