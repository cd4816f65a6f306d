"""The source of a trained head: a config and named tensors, in a folder, in the target's checkpoint
or in a GGUF file.

A source is opened by the headers of its files, so a head can be checked and weighed before a weight
is read. A kind of head says how published layouts name its tensors (`names.py`), makes its network
of the config and has it filled:

    source = HeadSource.open(folder, NAMES)
    with source.making(KIND), torch.device(source.device):
        network = Network(config of source.config and source.shape(...))
    source.fill(network, KIND)                 every parameter has its tensor, of its shape, and nothing is left over

A tensor that nobody asks for means that the head is of another kind, or has a part that would be
missing without a word. Weights in fp8 are widened by their scales; without scales, or as whole
numbers, they are refused: such a head drafts, and nothing of it is ever kept.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import CheckpointError, OutriderError, first_line
from outrider.models.gguf.config import DTYPES
from outrider.models.gguf.header import GgufFile, TensorInfo
from outrider.models.gguf.loading import USED_ELSEWHERE, plain_values
from outrider.models.gguf.names import gguf_in
from outrider.models.heads.gguf_heads import GgufLayout, gguf_layout
from outrider.models.heads.names import Names
from outrider.models.loading.weight_files import safetensors_header
from outrider.wellformed import load_object

CONFIG = "config.json"
# in the order of preference: a folder may hold the same tensors twice
WEIGHT_FILES = ("*.safetensors", "*.pt", "*.bin")
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")  # of weights in fp8, in blocks or whole
KINDS = {  # of numbers, as safetensors calls them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.float8_e4m3fn: FP8, torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
Network = TypeVar("Network", bound=nn.Module)


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str  # there
    kind: str  # of its numbers
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class HeadSource:
    """A head's config and its tensors, each of which is taken once."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: Iterable[Stored],
        names: Names,
        *,
        outline: bool,
    ) -> None:
        """`outline`: of weights the shapes alone, as tensors on torch's meta device."""
        self.path = path
        self.config = config
        self.outline = outline
        self.device = "meta" if outline else "cpu"  # on which the network is made
        self._names = names
        self._left = {names.ours(tensor.name): tensor for tensor in with_scales(tensors)}

    @classmethod
    def open(
        cls, path: Path | str, names: Names | None = None, *, outline: bool = False
    ) -> HeadSource:
        """The head in a folder or a GGUF file. Raises CheckpointError when there is none, no weight
        file in it, or one that cannot be read."""
        names = names or Names()
        file = gguf_in(str(path)) if Path(path).exists() else None
        if file is not None:
            layout = gguf_layout(file)
            config = layout.config(file)
            return cls(file.path, config, _of_gguf(file, layout, config), names, outline=outline)
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(
                f"no head folder at '{path}'. Give the folder or the GGUF file that holds the "
                "head's weights."
            )
        return cls(folder, read_config(folder), _of_folder(folder), names, outline=outline)

    def rename(self, names: Names) -> None:
        """The network's names of tensors that are still called as in the files, once it is clear
        which layout they have."""
        self._names = names
        self._left = {names.ours(tensor.name): tensor for tensor in self._left.values()}

    @property
    def names(self) -> list[str]:
        """The network's names of the tensors that were not taken yet."""
        return list(self._left)

    @property
    def trained_for(self) -> str:
        """The target the config names; '' where it names none."""
        speculators = _table(self.config, "speculators_config")
        target = _table(self.config, "outrider").get("target") or _table(
            speculators, "verifier"
        ).get("name_or_path")
        return str(target or self.config.get("base_model_name_or_path") or "")

    def what(self) -> str:
        """The folder, and the target that it was trained for: the beginning of every message."""
        return f"head '{self.path}'" + (
            f" (trained for '{self.trained_for}')" if self.trained_for else ""
        )

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there. Raises CheckpointError."""
        return self._stored(name).shape

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must have this shape. Raises CheckpointError saying both shapes and the
        head's own target, and for weights that are NaN, infinite or codes without their scales."""
        tensor = self._stored(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.what()}: tensor '{tensor.name}' has shape {list(tensor.shape)}, expected "
                f"{list(shape)}"
            )
        del self._left[name]
        return read_weights(tensor, self.what(), outline=self.outline)

    def drop(self, names: Iterable[str]) -> None:
        """Forget tensors that carry no information of their own, where they are there."""
        for name in names:
            self._left.pop(name, None)

    def finish(self, kind: str) -> None:
        """Raises CheckpointError when something was left over."""
        if self._left:
            named = sorted(tensor.name for tensor in self._left.values())
            raise CheckpointError(
                f"{self.what()} holds tensors that are no part of {kind}: {', '.join(named[:6])}"
                f"{' ...' if len(named) > 6 else ''}. It may be a head of another kind."
            )

    def fill(
        self, network: Network, kind: str, given: Mapping[str, Tensor] | None = None
    ) -> Network:
        """`network` with a tensor for each of its parameters, which must be all that there is; an
        outline is only checked.

        `given`: tensors of parameters that are made of others, or read already.
        """
        tensors = given or {}
        shapes = {name: parameter.shape for name, parameter in network.state_dict().items()}
        state = {
            name: tensors[name] if name in tensors else self.take(name, *shape)
            for name, shape in shapes.items()
        }
        self.finish(kind)
        if not self.outline:
            network.load_state_dict(state)
        return network.eval().requires_grad_(False)

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """While a head is made of what config.json says, which may be anything: what goes wrong
        inside is a CheckpointError."""
        try:
            yield
        except OutriderError:
            raise
        except Exception as error:
            what = kind.removeprefix("a ").removeprefix("an ")
            raise CheckpointError(
                f"{self.what()}: no {what} can be made of its config.json ({first_line(error)})"
            ) from error

    def _stored(self, name: str) -> Stored:
        if name not in self._left:
            held = ", ".join(sorted(tensor.name for tensor in self._left.values())) or "nothing"
            raise CheckpointError(
                f"{self.what()} lacks tensor '{self._names.theirs(name)}'. It has: {held}."
            )
        return self._left[name]


