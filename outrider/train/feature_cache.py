"""A bounded cache of target features on disk: one file a text, filled until the budget is spent or
the disk is full.

First come, first kept; nothing is thrown out, for every epoch reads everything once. What a resumed
run may use is what was there when its checkpoint was written (`load_state`): otherwise the bits of
its features could be those of another batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Features:
    """The features of one text."""

    hidden: dict[int, Tensor]  # layer -> (T, H)
    # (T, V); None: the output layer makes them of the states after the final norm
    logits: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        named = {f"hidden.{layer}": states for layer, states in self.hidden.items()}
        named |= {} if self.logits is None else {"logits": self.logits}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Features:
        hidden = {
            int(name.removeprefix("hidden.")): states
            for name, states in tensors.items()
            if name != "logits"
        }
        return cls(hidden, tensors.get("logits"))


class FeatureCache:
    """`budget` in bytes. `say` is called once when the disk is full; the run continues without
    further caching."""

    def __init__(
        self, folder: Path, budget: int, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = folder
        self._budget = budget
        self._say = say
        self._names: list[str] = []
        self._bytes = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._names)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def state(self) -> dict[str, object]:
        """For the checkpoint."""
        return {"names": list(self._names), "bytes": self._bytes, "closed": self._closed}

    def load_state(self, state: dict[str, object]) -> None:
        """Go on as at that checkpoint: what came later, or is gone, is forgotten."""
        names = state["names"]
        num_bytes = state["bytes"]
        assert isinstance(names, list)
        assert isinstance(num_bytes, int)
        self._names = list(names)
        self._bytes = num_bytes
        self._closed = bool(state["closed"])

    def get_all(self, names: list[str]) -> list[Features] | None:
        """All of these, or None when one is missing."""
        known = set(self._names)
        if not all(name in known and self._path(name).exists() for name in names):
            return None
        return [Features.of_tensors(load_file(self._path(name))) for name in names]

    def add(self, name: str, features: Features) -> None:
        """Keep them if they fit. A full disk ends caching, not training."""
        if self._closed or name in self._names:
            return
        tensors = features.tensors()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._bytes + size > self._budget:
            return
        path = self._path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".new")
            save_file(tensors, scratch)
            scratch.replace(path)
        except Exception as error:  # noqa: BLE001  safetensors has its own class for a full disk
            self._closed = True
            path.with_suffix(".new").unlink(missing_ok=True)
            self._say(
                f"note: the feature cache stops at {self._bytes / 1e6:.0f} MB ({error}); training "
                "continues without it"
            )
            return
        self._names.append(name)
        self._bytes += size

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"
