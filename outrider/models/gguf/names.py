"""Names that mean a GGUF checkpoint, and the file that each of them stands for.

/models/model.gguf, a file that begins with GGUF under any name
/models/model-00001-of-00003.gguf          the other shards next to it
/models                                    a folder with one such file and no other weights
USER/REPO:model.gguf, USER/REPO:Q4_K_M     on the hub: a file, or the one file of this quantisation
USER/REPO-GGUF                             on the hub: its only file
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath

from outrider.errors import CheckpointError, did_you_mean, first_line
from outrider.lazy import huggingface_hub
from outrider.models.gguf.header import SHARD, GgufFile, is_gguf, read_gguf
from outrider.models.loading import hub

SUFFIX = ".gguf"
ON_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<wanted>[^:]+))?")
SHOWN = 8  # files in an error
OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_config.json")


def gguf_in(name: str, revision: str | None = None, *, fetches: bool = True) -> GgufFile | None:
    """The GGUF checkpoint of this name; None where the name means something else.

    `fetches`: one on the hub, too, unless the cache has it. Raises CheckpointError where it means
    one that is missing, ambiguous or damaged, CapabilityError for one that cannot run.
    """
    path = Path(name).expanduser()
    if path.is_file() and (path.suffix.lower() == SUFFIX or is_gguf(path)):
        return read_gguf(path)
    if path.is_dir():
        return _in_folder(path)
    if (asked := _asked_of_hub(name)) is not None:
        return read_gguf(
            _from_hub(
                asked["repo"], asked["wanted"], revision, not fetches or hub.only_cached(name)
            )
        )
    if path.suffix.lower() == SUFFIX:
        near = _nearest(path.name, [candidate.name for candidate in path.parent.glob(f"*{SUFFIX}")])
        raise CheckpointError(
            f"no file '{name}'.{near} On the hub a file is called USER/REPO:FILE.gguf."
        )
    return None


def parts_on_hub(name: str, revision: str | None = None) -> tuple[str, list[str]] | None:
    """The repository and the files in it that a name means; None where it means no GGUF file on the
    hub, which is asked. Raises CheckpointError as `gguf_in` does."""
    asked = _asked_of_hub(name)
    if asked is None:
        return None
    try:
        names = huggingface_hub.HfApi().list_repo_files(asked["repo"], revision=revision)
        return asked["repo"], _parts(names, asked["repo"], asked["wanted"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot fetch '{name}': {first_line(error)}") from error


def names_gguf(name: str) -> bool:
    """Whether a name means a GGUF checkpoint, there or not. Nothing is fetched."""
    path = Path(name).expanduser()
    if path.is_dir():
        has_others = any(next(path.glob(pattern), None) for pattern in OTHER_WEIGHTS)
        return not has_others and any(path.glob(f"*{SUFFIX}"))
    return (
        path.suffix.lower() == SUFFIX
        or (path.is_file() and is_gguf(path))
        or _asked_of_hub(name) is not None
    )


def only_file(names: Sequence[str], where: str, wanted: str | None = None) -> str | None:
    """The one file among `names` (paths below `where`) that is meant: called `wanted`, or of this
    quantisation; None: no GGUF.

    Raises CheckpointError where several are, or none is.
    """
    files = sorted(name for name in names if name.lower().endswith(SUFFIX) and not _is_part(name))
    models = [name for name in files if not PurePosixPath(name).name.lower().startswith("mmproj")]
    if wanted is None:
        chosen = models
    elif wanted.lower().endswith(SUFFIX):
        chosen = [name for name in files if wanted in (name, PurePosixPath(name).name)]
    else:
        chosen = [name for name in models if _has_tag(name, wanted)]
    if len(chosen) == 1:
        return chosen[0]
    if not models and wanted is None:
        return None
    shown = ", ".join(files[:SHOWN]) + (", ..." if len(files) > SHOWN else "")
    if chosen:
        raise CheckpointError(
            f"'{where}' has {len(chosen)} GGUF files that could be meant: {shown}. Name one of them."
        )
    near = _nearest(wanted or "", [PurePosixPath(name).name for name in files])
    raise CheckpointError(f"'{where}' has no GGUF file '{wanted}'.{near}")


def _asked_of_hub(name: str) -> re.Match[str] | None:
    """The repository and what is wanted of it; None for a name that means no GGUF file on the hub."""
    asked = ON_HUB.fullmatch(name)
    is_repo = (
        asked is not None
        and asked["repo"].lower().endswith("gguf")
        and Path(name).suffix.lower() != SUFFIX
    )
    return asked if asked is not None and (asked["wanted"] or is_repo) else None


def _nearest(name: str, there: Sequence[str]) -> str:
    return did_you_mean(name, there) if there else ""


def _is_part(name: str) -> bool:
    shard = SHARD.fullmatch(PurePosixPath(name).name)
    return shard is not None and int(shard["number"]) != 1


def _has_tag(name: str, tag: str) -> bool:
    """Whether a file is named after this quantisation: the word before its end."""
    return (
        re.search(
            rf"(^|[-._/]){re.escape(tag)}([-._/]|$)", name.removesuffix(SUFFIX), re.IGNORECASE
        )
        is not None
    )


def _in_folder(folder: Path) -> GgufFile | None:
    if any(next(folder.glob(pattern), None) for pattern in OTHER_WEIGHTS):
        return None
    file_name = only_file([file.name for file in folder.glob("*")], str(folder))
    return None if file_name is None else read_gguf(folder / file_name)


@lru_cache(maxsize=16)
def _from_hub(repo: str, wanted: str | None, revision: str | None, offline: bool) -> Path:
    """The file, fetched unless the cache has it; `offline`: it must."""
    name = repo if wanted is None else f"{repo}:{wanted}"
    try:
        if offline:
            folder = hub.cached_snapshot(repo, revision)
            names = [str(file.relative_to(folder)) for file in folder.rglob(f"*{SUFFIX}")]
        else:
            names = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
        parts = _parts(names, repo, wanted)
        fetched = [
            huggingface_hub.hf_hub_download(repo, part, revision=revision, local_files_only=offline)
            for part in parts
        ]
    except CheckpointError:
        raise
    except Exception as error:
        if offline and hub.is_absent(error):
            raise CheckpointError(hub.not_found(name)) from error
        raise CheckpointError(f"cannot fetch '{name}': {first_line(error)}") from error
    return Path(fetched[0])


def _parts(names: Sequence[str], repo: str, wanted: str | None) -> list[str]:
    """The file that is meant among those of a repository, or all shards of it."""
    file_name = only_file(names, repo, wanted)
    if file_name is None:
        raise CheckpointError(
            f"'{repo}' has no GGUF file. For a transformers checkpoint give its id alone."
        )
    shard = SHARD.fullmatch(file_name)
    if shard is None:
        return [file_name]
    return [
        f"{shard['stem']}-{number:05d}-of-{shard['count']}{SUFFIX}"
        for number in range(1, int(shard["count"]) + 1)
    ]
