"""Prompts as callers give them, made into texts or token ids: one or many, as text, lists, tensors
or dictionaries.

    "a text"                                [1, 2, 3]                                   one prompt
    ["a text", [1, 2, 3]]                   tensors and arrays of two dimensions        several
    {"prompt": "a text"}                    {"prompt_token_ids": [1, 2, 3]}             vLLM's dictionaries
    tokenizer("a text")                     tokenizer(["a", "b"], padding=True, return_tensors="pt")

Tokens that an attention mask hides are padding and are left out. Whatever else is given is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor

from outrider.errors import ConfigError, RequestError, did_you_mean

# NumPy's arrays, too, which are no type to mypy
Prompt = str | Sequence[int] | Mapping[str, Any] | Tensor
EXPECTED = 'give text, token ids (a flat list of whole numbers), {"prompt": ...}, {"prompt_token_ids": ...} or tokenizer(...)'
VLLM = ("prompt", "prompt_token_ids")
TOKENIZER = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
)
TEXT_ONLY = "models are given text only here"
REFUSED = {
    "multi_modal_data": TEXT_ONLY,
    "multi_modal_uuids": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "pixel_values": TEXT_ONLY,
    "prompt_embeds": "prompts are text or token ids",
    "inputs_embeds": "prompts are text or token ids",
    "cache_salt": "no cache is shared between calls",
}
# members are no prompts or have no order
NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, PathLike, set, frozenset)
SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True)
class ReadPrompt:
    """One prompt. `token_ids` is what the model continues; None: the tokenizer makes them of
    `text`."""

    text: str | None = None
    token_ids: list[int] | None = None


def read_prompts(given: Any, tokenizer: Any = None) -> list[ReadPrompt]:
    """Every prompt in `given`, in order. `tokenizer`: its padding token is looked for in batches
    without an attention mask.

    Raises RequestError for what is no prompt.
    """
    return _Reader("prompt", tokenizer).read(given)[0]


def read_predictions(given: Any, count: int) -> list[ReadPrompt | None]:
    """The prediction for each of `count` answers: one for all, or one each, None where nothing is
    expected.

    Raises RequestError for what is no prediction, ConfigError where there are more or fewer.
    """
    if given is None:
        return [None] * count
    predictions, is_one = _Reader("prediction", optional=True).read(given)
    if is_one:
        return predictions * count
    if len(predictions) != count:
        raise ConfigError(
            f"{len(predictions)} predictions for {count} prompts; give one, or one for each"
        )
    return predictions


class _Reader:
    """Reads prompts, or predictions: `kind` is what messages call them; `optional` ones may be None
    in a list."""

    def __init__(self, kind: str, tokenizer: Any = None, *, optional: bool = False) -> None:
        self._kind = kind
        self._optional = optional
        self._pad = getattr(tokenizer, "pad_token_id", None)
        self._begin = getattr(tokenizer, "bos_token_id", None)

    def read(self, given: Any) -> tuple[list[Any], bool]:
        """(all that is in `given`, whether it is a single one rather than a list of them)."""
        first = f"{self._kind} 0"
        if isinstance(given, str):
            return [ReadPrompt(text=given)], True
        if isinstance(given, Mapping):
            return self._mapping(given, first)
        if _is_array(given):
            rows, is_one = _array_rows(given, first)
            return self._batch(rows), is_one
        items = _listed(given, first)
        if items and _is_token(items[0]):
            return [ReadPrompt(token_ids=_flat(items, first))], True
        return self._each(items), False

    def _each(self, items: list[Any]) -> list[ReadPrompt | None]:
        """Members of a list, each one prompt."""
        members = [
            self._member(item, f"{self._kind} {number}") for number, item in enumerate(items)
        ]
        if not any(item is None or isinstance(item, str | Mapping) for item in items):
            self._check_padding(
                [member.token_ids or [] for member in members if member is not None]
            )
        return members

    def _member(self, item: Any, called: str) -> ReadPrompt | None:
        if item is None and self._optional:
            return None
        if isinstance(item, str):
            return ReadPrompt(text=item)
        if isinstance(item, Mapping):
            found = self._mapping(item, called)[0]
            if len(found) != 1:
                raise RequestError(
                    f"{called} is a dictionary of {len(found)} prompts; inside a list each holds "
                    "one"
                )
            return found[0]
        return ReadPrompt(token_ids=_ids(item, called))

    def _mapping(self, given: Mapping[str, Any], called: str) -> tuple[list[ReadPrompt], bool]:
        """vLLM's dictionaries, which hold one prompt, and a tokenizer's, which may hold a batch."""
        fields = {name: value for name, value in given.items() if value is not None}
        for name in fields:
            if name in REFUSED:
                raise RequestError(
                    f"{called} has '{name}', which is not supported: {REFUSED[name]}"
                )
            if name not in (*VLLM, *TOKENIZER):
                raise RequestError(
                    f"{called} has an unknown key "
                    f"'{name}'.{did_you_mean(str(name), (*VLLM, *TOKENIZER))}"
                )
        if "input_ids" in fields:
            if others := [name for name in VLLM if name in fields]:
                raise RequestError(
                    f"{called} has both 'input_ids' and '{others[0]}': give one of them"
                )
            return self._encoded(fields, called)
        if "prompt_token_ids" in fields:
            return [
                ReadPrompt(
                    _text(fields.get("prompt"), called),
                    self._one_row(fields["prompt_token_ids"], called),
                )
            ], True
        if "prompt" in fields:
            return [ReadPrompt(_text(fields["prompt"], called))], True
        raise RequestError(
            f"{called} is a dictionary without a prompt, got {_shown(dict(given))}; {EXPECTED}"
        )

    def _one_row(self, token_ids: Any, called: str) -> list[int]:
        rows, _ = _rows(token_ids, f"prompt_token_ids of {called}")
        if len(rows) != 1:
            raise RequestError(
                f"prompt_token_ids of {called} holds {len(rows)} prompts; give one dictionary for "
                "each"
            )
        return rows[0]

    def _encoded(self, fields: Mapping[str, Any], called: str) -> tuple[list[ReadPrompt], bool]:
        """The ids that a tokenizer returned, without those that the mask hides."""
        rows, is_one = _rows(fields["input_ids"], f"input_ids of {called}")
        if "attention_mask" not in fields:
            return self._batch(rows), is_one
        ids = _real(rows, fields["attention_mask"], is_one, called)
        return [ReadPrompt(token_ids=row) for row in ids], is_one

    def _batch(self, rows: list[list[int]]) -> list[ReadPrompt]:
        self._check_padding(rows)
        return [ReadPrompt(token_ids=row) for row in rows]

    def _check_padding(self, rows: list[list[int]]) -> None:
        """Rows made equally long by padding tokens must not be continued as if those were text."""
        if len(rows) < 2 or self._pad is None or len({len(row) for row in rows}) != 1:
            return
        for number, row in enumerate(rows):
            begins = row[:1] == [self._pad] and (
                self._pad != self._begin or row[:2] == [self._pad] * 2
            )
            if begins or row[-1:] == [self._pad]:
                raise RequestError(
                    f"{self._kind} {number} begins or ends with the padding token {self._pad}, "
                    "and nothing says whether it "
                    "is text: give all that the tokenizer returned, its mask included, or "
                    '{"prompt_token_ids": ...} for each'
                )


def _rows(given: Any, called: str) -> tuple[list[list[int]], bool]:
    """Token ids as (rows, whether there is but one)."""
    if _is_array(given):
        return _array_rows(given, called)
    items = _listed(given, called)
    if not items or _is_token(items[0]):
        return [_flat(items, called)], True
    rows = [_ids(item, called) for item in items]
    return rows, len(rows) == 1


def _ids(item: Any, called: str) -> list[int]:
    """The token ids of a member of a list."""
    if not _is_array(item):
        return _flat(_listed(item, called), called)
    rows, _ = _array_rows(item, called)
    if len(rows) != 1:
        raise RequestError(
            f"{called} is {_shown(item)}; inside a list each tensor holds one prompt"
        )
    return rows[0]


def _real(rows: list[list[int]], mask: Any, is_one: bool, called: str) -> list[list[int]]:
    """`rows` without the tokens whose mask is 0."""
    values = mask.tolist() if _is_array(mask) else _listed(mask, f"attention_mask of {called}")
    masks = [values] if is_one and not (values and isinstance(values[0], Iterable)) else values
    lengths = [len(list(mask)) if isinstance(mask, Iterable) else None for mask in masks]
    if lengths != [len(row) for row in rows]:
        raise RequestError(f"attention_mask of {called} has another shape than its input_ids")
    if odd := [value for mask in masks for value in mask if value not in (0, 1)]:
        raise RequestError(
            f"attention_mask of {called} has {_shown(odd[0])}; 1 is a token, 0 is padding"
        )
    return [
        [token for token, real in zip(row, one, strict=True) if real]
        for row, one in zip(rows, masks, strict=True)
    ]


def _listed(given: Any, called: str) -> list[Any]:
    """The members of anything that has some in an order, generators included."""
    if isinstance(given, NO_LISTS) or not isinstance(given, Iterable):
        raise RequestError(f"{called} is {_shown(given)}; {EXPECTED}{_hint(given)}")
    return list(given)


def _hint(given: Any) -> str:
    if isinstance(given, bytes | bytearray):
        return ". Decode bytes first: data.decode()"
    if isinstance(given, PathLike):
        return ". Read the file first: Path(...).read_text()"
    return ""


def _is_array(given: Any) -> bool:
    """Tensors and arrays; NumPy's arrays of strings and objects are lists to us."""
    return isinstance(given, Tensor) or (
        isinstance(given, np.ndarray) and given.dtype.kind not in "UO"
    )


