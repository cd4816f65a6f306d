"""The data from which first starts make programs of native families (`runtime/family_program.py`),
recorded anew from transformers' code.

Two small models of a family, of three and of four layers, are loaded and lowered as any other. All
their sizes differ, so that a number in their programs is the size that is equal to it; numbers that
change from layer to layer are told by comparing layers.

    python -m tools.family_programs           writes outrider/runtime/families/*.json
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from outrider.models.loading.folder_tokenizer import PLAIN_CLASSES
from outrider.runtime.family_program import FOLDER, LAYER, SECOND, STEP, Sizes
from outrider.runtime.ops import Code

LAYERS = (3, 4)
SIZES = Sizes(3, 480, 416, 12, 3, 32, 263, 1e-5)  # no two numbers of `named` are equal
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model type -> GGUF's name
# where an operation has a size, apart from its views
HEADS = 11
SCALE = 12


def main() -> None:
    """Write the data of every family."""
    for model_type, architecture in FAMILIES.items():
        path = FOLDER / f"{model_type}.json"
        path.write_text(as_text(recorded(model_type, architecture)), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB")


def as_text(data: dict[str, Any]) -> str:
    """The data as it is written: the same for the same data, an operation or a value a line."""
    lines = ["{"]
    for number, (name, entry) in enumerate(sorted(data.items())):
        if isinstance(entry, dict) and name in ("values", "body"):
            parts = []
            for part, entries in entry.items():
                rows = ",\n".join(f"  {json.dumps(each)}" for each in entries)
                parts.append(f'"{part}": [\n{rows}]')
            text = "{" + ",\n".join(parts) + "}"
        else:
            text = json.dumps(entry)
        lines.append(f"{json.dumps(name)}: {text}" + ("," if number < len(data) - 1 else ""))
    return "\n".join([*lines, "}", ""])


def recorded(model_type: str, architecture: str) -> dict[str, Any]:
    """The data of a family, from two models of it."""
    short, long = (_start(architecture, count) for count in LAYERS)
    return FamilyData(short, long).data(model_type)


def _start(architecture: str, layers: int) -> dict[str, Any]:
    """What a first start of a small model keeps, made with transformers."""
    from outrider import LLM
    from outrider.runtime import first_start

    with tempfile.TemporaryDirectory() as folder, _settings(OUTRIDER_CACHE=folder):
        file = Path(folder) / "small.gguf"
        write_small(file, architecture, layers)
        with first_start.nothing_ships():
            LLM(str(file), drafter="none", runtime="native")
        (kept,) = (Path(folder) / "starts").glob("*.json")
        start: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8").splitlines()[1])
        return start


def folder_config(model_type: str) -> dict[str, Any]:
    """What transformers reads where a folder's config.json names the family alone: its defaults;
    None for a head's size that is a share of the hidden size."""
    values, wide = (_folder_config(model_type, size) for size in ({}, {"hidden_size": 1 << 20}))
    if values.get("head_dim") != wide.get("head_dim"):
        values["head_dim"] = None
    changing = ("_name_or_path", "transformers_version", "layer_types")
    return {name: value for name, value in sorted(values.items()) if name not in changing}


