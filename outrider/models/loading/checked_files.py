"""The JSON files of a checkpoint, looked at before transformers reads them, and what it makes of
them.

Anybody may have written them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from outrider.errors import CheckpointError
from outrider.models.loading import hub
from outrider.wellformed import load_object, parsed_json, regular_bytes

LARGE_ID = re.compile(rb'":\s*[0-9]{7}')  # a million or more
MANY_IDS = 1 << 20  # ids that may be left out, whatever the vocabulary: tables by id are that long
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
COUNTS = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "max_position_embeddings", "sliding_window"),
)
MAX_COUNT = 1 << 60


def check_json(name: str, file: str, revision: str | None, is_offline: bool) -> None:
    """Raises CheckpointError for a file of a model that is no JSON object, too large or nested too
    deep."""
    path = hub.file_of(name, file, revision, is_offline)
    if path is None:
        return
    try:
        load_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' is damaged: {error}. Fetch it again.") from error


def check_tokenizer_files(name: str, revision: str | None, is_offline: bool) -> None:
    """Raises CheckpointError for files of a tokenizer that would take all memory, or that are no
    JSON."""
    for file in TOKENIZER_FILES:
        check_json(name, file, revision, is_offline)
    for file in ("tokenizer.json", "vocab.json"):
        path = hub.file_of(name, file, revision, is_offline)
        if path is not None:
            check_ids(path)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises CheckpointError for a tokenizer with values of another type than transformers itself
    reads."""
    if not isinstance(tokenizer.model_max_length, int | float):
        raise CheckpointError(
            f"model_max_length must be a number, got {str(tokenizer.model_max_length)[:40]}"
        )


def check_config(name: str, config: Any) -> None:
    """Raises CheckpointError for a config with values of another type than those that are read of
    it."""
    architectures = getattr(config, "architectures", None) or []
    if not isinstance(architectures, list) or not all(
        isinstance(each, str) for each in architectures
    ):
        _refuse(name, "architectures", "a list of names", architectures)
    for part in (config, config.get_text_config()):
        dtype = value_in(part, "dtype")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            _refuse(name, "dtype", "the name of a type", dtype)
        for count in COUNTS:
            value = value_in(part, count)
            is_count = isinstance(value, int) and abs(value) < MAX_COUNT
            # some say it layer by layer
            if value is not None and not is_count and not isinstance(value, list | tuple | dict):
                _refuse(name, count, "a number", value)


def value_in(config: Any, name: str) -> Any:
    """A value of a config; None where it has none, or several for its layers, for which
    transformers raises an error."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  of a kind that is private to transformers
        return None


def check_ids(path: Path) -> None:
    """Raises CheckpointError for a tokenizer.json with an id far beyond its tokens: memory goes by
    the largest."""
    try:
        content = regular_bytes(path)
        if LARGE_ID.search(content) is None:
            return
        tokenizer = parsed_json(content.decode("utf-8"))
        whole: dict[str, Any] = (
            tokenizer if "model" in tokenizer else {"model": {"vocab": tokenizer}}
        )
        vocabulary = whole["model"]["vocab"]
        added = whole.get("added_tokens") or []
        ids = [
            *(vocabulary.values() if isinstance(vocabulary, dict) else ()),
            *(token["id"] for token in added),
        ]
        count = len(vocabulary) + len(added)
        largest = max(ids, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is damaged: {error}. Fetch it again.") from error
    if largest > count + MANY_IDS:
        raise CheckpointError(
            f"'{path}' is damaged: it has {count} tokens, and one with the id {largest}. Fetch it "
            "again."
        )


def _refuse(name: str, field: str, expected: str, value: object) -> None:
    raise CheckpointError(
        f"the config of '{name}' is damaged: '{field}' must be {expected}, got {str(value)[:40]!r}."
    )
