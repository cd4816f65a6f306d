"""Results of the checks at load, kept in a small file for the next start: on the native runtime a
model's shape, the check of its logits and its pass limits, on torch's modules the limits.

A model whose files, machine or software are others is another one. What files do not tell apart (a
checkpoint's own code, an adapter, a name on the hub without its commit) is checked at every start.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.kv import LayerShape
from outrider.kv.state_slots import StateShape
from outrider.machine import cpu_name
from outrider.models.lm import LMShape, PassLimits
from outrider.models.source import ModelSource
from outrider.runtime.building import fingerprint

MAX_FILES = 200  # the oldest go first
MAX_GRANULARITY = 1024  # tokens that passes are rounded up to
MAX_NUMBER = 1 << 50  # of what is counted in a model
# passes over fewer are short: threads would wait for one another longer than they work
FEW_WEIGHTS = 1_000_000_000


@dataclass(frozen=True)
class Checked:
    """The findings: the model's shape, that its passes give the plain module's logits, and their
    limits."""

    shape: LMShape
    limits: PassLimits


def key_of(
    source: ModelSource,
    commit: str | None,
    dtype: torch.dtype,
    quantise: int | None = None,
    *,
    eager: bool = False,
) -> str | None:
    """Tells this model on this machine from every other one; None where its files do not. `commit`:
    of a model on the hub; `quantise`: bits that loading rounds its linear layers to; `eager`: its
    passes run on torch's modules."""
    files = files_of(source)
    if source.adapter is not None or not (files or commit):
        return None
    facts = (
        place_of(source),
        files,
        commit,
        str(dtype),
        quantise,
        torch.__version__,
        version("transformers"),
        sources(),
        fingerprint(),
        cpu_name(),
        _kernels_of_torch() if eager else (),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _kernels_of_torch() -> tuple[object, ...]:
    """Whatever chooses torch's kernels in this process, and so the order of their sums."""
    variables = [
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(("ATEN_", "DNNL_", "MKL_", "ONEDNN_"))
    ]
    return (
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        sorted(variables),
    )


def find(key: str | None) -> Checked | None:
    """The results that an earlier start kept under this key."""
    if key is None:
        return None
    return kept_json(_path(key), _read)


def _read(content: Any) -> Checked:
    """The findings in a file's content, which anybody may have changed. Raises an error of any kind
    where they are none."""
    shape = content["shape"]
    limits = content["limits"]
    layers = tuple(LayerShape(**layer) for layer in shape.pop("layers"))
    states = tuple(StateShape(**state) for state in shape.pop("states"))
    if not 1 <= limits["granularity"] <= MAX_GRANULARITY:
        raise ValueError("passes of a length that none has")
    sizes = [
        shape["vocab_size"],
        shape["context_length"],
        limits["granularity"],
        limits["max_tokens_per_pass"],
    ]
    windows = [shape["sliding_window"], *(layer.window for layer in layers)]
    counts = [
        number
        for layer in layers
        for number in (layer.num_kv_heads, layer.key_size, layer.value_size)
    ]
    counts += [
        shape["num_parameters"],
        *(number for state in states for number in (state.size, state.record_bytes)),
    ]
    sizes += [window for window in windows if window is not None]
    if not all(type(size) is int and 1 <= size <= MAX_NUMBER for size in sizes):
        raise ValueError("a size of the model that is none")
    if not all(type(count) is int and 0 <= count <= MAX_NUMBER for count in counts):
        raise ValueError("a number of the model's layers that is none")
    return Checked(LMShape(layers=layers, states=states, **shape), PassLimits(**limits))


def keep(key: str | None, checked: Checked) -> None:
    """Remember the findings. An error costs the next start its time, nothing else."""
    if key is None:
        return
    with keeping("what loading found"):
        keep_json(_path(key), asdict(checked), max_files=MAX_FILES)


@contextmanager
def one_thread(num_weights: int) -> Iterator[None]:
    """torch's operations on one thread for a while, where the model has few weights."""
    before = torch.get_num_threads()
    if num_weights < FEW_WEIGHTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def place_of(source: ModelSource) -> str:
    """The folder with the files, the file, or a name on the hub of which nothing is here."""
    return source.name if source.folder is None else str(source.folder)


def files_of(source: ModelSource) -> list[tuple[str, int, int]]:
    """Path, size and time of every file of a checkpoint on this machine."""
    if source.gguf is not None:
        files = list(source.gguf.paths)
    elif source.folder is not None:
        files = [file for file in source.folder.iterdir() if file.is_file()]
    else:
        files = []
    return sorted(_state(file) for file in files)


def files_beside(source: ModelSource) -> list[tuple[str, int, int]]:
    """`files_of`, and of those next to a GGUF file whatever may say how it is read: a tokenizer,
    chat templates."""
    states = set(files_of(source))
    if not states:
        return []
    folder = source.folder if source.gguf is None else source.gguf.path.parent
    assert folder is not None, "a source with files has a folder"
    for kind in ("*.json", "*.jinja", "*.model", "*.txt", "*/*.jinja"):
        states |= {_state(file) for file in folder.glob(kind) if file.is_file()}
    return sorted(states)


def _state(file: Path) -> tuple[str, int, int]:
    state = file.stat()
    return str(file.resolve()), state.st_size, state.st_mtime_ns


@functools.cache
def sources() -> tuple[tuple[str, int, int], ...]:
    """States of our own source files that read, lower and run models."""
    package = Path(__file__).parents[1]
    files = [
        *package.glob("*.py"),
        *(file for part in ("models", "runtime", "kv") for file in (package / part).rglob("*.py")),
        *(package / "runtime" / "families").glob("*.json"),
    ]
    return tuple(sorted(_state(file) for file in files))


def _path(key: str) -> Path:
    return cache_folder() / "checked" / f"{key}.json"
