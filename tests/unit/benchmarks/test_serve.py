"""Servers that are measured do not outlive the measurement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MEASURING = """
import sys
from pathlib import Path
import serve
serve._answers = lambda url: True
with serve.serving([sys.executable, "-c", "import time; time.sleep(600)"], 1, "/", Path(sys.argv[1])):
    print("serving", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_a_server_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL runs no `finally`: a server would go on to take processor and memory from the next
    measurement."""
    command = [sys.executable, "-c", MEASURING, str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=BENCHMARKS
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        (server,) = psutil.Process(process.pid).children()
        process.kill()
    assert psutil.wait_procs([server], timeout=10)[0] == [server]