def _array_rows(given: Any, called: str) -> tuple[list[list[int]], bool]:
    """A tensor or array of whole numbers as (rows, whether there is but one)."""
    if not str(given.dtype).removeprefix("torch.").startswith(("int", "uint")):
        raise RequestError(f"{called} is {_shown(given)}; token ids are whole numbers")
    if given.ndim not in (1, 2):
        raise RequestError(
            f"{called} is {_shown(given)}; token ids have one dimension, a batch of them two"
        )
    rows = given.tolist() if given.ndim == 2 else [given.tolist()]
    return rows, len(rows) == 1


def _is_token(value: Any) -> bool:
    """A whole number, Python's, NumPy's or a tensor of no dimension. True and False are none."""
    if isinstance(value, Tensor):
        return (
            value.ndim == 0
            and not value.is_floating_point()
            and not value.is_complex()
            and str(value.dtype) != "torch.bool"
        )
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iu"
    return isinstance(value, Integral) and not isinstance(value, bool)


def _flat(items: Sequence[Any], called: str) -> list[int]:
    for index, item in enumerate(items):
        if not _is_token(item):
            raise RequestError(
                f"{called} has {_shown(item)} at position {index}, where a token id (a whole "
                "number) is expected"
            )
    return [int(item) for item in items]


def _text(value: Any, called: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(
            f"'prompt' of {called} must be text, got {_shown(value)}; token ids go into "
            "'prompt_token_ids'"
        )
    return value


def _shown(value: Any) -> str:
    """A wrong value with its type, short enough for a message."""
    if value is None:
        return "None"
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of {str(value.dtype).removeprefix('torch.')} with shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= SHOWN else text[: SHOWN - 1] + '…'} ({type(value).__name__})"
