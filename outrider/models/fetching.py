"""All files of a model on this machine, before anything runs it.

The hub's client downloads a file whole or not at all. Weights are large, so they come here in a way
that continues where an earlier try was interrupted: into a file of the hub's cache, next to the one
that the client would make of it.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import CheckpointError, OutriderError, first_line
from outrider.lazy import filelock, huggingface_hub
from outrider.models.gguf.names import parts_on_hub
from outrider.models.loading import hub
from outrider.models.source import WEIGHT_PATTERNS, resolve, weights_folder

# besides weights and configs: vocabularies, chat templates, a model's own code
ALL_PATTERNS = [*WEIGHT_PATTERNS, "*.txt", "*.model", "*.jinja", "*.py"]
WEIGHTS = ".safetensors"


def fetch(name: str, revision: str | None = None) -> list[Path]:
    """The files of a model, of an adapter its base's; those that this machine lacks come from the
    hub.

    Raises CheckpointError where they cannot be had, and what `resolve` raises.
    """
    if not Path(name).expanduser().exists() and not hub.only_cached(name):
        repo, parts = parts_on_hub(name, revision) or (name, [])
        _bring(repo, parts, revision)
    source = resolve(name, revision)
    weights = source.weights
    if weights.gguf is not None:
        return list(weights.gguf.paths)
    folder = Path(weights.name).expanduser()
    if not folder.exists():
        folder = _snapshot(weights.name, weights.revision)
    weights_folder(source)  # refuses what has none, or lacks some
    return [file for file in folder.rglob("*") if file.is_file()]


def _snapshot(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint in the hub's cache, with all that loading asks for."""
    offline = hub.only_cached(name)
    try:
        if not offline:
            names = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
            _bring(name, [file for file in names if file.endswith(WEIGHTS)], revision)
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=ALL_PATTERNS, local_files_only=offline
            )
        )
    except OutriderError:
        raise
    except Exception as error:
        if offline and hub.is_absent(error):
            raise CheckpointError(hub.not_found(name)) from error
        raise CheckpointError(f"cannot fetch '{name}': {first_line(error)}") from error


def _bring(repo: str, files: list[str], revision: str | None) -> None:
    """Download what files hold into the hub's cache, where its client finds it."""
    try:
        for file in files:
            _bring_one(repo, file, revision)
    except Exception as error:
        raise CheckpointError(f"cannot fetch '{repo}': {first_line(error)}") from error


def _bring_one(repo: str, file: str, revision: str | None) -> None:
    constants = huggingface_hub.constants
    client = huggingface_hub.file_download
    url = huggingface_hub.hf_hub_url(repo, file, revision=revision)
    facts = huggingface_hub.get_hf_file_metadata(url)
    folder = client.repo_folder_name(repo_id=repo, repo_type="model")
    content = Path(constants.HF_HUB_CACHE) / folder / "blobs" / facts.etag
    # what is larger comes by another protocol, which the client alone speaks
    if content.exists() or facts.size is None or facts.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    content.parent.mkdir(parents=True, exist_ok=True)
    partial = content.with_name(f"{content.name}.outrider.incomplete")
    with filelock.FileLock(f"{partial}.lock"):
        partial.touch()
        with partial.open("r+b") as target:
            begun = partial.stat().st_size
            target.seek(begun)
            client.http_get(
                url,
                target,
                resume_size=begun,
                headers=huggingface_hub.utils.build_hf_headers(),
                expected_size=facts.size,
                displayed_filename=file,
            )
        partial.rename(content)
