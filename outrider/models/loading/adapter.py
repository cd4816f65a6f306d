"""Folders with an adapter: peft merges it into its base model on load, which runs as any other
model from then on.

The merged model is the one that peft computes without merging. So layers that share weights, as an
output layer does that is tied to the embeddings, get weights of their own before one of them is
changed. What cannot be merged is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError, first_line, install_hint
from outrider.models.gguf.names import names_gguf
from outrider.models.quantised.checkpoint import quantisation_of
from outrider.wellformed import load_object

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
PREFIX = "base_model.model."  # of an adapter's tensors
WHOLE_TABLES = (
    "weight",
    "base_layer.weight",
    "modules_to_save.weight",
    "token_adapter.base_layer.weight",
)
# warnings: we untie
TIED = r"(Model (has|with) `tie_word_embeddings|Input and output embeddings are no longer tied)"
# kinds that do more than change weights; peft merges the first all the same
NO_WEIGHTS = ("XLORA", "POLY", "SHADOW", "LILY")
NOT_MERGED = {  # settings with which LoRA and its like do more than that
    "layer_replication": "it repeats layers of its base",
    "sample_at_inference": "it draws its weights anew in each pass",
    "alora_invocation_tokens": "it changes weights from some tokens of a text on",
    "arrow_config": "it chooses one of several adapters for each token",
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter, and the model it was trained on."""

    folder: Path
    kind: str  # peft's name, like LORA
    base: str  # a folder, or a hub id
    revision: str | None  # of a base on the hub

    @property
    def weights_bytes(self) -> int:
        return sum(
            (self.folder / file).stat().st_size for file in WEIGHTS if (self.folder / file).exists()
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer comes with it, which may have more tokens than the base's."""
        return any((self.folder / file).exists() for file in TOKENIZERS)

    @property
    def facts(self) -> dict[str, str]:
        """Folder, base and kind, for a person."""
        return {"folder": str(self.folder), "base": self.base, "kind": self.kind}

    def note(self, label: str) -> str:
        """One line for a person who named the adapter as a model."""
        return f"'{label}' is an adapter ({self.kind}), merged into '{self.base}'"

    def merging_bytes(self, config: Any, dtype: torch.dtype) -> int:
        """Bytes that are there besides the base's weights while it is merged. `config`: the base's."""
        text = config.get_text_config()
        table = (
            text.vocab_size * text.hidden_size if getattr(text, "tie_word_embeddings", False) else 0
        )
        return self.weights_bytes + (table * dtype.itemsize if self._changes_part_of(table) else 0)

    def _changes_part_of(self, table: int) -> bool:
        """Whether it has smaller matrices that belong to no numbered layer: for the embeddings or
        the output layer."""
        if not (self.folder / WEIGHTS[0]).is_file():
            return False  # only a pickle, whose names cannot be read without all of it
        with safe_open(self.folder / WEIGHTS[0], "pt") as file:
            names = [name for name in file.keys() if not re.search(r"\.\d+\.", name)]  # noqa: SIM118  no mapping
            shapes = [file.get_slice(name).get_shape() for name in names]
        return any(len(shape) > 1 and prod(shape) < table for shape in shapes)

    def merged_into(self, module: Any, config: Any) -> Any:
        """The base model with the adapter's changes made to its weights.

        `config`: says the merged model's vocabulary, and whether it is tied, from then on. Raises
        CheckpointError where the adapter does not fit, CapabilityError where no weights do what it
        does.
        """
        from peft import PeftModel  # seconds, and only who has an adapter needs it
        from peft.utils.save_and_load import load_peft_weights

        try:
            tensors = load_peft_weights(str(self.folder), device="cpu")
            self._refuse_broken(tensors)
            self._resize(module, tensors)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=TIED)
                # else they stay as they were drawn
                warnings.filterwarnings("error", message="Found missing adapter keys")
                adapted = PeftModel.from_pretrained(module, str(self.folder))
        except CheckpointError:
            raise
        except Exception as error:
            if (method := quantisation_of(config)) is not None and "Target module" in str(error):
                raise _on_quantised(self.folder, self.base, f"quantised by {method}") from error
            raise CheckpointError(
                f"the adapter '{self.folder}' does not fit its base '{self.base}': "
                f"{first_line(error)}"
            ) from error
        if not hasattr(adapted, "merge_and_unload"):
            raise _not_merged(self.folder, self.kind, "it does more than change weights")
        shared = _untied(adapted)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=TIED)
                merged = adapted.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
        except Exception as error:
            raise _not_merged(self.folder, self.kind, first_line(error)) from error
        _tie_equals(shared)
        _describe(merged, config)
        return merged

    def _refuse_broken(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for an adapter with values that are no numbers."""
        for name, tensor in tensors.items():
            if not tensor.float().isfinite().all():
                raise CheckpointError(
                    f"the adapter '{self.folder}' is damaged: '{name}' has values that are no "
                    "finite numbers."
                )

    def _resize(self, module: Any, tensors: Mapping[str, Tensor]) -> None:
        """Give the embeddings the rows that the adapter was trained with, as its user does who adds
        tokens.

        Raises CheckpointError where it has no values for rows that it adds.
        """
        tables = {path: part for path, part in module.named_modules() if part in _ends(module)}
        rows = {path: count for path in tables if (count := _rows(tensors, path)) is not None}
        before = module.get_input_embeddings().weight.shape[0]
        after = max(rows.values(), default=before)
        if after == before:
            return
        if len(set(rows.values())) > 1:
            raise CheckpointError(
                f"the adapter '{self.folder}' is damaged: rows of its embeddings and output layer "
                f"are {rows}."
            )
        filled = [
            path
            for path in tables
            if any(f"{PREFIX}{path}.{end}" in tensors for end in WHOLE_TABLES)
        ]
        lacking = sorted(tables.keys() - filled)
        is_tied = len({id(part.weight) for part in tables.values()}) < len(tables)
        if after > before and lacking and not (is_tied and filled):
            raise CheckpointError(
                f"the adapter '{self.folder}' was trained with {after} tokens, its base "
                f"'{self.base}' has {before}, and it lacks "
                f"'{lacking[0]}' for the others. Save the base with {after} tokens, and name its "
                f"folder in {CONFIG}."
            )
        module.resize_token_embeddings(after, mean_resizing=False)


def adapter_in(name: str) -> Adapter | None:
    """The adapter that a folder holds; None for other folders and for hub ids.

    Raises CheckpointError for a damaged or ambiguous folder, CapabilityError where peft is not
    installed.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG).is_file():
        return None
    try:
        settings = load_object(folder / CONFIG)
        named = settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"'{folder / CONFIG}' is damaged: it names no base_model_name_or_path."
        ) from error
    if whole := _whole_weights(folder):
        raise CheckpointError(
            f"'{name}' has weights of a whole model ({whole}) and an adapter for '{named}': which "
            f"one is meant? Move {CONFIG} "
            f"and {WEIGHTS[0]} to a folder of their own, and give that folder for the adapter or "
            "this one for the weights."
        )
    if not any((folder / file).is_file() for file in WEIGHTS):
        raise CheckpointError(f"'{name}' has {CONFIG} but no {WEIGHTS[0]}: incomplete adapter.")
    base = _base(folder, str(named or ""))
    if find_spec("peft") is None:
        raise CapabilityError(
            f"'{name}' is an adapter for '{named}', which is merged by peft, and that is not "
            "installed: pip install peft, "
            f"or {install_hint('lora')}."
        )
    kind = str(settings.get("peft_type", "LORA"))
    revision = settings.get("revision")
    _refuse_more_than_weights(folder, kind, settings)
    return Adapter(folder, kind, base, revision if isinstance(revision, str) else None)


