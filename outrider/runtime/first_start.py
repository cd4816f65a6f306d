"""A model's first start from what ships: nothing of transformers is imported, and no pass is
recorded.

For GGUF files of the families whose programs ship (`family_program.py`), all matrices in blocks;
for folders with plain weights in bfloat16, `folder_start.py`.
The result is the record that a first start by transformers keeps (`kept.py`), with the same
program, tables and card: `tests/unit/runtime/test_first_start.py` compares both. Whatever else a
file may be, and one that is damaged, starts as ever, which also says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.errors import OutriderError
from outrider.kv import LayerShape
from outrider.models.card import ModelCard
from outrider.models.gguf.architectures import WHOLE, own_config, row_of
from outrider.models.gguf.config import (
    end_tokens,
    num_extra_layers,
    own_dtype,
    recommended,
    rope_factors,
    rope_scaling,
)
from outrider.models.gguf.experts import SAME, staying
from outrider.models.gguf.formats import FORMS
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.loading import FREQUENCIES
from outrider.models.gguf.tokenizer import plain_tokenizer
from outrider.models.gguf.weights import blocks_note, tensor_bytes
from outrider.models.lm import LM, LMShape, PassLimits
from outrider.models.loaded import ModelMemory
from outrider.models.loading.generation_config import Asked
from outrider.models.loading.tensor_store import tensor_as_text
from outrider.models.source import ModelSource
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.runtime.checked import Checked, keep, one_thread
from outrider.runtime.family_program import (
    Sizes,
    by_layer,
    families,
    family,
    matrix_shapes,
    program_of,
    rotary_tables,
)
from outrider.runtime.folder_start import folder_start
from outrider.runtime.kept import Key, Start, keep_first
from outrider.runtime.limits import find_native_limits

DTYPE = torch.bfloat16
_ships = True


class FirstStart(NamedTuple):
    """A start, and what a kept one has elsewhere."""

    start: Start
    checked: Checked  # limits are not measured yet
    tokenizer: ModelTokenizer

    def finish(self, lm: LM, key: Key, checked_key: str | None) -> None:
        """Measure the limits of the model's passes, and remember all of it for later starts."""
        with one_thread(lm.shape.num_parameters):
            lm.limits = find_native_limits(lm)
        keep(checked_key, Checked(lm.shape, lm.limits))
        keep_first(key, self.start, self.tokenizer)


@contextmanager
def nothing_ships() -> Iterator[None]:
    """First starts by transformers meanwhile, as for any other model."""
    global _ships
    before, _ships = _ships, False
    try:
        yield
    finally:
        _ships = before


def first_start(source: ModelSource, label: str) -> FirstStart | None:
    """The first start of a model in bfloat16; None for one that starts as ever."""
    file = source.gguf
    if not _ships or source.adapter is not None:
        return None
    try:
        if file is None:
            found = folder_start(source, label)
            return None if found is None else _first(*found)
        model = _Model.of(file)
        return None if model is None else model.start(source, label)
    except (OutriderError, OSError, AttributeError, KeyError, TypeError, ValueError, IndexError):
        return None  # a damaged file, which the usual way names


def _first(start: Start, shape: LMShape, tokenizer: ModelTokenizer) -> FirstStart:
    return FirstStart(start, Checked(shape, PassLimits(granularity=1)), tokenizer)


