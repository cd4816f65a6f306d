"""`load_workload`: a name, a file, or several of them with + between, as one workload of requests
(docs/workloads.md).

A file is JSON lines, one JSON list, or Parquet; gzip is unpacked.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, counted, did_you_mean
from outrider.extras import check_installed
from outrider.lab.workload.builtin import BUILTIN, EMBEDDED, find, is_builtin, is_wanted, part_of
from outrider.lab.workload.formats import UnusableError, read_entry
from outrider.lab.workload.published import PUBLISHED, Chosen, choose, is_published
from outrider.lab.workload.types import BadLine, OnBad, Turns, Workload, WorkloadRequest, listing
from outrider.wellformed import parsed_json

FORMS = 'a request is a line like {"prompt": "..."}, or another form of docs/workloads.md'
REMEDY = "correct them, or leave them out (on_bad='skip', --reading on_bad=skip)"
GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
PARQUET_ROWS = 64  # read at once
NAMES = (*BUILTIN, *PUBLISHED)
Reader = Callable[[Any], list[WorkloadRequest]]


def load_workload(
    spec: str,
    *,
    limit: int | None = None,
    on_bad: OnBad = "refuse",
    data: Path | None = None,
    turns: Turns = "auto",
) -> Workload:
    """The prompts that a workload names. `data` is the folder of built-in benchmarks
    (`builtin.py`).

    `turns`: see `types.Turns`. Raises ConfigError: unknown names, unreadable or empty files,
    nothing usable, and with `on_bad="refuse"` any bad line that was met.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit of a workload must be at least 1, got {limit}")
    names = _names(spec)
    parts = [_part(name, limit, on_bad, data, turns) for name in names]
    chosen = list(islice(_in_turn([part.requests for part in parts]), limit))
    requests, num_renamed = _with_own_ids(chosen)
    skipped = [
        line if len(parts) == 1 else replace(line, reason=f"{part.name}: {line.reason}")
        for part in parts
        for line in part.bad
    ]
    notes = [part.note(chosen) for part in parts]
    if num_renamed:
        notes.append(
            f"{num_renamed} requests have an id that came before; they got #2, #3, ... after it"
        )
    return Workload(spec.strip(), tuple(requests), tuple(skipped), tuple(notes))


@dataclass
class _Part:
    """One name or file of a mix, read."""

    name: str
    origin: str
    requests: list[WorkloadRequest]
    bad: list[BadLine] = field(default_factory=list)

    def note(self, chosen: Sequence[WorkloadRequest]) -> str:
        """A note on the origin of the prompts; `chosen` are those of all parts that are used."""
        ids = set(map(id, self.requests))
        facts = [counted(sum(id(request) in ids for request in chosen), "prompt")]
        if self.bad:
            facts.append(f"{counted(len(self.bad), 'bad line')} skipped")
        return f"{self.origin} ({', '.join(facts)})"


def _names(spec: str) -> list[str]:
    """The parts of a mix. A file whose name has a + in it is one part."""
    if spec.strip() and os.path.exists(_path(spec)):
        return [spec]
    names = [name.strip() for name in spec.split("+")]
    if "" in names:
        raise ConfigError(
            f"the workload '{spec}' has an empty part; write names or files with + between: "
            "gsm8k+chats.jsonl"
        )
    if double := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ConfigError(f"'{double}' is twice in the workload '{spec}'")
    return names


def _part(name: str, limit: int | None, on_bad: OnBad, data: Path | None, turns: Turns) -> _Part:
    """The first `limit` requests of a part: all that a mix can need of it."""
    part = _Part(name, name, [])
    if is_published(name):
        benchmark = choose(name)
        part.origin = (
            f"{name.partition(':')[0]}: {', '.join(file.name for file in benchmark.files)}"
        )
        requests = _by_task(_read_published(benchmark, turns, part.bad), limit)
    elif is_builtin(name):
        chosen = part_of(name)
        path, part.origin = find(name, chosen, data)
        paths = (
            [path] if path is not None else [EMBEDDED / f"{kind}.jsonl" for kind in chosen.embedded]
        )
        requests = _in_turn(
            [
                _read(
                    file,
                    name,
                    _form(chosen.turns or turns),
                    part.bad,
                    chosen if path is not None else None,
                )
                for file in paths
            ]
        )
    else:
        path = _existing(name)
        requests = _read(path, path.name, _form(turns), part.bad)
    part.requests += islice(requests, limit)
    if part.bad and (on_bad == "refuse" or not part.requests):
        head = f"{name} has no usable line, but {counted(len(part.bad), 'bad line')}:"
        if part.requests:
            head = f"{name} has {counted(len(part.bad), 'bad line')} and {len(part.requests)} good ones:"
        reasons = [f"line {line.number}: {line.reason}" for line in part.bad]
        raise ConfigError(listing(head, reasons, REMEDY if part.requests else FORMS))
    if not part.requests:
        raise ConfigError(f"{part.origin} has no prompts for '{name}'")
    return part


