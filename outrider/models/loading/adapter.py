"""LoRA folders: an adapter is merged into its base model on load, by peft, and runs as any other model from then on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from outrider.errors import CapabilityError, CheckpointError
from outrider.wellformed import load_object

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter, and the model it was trained on."""

    folder: Path
    kind: str  # peft's name, like LORA
    base: str  # a folder, or a hub id
    revision: str | None  # of a base on the hub

    @property
    def weights_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in WEIGHTS if (self.folder / file).exists())

    @property
    def tokenizer_source(self) -> str:
        """The adapter's own folder where it has a tokenizer, else the base."""
        return str(self.folder) if any((self.folder / file).exists() for file in TOKENIZERS) else self.base

    def merged_into(self, module: nn.Module) -> nn.Module:
        """The base model with the adapter's weights added to its own. Raises CheckpointError where they do not fit it."""
        from peft import PeftModel  # seconds, and only who has an adapter needs it

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Found missing adapter keys")  # else they stay as they were drawn
                merged = PeftModel.from_pretrained(module, str(self.folder))
            if not hasattr(merged, "merge_and_unload"):
                raise CapabilityError(
                    f"'{self.folder}' is an adapter of kind {self.kind}, which cannot be merged into weights; LoRA's can."
                )
            return merged.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
        except CapabilityError:
            raise
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CheckpointError(f"the adapter '{self.folder}' does not fit its base '{self.base}': {reason}") from error


def adapter_in(name: str) -> Adapter | None:
    """The adapter that a folder holds; None for other folders and for hub ids.

    Raises CheckpointError for a damaged or ambiguous folder, CapabilityError where peft is not installed.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG).is_file():
        return None
    try:
        settings = load_object(folder / CONFIG)
        named = settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{folder / CONFIG}' is damaged: it names no base_model_name_or_path.") from error
    if whole := _whole_weights(folder):
        raise CheckpointError(
            f"'{name}' has weights of a whole model ({whole}) and an adapter for '{named}': which one is meant? Move {CONFIG} "
            f"and {WEIGHTS[0]} to a folder of their own, and give that folder for the adapter or this one for the weights."
        )
    if not any((folder / file).is_file() for file in WEIGHTS):
        raise CheckpointError(f"'{name}' has {CONFIG} but no {WEIGHTS[0]}: incomplete adapter.")
    if find_spec("peft") is None:
        raise CapabilityError(
            f"'{name}' is an adapter for '{named}', which is merged by peft, and that is not installed: pip install peft "
            "(or outrider[lora])."
        )
    kind, revision = str(settings.get("peft_type", "LORA")), settings.get("revision")
    return Adapter(folder, kind, _base(folder, str(named or "")), revision if isinstance(revision, str) else None)


def adapters(**names: str | None) -> dict[str, dict[str, str]]:
    """Folder, base and kind of each named model that is an adapter, by its role."""
    found = {role: adapter_in(name) for role, name in names.items() if name is not None}
    return {
        role: {"folder": str(one.folder), "base": one.base, "kind": one.kind} for role, one in found.items() if one is not None
    }  # fmt: skip


def merged_note(label: str, name: str) -> list[str]:
    """A note for a model that is an adapter."""
    adapter = adapter_in(name)
    return [] if adapter is None else [f"'{label}' is an adapter ({adapter.kind}), merged into '{adapter.base}'"]


def _base(folder: Path, named: str) -> str:
    """The base model's folder, as the adapter names it or beside the adapter; else its hub id."""
    here = Path(named).expanduser()
    candidates = [here, folder / here, folder.parent / here, folder.parent / here.name]
    for candidate in candidates if named else []:
        if candidate.is_dir() and candidate.resolve() != folder.resolve():
            return str(candidate)
    if not named or here.is_absolute() or named.startswith((".", "~")) or named.count("/") > 1:
        raise CheckpointError(
            f"'{folder}' is an adapter for '{named}', and no such folder is there. Put the base model into "
            f"'{here.name or 'base'}' beside it, or correct base_model_name_or_path in its {CONFIG}."
        )
    return named


def _whole_weights(folder: Path) -> str | None:
    """The name of a file with weights of a whole model."""
    files = [*folder.glob("*.safetensors*"), *folder.glob("pytorch_model*.bin*")]
    return next((file.name for file in sorted(files) if not file.name.startswith("adapter_")), None)


def about_base(adapter: Adapter, error: CheckpointError) -> CheckpointError:
    """An error about the base, for someone who named the adapter."""
    return CheckpointError(f"'{adapter.folder}' is an adapter for '{adapter.base}', which cannot be loaded: {error}")
