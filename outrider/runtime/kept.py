"""All that a model's next start takes over from an earlier one, so that it makes no module of
transformers' and imports none.

Kept is what loading found and decided: the config's values, which tokens end a text, the program of
a pass, where each of its tensors lies in the checkpoint's files, the numbers of its rotary
tables. The weights stay where they are. A model of which something cannot be kept to the bit
(`models/loading/tensor_store.py`, `rotary.py`) starts as the first time.

Weights that loading rounds or repacks are in no file of the checkpoint: `weights/` in the cache
folder has them in panels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.lazy import pydantic
from outrider.machine import cpu_name
from outrider.models.card import ModelCard
from outrider.models.lm import LM
from outrider.models.loaded import ModelMemory
from outrider.models.loading.generation_config import Asked
from outrider.models.loading.kept_weights import SUFFIX
from outrider.models.loading.memory import PACKED_COPIES
from outrider.models.loading.tensor_store import KeptAt, find_stored, read_stored
from outrider.models.source import ModelSource
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.runtime import checked, library, program_text
from outrider.runtime.building import fingerprint
from outrider.runtime.coding import coder_for
from outrider.runtime.kept_panels import KeptPanels, are_kept, block_panels
from outrider.runtime.matrices import Matrix
from outrider.runtime.ops import Program
from outrider.runtime.plain_panels import PlainPanels
from outrider.runtime.rotary import Rotary, Wave, waves_of
from outrider.runtime.run import Bound, Executor, NativeRun, tensors_of
from outrider.runtime.start_check import check_start

# the oldest go first
MAX_FILES = 50
MAX_TOKENIZERS = 20
DTYPES = ("bfloat16", "float32")  # that the native runtime runs
# whose versions decide what is loaded
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf")


@dataclass(frozen=True)
class Start:
    """The stored record of a model on the native runtime."""

    card: ModelCard
    # name of the file with its record; None: transformers' own, which is loaded anew
    tokenizer: str | None
    dtype: str
    ends: list[int]  # tokens that end a text
    asked: Asked | None
    notes: list[str]
    program: dict[str, Any]  # `program_text.written`
    stored: dict[str, Any]  # `tensor_store.find_stored`
    waves: list[dict[str, Any]]
    memory: ModelMemory

    def copies(self, source: ModelSource) -> float:
        """The number of times that plain weights are in memory while this start is repeated.

        Those of a folder in the type that they are loaded in are packed from the mapped files: then
        it is once, and a table of embeddings that is the output layer besides.
        """
        card = self.card
        is_same = source.gguf is None and card.values.get("dtype") == self.dtype
        if not is_same or card.has_experts:
            return PACKED_COPIES
        plain = self.memory.weights_bytes - self.memory.quantised_bytes
        table = card.vocab_size * card.hidden_size * getattr(torch, self.dtype).itemsize
        return 1 + min(1, table / plain) if card.ties_embeddings and plain else 1.0


class Found(NamedTuple):
    """The facts found at load, besides the program and the place of the weights."""

    card: ModelCard
    tokenizer: Any
    ends: frozenset[int]
    asked: Asked | None
    notes: list[str]
    memory: ModelMemory


class Key(NamedTuple):
    """Tells a start of a model on this machine from every other one."""

    start: str
    # the same for a checkpoint that has changed, whose weights take the place of the old ones
    weights: str


def key_of(source: ModelSource, *options: object) -> Key | None:
    """The key of a model. None where its files are not on this machine.

    `options`: the loading options that decide the result.
    """
    files = checked.files_beside(source)
    if source.adapter is not None or not files:
        return None
    name = checked.place_of(source)
    facts = (
        name,
        files,
        options,
        [_version(package) for package in PACKAGES],
        checked.sources(),
        fingerprint(),
        cpu_name(),
    )
    return Key(
        *(
            hashlib.blake2b(repr(each).encode(), digest_size=16).hexdigest()
            for each in (facts, (name, options))
        )
    )


def find(key: Key | None) -> Start | None:
    """The record that an earlier start kept under this key. Raises ConfigError where the environment
    says of panels what is none of its choices."""
    are_kept()
    return None if key is None else kept_json(_path(key), _start)


def _start(content: Any) -> Start:
    """A start of a file's content, which anybody may have changed. Raises an error of any kind
    where it is none."""
    asked = content.pop("asked")
    memory = content.pop("memory")
    card = pydantic.TypeAdapter(ModelCard).validate_json(json.dumps(content.pop("card")))
    start = Start(
        card=card,
        asked=None if asked is None else Asked(**asked),
        memory=ModelMemory(**memory),
        **content,
    )
    name, *sizes = astuple(start.memory)
    texts = [
        start.dtype,
        name,
        *start.notes,
        *([] if start.tokenizer is None else [start.tokenizer]),
    ]
    numbers = [*start.ends, *sizes]
    if not all(isinstance(text, str) for text in texts) or start.dtype not in DTYPES:
        raise TypeError("a name, a note or a type that is none")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a token or a size that is none")
    if asked is not None and not (
        isinstance(asked["values"], dict) and isinstance(asked["foreign"], dict)
    ):
        raise TypeError("sampling defaults that are none")
    return start


def keep(key: Key | None, lm: LM, module: Any, source: ModelSource, facts: Found) -> None:
    """Remember a start, where all of it can be kept. An error costs the next start its time,
    nothing else."""
    if key is None:
        return
    with keeping(f"how '{source.name}' starts"):
        assert isinstance(lm.run, NativeRun)
        program = lm.run.executor.program
        written = program_text.written(program)
        waves = waves_of(module, program, lm.shape.context_length)
        if written is None or waves is None:
            return
        start = {
            "card": asdict(facts.card),
            "tokenizer": _keep_tokenizer(facts.tokenizer),
            "dtype": str(lm.dtype).removeprefix("torch."),
            "ends": sorted(facts.ends),
            "asked": None if facts.asked is None else asdict(facts.asked),
            "notes": facts.notes,
            "program": written,
            "stored": find_stored(
                source, module, tensors_of(program, module), program.matrices, _made_at(key)
            ),
            "waves": [asdict(wave) for wave in waves],
            "memory": asdict(facts.memory),
        }
        keep_json(_path(key), start, max_files=MAX_FILES)


def keep_first(key: Key, start: Start, tokenizer: ModelTokenizer) -> None:
    """Remember a start that shipped, for those that come: they find it faster than it is made."""
    with keeping("how a model starts"):
        whole = replace(start, tokenizer=_keep_tokenizer(tokenizer))
        keep_json(_path(key), asdict(whole), max_files=MAX_FILES)


def started_lm(start: Start, key: Key, source: ModelSource, facts: checked.Checked) -> LM | None:
    """The model that was kept, ready to run; None where its weights are not as they were. Damaged
    files may raise anything."""
    dtype = getattr(torch, start.dtype)
    path = library.find(cache_folder())
    program = program_text.read(start.program)
    plain = _plain_panels(start, key, program, path)
    made_panels = partial(block_panels, KeptPanels(_weights(key, "blocks"), key.start))
    stored = read_stored(source, start.stored, _made_at(key), made_panels, plain)
    if stored is None:
        return None
    tensors, in_blocks = stored
    program.matrices = {layer: Matrix(*blocks) for layer, blocks in in_blocks.items()}
    waves = [Wave(**{**wave, "frequencies": tuple(wave["frequencies"])}) for wave in start.waves]
    check_start(program, waves, start.ends, facts.shape)
    weights = plain.put_into(tensors)
    every = {**weights, **program.constants, **program.matrices}
    bound = Bound(Executor(program, every, facts.shape.layers, dtype, path), Rotary(waves))
    run = NativeRun.around(bound, path)
    lm = LM(run, facts.shape, dtype, torch.device("cpu"))
    lm.limits = facts.limits
    lm.kernels = run.executor.library
    return lm


def _plain_panels(start: Start, key: Key, program: Program, path: Path) -> PlainPanels:
    """The panels of weights that lie in the checkpoint as plain numbers."""
    shapes = {
        name: (getattr(torch, dtype), shape)
        for name, (_, dtype, shape) in start.stored["plain"].items()
    }
    num_bytes = sum(
        prod(shape) * 2
        for dtype, shape in shapes.values()
        if dtype == torch.bfloat16 and len(shape) > 1
    )
    threads = torch.get_num_threads()
    coder = coder_for(path, library.load(path), threads, num_bytes)
    kind = "plain" if coder is None else "coded"
    return PlainPanels(KeptPanels(_weights(key, kind), key.start), program, shapes, coder)


def started_tokenizer(start: Start, whole: Callable[[], Any]) -> Any:
    """The tokenizer that was kept. `whole` loads transformers'."""
    path = None if start.tokenizer is None else _tokenizers() / Path(start.tokenizer).name
    tokenizer = (
        None if path is None else kept_json(path, lambda content: ModelTokenizer(content, whole))
    )
    return whole() if tokenizer is None else tokenizer


def _keep_tokenizer(tokenizer: Any) -> str | None:
    """The name of the file that holds it from now on."""
    if not isinstance(tokenizer, ModelTokenizer):
        return None
    record = tokenizer.record
    name = f"{hashlib.blake2b(repr(record).encode(), digest_size=16).hexdigest()}.json"
    keep_json(_tokenizers() / name, record, max_files=MAX_TOKENIZERS)
    return name


def _tokenizers() -> Path:
    return cache_folder() / "tokenizers"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _made_at(key: Key) -> KeptAt:
    return KeptAt(_weights(key, f"made{SUFFIX}"), key.start)


def _weights(key: Key, kind: str) -> Path:
    """The file of a kind of weights, or the beginning of the names of several."""
    return cache_folder() / "weights" / f"{key.weights}-{kind}"


def _path(key: Key) -> Path:
    return cache_folder() / "starts" / f"{key.start}.json"
