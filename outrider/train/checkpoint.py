"""Checkpoints from which a training run continues: weights, optimizer, place in the data, curve.

Written to a scratch file and renamed: a kill in the middle leaves the previous checkpoint. No
random state is saved, because the loop seeds every batch from (seed, step); see loop.py.
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CheckpointError, OutriderError, first_line

GO_ON = "when that is mended, the same command with --resume continues"
FULL = re.compile(r"os error 28|No space left")
LITTLE = 1 << 16  # bytes that a full disk may have left


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes: those with gradients. Frozen parts come from where they
    came from."""
    return {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def load_trained(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Put them back. Raises CheckpointError when they are those of another module."""
    parameters = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    if wrong := sorted(parameters.keys() ^ state.keys()) or sorted(
        n for n in parameters if parameters[n].shape != state[n].shape
    ):
        raise CheckpointError(
            f"the checkpoint is of another drafter: '{wrong[0]}' does not fit ({len(wrong)} "
            "tensors differ)"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all. Raises OutriderError when the disk is full; the previous checkpoint then
    still stands."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        torch.save(state, scratch)
        scratch.replace(path)
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch's own writer raises RuntimeError on a full disk
        why = why_unwritten(path.parent, error)
        scratch.unlink(missing_ok=True)
        before = f"the one before it is whole ({path}), and " if path.exists() else ""
        raise OutriderError(f"the checkpoint cannot be written ({why}); {before}{GO_ON}") from error


def why_unwritten(folder: Path, error: Exception) -> str:
    """The reason that a file could not be written there, as long as what was written of it lies
    there still.

    Of torch's errors none says that the disk is full.
    """
    is_full = FULL.search(str(error)) is not None or getattr(error, "errno", None) == errno.ENOSPC
    if not is_full and folder.is_dir():
        is_full = shutil.disk_usage(folder).free < LITTLE
    return "the disk is full: make room" if is_full else first_line(error)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """A training checkpoint from its file. Raises CheckpointError when it is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        reason = first_line(error)
        raise CheckpointError(
            f"{path} is damaged and cannot be resumed ({reason}); begin anew without --resume"
        ) from error
    return state
