"""A trained head that is named by its hub id: told from a whole model by its config and the names of
its files, then fetched like any other download that was asked for. Names of heads that come with
Outrider need no hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError, first_line
from outrider.lazy import huggingface_hub
from outrider.models.families import ASSISTANTS
from outrider.models.heads.kinds import OURS, TOKENIZERS
from outrider.models.heads.shipped import shipped_head
from outrider.models.heads.source import CONFIG, WEIGHT_FILES
from outrider.models.loading import hub
from outrider.wellformed import load_object

# what configs of heads have, and no model's
FIELDS = (
    "speculators_model_type",
    "draft_vocab_size",
    "eagle_config",
    "dflash_config",
    "medusa_num_heads",
)
ARCHITECTURES = re.compile(r"eagle|medusa|dflash|dspark|speculator|assistant", re.IGNORECASE)


def fetched_head(name: str) -> str:
    """The folder of the trained head that a name means: one that comes with Outrider, or one on the
    hub, fetched where it is not here.

    The name itself where it means anything else, or nothing that can be had. Raises CheckpointError
    where the weights of a head cannot be fetched.
    """
    if Path(name).exists():
        return name
    if (shipped := shipped_head(name)) is not None:
        return str(shipped)
    if hub.REPOSITORY.fullmatch(name) is None:
        return name
    offline = hub.only_cached(name)
    try:
        if offline:
            folder = hub.cached_snapshot(name, None)
            files = [file.name for file in folder.iterdir()]
            return str(folder) if _is_head(folder, files) else name
        files = huggingface_hub.HfApi().list_repo_files(name)
        if CONFIG not in files:
            return name
        folder = Path(huggingface_hub.hf_hub_download(name, CONFIG)).parent
        if not _is_head(folder, files):
            return name
    except Exception:  # noqa: BLE001  loading says what is wrong with it
        return name
    suffixes = [Path(pattern).suffix for pattern in WEIGHT_FILES]
    kept = next((one for one in suffixes if any(file.endswith(one) for file in files)), None)
    if kept is None:
        return name
    try:
        return str(huggingface_hub.snapshot_download(name, allow_patterns=[CONFIG, f"*{kept}"]))
    except Exception as error:
        raise CheckpointError(f"cannot fetch the head '{name}': {first_line(error)}") from error


def _is_head(folder: Path, files: list[str]) -> bool:
    """Whether a repository with these files, whose config lies in the folder, is a head."""
    config: dict[str, Any] = load_object(folder / CONFIG)
    settings = config.get("outrider")
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    return (
        config.get("model_type") in (*OURS, *ASSISTANTS.model_types)
        or (isinstance(settings, dict) and bool(settings.get("head")))
        or any(field in config for field in FIELDS)
        or any(ARCHITECTURES.search(str(one)) for one in named)
        or not any(file in TOKENIZERS for file in files)
    )
