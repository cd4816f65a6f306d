"""Which kind of trained head a folder or a GGUF file holds: its files and the headers of its
weights decide, not its name.

    what `outrider train` saved          by the config, which names the kind: loading will say which tensor a damaged one lacks
    medusa, eagle, eagle3, block, mtp    of others by the names of their tensors; assistants, which draft as mtp, by the config
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.models.families import ASSISTANTS, MTP_LAYOUTS
from outrider.models.heads.acceptance import KIND as ACCEPTANCE_FILES
from outrider.models.heads.assistant import is_assistant
from outrider.models.heads.exit import KIND as EXIT_FILES
from outrider.models.heads.gguf_heads import gguf_head_kind
from outrider.models.heads.mtp_gguf import find_nextn
from outrider.models.heads.mtp_layout import find_tensors
from outrider.models.heads.source import WEIGHT_FILES, HeadSource, read_config
from outrider.models.source import ModelSource

ACCEPTANCE = "acceptance"
EARLY_EXIT = "early-exit"
OURS = {ACCEPTANCE_FILES: ACCEPTANCE, EXIT_FILES: EARLY_EXIT}  # by the config's model_type
# one of them alongside a model, none alongside a head
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# how its tensors begin
MEDUSA = re.compile(r"(model\.)?(0\.0\.linear|0\.1\.weight|blocks\.0\.|medusa_heads?\.)")
PROJECTION = re.compile(r"(model\.)?(encoder\.)?fc\.weight")  # which EAGLE's and block heads have
SIGNS = {  # tensors by which these differ; an EAGLE head has none of them
    "eagle3": re.compile(r"(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight"),
    "block": re.compile(r"(model\.)?(hidden_norm|encoder\.output_norm_enc)\.weight"),
}


def head_kind(source: ModelSource) -> str | None:
    """The drafter that drafts with it; ACCEPTANCE: a rule that ends a draft model's drafts; None:
    no head, perhaps a whole model.

    Raises CheckpointError for files that cannot be read.
    """
    if source.gguf is not None:
        if is_assistant(source):
            return "mtp"
        nextn = find_nextn(source.gguf)
        return "mtp" if nextn is not None and nextn.is_alone else gguf_head_kind(source.gguf)
    folder = source.folder
    if folder is None or source.adapter is not None:
        return None
    config = read_config(folder)
    model_type = str(config.get("model_type"))
    settings = config.get("outrider")
    if model_type in OURS or model_type in ASSISTANTS.model_types:
        return OURS.get(model_type, "mtp")
    if isinstance(settings, dict) and settings.get("head"):
        return str(settings["head"])
    pickled = any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)
    if any(folder.glob("*.safetensors")) or (pickled and not has_tokenizer(folder)):
        return _kind_by_names(HeadSource.open(folder).names)
    return None  # of pickled weights whole models would have to be read


def how_to_draft(kind: str, folder: str) -> str:
    """Options of the command line that use a head of this kind."""
    if kind == ACCEPTANCE:
        return f'--draft MODEL --drafter "draft-model stop={ACCEPTANCE} acceptance_head={folder}"'
    return (
        f'--drafter "{kind} head={folder}"'
        if kind == EARLY_EXIT
        else f"--drafter {kind} --draft {folder}"
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer, as a whole model has."""
    return any((folder / file).exists() for file in TOKENIZERS)


def _kind_by_names(names: list[str]) -> str | None:
    if _is_mtp_alone(names):
        return "mtp"
    if any(MEDUSA.match(name) for name in names):
        return "medusa"
    if not any(PROJECTION.fullmatch(name) for name in names):
        return None
    return next(
        (kind for kind, sign in SIGNS.items() if any(sign.fullmatch(name) for name in names)),
        "eagle",
    )


def _is_mtp_alone(names: list[str]) -> bool:
    """Whether all that there is makes an MTP head: a whole model may have one, too."""
    tensors = find_tensors(MTP_LAYOUTS.values(), names, 0)
    return tensors is not None and set(names) <= {*tensors.names, *tensors.copies}
