"""Special tokens in the texts of clients, spelled as text: a user who writes `<|im_end|>` ends no
turn.

The special tokens that a chat template writes stay what they are. So each that stands in a client's
text gets marks around it before the template is rendered. Afterwards those without marks get
another name, and the text is read by a copy of the tokenizer that knows special tokens by these
names alone. What clients wrote is ordinary text to it, in one piece with the text around it; a text
that names no special token has the tokens that it always has. Names and marks are drawn at random,
so that nobody writes them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import ConfigError

# code points without a meaning
PRIVATE = 0xF0000
NUM_PRIVATE = 0xFFF0
SAMPLES = ("Hello, world!", "  Zwölf Boxkämpfer\n\n\tjagen 12 345 … 🙂", "")


class Spelling:
    """Reads texts and conversations of clients. Raises ConfigError for a tokenizer that has no such
    copy."""

    def __init__(self, tokenizer: Any, chat_template: str | None, name: str) -> None:
        self._chat_template = chat_template or ""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(_cannot(name, "is none of the tokenizers library"))
        try:
            form = json.loads(backend.to_str())
        except Exception as error:  # steps in Python have no form
            raise ConfigError(_cannot(name, f"cannot be copied: {error}")) from error
        self._names = {
            token["content"]: _unguessable()
            for token in form["added_tokens"]
            if self._is_control(token)
        }
        try:
            self._backend = Tokenizer.from_str(json.dumps(_renamed(form, self._names)))
        except Exception as error:
            raise ConfigError(
                _cannot(name, f"cannot be copied with other names of its special tokens: {error}")
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = backend.encode_special_tokens
        for content, other in self._names.items():
            if self._backend.token_to_id(other) != backend.token_to_id(content):
                raise ConfigError(
                    _cannot(name, f"has another id for '{content}' when that has another name")
                )
        if any(
            self.encode(text, special=True) != list(tokenizer(text, verbose=False)["input_ids"])
            for text in SAMPLES
        ):
            raise ConfigError(_cannot(name, "does more than its tokenizer.json says"))
        longest_first = sorted(self._names, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _is_control(self, token: Mapping[str, Any]) -> bool:
        """Whether a token is special, or one that the template writes as a mark, such as `<think>`."""
        content = token["content"]
        return bool(token["special"] or (content in self._chat_template and not content.isspace()))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a client's text. `special`: with the begin token and the like, where the
        model has them."""
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def render(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], apply: Callable[..., str]
    ) -> list[int]:
        """Token ids of a conversation. `apply` renders messages, with the options as arguments.
        Raises what it raises, without marks."""
        begin = _unguessable()
        end = _unguessable()

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return self._control.sub(lambda found: f"{begin}{found[0]}{end}", value)
            if isinstance(value, Mapping):
                return {marked(key): marked(each) for key, each in value.items()}
            return [marked(each) for each in value] if isinstance(value, list | tuple) else value

        try:
            text = apply(
                marked(messages), **{name: marked(value) for name, value in options.items()}
            )
        except Exception as error:
            message = str(error)
            if begin not in message and end not in message:
                raise
            raise ValueError(message.replace(begin, "").replace(end, "")) from None
        for mark in (begin, end):
            text = text.replace(json.dumps(mark)[1:-1], mark)  # a template may write JSON in ASCII
        return self.encode(self._named(text, begin, end), special=False)

    def _named(self, text: str, begin: str, end: str) -> str:
        """A rendered text without marks, in which the template's special tokens have their other
        names.

        A template may cut a text between two marks. What stands between any two is named alone, so
        that no token is put together from parts.
        """

        def own(part: str) -> str:
            return "".join(
                self._control.sub(lambda found: self._names[found[0]], piece)
                for piece in part.split(end)
            )

        first, *others = text.split(begin)
        pieces = [own(first)]
        for other in others:
            token, closed, rest = other.partition(end)
            is_clients = closed and self._control.fullmatch(token)
            pieces += [token, own(rest)] if is_clients else [own(other)]
        return "".join(pieces)


def _unguessable() -> str:
    return "".join(chr(PRIVATE + secrets.randbelow(NUM_PRIVATE)) for _ in range(6))


def _cannot(name: str, why: str) -> str:
    return f"spell_special_tokens cannot be had for '{name}': its tokenizer {why}. Leave it out"


def _renamed(form: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json in which special tokens have other names, in the model's vocabulary as well:
    ids stay."""

    def other(content: str | None) -> str | None:
        return content if content is None else names.get(content, content)

    model = form["model"]
    vocab = form["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab = {other(content): token for content, token in vocab.items()}
    else:
        vocab = [[other(piece[0]), *piece[1:]] for piece in vocab]
    model = {**model, "vocab": vocab}
    if "unk_token" in model:
        model["unk_token"] = other(model["unk_token"])
    added = [{**token, "content": other(token["content"])} for token in form["added_tokens"]]
    return {**form, "model": model, "added_tokens": added}