def _existing(name: str) -> Path:
    path = _path(name)
    if not os.path.exists(path):
        if any(mark in name for mark in "/\\.") or not name.isprintable():
            raise ConfigError(
                f"the workload file {name!r} does not exist. Names of workloads: "
                f"{', '.join(sorted(NAMES))}"
            )
        raise ConfigError(
            f"unknown workload '{name}', and no file of this name.{did_you_mean(name, NAMES)}"
        )
    if path.is_dir():
        raise ConfigError(
            f"the workload '{name}' is a folder; give a file, or a name with this folder as the "
            "data folder"
        )
    return path


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # unlike Path.expanduser, it lets ~nobody pass


def _form(turns: Turns) -> Reader:
    """Reads entries of any known form."""
    return lambda value: read_entry(value, turns)


def _read_published(
    benchmark: Chosen, turns: Turns, bad: list[BadLine]
) -> Iterator[WorkloadRequest]:
    for file in benchmark.files:
        reader = partial(benchmark.requests, file=file, turns=turns)
        yield from _read(file, file.name, reader, bad)


def _by_task(requests: Iterable[WorkloadRequest], limit: int | None) -> Iterator[WorkloadRequest]:
    """One of each task in turn, in the order in which tasks come first: a subset has all
    categories. No more than `limit` of a task are held."""
    of_task: dict[str, list[WorkloadRequest]] = {}
    for request in requests:
        same = of_task.setdefault(request.task, [])
        if limit is None or len(same) < limit:
            same.append(request)
    return _in_turn(list(of_task.values()))


def _read(
    path: Path, name: str, reader: Reader, bad: list[BadLine], wanted: Any = None
) -> Iterator[WorkloadRequest]:
    """The requests of a file, one entry after another; lines that are none go to `bad`.

    `name`: what ids and messages call it; `wanted`: the part of a benchmark. Raises ConfigError
    when the file cannot be read or has no entries.
    """
    number = 0
    try:
        for number, mark, content in _entries(path):
            try:
                value = parsed_json(content) if isinstance(content, str) else content
                if wanted is not None and isinstance(value, dict) and not is_wanted(value, wanted):
                    continue
                requests = reader(value)
            except UnusableError as error:
                bad.append(BadLine(number, str(error)))
                continue
            except ValueError as error:
                bad.append(BadLine(number, f"not JSON: {error}"))
                continue
            for turn, request in enumerate(requests, 1):
                turn_mark = f"/{turn}" if len(requests) > 1 else ""
                yield (
                    request
                    if request.id
                    else replace(request, id=f"{name}{mark}{number}{turn_mark}")
                )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{name} is a damaged gzip file: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not number:
        raise ConfigError(f"{name} is empty: it has no prompts")


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(number, mark before it in an id, content) of every line that is not blank, or of every entry
    of a JSON list."""
    with path.open("rb") as raw:
        head = raw.peek(4)
    if head.startswith(PARQUET):
        yield from ((number, "#", row) for number, row in enumerate(_rows(path), 1))
        return
    is_packed = head.startswith(GZIP)
    with (gzip.open if is_packed else open)(
        path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n"
    ) as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if first.lstrip().startswith("["):
            try:
                entries = parsed_json(file.read())
            except ValueError as error:
                raise ValueError(f"it begins like a JSON list, and is not JSON: {error}") from error
            yield from ((number, "#", entry) for number, entry in enumerate(entries, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, ":", line


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, a few at a time. Raises MissingExtraError, ValueError for a file
    that is damaged."""
    check_installed(f"{path.name}, a Parquet file,", "parquet")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"it is damaged: {error}") from error


def _in_turn(parts: Sequence[Iterable[WorkloadRequest]]) -> Iterator[WorkloadRequest]:
    """One of each, again and again; a part that has run out is passed over."""
    if len(parts) == 1:
        return iter(parts[0])
    return (request for request in chain.from_iterable(zip_longest(*parts)) if request is not None)


def _with_own_ids(requests: Iterable[WorkloadRequest]) -> tuple[list[WorkloadRequest], int]:
    """The requests with ids that are unique, and how many had to be renamed."""
    taken: dict[str, int] = {}
    unique = []
    num_renamed = 0
    for request in requests:
        name = request.id
        while name in taken:
            taken[request.id] += 1
            name = f"{request.id}#{taken[request.id]}"
        taken[name] = 1
        num_renamed += name != request.id
        unique.append(replace(request, id=name))
    return unique, num_renamed
