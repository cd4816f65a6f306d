"""A model's tokenizer: the `tokenizers` part of transformers' one, the tokens with a meaning, and
the chat template.

Encoding and decoding take no more than that, so that a start imports no transformers. Where
transformers' class does more (code of a checkpoint, an older tokenizer in Python), its own object
stays; both answer the same calls.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.lazy import transformers

VALUES = ("bos_token_id", "eos_token_id", "all_special_ids", "special_tokens_map", "chat_template")
# methods
PLAIN = (
    "__call__",
    "_encode_plus",
    "decode",
    "_decode",
    "apply_chat_template",
    "get_chat_template",
    "get_vocab",
)
SAMPLES = ("Hello, world!", "  Zwölf Boxkämpfer\n\n\tjagen 12 345 … 🙂", "")


class ModelTokenizer:
    """Answers as transformers' tokenizer of the same model does."""

    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]
    special_tokens_map: dict[str, str]
    chat_template: str | None

    def __init__(self, record: Mapping[str, Any], load_whole: Callable[[], Any]) -> None:
        """`record`: plain data, kept for later starts; `load_whole` loads transformers' tokenizer.

        Raises an error of any kind for a record that is none.
        """
        values = record["values"]
        if values.keys() != set(VALUES):
            raise ValueError("values of another tokenizer")
        self.backend_tokenizer = Tokenizer.from_str(record["backend"])
        self.backend_tokenizer.encode_special_tokens = record["splits_special_tokens"]
        self.__dict__ |= values
        self._load_whole = load_whole
        self._whole: Any = None

    @classmethod
    def around(
        cls, backend: Tokenizer, values: Mapping[str, Any], load_whole: Callable[[], Any]
    ) -> ModelTokenizer:
        """One of a `tokenizers` part that was just made, and the values of VALUES. A large
        vocabulary takes long to be written down and read again."""
        tokenizer = cls.__new__(cls)
        tokenizer.backend_tokenizer = backend
        tokenizer.__dict__ |= values
        tokenizer._load_whole = load_whole
        tokenizer._whole = None
        return tokenizer

    @classmethod
    def of(cls, tokenizer: Any) -> ModelTokenizer | None:
        """A tokenizer of transformers as one of ours; None where code of its class decides its
        answers."""
        plain: Any = transformers.PreTrainedTokenizerFast
        if not isinstance(tokenizer, plain):
            return None
        if any(getattr(type(tokenizer), name) is not getattr(plain, name) for name in PLAIN):
            return None
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        values = {name: getattr(tokenizer, name) for name in VALUES}
        if not (values["chat_template"] is None or isinstance(values["chat_template"], str)):
            return None
        record = {
            "backend": backend.to_str(),
            "values": values,
            "splits_special_tokens": bool(tokenizer.split_special_tokens),
        }
        try:
            json.dumps(record)
        except TypeError:  # no plain data
            return None
        wrapped = cls(record, lambda: tokenizer)
        is_same = all(
            wrapped(text)["input_ids"] == tokenizer(text)["input_ids"] for text in SAMPLES
        )
        return wrapped if is_same else None

    @property
    def record(self) -> dict[str, Any]:
        """Plain data from which a later start makes it again."""
        values = {name: getattr(self, name) for name in VALUES}
        splits = self.backend_tokenizer.encode_special_tokens
        return {
            "backend": self.backend_tokenizer.to_str(),
            "values": values,
            "splits_special_tokens": splits,
        }

    @property
    def whole(self) -> Any:
        """transformers' own."""
        if self._whole is None:
            self._whole = self._load_whole()
        return self._whole

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        """Token ids of a text, under "input_ids". `verbose` is transformers' word for its warnings
        of long texts, which no one needs who counts tokens."""
        return {
            "input_ids": self.backend_tokenizer.encode(
                text, add_special_tokens=add_special_tokens
            ).ids
        }

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of some tokens. Raises ValueError where spaces are to be cleaned up, which no
        caller of ours wants."""
        if clean_up_tokenization_spaces:
            raise ValueError(
                "spaces are kept as the tokens have them; the tokenizer of transformers (`whole`) "
                "cleans them up"
            )
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Every token's id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are matched whole, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelTokenizer:
        twin = copy.copy(self)
        twin.backend_tokenizer = copy.deepcopy(self.backend_tokenizer, memo)
        twin._whole = copy.deepcopy(self._whole, memo)
        return twin


def whole_tokenizer(tokenizer: Any) -> Any:
    """transformers' tokenizer, whichever of both this is."""
    return tokenizer.whole if isinstance(tokenizer, ModelTokenizer) else tokenizer
