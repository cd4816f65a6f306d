"""Checkpoints that bring Python code of their own: who may run it, and the message when nobody may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError
from outrider.wellformed import load_object

REMEDY = "read it, then pass --set trust_remote_code=true (trust_remote_code=True in Python)"


def refuse_untrusted(name: str, part: str, error: Exception) -> None:
    """Raise CheckpointError where transformers refused because `part` ("model", "tokenizer") needs the checkpoint's own code."""
    if "contains custom code" not in str(error):
        return
    files = _files(Path(name), "tokenizer_config.json" if part == "tokenizer" else "config.json")
    named = f" ({', '.join(files)})" if files else ""
    raise CheckpointError(f"the {part} of '{name}' needs Python code of the checkpoint's own{named}: {REMEDY}.") from error


def ignored_code(config: Any, module: Any, trusted: bool, name: str) -> list[str]:
    """A note where a checkpoint brings code for its model and transformers' own class runs instead."""
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if trusted or not own:
        return []
    runs = type(module).__name__
    return [f"'{name}' brings code of its own ({own}), transformers' {runs} runs instead; trust_remote_code=true runs its own"]


def _files(folder: Path, file: str) -> list[str]:
    """Files of code that a local checkpoint names; none for one on the hub."""
    try:
        named = load_object(folder / file).get("auto_map") or {}
    except (OSError, ValueError):
        return []
    classes = [one for value in named.values() for one in (value if isinstance(value, list) else [value]) if one]
    return sorted({one.split("--")[-1].rpartition(".")[0] + ".py" for one in classes})
