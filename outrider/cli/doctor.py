"""`outrider doctor`: versions, devices, memory, caches, and what is unavailable here and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from outrider.cli.options import AsJson
from outrider.errors import CheckpointError
from outrider.report.text import amount, to_json


def doctor(as_json: AsJson = False) -> int:
    """Say what this machine and installation can do, and what they cannot and why."""
    findings = examine()
    if as_json:
        sys.stdout.write(to_json(findings) + "\n")
    else:
        _show(findings)
    return 0


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain JSON."""
    import torch

    from outrider import machine
    from outrider.models import native
    from outrider.models.compile import cache_folder
    from outrider.models.memory import available_memory
    from outrider.runtime import library as runtime

    unavailable = machine.unavailable()
    if (why := _why_no_pair()) is not None:
        remedy = "reinstall outrider, or train it: python -m outrider.demo.recipe --help"
        unavailable.append({"what": "the embedded pair 'demo'", "why": why, "remedy": remedy})
    return {
        "versions": machine.versions(),
        "python_path": machine.python_path(),
        "cpu": machine.cpu_name(),
        "cpu_flags": machine.cpu_flags(),
        "native_kernels": native.instructions() if native.compiler() else None,
        "native_runtime": runtime.why_missing() or "available",
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "memory_available_bytes": available_memory(torch.device("cpu")),
        "cuda_devices": machine.cuda_devices(),
        "compiler": machine.compiler(),
        "compiled_cache": machine.folder_size(cache_folder()),
        "unavailable": unavailable,
    }


def _why_no_pair() -> str | None:
    """What keeps the embedded pair from being loaded; None where nothing does."""
    from outrider.demo import demo_paths

    try:
        pair = demo_paths()
    except CheckpointError as error:
        return str(error)
    missing = [path for path in pair if not (path / "config.json").exists()]
    return f"{missing[0]} is missing" if missing else None


def _show(findings: Mapping[str, Any]) -> None:
    from outrider.report.tables import facts_table, show

    cores, cache = findings["cores"], findings["compiled_cache"]
    devices = [
        f"{d['name']}, {amount(d['free_bytes'])} of {amount(d['total_bytes'])} free"
        for d in findings["cuda_devices"]
    ]
    show(facts_table("versions", findings["versions"]))
    facts = {
        "python": findings["python_path"],
        "cpu": findings["cpu"],
        "instruction sets": findings["cpu_flags"] or "unknown",
        "our kernels use": (findings["native_kernels"] or "").upper() or "nothing: torch's own serve",
        "native runtime": findings["native_runtime"],
        "torch uses": findings["torch_cpu_capability"],
        "cores": f"{cores['usable']} usable of {cores['logical']}",
        "threads": findings["threads"],
        "memory available": amount(findings["memory_available_bytes"]),
        "CUDA": devices or "none",
        "C++ compiler": findings["compiler"] or "none",
        "compiled programs": f"{cache['num_files']} files, {amount(cache['num_bytes'])} in {cache['path']}",
    }
    show(facts_table("machine", facts))
    if findings["unavailable"]:
        show(
            facts_table(
                "unavailable", {i["what"]: f"{i['why']}; {i['remedy']}" for i in findings["unavailable"]}
            )
        )
