"""The files of a checkpoint that hold weights, and their headers, which are checked before a weight
is read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError
from outrider.models.loading.adapter import WEIGHTS
from outrider.models.loading.checked_files import value_in
from outrider.wellformed import load_object, parsed_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
# that cost nobody much, whatever they are
FEW_NUMBERS = 1 << 26
FEW_LAYERS = 256
MAX_NUMBER = 1 << 50  # of bytes, or of a tensor's numbers in one direction


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that hold weights. Raises CheckpointError where there are
    none, or some are missing."""
    index = folder / INDEX
    single = folder / SINGLE
    # an index next to one whole file is left over, as transformers has it
    if index.exists() and not single.exists():
        files = [folder / file for file in _indexed(index)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"'{folder}' lacks {len(missing)} of {len(files)} weight files, first "
                f"'{missing[0]}'."
            )
        if files:
            return files
    files = (
        [single]
        if single.exists()
        else sorted(set(folder.glob("*.safetensors")) - {folder / WEIGHTS[0]})
    )
    files = files or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(
            f"'{folder}' has no weights: neither *.safetensors nor pytorch_model*.bin."
        )
    return files


def safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a file by name: dtype, shape, offset. CheckpointError when the file is cut
    off."""
    if not file.is_file():
        raise CheckpointError(f"'{file}' is no regular file.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header_ends = 8 + length
        if not 2 <= length <= MAX_HEADER_BYTES or header_ends > size:
            raise CheckpointError(
                f"'{file}' is damaged: {size} bytes are no safetensors file. Fetch it again."
            )
        try:
            header = parsed_json(stream.read(length).decode("utf-8"))
            header.pop("__metadata__", None)
            ends = [_checked_entry(entry)["data_offsets"][1] for entry in header.values()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"'{file}' is damaged: its header cannot be read. Fetch it again."
            ) from error
    expected = header_ends + max(ends, default=0)
    if expected != size:
        raise CheckpointError(
            f"'{file}' is damaged: {size} bytes instead of {expected}. Fetch it again."
        )
    return header


def check_sizes(folder: Path, tensors: dict[str, dict[str, Any]], config: Any) -> None:
    """Raises CheckpointError where a config names sizes that the files cannot have: the model would
    be made before that shows."""
    layers, hidden = (value_in(config, name) for name in ("num_hidden_layers", "hidden_size"))
    bits = 8 * sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values()
    )
    if isinstance(layers, int) and layers > max(len(tensors), FEW_LAYERS):
        raise CheckpointError(
            f"'{folder}': config.json says num_hidden_layers {layers}, and the files have "
            f"{len(tensors)} tensors in all. Weights "
            "and config.json are of different models."
        )
    for name in ("vocab_size", "intermediate_size", "hidden_size"):
        size = value_in(config, name)
        if (
            isinstance(size, int)
            and isinstance(hidden, int)
            and hidden * size > max(bits, FEW_NUMBERS)
        ):
            raise CheckpointError(
                f"'{folder}': config.json says {name} {size} and hidden_size {hidden}, for which "
                "the files have too few numbers. "
                "Weights and config.json are of different models."
            )


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        names = sorted(set(load_object(index).get("weight_map", {}).values()))
    except (ValueError, TypeError, AttributeError) as error:
        problem = "it is no JSON that says which file has which weight"
        raise CheckpointError(f"'{index}' is damaged: {problem}. Fetch it again.") from error
    wrong = [
        name
        for name in names
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts
    ]
    if wrong:
        raise CheckpointError(
            f"'{index}' is damaged: it names {wrong[0]!r} for a file of this folder. Fetch it "
            "again."
        )
    return names


def _checked_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """A tensor's entry in a header. Raises an error where it is none."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or not all(
        type(number) is int and 0 <= number <= MAX_NUMBER for number in numbers
    ):
        raise ValueError("a tensor is a type, a shape and two offsets")
    if begin > end:
        raise ValueError("a tensor ends before it begins")
    return entry
