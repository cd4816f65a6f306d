"""The header of a GGUF file: metadata and the table of tensors, read in milliseconds and checked
before any weight is.

gguf's own reader makes an array of every word of the vocabulary, seconds for a large one, and each
part of loading would do so again. This one steps over long lists, and says what is wrong with a
file: cut off, no GGUF, of another byte order, of a kind that holds no language model. Sizes of
block formats are gguf's own table. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf import library

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_LIST = 4096  # entries of a list that is kept; of longer ones only the number is
MAX_DIMENSIONS = 4
# the remedy in messages
ORIGINAL = "Use the original checkpoint: a folder with config.json and *.safetensors."
ALIGNMENT = 32  # of tensor data, where the file names none
# value types
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING = 8
LIST = 9
LENGTH = struct.Struct("<Q")  # in front of a string
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
ONE_EXPERT = re.compile(r"(?P<layer>blk\.\d+\.ffn_(gate|up|down))\.(?P<expert>\d+)\.weight")
OTHER_KINDS = {
    "adapter": "a LoRA adapter in llama.cpp's form",
    "mmproj": "the vision or audio part of a model (mmproj)",
    "clip": "the vision or audio part of a model (mmproj)",
    "imatrix": "an importance matrix, made to quantise with",
}


class Count(int):
    """The number of entries of a list that was stepped over; `kind` and `start`: of its entries,
    and where they begin in the file."""

    kind: int
    start: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its shape as torch has it (outputs first), and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    path: Path
    start: int
    num_bytes: int
    # of those that lie in the file one by one: experts in files of 2023
    parts: tuple[TensorInfo, ...] = ()

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    def read(self) -> np.ndarray:
        """The stored bytes (..., bytes of a row) uint8, mapped, not yet in memory; copied where
        they lie one by one."""
        if self.parts:
            return np.stack([part.read() for part in self.parts])
        mapped = np.memmap(
            self.path, mode="r", dtype=np.uint8, offset=self.start, shape=(self.num_bytes,)
        )
        return mapped.reshape(*self.shape[:-1], -1)


@dataclass(frozen=True)
class GgufFile:
    """A checkpoint: one file, or all shards of it in order."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def path(self) -> Path:
        """The file, or its first shard, which has the metadata."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value that the file keeps under its architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def with_whole_experts(tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Experts that lie one by one (`blk.0.ffn_up.3.weight`) as one tensor of a layer, as files
    since 2024 have them."""
    experts: dict[str, dict[int, TensorInfo]] = {}
    for tensor in tensors:
        if match := ONE_EXPERT.fullmatch(tensor.name):
            experts.setdefault(f"{match['layer']}_exps.weight", {})[int(match["expert"])] = tensor
    whole = [
        _whole(name, [each[number] for number in sorted(each)])
        for name, each in experts.items()
        if _is_whole(each)
    ]
    inside = {part.name for match in whole for part in match.parts}
    return (*(tensor for tensor in tensors if tensor.name not in inside), *whole)


def _is_whole(experts: dict[int, TensorInfo]) -> bool:
    """Whether none is missing, and all are of one shape and format."""
    return (
        sorted(experts) == list(range(len(experts)))
        and len({(expert.kind, expert.shape) for expert in experts.values()}) == 1
    )