def read_weights(tensor: Stored, what: str, *, outline: bool = False) -> Tensor:
    """A tensor in plain numbers; of an outline's weights the shape.

    Raises CheckpointError, beginning with `what`, for weights that are NaN, infinite or codes
    without their scales.
    """
    check_numbers(tensor, what)
    if outline and tensor.kind in FLOATS:
        return torch.empty(tensor.shape, device="meta")
    values = tensor.read()
    if values.is_floating_point() and not values.isfinite().all():
        raise CheckpointError(
            f"{what} is damaged: tensor '{tensor.name}' has NaN or infinite values. Fetch it again."
        )
    return values


def check_numbers(tensor: Stored, what: str) -> None:
    """Raises CheckpointError, beginning with `what`, for weights that are codes: floats of 8 bits,
    whole numbers in a matrix."""
    if tensor.kind.startswith("F8") or (
        tensor.kind not in (*FLOATS, "BOOL") and len(tensor.shape) > 1
    ):
        missing = (
            f" and its scales '{_scale_names(tensor.name)[0]}' are missing"
            if tensor.kind == FP8
            else ""
        )
        read = "Heads in floats, or in fp8 with scales, are read."
        raise CheckpointError(
            f"{what} is quantised: tensor '{tensor.name}' is stored as {tensor.kind}{missing}. "
            f"{read}"
        )


def with_scales(tensors: Iterable[Stored]) -> list[Stored]:
    """Tensors without those that scale others: weights in fp8 are widened by theirs when they are
    read."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in [name for name, tensor in by_name.items() if tensor.kind == FP8]:
        if scale := next(
            (by_name.pop(there) for there in _scale_names(name) if there in by_name), None
        ):
            by_name[name] = by_name[name]._replace(
                kind="F32", read=partial(_widened, by_name[name], scale)
            )
    return list(by_name.values())


def _scale_names(name: str) -> list[str]:
    """Possible names of the scales of a weight in fp8."""
    return [name.removesuffix("weight") + each for each in SCALES]


def _widened(weight: Stored, scale: Stored) -> Tensor:
    """Weights (out, in) in fp8 times their scales: one, one a row, or one for each block."""
    values = weight.read().float()
    scales = scale.read()
    if scales.dim() == 2:
        sizes = [
            -(-whole // parts) for whole, parts in zip(values.shape, scales.shape, strict=True)
        ]
        sizes = [1 << (size - 1).bit_length() for size in sizes]  # blocks at the edge are cut
        scales = scales.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[
            : values.shape[0], : values.shape[1]
        ]
    return values * scales.float()


def in_fp8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store every matrix of floats in fp8 (e4m3) with one scale a row, as `with_scales` reads them;
    other tensors stay as they are."""
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if _is_matrix(tensor):
            codes, scales = _fp8(tensor)
            stored[name] = codes
            stored[name.removesuffix("weight") + SCALES[1]] = scales
    return stored


