"""First starts of checkpoint folders from what ships: plain weights in safetensors files, of the
families whose programs ship.

`first_start.py` says which starts these are. config.json may hold what transformers' class of the
family has by default, the model's sizes, its base of positions, its tokens and its dropout; a
folder with anything else starts as ever.
"""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.kv import LayerShape
from outrider.models.card import ModelCard
from outrider.models.gguf.experts import SAME
from outrider.models.lm import LMShape
from outrider.models.loaded import ModelMemory
from outrider.models.loading.folder_tokenizer import plain_folder_tokenizer
from outrider.models.loading.generation_config import FILE, TAKEN, Asked
from outrider.models.loading.load import load_tokenizer
from outrider.models.loading.tensor_store import tensor_as_text
from outrider.models.loading.weight_files import safetensors_header, weight_files
from outrider.models.source import ModelSource
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.runtime.family_program import (
    Sizes,
    by_layer,
    families,
    family,
    matrix_shapes,
    program_of,
    rotary_tables,
    with_parameters,
)
from outrider.runtime.kept import Start
from outrider.wellformed import load_object

DTYPE = torch.bfloat16
STORED = ("BF16", "F32")  # types of tensors, of which bfloat16 is made
TABLE = "model.embed_tokens.weight"
SIZES = {  # of config.json -> of Sizes
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "mlp",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocabulary",
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# of training or of transformers' own loop, or without a meaning where no window slides
WITHOUT_EFFECT = ("attention_dropout", "initializer_range", "use_cache", "max_window_layers")
GENERATION = (*TOKENS, "do_sample", "transformers_version", "_from_model_config", *TAKEN)
IDLE = ("output_attentions", "output_hidden_states", "use_cache")  # of generation_config.json


class FolderStart(NamedTuple):
    """A folder's start, the shape of its passes and its tokenizer."""

    start: Start
    shape: LMShape
    tokenizer: ModelTokenizer


def folder_start(source: ModelSource, label: str) -> FolderStart | None:
    """The start of a folder on this machine; None for one of another kind. Raises errors of many
    kinds where it is damaged."""
    folder = Path(source.name).expanduser()
    if source.folder != folder or not folder.is_dir():
        return None
    given = load_object(folder / "config.json")
    model_type = given.get("model_type")
    if model_type not in families() or not family(model_type)["takes_tokenizer_json"]:
        return None
    values = _values(given, family(model_type))
    asked = load_object(folder / FILE)
    if values is None or any(asked[name] for name in IDLE[:2] if name in asked):
        return None
    if asked.keys() - {*GENERATION, *IDLE}:
        return None
    tokenizer = plain_folder_tokenizer(folder, lambda: load_tokenizer(source))
    model = _FolderModel(folder, values)
    if tokenizer is None or not model.has_its_tensors():
        return None
    return model.start(source, label, asked, tokenizer)


def _values(given: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """The values of transformers' config of the family; None where config.json says something that
    the program may not do."""
    defaults: dict[str, Any] = data["folder_config"]
    given = dict(given)
    given.pop("transformers_version", None)
    if "torch_dtype" in given:  # until transformers 4
        given.setdefault("dtype", given.pop("torch_dtype"))
    if given.get("rope_scaling", 0) is None:
        del given["rope_scaling"]
    if "rope_theta" in given:
        theta = given.pop("rope_theta")
        given.setdefault("rope_parameters", {"rope_theta": theta, "rope_type": "default"})
    if "sliding_window" in given and given.get("use_sliding_window") is False:
        given["sliding_window"] = None
    layers = given.get("num_hidden_layers", defaults["num_hidden_layers"])
    for name, each in data["config_by_layer"].items():
        listed = given.pop(name, None)
        if listed is not None and (len(listed) != layers or any(one != each for one in listed)):
            return None
    values = defaults | given
    if "head_dim" in defaults and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    is_known = not given.keys() - defaults.keys()
    return values if is_known and _is_usual(values, defaults) else None


def _is_usual(values: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether a model with these values computes what the family's program does."""
    own = {*SIZES, "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters"}
    own |= {"dtype", "architectures", "tie_word_embeddings", *TOKENS, *WITHOUT_EFFECT}
    rope = values["rope_parameters"]
    kind = f"{values['model_type']}ForCausalLM".lower()
    return (
        all(values[name] == defaults[name] for name in defaults.keys() - own)
        and all(type(values[name]) is int and values[name] > 0 for name in _numbers(values))
        and type(values["rms_norm_eps"]) is float
        and type(values["tie_word_embeddings"]) is bool
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) in (int, float)
        and values["dtype"] == "bfloat16"
        and [one.lower() for one in values["architectures"] or [kind]] == [kind]
        and all(_is_token(values[name], values["vocab_size"]) for name in TOKENS)
    )


def _numbers(values: dict[str, Any]) -> list[str]:
    head = ["head_dim"] if "head_dim" in values else []
    return [*SIZES, *head, "max_position_embeddings"]


def _is_token(value: Any, vocabulary: int) -> bool:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(token) is int and 0 <= token < vocabulary for token in tokens)


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


class _FolderModel:
    """A folder whose family's program ships."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self._folder = folder
        self._values = values
        self._data = family(values["model_type"])
        share = values["hidden_size"] // values["num_attention_heads"]
        self._sizes = Sizes(
            **{ours: values[theirs] for theirs, ours in SIZES.items()},
            head=values.get("head_dim", share),
            epsilon=values["rms_norm_eps"],
        )

    @cached_property
    def _program(self) -> dict[str, Any]:
        program = program_of(self._data, self._sizes)
        return with_parameters(program, is_tied=self._values["tie_word_embeddings"])

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the family has."""
        shapes: dict[str, tuple[int, ...]] = {**matrix_shapes(self._program)}
        shapes[TABLE] = (self._sizes.vocabulary, self._sizes.hidden)
        plain = by_layer(self._data["plain"], self._sizes)
        return shapes | {name: tuple(shape) for name, (_, _, shape) in plain.items()}

    def has_its_tensors(self) -> bool:
        """Whether the files have the family's tensors, no others, in their shapes."""
        files = weight_files(self._folder)
        headers = [safetensors_header(file) for file in files if file.suffix == ".safetensors"]
        there = {name: entry for header in headers for name, entry in header.items()}
        if len(headers) < len(files) or not self._sizes.is_covered:
            return False
        if self._sizes.layers > len(there):  # a damaged number, of which no program is made
            return False
        shapes = {name: tuple(entry["shape"]) for name, entry in there.items()}
        return shapes == self._shapes and all(entry["dtype"] in STORED for entry in there.values())

    def start(
        self, source: ModelSource, label: str, asked: dict[str, Any], tokenizer: ModelTokenizer
    ) -> FolderStart:
        """`asked`: generation_config.json."""
        sizes = self._sizes
        shapes = self._shapes
        weights = sum(prod(shape) for shape in shapes.values())
        kv = sizes.layers * 2 * sizes.kv_heads * sizes.head * DTYPE.itemsize
        named = _listed(asked.get("eos_token_id")) or _listed(self._values["eos_token_id"])
        ends = {*named, *_listed(tokenizer.eos_token_id)}
        kept = {name: asked[name] for name in (*TAKEN, "do_sample") if asked.get(name) is not None}
        start = Start(
            card=self._card(source),
            tokenizer=None,  # it is kept when the start is
            dtype="bfloat16",
            ends=sorted(token for token in ends if 0 <= token < sizes.vocabulary),
            asked=Asked(kept),
            notes=[],
            program=self._program,
            stored={
                "plain": {name: [[name], "bfloat16", [*shape]] for name, shape in shapes.items()},
                "few": {},
                "blocks": {},
                "orders": [tensor_as_text(torch.from_numpy(SAME.astype(np.int32)))],
                "made": {"tensors": {}, "matrices": {}},
            },
            waves=rotary_tables(sizes.head, self._values["rope_parameters"]["rope_theta"], None),
            memory=ModelMemory(label, weights * DTYPE.itemsize, kv),
        )
        layer = LayerShape(sizes.kv_heads, sizes.head, sizes.head)
        context = self._values["max_position_embeddings"]
        layers = (layer,) * sizes.layers
        shape = LMShape(sizes.vocabulary, context, layers, None, weights)
        return FolderStart(start, shape, tokenizer)

    def _card(self, source: ModelSource) -> ModelCard:
        """The card of transformers' config."""
        layers = self._sizes.layers
        by_number = {name: [each] * layers for name, each in self._data["config_by_layer"].items()}
        own = {"_name_or_path": source.name, "transformers_version": version("transformers")}
        context = self._values["max_position_embeddings"]
        return ModelCard(
            model_type=self._values["model_type"],
            commit=None,
            hidden_size=self._sizes.hidden,
            num_layers=layers,
            vocab_size=self._sizes.vocabulary,
            context_length=context,
            usable_context=context,
            ties_embeddings=self._values["tie_word_embeddings"],
            has_experts=False,
            quantisation=None,
            values=self._values | by_number | own,
        )