def _whole(name: str, parts: Sequence[TensorInfo]) -> TensorInfo:
    first = parts[0]
    num_bytes = sum(part.num_bytes for part in parts)
    return TensorInfo(
        name,
        (len(parts), *first.shape),
        first.kind,
        first.path,
        first.start,
        num_bytes,
        tuple(parts),
    )


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF files do."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """The checkpoint that begins with this file, its other shards next to it.

    Raises CheckpointError for a file that is damaged, incomplete or no GGUF, CapabilityError for
    what holds no language model.
    """
    paths = _shards(path.expanduser())
    parts = [_read_once(path, path.stat().st_mtime_ns) for path in paths]
    metadata = parts[0][0]
    _check_kind(path, metadata)
    count = metadata.get("split.count", 1)
    if count != len(paths):
        raise CheckpointError(
            f"'{path}' is one of {count} shards, but its name says {len(paths)}: give it its "
            "first name back."
        )
    tensors = with_whole_experts([tensor for _, found in parts for tensor in found])
    if not tensors:
        raise CapabilityError(
            f"'{path}' has a vocabulary and no weights, so it cannot run. Give the file with the "
            "weights."
        )
    return GgufFile(tuple(paths), metadata, tensors)


def long_list(file: GgufFile, key: str) -> list[Any]:
    """A list of the metadata, in full. Raises CheckpointError where the file has none under this
    key."""
    values = file.metadata.get(key)
    if isinstance(values, Count):
        values = _long_list(
            file.path, file.path.stat().st_mtime_ns, values.kind, values.start, values
        )
    if not isinstance(values, list):
        raise CheckpointError(
            f"'{file.path}' has no list {key}: incomplete. Convert the model again."
        )
    return values


@lru_cache(maxsize=64)
def _read_once(path: Path, changed: int) -> tuple[dict[str, Any], tuple[TensorInfo, ...]]:
    reader = _HeaderReader(path)
    return reader.metadata(), reader.tensors()


@lru_cache(maxsize=8)  # those of a target and a draft
def _long_list(path: Path, changed: int, kind: int, start: int, count: int) -> list[Any]:
    return _HeaderReader(path).entries(kind, start, count)


def _shards(path: Path) -> list[Path]:
    if not (name := SHARD.fullmatch(path.name)):
        return [path]
    count = int(name["count"])
    paths = [
        path.with_name(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            f"'{path.parent}' lacks {len(missing)} of {count} shards, first '{missing[0]}'. Fetch "
            "them, too."
        )
    return paths


def _check_kind(path: Path, metadata: dict[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    kind = metadata.get("general.type", "model")
    other = OTHER_KINDS.get(str(kind)) or OTHER_KINDS.get(str(architecture))
    if other is not None:
        raise CapabilityError(
            f"'{path}' is {other}, not a language model. Give the file of the model itself."
        )
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"'{path}' names no general.architecture, so nothing says what model it is. Fetch it "
            "again."
        )


class _HeaderReader:
    """Reads a header front to back, and long lists that were stepped over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        with path.open("rb") as stream:
            self._size = os.fstat(stream.fileno()).st_size
            self._blob = (
                mmap.mmap(stream.fileno(), self._size, access=mmap.ACCESS_READ)
                if self._size
                else b""
            )
        self._check_start()
        self._num_tensors, self._num_values = self._numbers("2Q")
        self._metadata: dict[str, Any] | None = None

    def _check_start(self) -> None:
        start = self._take(min(8, self._size))
        if start[:4] != MAGIC:
            raise CheckpointError(
                f"'{self._path}' is no GGUF file: {_what_begins(start, self._path)}."
            )
        if len(start) < 8:
            self._cut_off()
        version = struct.unpack("<I", start[4:])[0]
        if version in VERSIONS:
            return
        if struct.unpack(">I", start[4:])[0] in VERSIONS:
            raise CapabilityError(
                f"'{self._path}' has its bytes in big-endian order, made for another kind of "
                "processor. Fetch the usual file, or "
                "convert it with llama.cpp's gguf_convert_endian.py."
            )
        raise CapabilityError(
            f"'{self._path}' is GGUF version {version}; versions 2 and 3 can be read. Convert the "
            "model again."
        )

    def metadata(self) -> dict[str, Any]:
        if self._metadata is None:
            self._metadata = {}
            for _ in range(self._num_values):
                key = self._string()
                self._metadata[key] = self._value(self._numbers("I")[0], key)
        return self._metadata

    def tensors(self) -> tuple[TensorInfo, ...]:
        self.metadata()
        entries = []
        for _ in range(self._num_tensors):
            name = self._string()
            num_dimensions = self._numbers("I")[0]
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                self._damaged(f"its tensor '{name}' has {num_dimensions} dimensions")
            shape = tuple(reversed(self._numbers(f"{num_dimensions}Q")))
            kind, offset = self._numbers("IQ")
            entries.append((name, shape, self._kind(name, kind), offset))
        alignment = self.metadata().get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            self._damaged(f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        return tuple(
            self._located(name, shape, kind, start + offset)
            for name, shape, kind, offset in entries
        )

    def _located(
        self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int
    ) -> TensorInfo:
        weights, size = library.GGML_QUANT_SIZES[kind]
        if shape[-1] % weights or not prod(shape):
            self._damaged(
                f"its tensor '{name}' has rows of {shape[-1]} weights, which {kind.name} cannot "
                "hold"
            )
        num_bytes = prod(shape) // weights * size
        if start + num_bytes > self._size:
            self._cut_off(start + num_bytes)
        return TensorInfo(name, shape, kind, self._path, start, num_bytes)

    def _kind(self, name: str, number: int) -> GGMLQuantizationType:
        try:
            kind = library.GGMLQuantizationType(number)
        except ValueError:
            kind = None
        if kind is None or kind not in library.GGML_QUANT_SIZES:
            raise CapabilityError(
                f"'{self._path}': the tensor '{name}' is stored as type {number}, which the "
                "installed gguf package does not "
                "know. Use a file in another quantisation (Q4_K_M, Q8_0), or a newer gguf package."
            )
        return kind

    def _value(self, kind: int, key: str) -> Any:
        if kind in NUMBERS:
            return self._numbers(NUMBERS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != LIST:
            return self._damaged(f"its value {key} is of type {kind}")
        kind, count = self._numbers("IQ")
        if kind not in NUMBERS and kind != STRING:
            return self._damaged(f"its list {key} is of type {kind}")
        if count <= MAX_LIST:
            return self.entries(kind, self._at, count)
        stepped = Count(count)
        stepped.kind = kind
        stepped.start = self._at
        if kind == STRING:
            self._ends(count)
        else:
            self._take(count * struct.calcsize(f"<{NUMBERS[kind]}"))
        return stepped

    def entries(self, kind: int, start: int, count: int) -> list[Any]:
        """The entries of a list that begin at `start`; reading goes on after them."""
        self._at = start
        if kind in NUMBERS:
            raw = self._take(count * struct.calcsize(f"<{NUMBERS[kind]}"))
            return list(struct.unpack(f"<{count}{NUMBERS[kind]}", raw))
        ends = self._ends(count)
        blob = self._blob
        try:
            return [
                blob[begin + LENGTH.size : end].decode("utf-8")
                for begin, end in zip([start, *ends], ends, strict=False)
            ]
        except UnicodeDecodeError:
            return self._damaged("its text is no UTF-8")

    def _ends(self, count: int) -> list[int]:
        """The end of each of so many strings, which are stepped over. Vocabularies have 100,000 and
        more, so this is one short loop."""
        blob = self._blob
        size = self._size
        length_at = LENGTH.unpack_from
        at = self._at
        ends = []
        for _ in range(count):
            if at + LENGTH.size > size:
                self._cut_off()
            at += LENGTH.size + length_at(blob, at)[0]
            ends.append(at)
        if at > size:
            self._cut_off()
        self._at = at
        return ends

    def _numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def _string(self) -> str:
        try:
            return self._take_string().decode("utf-8")
        except UnicodeDecodeError:
            return self._damaged("its text is no UTF-8")

    def _take_string(self) -> bytes:
        return self._take(self._numbers("Q")[0])

    def _take(self, count: int) -> bytes:
        if self._at + count > self._size:
            self._cut_off()
        chunk = self._blob[self._at : self._at + count]
        self._at += count
        return chunk

    def _cut_off(self, wanted: int | None = None) -> Any:
        expected = "end within its header" if wanted is None else f"instead of at least {wanted}"
        raise CheckpointError(
            f"'{self._path}' is damaged: {self._size} bytes {expected}. Fetch it again."
        )

    def _damaged(self, what: str) -> Any:
        raise CheckpointError(f"'{self._path}' is damaged: {what}. Fetch it again.")


def _what_begins(start: bytes, path: Path) -> str:
    """A guess at the format of a file that is not GGUF."""
    if not start:
        return "it is empty"
    if start.startswith(b"version "):
        return "it is a pointer of Git LFS, not the file itself (git lfs pull)"
    if start[:2] == b"PK":
        return "it is a zip archive, perhaps weights of torch"
    if start.lstrip()[:1] == b"<":
        return "it is a web page, perhaps an error of a download"
    if len(start) == 8 and struct.unpack("<Q", start)[0] < path.stat().st_size:
        return "it may be a safetensors file under another name"
    return f"it begins with {start[:4]!r} instead of b'GGUF'"