def rounded_to_fp8(tensor: Tensor) -> Tensor:
    """The values that `in_fp8` stores: of a matrix rounded ones, fp32; of others as they are."""
    if not _is_matrix(tensor):
        return tensor
    codes, scales = _fp8(tensor)
    return codes.float() * scales


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


def _fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (out, in) and scales (out, 1), fp32."""
    values = matrix.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (values.abs().amax(1, keepdim=True) / largest).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return (values / scales).to(torch.float8_e4m3fn), scales


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, or nothing where there is none. Raises CheckpointError when it is no JSON
    object."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        return load_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from error


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside a config; empty where there is none."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- files


def _of_folder(folder: Path) -> list[Stored]:
    for pattern in WEIGHT_FILES:
        if paths := sorted(folder.glob(pattern)):
            return [
                tensor
                for path in paths
                for tensor in (of_safetensors(path) if "safe" in pattern else _of_pickle(path))
            ]
    held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise CheckpointError(f"'{folder}' holds no weights ({', '.join(WEIGHT_FILES)}), only: {held}")


def of_safetensors(path: Path) -> list[Stored]:
    """The tensors of a file, by its header. Raises CheckpointError for a damaged one."""
    file = _Opened(path)
    return [
        Stored(name, entry["dtype"], tuple(entry["shape"]), partial(file.read, name))
        for name, entry in safetensors_header(path).items()
    ]


class _Opened:
    """A safetensors file that is opened once, when its first tensor is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _file(self) -> Any:
        return safe_open(str(self._path), "pt")

    def read(self, name: str) -> Tensor:
        """One of its tensors. Raises CheckpointError."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read the weights '{self._path}': {first_line(error)}"
            ) from error
        return tensor


def _of_pickle(path: Path) -> list[Stored]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read the weights '{path}': {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, Tensor) for tensor in tensors.values()
    ):
        raise CheckpointError(f"'{path}' must hold named tensors, got a {type(tensors).__name__}")
    return [
        Stored(name, KINDS.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.detach)
        for name, tensor in tensors.items()
    ]


def _of_gguf(file: GgufFile, layout: GgufLayout, config: dict[str, Any]) -> list[Stored]:
    """The tensors of a GGUF file by the names that they have in folders."""
    tensors = []
    for tensor in file.tensors:
        if tensor.name not in USED_ELSEWHERE:
            kind = tensor.kind.name if tensor.kind.name in ("I64", *DTYPES) else "F32"
            name = layout.names.ours(tensor.name)
            tensors.append(
                Stored(
                    name, kind, tensor.shape, partial(_gguf_values, tensor, name, layout, config)
                )
            )
    return tensors


def _gguf_values(
    tensor: TensorInfo, name: str, layout: GgufLayout, config: dict[str, Any]
) -> Tensor:
    if tensor.kind.name == "I64":
        values = torch.from_numpy(tensor.read().view(np.int64).reshape(tensor.shape).copy())
    else:
        values = torch.from_numpy(plain_values(tensor).copy()).to(
            DTYPES.get(tensor.kind.name, torch.float32)
        )
    return layout.rearranged(name, values, config)


# ---------------------------------------------------------------- writing


def write_head(
    folder: Path,
    file: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """config.json and one safetensors file; weights as they are, or in `dtype`, which the config
    then names. Raises OSError when they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    (folder / CONFIG).write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    # clones: safetensors refuses tensors that share storage
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        str(folder / file),
    )
