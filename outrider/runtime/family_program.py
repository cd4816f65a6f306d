"""The program of a pass for any model of a family, made of data that ships: so a first start needs
no module of transformers' to record one.

A family's models differ in a few sizes and in how many layers they have. The data is a program
that was recorded from transformers' code (`tools/family_programs.py`), in which sizes have names,
and what changes from one layer to the next has a step:

    "hidden"          a size, see `Sizes`
    {"+": [44, 40]}   44 in the second layer (in `last`: 44 with two layers), 40 more in each further one
    "{layer}"         in a name: the layer's number

`tests/unit/runtime/test_family_program.py` compares what comes out with programs that are recorded
anew, to the last number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from outrider.models.loading.tensor_store import tensor_as_text
from outrider.runtime.ops import Code
from outrider.wellformed import load_json

FOLDER = Path(__file__).parent / "families"
SECOND = 1  # the layer that stands for all but the first
STEP = "+"
LAYER = "{layer}"
WEIGHT = 4  # the place of a weight's name in an operation


@dataclass(frozen=True)
class Sizes:
    """The numbers by which models of one family differ."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    epsilon: float

    def named(self) -> dict[str, int]:
        """The numbers by the names that they have in a family's data."""
        sizes = asdict(self)
        del sizes["layers"], sizes["epsilon"]
        queries = self.heads * self.head
        keys = self.kv_heads * self.head
        return {
            **sizes,
            "half": self.head // 2,
            "queries": queries,
            "keys": keys,
            "half_queries": queries // 2,
            "half_keys": keys // 2,
        }

    @property
    def scale(self) -> float:
        """The factor of products of queries and keys."""
        return float(self.head**-0.5)

    @property
    def is_covered(self) -> bool:
        """Whether the data describes such models: blocks of one row are written down in another
        way."""
        return self.layers > SECOND and min(self.heads, self.kv_heads) > 1 and self.head % 2 == 0


def families() -> frozenset[str]:
    """The model types whose programs ship."""
    return frozenset(path.stem for path in FOLDER.glob("*.json"))


@lru_cache(maxsize=8)
def family(model_type: str) -> dict[str, Any]:
    """A family's data."""
    data: dict[str, Any] = load_json(FOLDER / f"{model_type}.json")
    return data


def program_of(data: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The program of a model of these sizes, as `program_text.written` has it."""
    named = sizes.named() | {"scale": sizes.scale}
    parts = {}
    for name in ("values", "body"):
        stored = data[name]
        parts[name] = list(made(stored["first"], named, SECOND))
        for layer in range(SECOND, sizes.layers):
            parts[name] += made(stored["layer"], named, layer)
        parts[name] += made(stored["last"], named, sizes.layers - 1)
    epsilon = tensor_as_text(torch.tensor([sizes.epsilon], dtype=torch.float32))
    return {
        **parts,
        "head": made(data["head"], named, sizes.layers - 1),
        "logits": made(data["logits"], named, sizes.layers - 1),
        "signals": [*range(sizes.layers + 1), -1],
        "hidden_size": sizes.hidden,
        "states": [],
        "constants": {name: epsilon for name in data["epsilons"]},
    }


def with_parameters(program: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """The program of a model whose matrices are plain: operations name parameters, not layers."""
    table = "model.embed_tokens.weight"

    def named(op: list[Any]) -> list[Any]:
        if op[0] not in (Code.LINEAR, Code.EMBED):
            return op
        name = table if is_tied and op[WEIGHT] == "lm_head" else f"{op[WEIGHT]}.weight"
        return [*op[:WEIGHT], name, *op[WEIGHT + 1 :]]

    changed = {part: [named(op) for op in program[part]] for part in ("body", "head")}
    return {**program, **changed}


def matrix_shapes(program: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices that a program multiplies by, under the names it has for
    them."""
    linears = (op for op in (*program["body"], *program["head"]) if op[0] == Code.LINEAR)
    return {op[WEIGHT]: (op[2][1] * op[2][2], op[1][0][1] * op[1][0][2]) for op in linears}


def rotary_tables(size: int, theta: float, factors: torch.Tensor | None) -> list[dict[str, Any]]:
    """Cosines and sines of a head's size, of frequencies as transformers computes them, divided by
    factors."""
    even = torch.arange(0, size, 2, dtype=torch.int64).to(dtype=torch.float)
    frequencies = 1.0 / (theta ** (even / size))
    if factors is not None:
        frequencies = frequencies / factors
    wave = {
        "frequencies": frequencies.tolist(),
        "scale": 1.0,
        "times": 2,
        "side_by_side": False,
        "dtype": "bfloat16",
    }
    return [{**wave, "is_sine": is_sine} for is_sine in (False, True)]


def by_layer(entries: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Entries of a family's data under names with a layer's number, for every layer of a model."""
    named: dict[str, Any] = sizes.named()
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        for layer in range(sizes.layers) if LAYER in name else (0,):
            found[name.replace(LAYER, str(layer))] = made(entry, named, layer)
    return found


def made(data: Any, sizes: Mapping[str, Any], layer: int) -> Any:
    """Plain data with the sizes and the layer's number in place of their names."""
    if isinstance(data, list):
        return [made(entry, sizes, layer) for entry in data]
    if isinstance(data, dict):
        first, step = data[STEP]
        return first + step * (layer - SECOND)
    if isinstance(data, str):
        return sizes[data] if data in sizes else data.replace(LAYER, str(layer))
    return data