class _Model:
    """A GGUF file whose family's program ships."""

    def __init__(self, file: GgufFile, values: dict[str, Any], sizes: Sizes) -> None:
        self._file = file
        self._values = values  # of transformers' config
        self._sizes = sizes
        self._data = family(values["model_type"])
        self._plain = by_layer(self._data["plain"], sizes)
        self._blocks = by_layer(self._data["blocks"], sizes)
        if values["tie_word_embeddings"]:
            self._blocks["lm_head"] = self._blocks["model.embed_tokens"]

    @classmethod
    def of(cls, file: GgufFile) -> _Model | None:
        """None for a file of another kind. Raises errors of many kinds where it is damaged."""
        row = row_of(file)
        if row.positions != WHOLE or num_extra_layers(file):
            return None
        values = own_config(file, row)
        if values["model_type"] not in families():
            return None
        sizes = Sizes(
            layers=values["num_hidden_layers"],
            hidden=values["hidden_size"],
            mlp=values["intermediate_size"],
            heads=values["num_attention_heads"],
            kv_heads=values["num_key_value_heads"],
            head=values["head_dim"],
            vocabulary=values["vocab_size"],
            epsilon=values["rms_norm_eps"],
        )
        rotated = file.of_model("rope.dimension_count")
        is_usual = (
            sizes.is_covered
            and rotated in (None, sizes.head)
            and not values.get("sliding_window")
            and rope_scaling(file) is None
            and own_dtype(file) == DTYPE
        )
        model = cls(file, values, sizes) if is_usual else None
        return model if model is not None and model._has_its_tensors() else None

    def _has_its_tensors(self) -> bool:
        """Whether the file has the family's tensors, no others, in their shapes; all matrices in
        blocks."""
        named = self._sizes.named()
        shapes = {names[0]: tuple(shape) for names, _, shape in self._plain.values()}
        matrices = {layer: names[0] for layer, (names,) in self._blocks.items()}
        outputs = matrix_shapes(self.program)
        outputs["model.embed_tokens"] = (self._sizes.vocabulary, named["hidden"])
        for layer, name in matrices.items():
            if shapes.setdefault(name, outputs[layer]) != outputs[layer]:
                return False
        there = {tensor.name: tensor for tensor in self._file.tensors if tensor.name != FREQUENCIES}
        return (
            there.keys() == shapes.keys()
            and all(tensor.shape == shapes[name] for name, tensor in there.items())
            and all(there[name].kind.name in FORMS for name in matrices.values())
        )

    @property
    def program(self) -> dict[str, Any]:
        return program_of(self._data, self._sizes)

    def start(self, source: ModelSource, label: str) -> FirstStart | None:
        """None where its tokenizer needs transformers."""
        file = self._file
        sizes = self._sizes
        if (tokenizer := plain_tokenizer(file)) is None:
            return None
        plain_bytes, in_blocks = tensor_bytes(file.tensors, staying(file), DTYPE)
        kv = sizes.layers * 2 * sizes.kv_heads * sizes.head * DTYPE.itemsize
        ends = {*end_tokens(file)}
        if tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        start = Start(
            card=self._card(),
            tokenizer=None,  # it is kept when the start is
            dtype=str(DTYPE).removeprefix("torch."),
            ends=sorted(token for token in ends if token < sizes.vocabulary),
            asked=Asked(recommended(file)),
            notes=[blocks_note(file, label, on_kernels=True)],
            program=self.program,
            stored=self._stored(),
            waves=rotary_tables(sizes.head, self._values["rope_theta"], rope_factors(file)),
            memory=ModelMemory(source.name, plain_bytes + in_blocks, kv, in_blocks),
        )
        layer = LayerShape(sizes.kv_heads, sizes.head, sizes.head)
        weights = sum(int(np.prod(shape)) for _, _, shape in self._plain.values())
        tensors = {tensor.name: tensor.num_weights for tensor in file.tensors}
        weights += sum(tensors[names[0]] for (names,) in self._blocks.values())
        context = self._values["max_position_embeddings"]
        shape = LMShape(sizes.vocabulary, context, (layer,) * sizes.layers, None, weights)
        return _first(start, shape, tokenizer)

    def _card(self) -> ModelCard:
        """The card of transformers' config."""
        values = {name: value for name, value in self._values.items() if name != "rope_theta"}
        if ends := end_tokens(self._file):
            values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        more = {
            "rope_parameters": {"rope_theta": self._values["rope_theta"], "rope_type": "default"},
            "_name_or_path": str(self._file.path),
            "transformers_version": version("transformers"),
        }
        layers = self._sizes.layers
        more |= {name: [each] * layers for name, each in self._data["config_by_layer"].items()}
        context = values["max_position_embeddings"]
        return ModelCard(
            model_type=values["model_type"],
            commit=None,
            hidden_size=self._sizes.hidden,
            num_layers=self._sizes.layers,
            vocab_size=self._sizes.vocabulary,
            context_length=context,
            usable_context=context,
            ties_embeddings=values["tie_word_embeddings"],
            has_experts=False,
            quantisation=None,
            values=json.loads(json.dumps(self._data["config"] | values | more)),
        )

    def _stored(self) -> dict[str, Any]:
        """The places of the tensors in the file, as `tensor_store.find_stored` says them."""
        file = self._file
        shapes = {tensor.name: tensor.shape for tensor in file.tensors}
        orders: list[np.ndarray] = [SAME]
        known: dict[tuple[bytes, int], int] = {}
        arrange = row_of(file).arrange
        blocks = {}
        for layer, (names,) in self._blocks.items():
            rows = np.arange(shapes[names[0]][0])
            order = arrange(rows[:, None], names[0], self._values)[:, 0].astype(np.int64)
            number = 0
            if not np.array_equal(order, rows):
                number = known.setdefault((order.tobytes(), len(order)), len(orders))
                orders += [order] if number == len(orders) else []
            blocks[layer] = [names, number]
        texts = [tensor_as_text(torch.from_numpy(order.astype(np.int32))) for order in orders]
        return {
            "plain": self._plain,
            "few": {},
            "blocks": blocks,
            "orders": texts,
            "made": {"tensors": {}, "matrices": {}},
        }
