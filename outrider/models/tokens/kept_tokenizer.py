"""A model's tokenizer as an earlier start kept it: the `tokenizers` part of transformers' tokenizer, and its few values.

transformers is not imported to encode and decode text. Whatever else is asked for (padding, offsets, tensors) is asked of the
real tokenizer, which is then loaded.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from outrider.lazy import transformers

VALUES = (
    "bos_token", "eos_token", "unk_token", "pad_token", "bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id",
    "all_special_ids", "special_tokens_map", "chat_template", "padding_side", "name_or_path",
)  # fmt: skip
PLAIN = ("__call__", "_encode_plus", "decode", "_decode", "apply_chat_template", "get_chat_template", "get_vocab")  # methods
SAMPLES = ("Hello, world!", "  Zwölf Boxkämpfer\n\n\tjagen 12 345 … 🙂", "")


class KeptTokenizer:
    """Answers what transformers' tokenizer of the same model answers."""

    def __init__(self, kept: dict[str, Any], whole: Callable[[], Any]) -> None:
        """`kept`: what `written` gave; `whole` loads the real tokenizer."""
        self.backend_tokenizer = Tokenizer.from_str(kept["backend"])
        self.backend_tokenizer.encode_special_tokens = kept["splits_special_tokens"]
        values = ast.literal_eval(kept["values"])
        if values.keys() != set(VALUES):
            raise ValueError("values of another tokenizer")
        self.__dict__ |= values
        self._load_whole, self._loaded = whole, None

    @property
    def whole(self) -> Any:
        """transformers' own."""
        if self._loaded is None:
            self._loaded = self._load_whole()
        return self._loaded

    def __call__(self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True, **others: Any) -> Any:
        """Token ids of a text, under "input_ids"."""
        if others or not isinstance(text, str):
            return self.whole(text, add_special_tokens=add_special_tokens, verbose=verbose, **others)
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, ids: Any, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of some tokens."""
        if clean_up_tokenization_spaces is not False or not isinstance(ids, list):
            cleans = clean_up_tokenization_spaces
            return str(self.whole.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=cleans))
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Every token's id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptTokenizer:
        twin = copy.copy(self)
        twin.backend_tokenizer, twin._loaded = copy.deepcopy((self.backend_tokenizer, self._loaded), memo)
        return twin

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_load_whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.whole, name)


def whole_tokenizer(tokenizer: Any) -> Any:
    """transformers' tokenizer, whichever of both this is."""
    return tokenizer.whole if isinstance(tokenizer, KeptTokenizer) else tokenizer


def written(tokenizer: Any) -> dict[str, Any] | None:
    """A tokenizer as text, for `KeptTokenizer`; None for one of which more than that decides what it does."""
    plain: Any = transformers.PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain) or any(getattr(type(tokenizer), name) is not getattr(plain, name) for name in PLAIN):
        return None
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    values = {name: getattr(tokenizer, name) for name in VALUES}
    if not (values["chat_template"] is None or isinstance(values["chat_template"], str)):
        return None
    kept = {"backend": backend.to_str(), "values": repr(values), "splits_special_tokens": bool(tokenizer.split_special_tokens)}
    again = KeptTokenizer(kept, lambda: tokenizer)
    same = all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in SAMPLES)
    return kept if same and all(getattr(again, name) == value for name, value in values.items()) else None
