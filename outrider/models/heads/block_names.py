"""Names of tensors by which block heads are recognised, without importing any head's code."""

from __future__ import annotations

from outrider.models.heads.tensors import HeadTensors


def rename_parts(files: HeadTensors) -> None:
    """Names of other layouts become those of DFlash."""
    files.rename("model.")
    files.rename("midlayer.", "layers.0.")
    for codebook in ("predecessor_codebook", "successor_codebook"):
        files.rename(f"candidate_selector.{codebook}.weight", f"candidate_selector.{codebook}")
    files.rename("encoder.fc.", "fc.")  # transformers' MuseGlimmerAssistantModel
    files.rename("encoder.output_norm_enc.", "hidden_norm.")
