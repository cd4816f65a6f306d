"""`outrider doctor`: versions, devices, memory, caches, and what is unavailable here and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from outrider.cache import cache_folder
from outrider.cli.options import Json
from outrider.cli.verbs import with_groups
from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import torch
from outrider.report.text import amount, to_json


@with_groups
def doctor(json: Json = False) -> int:
    """Say what this machine and installation can do, and what they cannot and why."""
    findings = examine()
    if json:
        sys.stdout.write(to_json(findings) + "\n")
    else:
        _show(findings)
    return 0


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain JSON."""
    from outrider import machine
    from outrider.models.loading.memory import available_memory
    from outrider.runtime import building

    unavailable = machine.unavailable()
    if (why := _why_no_pair()) is not None:
        remedy = "reinstall outrider"
        unavailable.append({"what": "the embedded pair 'demo'", "why": why, "remedy": remedy})
    return {
        "versions": machine.versions(),
        "python_path": machine.python_path(),
        "cpu": machine.cpu_name(),
        "cpu_flags": machine.cpu_flags(),
        "runtime": _runtime(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "memory_available_bytes": available_memory(torch.device("cpu")),
        "cuda_devices": machine.cuda_devices(),
        "compiler": building.compiler(),
        "cache": machine.folder_size(cache_folder()),
        "kept_weights_bytes": machine.folder_size(cache_folder() / "weights")["num_bytes"],
        "unavailable": unavailable,
    }


def _runtime() -> dict[str, Any]:
    """Which runtime models get here, by which library, and why not a faster one."""
    from outrider.instructions import of_this_cpu
    from outrider.runtime import coding, library

    path = compiler = gain = None
    why_not = library.why_missing()
    if why_not is None:
        try:
            path, compiler = library.in_use()
            gain = coding.kept_gain(path.name, torch.get_num_threads())
        except CapabilityError as error:
            why_not = str(error)
    return {
        "name": "graphs" if torch.cuda.is_available() else "eager" if why_not else "native",
        "instructions": None if why_not else of_this_cpu(),
        "matrix_tiles": why_not is None and library.has_tiles(),
        "library": None if path is None else str(path),
        "library_made_by": compiler,
        "bf16_weights": coding.choice(),
        "bf12_gain": gain,
        "why_not_native": why_not,
    }


def _runtime_in_words(runtime: Mapping[str, Any]) -> str:
    if runtime["name"] == "native":
        tiles = ", with matrix tiles (AMX)" if runtime["matrix_tiles"] else ""
        return f"native, by {runtime['instructions'].upper()} instructions{tiles}: a pass is one call of our own library"
    if runtime["name"] == "graphs":
        return "graphs: passes are recorded and replayed as CUDA graphs"
    return f"eager, which is slower: PyTorch's own modules, since the native runtime is missing ({runtime['why_not_native']})"


def _weights_in_words(runtime: Mapping[str, Any]) -> str:
    """How bf16 weights lie on the native runtime."""
    from outrider.runtime.coding import ALWAYS, MIN_GAIN, NEVER, SWITCH

    gain = runtime["bf12_gain"]
    if (choice := runtime["bf16_weights"]) in (ALWAYS, NEVER):
        return f"in {12 if choice == ALWAYS else 16} bits a number, since {SWITCH} says {choice}"
    if gain is None:
        return "in 12 or 16 bits a number, which the first load of a large model measures"
    return f"in {12 if gain >= MIN_GAIN else 16} bits a number: 12 are {gain:.2f} times as fast"


def _library_in_words(runtime: Mapping[str, Any]) -> str:
    if runtime["library"] is None:
        return "none"
    return f"{runtime['library']}, compiled by {runtime['library_made_by']}"


def _why_no_pair() -> str | None:
    """The reason why the embedded pair cannot be loaded; None where there is none."""
    from outrider.demo import demo_paths

    try:
        pair = demo_paths()
    except CheckpointError as error:
        return str(error)
    missing = [path for path in pair if not (path / "config.json").exists()]
    return f"{missing[0]} is missing" if missing else None


def _show(findings: Mapping[str, Any]) -> None:
    from outrider.report.console import print_blocks
    from outrider.report.document import facts_table

    cores = findings["cores"]
    cache = findings["cache"]
    devices = [
        f"{d['name']}, {amount(d['free_bytes'])} of {amount(d['total_bytes'])} free"
        for d in findings["cuda_devices"]
    ]
    facts = {
        "python": findings["python_path"],
        "cpu": findings["cpu"],
        "instruction sets": findings["cpu_flags"] or "unknown",
        "passes run": _runtime_in_words(findings["runtime"]),
        "native library": _library_in_words(findings["runtime"]),
        "bf16 weights": _weights_in_words(findings["runtime"]),
        "torch uses": findings["torch_cpu_capability"],
        "cores": f"{cores['usable']} usable of {cores['logical']}",
        "threads": findings["threads"],
        "memory available": amount(findings["memory_available_bytes"]),
        "CUDA": devices or "none",
        "C++ compiler": findings["compiler"] or "none",
        "cache": f"{cache['num_files']} files, {amount(cache['num_bytes'])} in {cache['path']}, "
        f"{amount(findings['kept_weights_bytes'])} of it weights for later starts",
    }
    unavailable = {
        item["what"]: f"{item['why']}; {item['remedy']}" for item in findings["unavailable"]
    }
    tables = {"versions": findings["versions"], "machine": facts, "unavailable": unavailable}
    print_blocks([facts_table(title, values) for title, values in tables.items() if values])
