"""Benchmarks that model cards quote, read from where the user has put them: `NAME:PATH` or
`NAME:PATH:PART`, where PATH is a file or a folder as its publisher leaves it (docs/workloads.md).

Nothing is shipped or downloaded: SPEED-Bench's licence allows to read it, not to pass it on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, did_you_mean
from outrider.lab.workload.formats import PREPARE, Entry, UnusableError, conversation_of
from outrider.lab.workload.types import Turns, WorkloadRequest

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")
DEPTH = 3  # folders below the one that is named: enough for a snapshot of the hub
SPLIT = re.compile(r"(test|train|validation)(-\d+-of-\d+)?")  # a file's name that says no part
MAX_FILES = 1000


@dataclass(frozen=True)
class Published:
    """A published benchmark."""

    fields: tuple[str, ...]  # the first of these that an entry has is asked
    source: str  # where it comes from, or the command that makes it
    # the task of its prompts; None: their category where they have one, else the file's part
    task: str | None = None
    parts_differ: bool = False  # its parts are not to be mixed: one has to be named


PUBLISHED = {
    "speed-bench": Published(
        ("turns",),
        PREPARE,
        parts_differ=True,
    ),
    "speculator-benchmarks": Published(
        ("prompt", "turns"),
        "hf download RedHatAI/speculator_benchmarks --repo-type dataset --local-dir FOLDER",
    ),
    # the sets that NVIDIA's AIPerf calls spec_al_*: the field verbatim, as one question
    "spec-al-gsm8k": Published(
        ("question",), "hf download openai/gsm8k --repo-type dataset", "reasoning", True
    ),
    "spec-al-math500": Published(
        ("problem",), "hf download HuggingFaceH4/MATH-500 --repo-type dataset", "reasoning"
    ),
    "spec-al-humaneval": Published(
        ("prompt",), "hf download openai/openai_humaneval --repo-type dataset", "code"
    ),
    "spec-al-mbpp": Published(
        ("text", "prompt"),
        "hf download google-research-datasets/mbpp --repo-type dataset",
        "code",
        True,
    ),
    "spec-al-mtbench": Published(
        ("prompt", "turns"),
        "hf download HuggingFaceH4/mt_bench_prompts --repo-type dataset",
        "chat",
    ),
}


def is_published(name: str) -> bool:
    """Whether a name is that of a published benchmark; AIPerf writes it with underscores."""
    return _key(name.partition(":")[0]) in PUBLISHED


@dataclass(frozen=True)
class Chosen:
    """A benchmark that the user named, and its files."""

    benchmark: Published
    files: tuple[Path, ...]

    def requests(self, value: Any, file: Path, turns: Turns) -> list[WorkloadRequest]:
        """The request of one entry. Raises UnusableError."""
        if not isinstance(value, dict):
            raise UnusableError("not an object with fields")
        entry: Entry = {name: content for name, content in value.items() if content is not None}
        field = next((name for name in self.benchmark.fields if name in entry), None)
        if field is None:
            names = ", ".join(str(name)[:40] for name in list(entry)[:8])
            raise UnusableError(f"no field {' or '.join(self.benchmark.fields)}; it has {names}")
        asked = entry[field] if isinstance(entry[field], list) else [entry[field]]
        category = str(entry.get("category") or part_of_file(file))
        task = self.benchmark.task or category
        return [conversation_of(asked, entry, turns, task=task, field=field)]


def choose(name: str) -> Chosen:
    """The benchmark and the files of NAME:PATH or NAME:PATH:PART. Raises ConfigError."""
    key, _, rest = name.partition(":")
    benchmark = PUBLISHED[_key(key)]
    if not rest:
        raise ConfigError(
            f"'{key}' needs the place of its files: {key}:FOLDER_OR_FILE; get them with "
            f"{benchmark.source}"
        )
    path, part = _split(rest)
    if not path.exists():
        raise ConfigError(f"{path}, of the workload '{name}', does not exist: {benchmark.source}")
    if path.is_file():
        if part is not None:
            raise ConfigError(f"'{name}' names a file and a part of it; a part is of a folder")
        return Chosen(benchmark, (path,))
    by_part: dict[str, list[Path]] = {}
    for file in _files(path):
        by_part.setdefault(part_of_file(file), []).append(file)
    if not by_part:
        raise ConfigError(f"{path} has no {', '.join(SUFFIXES)} file: {benchmark.source}")
    if part is not None and part not in by_part:
        raise ConfigError(f"{path} has no part '{part}'.{did_you_mean(part, by_part)}")
    if part is None and benchmark.parts_differ and len(by_part) > 1:
        raise ConfigError(
            f"{path} has the parts {', '.join(sorted(by_part))}: name one, {key}:{path}:PART"
        )
    parts = sorted(by_part) if part is None else [part]
    return Chosen(benchmark, tuple(file for part in parts for file in _tests(by_part[part])))


def part_of_file(file: Path) -> str:
    """The part of a benchmark that a file has: its name, or its folder's where that says only which
    split it is."""
    name = file.name.split(".")[0]
    return file.parent.name if SPLIT.fullmatch(name) else name


def _key(name: str) -> str:
    return name.replace("_", "-")


def _split(rest: str) -> tuple[Path, str | None]:
    """PATH and PART; a path with a colon in it is a path."""
    whole = Path(os.path.expanduser(rest))
    head, colon, part = rest.rpartition(":")
    if whole.exists() or not colon:
        return whole, None
    return Path(os.path.expanduser(head)), part


def _files(folder: Path) -> list[Path]:
    """Data files in a folder and a few levels below, in the order of their names."""
    found: list[Path] = []
    for file in _walk(folder, DEPTH):
        found.append(file)
        if len(found) > MAX_FILES:
            raise ConfigError(f"{folder} has more than {MAX_FILES} files: name the benchmark's own")
    return found


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if depth:
                yield from _walk(entry, depth - 1)
        elif entry.name.endswith(SUFFIXES):
            yield entry


def _tests(files: list[Path]) -> list[Path]:
    """The test split where a folder has several."""
    tests = [file for file in files if file.name.startswith("test")]
    return tests or files