def takes_tokenizer_json(model_type: str) -> bool:
    """Whether transformers takes a folder's tokenizer.json as it is where the folder says so; for
    some families it has a class of its own all the same."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        contents = {
            "config.json": {"model_type": model_type},
            "tokenizer_config.json": {"tokenizer_class": PLAIN_CLASSES[0]},
            "tokenizer.json": json.loads(Tokenizer(models.BPE()).to_str()),
        }
        for name, content in contents.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        return type(AutoTokenizer.from_pretrained(folder)).__name__ == PLAIN_CLASSES[0]


def _folder_config(model_type: str, more: dict[str, Any]) -> dict[str, Any]:
    from outrider.models.loading.load import load_config
    from outrider.models.loading.read_card import card_of
    from outrider.models.source import resolve

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"model_type": model_type, **more}), encoding="utf-8")
        return card_of(load_config(resolve(folder))).values


@contextmanager
def _settings(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


def write_small(path: Path, architecture: str, layers: int, sizes: Sizes = SIZES) -> None:
    """A GGUF file of this architecture with random weights, all matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_block_count(layers)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.mlp)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head)
    writer.add_layer_norm_rms_eps(sizes.epsilon)
    writer.add_vocab_size(sizes.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [*sorted(_letters()), "Ġt"]
    words = [*letters, *(f"<|{number}|>" for number in range(sizes.vocabulary - len(letters)))]
    writer.add_token_list(words)
    writer.add_token_types([1] * len(letters) + [3] * (len(words) - len(letters)))
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(len(words) - 1)
    dice = np.random.default_rng(3)
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (sizes.hidden,),
        "attn_q.weight": (queries, sizes.hidden),
        "attn_k.weight": (keys, sizes.hidden),
        "attn_v.weight": (keys, sizes.hidden),
        "attn_output.weight": (sizes.hidden, queries),
        "ffn_norm.weight": (sizes.hidden,),
        "ffn_gate.weight": (sizes.mlp, sizes.hidden),
        "ffn_up.weight": (sizes.mlp, sizes.hidden),
        "ffn_down.weight": (sizes.hidden, sizes.mlp),
    }
    if architecture == "qwen2":
        layer |= {f"attn_{part}.bias": layer[f"attn_{part}.weight"][:1] for part in "qkv"}
    if architecture == "qwen3":
        layer |= {f"attn_{part}_norm.weight": (sizes.head,) for part in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes.vocabulary, sizes.hidden)}
    for number in range(layers):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    shapes |= {"output_norm.weight": (sizes.hidden,), "output.weight": shapes["token_embd.weight"]}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = dice.normal(1.0 if "norm" in name else 0.0, 0.05, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


class FamilyData:
    """Two kept starts of one family, of three and of four layers, turned into its data."""

    def __init__(self, short: dict[str, Any], long: dict[str, Any]) -> None:
        self._short = short
        self._long = long
        self._names: dict[int, str] = {}
        for name, size in SIZES.named().items():
            assert size not in self._names, f"'{name}' and '{self._names[size]}' are both {size}"
            self._names[size] = name

    def data(self, model_type: str) -> dict[str, Any]:
        short, long = self._short["program"], self._long["program"]
        first, second, third, last = _layers(short["body"])
        longest = _layers(long["body"])[-1]
        begin, after, end = (
            _highest(part) for part in (first, first + second, first + second + third)
        )
        values = short["values"]
        one, other = (start["card"]["values"] for start in (self._short, self._long))
        epsilons = [*short["constants"]]
        expected = torch.tensor([SIZES.epsilon], dtype=torch.float32)
        from outrider.models.loading.tensor_store import tensor_of_text

        for text in short["constants"].values():
            assert torch.equal(tensor_of_text(text), expected), "a constant that is no epsilon"
        stored = self._short["stored"]
        weights = (stored["few"], *stored["made"].values())
        assert not any(weights), "weights that the file has not"
        return {
            "model_type": model_type,
            "transformers": self._short["card"]["values"]["transformers_version"],
            "values": {
                "first": [self._value(*[one] * 2) for one in values[:begin]],
                "layer": [
                    self._value(*pair)
                    for pair in zip(values[begin:after], values[after:end], strict=True)
                ],
                "last": [self._value(*[one] * 2) for one in values[end:]],
            },
            "body": {
                "first": [self._op(op, op, 0) for op in first],
                "layer": [self._op(*pair, 0) for pair in zip(second, third, strict=True)],
                "last": [self._op(*pair, 1) for pair in zip(last, longest, strict=True)],
            },
            "head": [self._op(*pair, 1) for pair in zip(short["head"], long["head"], strict=True)],
            "logits": self._view(short["logits"], long["logits"], 1),
            "epsilons": epsilons,
            "plain": self._entries(stored["plain"], lambda entry: entry),
            "blocks": self._entries(stored["blocks"], lambda entry: [entry[0]]),
            "config": {name: value for name, value in sorted(one.items()) if value == other[name]},
            "folder_config": folder_config(model_type),
            "takes_tokenizer_json": takes_tokenizer_json(model_type),
            "config_by_layer": {
                name: value[0]
                for name, value in sorted(one.items())
                if isinstance(value, list)
                and value * LAYERS[1] == other[name] * LAYERS[0]
                and value != other[name]
            },
        }

    def _entries(self, entries: dict[str, Any], kept: Callable[[Any], Any]) -> dict[str, Any]:
        """Entries by layer, told by those of the layer `SECOND`, and those of no layer."""
        mark = f".{SECOND}."
        found = {}
        for name, entry in entries.items():
            if mark in name or not re.search(r"\.\d+\.", name):
                tensors, *rest = kept(entry)
                named = [one.replace(mark, f".{LAYER}.") for one in tensors]
                sizes = [
                    [self._names[size] for size in part] if isinstance(part, list) else part
                    for part in rest
                ]
                found[name.replace(mark, f".{LAYER}.")] = [named, *sizes]
        return found

    def _value(self, one: list[Any], other: list[Any]) -> list[Any]:
        """A value of the layer `SECOND`, and the same of the next."""
        assert one[:3] == other[:3], (one, other)
        name = one[3] if one[3] == other[3] else one[3].replace(f".{SECOND}.", f".{LAYER}.")
        return [self._size(one[0]), *one[1:3], name]

    def _op(self, one: list[Any], other: list[Any], back: int) -> list[Any]:
        """`back`: what to add where one is of the whole program with three layers, since steps
        count from the layer `SECOND`."""
        made = [self._number(*pair, back) for pair in zip(one, other, strict=True)]
        made[1] = [self._view(*pair, back) for pair in zip(one[1], other[1], strict=True)]
        made[2] = None if one[2] is None else self._view(one[2], other[2], back)
        if one[HEADS]:
            made[HEADS] = {SIZES.heads: "heads", SIZES.kv_heads: "kv_heads"}[one[HEADS]]
        if one[SCALE] != 1.0:
            assert one[SCALE] == SIZES.scale, one
            made[SCALE] = "scale"
        return made

    def _view(self, one: list[int], other: list[int], back: int) -> list[Any]:
        assert one[1:] == other[1:], (one, other)
        return [self._number(one[0], other[0], back), *map(self._size, one[1:])]

    def _number(self, one: Any, other: Any, back: int) -> Any:
        """A number or a name that the next layer has another one in place of, or the same."""
        if one == other or isinstance(one, list):
            return one
        if isinstance(one, str):
            return one.replace(f".{SECOND}.", f".{LAYER}.")
        return {STEP: [one - back * (other - one), other - one]}

    def _size(self, number: int) -> int | str:
        if number in (0, 1):
            return number
        return self._names[number]


def _layers(body: list[list[Any]]) -> list[list[list[Any]]]:
    """The operations of each layer, what comes before with the first; last what comes after."""
    starts = [number for number, op in enumerate(body) if op[0] == Code.SIGNAL][1:-1]
    edges = [0, *starts, len(body)]
    return [body[begin:end] for begin, end in pairwise(edges)]


def _highest(body: list[list[Any]]) -> int:
    """One more than the highest value that operations name."""
    views = (view for op in body for view in (*op[1], op[2]) if view is not None)
    return 1 + max(view[0] for view in views)


if __name__ == "__main__":
    main()
