"""Which kind of trained head a folder or a GGUF file holds: its files and the headers of its weights decide, not its name.

    medusa, eagle, eagle3, block, mtp    by the names of their tensors; Gemma 4's assistants, which draft as mtp, by the config
    early-exit, acceptance               by the config: ours alone
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.models.gguf.names import gguf_in
from outrider.models.heads.acceptance import KIND as ACCEPTANCE_FILES
from outrider.models.heads.assistant import ASSISTANTS, is_assistant
from outrider.models.heads.block_names import rename_parts
from outrider.models.heads.exit import KIND as EXIT_FILES
from outrider.models.heads.gguf_heads import gguf_head_kind
from outrider.models.heads.mtp_gguf import find_nextn
from outrider.models.heads.mtp_layout import find_layout
from outrider.models.heads.tensors import WEIGHT_FILES, HeadTensors, read_config

ACCEPTANCE, EARLY_EXIT = "acceptance", "early-exit"
OURS = {ACCEPTANCE_FILES: ACCEPTANCE, EXIT_FILES: EARLY_EXIT}  # by the config's model_type
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")  # one of them beside a model, none beside a head
MEDUSA = ("0.0.linear", "0.1.weight", "blocks.0.", "medusa_heads.", "medusa_head.")  # how tensors of its layouts begin


def head_kind(folder: Path) -> str | None:
    """The drafter that drafts with it; ACCEPTANCE: a rule that ends a draft model's drafts; None: no head, perhaps a whole model.

    Also of a GGUF file. Raises CheckpointError for files that cannot be read.
    """
    if (file := gguf_in(str(folder))) is not None:
        if is_assistant(folder):
            return "mtp"
        nextn = find_nextn(file)
        return "mtp" if nextn is not None and nextn.is_alone else gguf_head_kind(file)
    if folder.is_file():
        return None
    config = read_config(folder)
    model_type = str(config.get("model_type"))
    if model_type in OURS or model_type in ASSISTANTS:
        return OURS.get(model_type, "mtp")
    pickled = any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)
    if any(folder.glob("*.safetensors")) or (pickled and not has_tokenizer(folder)):
        return _kind_by_names(HeadTensors.outline(folder)) or _claimed(config)
    return None  # of pickled weights whole models would have to be read


def how_to_draft(kind: str, folder: str) -> str:
    """Options of the command line that use a head of this kind."""
    if kind == ACCEPTANCE:
        option = f"stop={ACCEPTANCE} --drafter-option acceptance_head={folder}"
        return f"--drafter draft-model --draft MODEL --drafter-option {option}"
    return f"--drafter {kind} --drafter-option head={folder}" if kind == EARLY_EXIT else f"--drafter {kind} --draft {folder}"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer, as a whole model has."""
    return any((folder / file).exists() for file in TOKENIZERS)


def _kind_by_names(files: HeadTensors) -> str | None:
    if _is_mtp_alone(files.names):
        return "mtp"
    rename_parts(files)
    if any(name.startswith(MEDUSA) for name in files.names):
        return "medusa"
    if "fc.weight" not in files:
        return None
    if "layers.0.hidden_norm.weight" in files:
        return "eagle3"
    return "block" if "hidden_norm.weight" in files else "eagle"


def _is_mtp_alone(names: list[str]) -> bool:
    """Whether all that there is makes an MTP head: a whole model may have one, too."""
    layout = find_layout(names, 0)
    return layout is not None and set(names) <= {*layout.tensors, *layout.copies}


def _claimed(config: dict[str, Any]) -> str | None:
    """By ourselves when it was saved: loading will say which tensor it lacks."""
    own = config.get("outrider")
    return str(own["head"]) if isinstance(own, dict) and own.get("head") else None
