"""Names of tensors by which block heads are recognised, without importing any head's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError
from outrider.models.heads.tensors import HeadTensors
from outrider.models.loading.weight_files import safetensors_header

DSPARK = "mtp.0.main_proj.weight"  # of the head inside DeepSeek V4's checkpoints


def rename_parts(files: HeadTensors) -> None:
    """Names of other layouts become those of DFlash."""
    files.rename("model.")
    files.rename("midlayer.", "layers.0.")
    for codebook in ("predecessor_codebook", "successor_codebook"):
        files.rename(f"candidate_selector.{codebook}.weight", f"candidate_selector.{codebook}")
    files.rename("encoder.fc.", "fc.")  # transformers' MuseGlimmerAssistantModel
    files.rename("encoder.output_norm_enc.", "hidden_norm.")


def ships_dspark(folder: Path | str) -> bool:
    """Whether a folder's files hold DeepSeek V4's DSpark head. Damaged files have none."""
    try:
        return bool(dspark_tensors(Path(folder)))
    except (OSError, CheckpointError):
        return False


def dspark_tensors(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Files and headers of the tensors under `mtp.`; nothing where they make no DSpark head."""
    found = {
        name: (file, entry)
        for file in sorted(folder.glob("*.safetensors"))
        for name, entry in safetensors_header(file).items()
        if name.startswith("mtp.")
    }
    return found if DSPARK in found else {}
