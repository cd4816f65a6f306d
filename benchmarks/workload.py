"""What every benchmark here shares: the prompts, the machine's description, and how a result is
written.

Prompts are GSM8K test questions in the form the shared pair was trained on, `<s>Question:
...\\nAnswer:`, as token ids, so that every engine gets exactly the same input. A result is one JSON
file: versions, hardware, command, settings, every single measurement; tables are derived from it.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console

from outrider.demo import demo_paths
from outrider.machine import memory_bandwidth

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
SHARED = Path(os.environ.get("OUTRIDER_SHARED", REPOSITORY.parent / "shared"))
PEERS = REPOSITORY / ".peers"  # environments and converted models, git-ignored
RESULTS = BENCHMARKS / "results"
PAIRS = {"shared": SHARED / "models" / "pair-14M", "demo": demo_paths().draft.parent}
GSM8K_TEST = SHARED / "data" / "gsm8k" / "test.jsonl"
RESULT_VERSION = 1
PLAIN_BYTES = 50_000  # a longer result is compressed


def console() -> Console:
    """Wide enough for the tables when the output goes to a file."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def model_pair(pair: str) -> tuple[Path, Path]:
    """Target and draft folder of a named pair, or of any folder that holds `target` and `draft`."""
    folder = PAIRS.get(pair, Path(pair)).resolve()
    if (
        not (folder / "target" / "config.json").exists()
        or not (folder / "draft" / "config.json").exists()
    ):
        raise typer.BadParameter(
            f"{pair} holds no target and draft; known pairs: {', '.join(PAIRS)}"
        )
    return folder / "target", folder / "draft"


def prompt_texts(count: int, file: Path = GSM8K_TEST) -> list[str]:
    """The first `count` questions of a GSM8K file, as prompts."""
    with file.open(encoding="utf-8") as lines:
        questions = [
            json.loads(line)["question"] for _, line in zip(range(count), lines, strict=False)
        ]
    return [f"Question: {question}\nAnswer:" for question in questions]


def encode(texts: Sequence[str], model: Path) -> list[list[int]]:
    """Token ids under the tokenizer of `model`, `<s>` first."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    bos = config["bos_token_id"]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[bos, *ids] for ids in encoded]


class OtherCpu:
    """How much of all processors everyone but `process` has used since this was made: neighbours,
    and the hypervisor's share. A speed measured beside a busy neighbour says nothing."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._start = time.perf_counter()
        self._before = self._seconds()

    def share(self) -> float:
        available = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return max(0.0, (self._seconds() - self._before) / available)

    def _seconds(self) -> float:
        total = psutil.cpu_times()
        own = self._process.cpu_times()
        busy = total.user + total.nice + total.system + total.irq + total.softirq + total.steal
        return busy - own.user - own.system


def hardware(threads: int) -> dict[str, Any]:
    """The processor as lscpu names it, and the memory bandwidth measured now; no host names."""
    listing = subprocess.run(["lscpu", "--json"], capture_output=True, text=True, check=True).stdout
    fields = {
        item["field"].rstrip(":"): item["data"] for item in _flatten(json.loads(listing)["lscpu"])
    }
    flags = fields.get("Flags", "").split()
    return {
        "cpu": fields.get("Model name"),
        "cpus": os.cpu_count(),
        "l3": fields.get("L3 cache") or fields.get("L3"),
        "instructions": [
            flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags
        ],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "memory_read_gb_per_s": round(memory_bandwidth(threads) / 1e9, 1),
        "threads_used": threads,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _flatten(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for item in items for entry in (item, *_flatten(item.get("children", [])))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the values, and how many there were."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
    }


def write_result(name: str, content: dict[str, Any], threads: int, folder: Path = RESULTS) -> Path:
    """Store content, date, command and hardware as `folder/name-DATE.json`, or `.json.gz` where it
    is long.

    Overwrites one of the same day."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {
        "version": RESULT_VERSION,
        "benchmark": name,
        "date": today,
        "command": " ".join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(as_shown, sys.argv[1:])]
        ),
        "hardware": hardware(threads),
    }
    return store({**head, **content}, folder / f"{name}-{today}.json")


def store(content: dict[str, Any], path: Path) -> Path:
    """Write a result without indentation to `path`, or compressed to `path` and `.gz` where it is
    long; returns which.

    Paths in it, such as those of an engine's notes, lose the folders of this machine. The file that
    `path` had under the other ending is deleted. The same content gives the same bytes."""
    text = json.dumps(content, separators=(",", ":")) + "\n"
    for folder in (REPOSITORY, SHARED):
        text = text.replace(f"{folder}/", "")
    data = text.encode()
    packed = path.with_name(path.name + ".gz")
    written, other = (packed, path) if len(data) > PLAIN_BYTES else (path, packed)
    path.parent.mkdir(parents=True, exist_ok=True)
    written.write_bytes(gzip.compress(data, mtime=0) if written == packed else data)
    other.unlink(missing_ok=True)
    return written


def read_result(path: Path) -> Any:
    """The content of a stored result, `.json` or `.json.gz`."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def as_shown(argument: str) -> str:
    """An argument of a command line as a result keeps it: a path without the folders of this
    machine."""
    return model_name(Path(argument)) if Path(argument).is_absolute() else argument


def model_name(folder: Path) -> str:
    """A model folder as the reader knows it: relative to the repository, or its last two parts
    outside it."""
    folder = folder.resolve()
    inside = folder.is_relative_to(REPOSITORY)
    return str(folder.relative_to(REPOSITORY)) if inside else "/".join(folder.parts[-2:])
