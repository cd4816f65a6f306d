"""`load_workload`: a name, a file, or several of them with + between, as one workload of requests (docs/workloads.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from outrider.counted import counted
from outrider.errors import ConfigError, did_you_mean
from outrider.lab.workload.builtin import BUILTIN, Located, is_builtin, locate
from outrider.lab.workload.fields import Turns
from outrider.lab.workload.files import RequestFile
from outrider.lab.workload.types import BadLines, OnBad, Workload, WorkloadRequest


def load_workload(
    spec: str, *, limit: int | None = None, on_bad: OnBad = "refuse", data: Path | None = None, turns: Turns = "first"
) -> Workload:
    """Loads the prompts that a workload names. `data` is the folder of built-in benchmarks (`builtin.py`).

    `turns="all"` makes a request of every answered question of a ShareGPT conversation. Raises ConfigError: unknown names,
    unreadable or empty files, nothing usable, and with `on_bad="refuse"` any bad line that was met.
    """
    _check(limit, on_bad, turns)
    parts = [_load(name, limit, on_bad, data, turns) for name in _names(spec)]
    chosen = list(islice(_in_turn([part.requests for part in parts]), limit))
    requests, renamed = _with_own_ids(chosen)
    skipped = [line for part in parts for line in part.bad.lines_of(part.name if len(parts) > 1 else None)]
    notes = [part.note(chosen) for part in parts]
    if renamed:
        notes.append(f"{renamed} requests have an id that came before; they got #2, #3, ... behind it")
    return Workload(spec.strip(), tuple(requests), tuple(skipped), tuple(notes))


@dataclass(frozen=True)
class _MixPart:
    """One name or file of a mix, read."""

    name: str
    located: Located
    requests: list[WorkloadRequest]
    bad: BadLines

    def note(self, chosen: Sequence[WorkloadRequest]) -> str:
        """A note on the origin of the prompts; `chosen` are those of all parts that are used."""
        own = set(map(id, self.requests))
        facts = [counted(sum(id(request) in own for request in chosen), "prompt")]
        if any(source.is_text for source in self.located.sources):
            facts.append("plain text with blank lines between prompts")
        if self.bad.count:
            facts.append(f"{counted(self.bad.count, 'bad line')} skipped")
        return f"{self.located.note} ({', '.join(facts)})"


def _check(limit: int | None, on_bad: str, turns: str) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit of a workload must be at least 1, got {limit}")
    for name, value, known in (("on_bad", on_bad, ("skip", "refuse")), ("turns", turns, ("first", "all"))):
        if value not in known:
            raise ConfigError(f"unknown value '{value}' of {name}.{did_you_mean(str(value), known)}")


def _names(spec: str) -> list[str]:
    """The parts of a mix. A file whose name has a + in it is one part."""
    if spec.strip() and _exists(_path(spec)):
        return [spec]
    names = [name.strip() for name in spec.split("+")]
    if "" in names:
        raise ConfigError(f"the workload '{spec}' has an empty part; write names or files with + between: gsm8k+chats.jsonl")
    if double := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ConfigError(f"'{double}' is twice in the workload '{spec}'")
    return names


def _load(name: str, limit: int | None, on_bad: OnBad, data: Path | None, turns: Turns) -> _MixPart:
    """The first `limit` requests of a part: all that a mix can need of it."""
    located = _locate(name, data, turns)
    bad = BadLines(keep_all=on_bad == "skip")
    good = _in_turn([bad.sorted_out(source.requests()) for source in located.sources])
    requests = list(islice(good, limit))
    if bad.count and (on_bad == "refuse" or not requests):
        raise ConfigError(bad.message(name, len(requests)))
    if not requests:
        raise ConfigError(f"{located.note} has no prompts for '{name}'")
    return _MixPart(name, located, requests, bad)


def _locate(name: str, data: Path | None, turns: Turns) -> Located:
    if is_builtin(name):
        return locate(name, data, turns)
    path = _path(name)
    if not _exists(path):
        if any(mark in name for mark in "/\\.") or not name.isprintable():
            raise ConfigError(f"the workload file {name!r} does not exist. Names of workloads: {', '.join(sorted(BUILTIN))}")
        raise ConfigError(f"unknown workload '{name}', and no file of this name.{did_you_mean(name, BUILTIN)}")
    if path.is_dir():
        raise ConfigError(f"the workload '{name}' is a folder; give a file, or a name with this folder as the data folder")
    return Located((RequestFile(path, path.name, turns=turns),), name)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # unlike Path.expanduser, it lets ~nobody pass


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, no right to look, a NUL in it
        return False


def _in_turn(parts: Sequence[Iterable[WorkloadRequest]]) -> Iterator[WorkloadRequest]:
    """One of each, again and again; a part that has run out is passed over."""
    if len(parts) == 1:
        return iter(parts[0])
    return (request for request in chain.from_iterable(zip_longest(*parts)) if request is not None)


def _with_own_ids(requests: Iterable[WorkloadRequest]) -> tuple[list[WorkloadRequest], int]:
    """The requests with ids that are unique, and how many had to be renamed."""
    taken: dict[str, int] = {}
    found, renamed = [], 0
    for request in requests:
        name = request.id
        while name in taken:
            taken[request.id] += 1
            name = f"{request.id}#{taken[request.id]}"
        taken[name] = 1
        renamed += name != request.id
        found.append(request if name == request.id else replace(request, id=name))
    return found, renamed
