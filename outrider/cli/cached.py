"""The models on this machine: those in the hub's cache, and the embedded one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.cli import session
from outrider.demo import demo_paths
from outrider.errors import counted
from outrider.lazy import huggingface_hub
from outrider.models.gguf.header import SHARD
from outrider.models.gguf.names import SUFFIX
from outrider.wellformed import load_object

WEIGHTS = ".safetensors"
INDEX = f"model{WEIGHTS}.index.json"
SPANS = {"day": 86400, "hour": 3600, "minute": 60}


@dataclass(frozen=True)
class CachedModel:
    """A model that needs no download, under the name that every command takes."""

    name: str
    format: str
    num_bytes: int
    used_at: float | None  # seconds since 1970; None: it comes with the package

    def used(self) -> str:
        """When it was used last, in words."""
        if self.used_at is None:
            return "-"
        seconds = time.time() - self.used_at
        for unit, length in SPANS.items():
            if seconds >= length:
                return f"{counted(int(seconds / length), unit)} ago"
        return "just now"


def cache_path() -> Path:
    """The folder of the hub's cache."""
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """The embedded model, then those of the cache, the one used last first."""
    pair = demo_paths().target.parent
    embedded = CachedModel("demo", "safetensors", _size(pair.rglob("*")), None)
    try:
        found = huggingface_hub.scan_cache_dir(cache_path())
    except huggingface_hub.errors.CacheNotFound:
        return [embedded]
    for warning in found.warnings:
        session.say(f"note: {warning}")
    models = [model for repo in found.repos for model in _of_repo(repo)]
    return [embedded, *sorted(models, key=lambda model: (-(model.used_at or 0.0), model.name))]


def _of_repo(repo: Any) -> Iterator[CachedModel]:
    """The models that one repository's newest snapshot holds: each GGUF file, and a checkpoint."""
    if repo.repo_type != "model" or not repo.revisions:
        return
    folder = max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
    used_at = repo.last_accessed
    gguf = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() == SUFFIX]
    shards = groupby(
        gguf, lambda path: match["stem"] if (match := SHARD.match(str(path))) else path
    )
    for _, group in shards:
        paths = list(group)
        name = f"{repo.repo_id}:{paths[0].relative_to(folder)}"
        yield CachedModel(name, "GGUF", _size(paths), used_at)
    others = [path for path in folder.rglob("*") if path not in gguf]
    if not gguf or any(path.suffix == WEIGHTS for path in others):
        format = "safetensors" if _is_whole(folder) else "incomplete"
        yield CachedModel(repo.repo_id, format, _size(others), used_at)


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint has weights, and all that its index lists."""
    index = folder / INDEX
    if not index.exists():
        return any(folder.glob(f"*{WEIGHTS}"))
    try:
        files = load_object(index)["weight_map"].values()
        return all((folder / file).exists() for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