def _base(folder: Path, named: str) -> str:
    """The base model's folder, as the adapter names it or next to the adapter; else its hub id."""
    here = Path(named).expanduser()
    candidates = [here, folder / here, folder.parent / here, folder.parent / here.name]
    for candidate in candidates if named else []:
        if candidate.exists() and names_gguf(str(candidate)):
            raise _on_quantised(folder, named, "a GGUF file")
        if candidate.is_dir() and candidate.resolve() != folder.resolve():
            return str(candidate)
    if names_gguf(named):
        raise _on_quantised(folder, named, "a GGUF file")
    if not named or here.is_absolute() or named.startswith((".", "~")) or named.count("/") > 1:
        raise CheckpointError(
            f"'{folder}' is an adapter for '{named}', and no such folder is there. Put the base "
            "model into "
            f"'{here.name or 'base'}' next to it, or correct base_model_name_or_path in its "
            f"{CONFIG}."
        )
    return named


def _whole_weights(folder: Path) -> str | None:
    """The name of a file with weights of a whole model."""
    files = [*folder.glob("*.safetensors*"), *folder.glob("pytorch_model*.bin*")]
    return next((file.name for file in sorted(files) if not file.name.startswith("adapter_")), None)


def about_base(adapter: Adapter, error: CheckpointError) -> CheckpointError:
    """An error about the base, for someone who named the adapter."""
    return CheckpointError(
        f"'{adapter.folder}' is an adapter for '{adapter.base}', which cannot be loaded: {error}"
    )


