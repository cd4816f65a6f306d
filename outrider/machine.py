"""Facts about this machine that matter for speed: for `outrider doctor` and for results.

Every "no" comes with its reason and a remedy. Nothing here loads a model or changes a setting.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from outrider.cpus import usable_cpus
from outrider.lazy import torch

PACKAGES = ("outrider", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Which of the instruction sets that matter here the CPU has; empty where it cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    flags = next(
        (
            line.split(":", 1)[1].split()
            for line in text.splitlines()
            if line.startswith(("flags", "Features"))
        ),
        [],
    )
    return [flag for flag in FLAGS if flag in flags]


def versions() -> dict[str, str]:
    """Python and the packages whose version changes results or speed."""
    packages = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = "not installed"
    return packages


def cuda_devices() -> list[dict[str, Any]]:
    """Every CUDA device torch sees, with its memory."""
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "free_bytes": torch.cuda.mem_get_info(index)[0],
            "total_bytes": torch.cuda.mem_get_info(index)[1],
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]


def describe_machine() -> dict[str, Any]:
    """The facts about the machine that a result records; no host name, no paths."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "cuda_devices": [
            {"name": device["name"], "total_bytes": device["total_bytes"]}
            for device in cuda_devices()
        ],
    }


def memory_bandwidth(threads: int, mebibytes: int = 512, repeats: int = 7) -> float:
    """Best read rate of `threads` threads over one buffer far larger than the caches, in bytes/s."""
    buffer = np.ones(mebibytes * 2**20 // 8, dtype=np.float64)
    parts = np.array_split(buffer, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            # max: one SIMD read stream, no store; numpy releases the GIL
            list(pool.map(np.max, parts))
            best = max(best, buffer.nbytes / (time.perf_counter() - start))
    return best


def cores() -> dict[str, int | None]:
    """Cores there are, and those this process may use."""
    return {
        "physical": psutil.cpu_count(logical=False),
        "logical": os.cpu_count(),
        "usable": usable_cpus(),
    }


def folder_size(folder: Path) -> dict[str, Any]:
    """A folder's path, number of files and size; zeros when it does not exist."""
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {
        "path": str(folder),
        "num_files": len(files),
        "num_bytes": sum(file.stat().st_size for file in files),
    }


def unavailable() -> list[dict[str, str]]:
    """Features that do not work here, why, and what would help."""
    features = []

    def say(what: str, why: str, remedy: str) -> None:
        features.append({"what": what, "why": why, "remedy": remedy})

    if not torch.cuda.is_available():
        why = (
            "this torch was built without CUDA"
            if torch.version.cuda is None
            else "torch sees no CUDA device"
        )
        say(
            "CUDA",
            why,
            "on a machine with an NVIDIA GPU: pip install torch with CUDA, check nvidia-smi",
        )
    if not torch.backends.mkldnn.is_available():
        say(
            "packed CPU weights", "this torch was built without oneDNN", "use the wheels of PyTorch"
        )
    flags = cpu_flags()
    if flags and "avx2" not in flags and "asimddp" not in flags:
        say(
            "fast bfloat16 on CPU",
            "the CPU has neither AVX2 nor ARM's byte products",
            "checkpoints in it run as float32, of twice the size",
        )
    return features


def python_path() -> str:
    """The interpreter in use."""
    return sys.executable
