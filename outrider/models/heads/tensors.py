"""The files of a trained head: a config and named tensors, read by what is in them, not by what the folder is called. Heads in
GGUF files look the same from here (`gguf_heads.py`).

Published heads differ in file names, prefixes and in what their configs claim, so a loader asks for tensors one by one, each
with the shape it must have, and in the end makes sure that nothing was left over: a tensor nobody asked for means that the head
is of another kind, or has a part that would be missing without a word.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import CheckpointError, OutriderError, first_line
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.names import gguf_in
from outrider.models.heads.gguf_heads import read_gguf_head
from outrider.wellformed import load_object

CONFIG = "config.json"
WEIGHT_FILES = ("*.safetensors", "*.pt", "*.bin")  # in the order of preference: a folder may hold the same tensors twice


class HeadTensors:
    """What a folder holds. `take` hands a tensor out, `finish` complains about those that were not taken."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.config = config
        self._left = dict(tensors)

    @classmethod
    def read(cls, folder: Path | str) -> HeadTensors:
        """What a folder or a GGUF file holds. Raises CheckpointError when there is none, no weight file in it, or one that cannot
        be read."""
        if (file := _gguf(folder)) is not None:
            return cls(file.path, *read_gguf_head(file))
        folder = _existing(folder)
        return cls(folder, read_config(folder), _read_weights(folder))

    @classmethod
    def outline(cls, folder: Path | str) -> HeadTensors:
        """The tensors of a folder, from the files' headers alone: numbers that are no weights (ids of tokens) as they are,
        of weights the shape only (tensors on torch's meta device). Costs no memory and no time, however large the head
        is. Raises as `read`."""
        if (file := _gguf(folder)) is not None:
            return cls(file.path, *read_gguf_head(file, outline=True))
        folder = _existing(folder)
        return cls(folder, read_config(folder), _read_weights(folder, outline=True))

    @property
    def names(self) -> list[str]:
        """Names of the tensors that were not taken yet."""
        return list(self._left)

    @property
    def trained_for(self) -> str:
        """The target the config names; '' where it names none."""
        speculators = _table(self.config, "speculators_config")
        found = _table(self.config, "outrider").get("target") or _table(speculators, "verifier").get("name_or_path")
        return str(found or self.config.get("base_model_name_or_path") or "")

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there. Raises CheckpointError."""
        if name not in self._left:
            raise CheckpointError(f"{self.what()} lacks tensor '{name}'. It has: {', '.join(sorted(self._left)) or 'nothing'}.")
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must have this shape. Raises CheckpointError saying both shapes and the head's own target, and for
        weights that are NaN, infinite or codes without their scales: such a head drafts, and nothing of it is ever kept."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.what()}: tensor '{name}' has shape {list(found)}, expected {list(shape)}")
        tensor = self._left.pop(name)
        if _is_codes(tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.what()} is quantised: tensor '{name}' is stored as {kind}, and Outrider reads no scales of heads of this "
                "kind. Use the head in bfloat16 or float32."
            )
        if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
            raise CheckpointError(f"{self.what()} is damaged: tensor '{name}' has NaN or infinite values. Fetch it again.")
        return tensor

    def rename(self, prefix: str, to: str = "") -> None:
        """Names that begin with `prefix` begin with `to`."""
        self._left = {
            to + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor for name, tensor in self._left.items()
        }

    def drop(self, names: Iterable[str]) -> None:
        """Forget tensors that carry no information of their own, where they are there."""
        for name in names:
            self._left.pop(name, None)

    def finish(self, kind: str) -> None:
        """Raises CheckpointError when something was left over."""
        if self._left:
            raise CheckpointError(
                f"{self.what()} holds tensors that are no part of {kind}: {', '.join(sorted(self._left)[:6])}"
                f"{' ...' if len(self._left) > 6 else ''}. It may be a head of another kind."
            )

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """While a head is made of what config.json says, which may be anything: what goes wrong inside is a CheckpointError."""
        try:
            yield
        except OutriderError:
            raise
        except Exception as error:
            what = kind.removeprefix("a ").removeprefix("an ")
            raise CheckpointError(f"{self.what()}: no {what} can be made of its config.json ({first_line(error)})") from error

    def what(self) -> str:
        """The folder, and the target that it was trained for: the beginning of every message."""
        return f"head '{self.folder}'" + (f" (trained for '{self.trained_for}')" if self.trained_for else "")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, or nothing where there is none. Raises CheckpointError when it is no JSON object."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        return load_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from error


def write_head(
    folder: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """config.json and one safetensors file; weights as they are, or in `dtype`, which the config then names. Raises OSError
    when they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # clones: safetensors refuses tensors that share storage
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, str(folder / file))


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside a config; empty where there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _is_codes(tensor: Tensor) -> bool:
    """Whether these weights mean nothing without scales: floats of 8 bits, whole numbers in a matrix."""
    return tensor.element_size() == 1 if tensor.is_floating_point() else tensor.dim() > 1 and tensor.dtype != torch.bool


def _gguf(path: Path | str) -> GgufFile | None:
    """The GGUF file of this path; None where there is none."""
    return gguf_in(str(path)) if Path(path).exists() else None


def _existing(folder: Path | str) -> Path:
    if not Path(folder).is_dir():
        raise CheckpointError(f"no head folder at '{folder}'. Give the folder or the GGUF file that holds the head's weights.")
    return Path(folder)


def _read_weights(folder: Path, *, outline: bool = False) -> dict[str, Tensor]:
    for pattern in WEIGHT_FILES:
        paths = sorted(folder.glob(pattern))
        if paths:
            tensors: dict[str, Tensor] = {}
            for path in paths:
                tensors.update(_read_file(path, outline=outline))
            return tensors
    held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise CheckpointError(f"'{folder}' holds no weights ({', '.join(WEIGHT_FILES)}), only: {held}")


def _read_file(path: Path, *, outline: bool) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return _header(path) if outline else load_file(str(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read the weights '{path}': {first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"'{path}' must hold named tensors, got a {type(found).__name__}")
    return found


def _header(path: Path) -> dict[str, Tensor]:
    """Whole numbers and booleans as stored; in place of weights, their shapes."""
    found: dict[str, Tensor] = {}
    with safe_open(str(path), "pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            part = file.get_slice(name)
            is_weight = part.get_dtype().startswith(("F", "BF"))
            dtype = torch.float8_e4m3fn if part.get_dtype().startswith("F8") else None
            found[name] = torch.empty(part.get_shape(), device="meta", dtype=dtype) if is_weight else file.get_tensor(name)
    return found
