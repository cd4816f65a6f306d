"""The Hugging Face hub: is it there? Asked once, briefly, before its client is.

For a file that is not in the cache the client asks again and again: half a minute where there is no
network, minutes behind a firewall that drops packets. Where the hub gives no sign of life, models
are looked for in the cache alone, which answers at once.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from pathlib import Path

from outrider.lazy import huggingface_hub, transformers
from outrider.wellformed import load_object

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
PATIENCE_S = 5.0  # for each of connecting and answering
REMEMBERED_S = 60  # one model is several questions


def only_cached(name: str) -> bool:
    """Whether the model of this name can only come from the cache: it is no folder, and the hub is
    out of reach."""
    return not Path(name).is_dir() and not _answers(
        huggingface_hub.constants.ENDPOINT, int(time.monotonic() // REMEMBERED_S)
    )


def snapshot_of(name: str, revision: str | None = None, *, fetches: bool = True) -> Path | None:
    """The hub cache's folder of a model's newest commit, which the hub is asked for where it
    answers and `fetches`.

    None for a name of anything else, and where the config cannot be had: loading says what is
    wrong.
    """
    if REPOSITORY.fullmatch(name) is None or Path(name).exists():
        return None
    try:
        offline = not fetches or only_cached(name)
        config = huggingface_hub.hf_hub_download(
            name, "config.json", revision=revision, local_files_only=offline
        )
    except Exception:  # noqa: BLE001  of any HTTP library, and of the hub's own kinds
        return None
    return Path(config).parent


def cached_snapshot(name: str, revision: str | None) -> Path:
    """The cache's folder of a model, which may lack files that were never asked for. Raises what
    the hub's client raises where there is none."""
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)
        )
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        folder = _incomplete(error)
        if folder is None:
            raise
        return folder


def repository_of(folder: Path) -> str | None:
    """The hub id of a snapshot's folder in a cache of the hub's; None for any other folder."""
    home = folder.absolute().parent.parent
    if folder.absolute().parent.name != "snapshots" or not home.name.startswith("models--"):
        return None
    return home.name.removeprefix("models--").replace("--", "/", 1)


def called(name: str) -> str:
    """The name that a person gives a model: of a snapshot in the hub's cache its hub id."""
    return repository_of(Path(name)) or name


def template_of_processor(name: str, revision: str | None, is_offline: bool) -> str | None:
    """The chat template of older multimodal checkpoints, which is in a file that only processors
    read."""
    path = file_of(name, "chat_template.json", revision, is_offline)
    template = None if path is None else load_object(path).get("chat_template")
    return template if isinstance(template, str) else None


def file_of(name: str, file: str, revision: str | None, is_offline: bool) -> Path | None:
    """A file of a model that is a folder or on the hub; None where it has none of this name."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.exists() else None
    found = transformers.utils.cached_file(
        name,
        file,
        revision=revision,
        local_files_only=is_offline,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def is_absent(error: BaseException) -> bool:
    """Whether this error of `from_pretrained` says that the cache does not have the file, or
    nothing of the model."""
    absent = huggingface_hub.errors.LocalEntryNotFoundError
    return _incomplete(error) is None and (
        isinstance(error, absent) or isinstance(error.__cause__, absent)
    )


def _incomplete(error: BaseException) -> Path | None:
    """The folder that this error calls incomplete, as clients since 2.0 do."""
    folder = getattr(error, "snapshot_path", None)
    return None if folder is None else Path(folder)


def not_found(name: str) -> str:
    """The error for a model that is neither a folder nor in the cache, while the hub is out of
    reach."""
    constants = huggingface_hub.constants
    why = (
        "HF_HUB_OFFLINE forbids to ask the hub"
        if constants.HF_HUB_OFFLINE
        else f"{constants.ENDPOINT} does not answer"
    )
    return (
        f"no model '{name}': there is no folder of that name, the hub's cache does not have it, and {why}. "
        "Give a folder with config.json, a .gguf file, a hub id, or 'demo'."
    )


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Through the client's own session, so with the user's proxies and certificates. Any answer is
    one."""
    try:
        huggingface_hub.utils.get_session().head(endpoint, timeout=PATIENCE_S)
    except Exception:  # noqa: BLE001  of whichever HTTP library this client uses, or of its offline mode
        return False
    return True