def _refuse_more_than_weights(folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Raises CapabilityError for an adapter that would be another model once it is merged."""
    if kind in NO_WEIGHTS:
        raise _not_merged(folder, kind, "it does more than change weights")
    for setting, reason in NOT_MERGED.items():
        if settings.get(setting):
            raise _not_merged(folder, kind, f"{reason} ({setting})")


def _not_merged(folder: Path, kind: str, reason: str) -> CapabilityError:
    return CapabilityError(
        f"'{folder}' is an adapter of kind {kind}, which cannot be merged into weights: "
        f"{reason.rstrip('.')}. Plain LoRA can."
    )


def _on_quantised(folder: Path, base: str, what: str) -> CapabilityError:
    return CapabilityError(
        f"'{folder}' is an adapter for '{base}', which is {what}: weights that stay in blocks "
        "take no adapter. Set "
        f"base_model_name_or_path in its {CONFIG} to the checkpoint that '{Path(base).name}' was "
        "made from."
    )


def _ends(module: Any) -> list[nn.Module]:
    """Embeddings and output layer."""
    return [
        part
        for part in (module.get_input_embeddings(), module.get_output_embeddings())
        if part is not None
    ]


def _rows(tensors: Mapping[str, Tensor], path: str) -> int | None:
    """How many rows an adapter's tensors say that the embeddings or the output layer at this path
    have; None: they do not."""
    for end in (*WHOLE_TABLES, "lora_B.weight"):
        if (tensor := tensors.get(f"{PREFIX}{path}.{end}")) is not None:
            return tensor.shape[0]
    factors = tensors.get(f"{PREFIX}{path}.lora_embedding_A")
    return None if factors is None else factors.shape[1]


def _untied(adapted: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Give layers that share weights, of which an adapter changes some, weights of their own; the
    layers that shared, in groups.

    After the adapter is loaded, which may bring the shared weights along.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    changed = [
        part.get_base_layer() for part in adapted.modules() if isinstance(part, BaseTunerLayer)
    ]
    changes = {id(parameter) for part in changed for parameter in part.parameters()}
    groups: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in adapted.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in changes:
                groups.setdefault(id(parameter), []).append((layer, name))
    shared = [group for group in groups.values() if len(group) > 1]
    for group in shared:
        for layer, name in group[1:]:
            parameter = getattr(layer, name)
            setattr(
                layer,
                name,
                nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad),
            )
    return shared


def _tie_equals(shared: list[list[tuple[nn.Module, str]]]) -> None:
    """Let layers share their weights again that are still the same after merging."""
    for (first, first_name), *others in shared:
        weights = getattr(first, first_name)
        for layer, name in others:
            if torch.equal(getattr(layer, name), weights):
                setattr(layer, name, weights)


def _describe(module: Any, config: Any) -> None:
    """Write into configs how many tokens there are, and whether the output layer shares the
    embeddings' weights.

    peft says of its tables that they are not tied, whatever becomes of them."""
    config.get_text_config().vocab_size = module.config.get_text_config().vocab_size
    is_tied = len({id(part.weight) for part in _ends(module)}) == 1
    for each in (module.config, module.config.get_text_config(), config, config.get_text_config()):
        if hasattr(each, "tie_word_embeddings"):
            each.tie_word_embeddings = is_tied
