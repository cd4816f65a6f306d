"""TensorBoard logs, where they are wanted and the package is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


class Logs:
    """Scalars by step. Raises ConfigError when TensorBoard is asked for and missing."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard logs need the package tensorboard: pip install 'outrider[train]', or leave tensorboard=true out"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
