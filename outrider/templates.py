"""Chat templates: conversations as text, rendered in jinja2's sandbox within the bounds of
`bounded_templates.py`.

What templates may use is what transformers gives them (`transformers.utils.chat_template_utils`),
whose import takes longer than a short answer. A tokenizer with a renderer of its own (code of a
checkpoint, mistral-common) keeps it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from outrider.bounded_templates import BoundedEnvironment

SAMPLE = "Outrider's sample"
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # written after a final message, to find where it ends
BARE: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
# names of what a model thought before it answered
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
BASE = "transformers.tokenization_utils_base"  # the module of the renderer that this one stands for


def conversation_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    **options: Any,
) -> str:
    """A conversation in the words of the tokenizer's chat template, or of another one.

    `options`: those of `render`. Raises ValueError where there is no template, and what rendering
    raises.
    """
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if method is not None and method.__module__ != BASE:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=chat_template, **options
            )
        )
    template = _chosen(tokenizer.chat_template, chat_template, has_tools=bool(options.get("tools")))
    return render(template, messages, **{**tokenizer.special_tokens_map, **options})


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation. `variables`: what else the template may look at, such as `tools`.

    Raises jinja2.TemplateError where the template refuses the conversation or breaks a bound,
    ValueError where the final message cannot be continued.
    """
    turns = [_turn(message) for message in messages]
    final = _marked(turns) if continue_final_message else ""
    given = {
        "tools": None,
        "documents": None,
        **{name: _plain(value) for name, value in variables.items()},
    }
    text = _compiled(template).render(
        messages=turns, add_generation_prompt=add_generation_prompt, **given
    )
    return _cut(text, final) if continue_final_message else text


@lru_cache(maxsize=8)
def takes_parts(template: str) -> bool:
    """Whether a template writes the pieces of a content alone and nothing of a plain text, as those
    of Idefics and SmolVLM."""
    contents = (SAMPLE, [{"type": "text", "text": SAMPLE}])
    return [_shows(template, content) for content in contents] == [False, True]


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Variables that a template reads; none where it cannot be parsed: it will be refused when it
    is used."""
    try:
        return frozenset(find_undeclared_variables(_environment().parse(template)))
    except TemplateSyntaxError:
        return frozenset()


def _chosen(
    templates: str | Mapping[str, str] | None, asked: str | None, *, has_tools: bool
) -> str:
    """One of a tokenizer's templates, as transformers chooses. Raises ValueError for a tokenizer
    that has none to choose."""
    by_name = (
        templates if isinstance(templates, Mapping) else {"default": templates} if templates else {}
    )
    if asked is not None:
        return by_name.get(asked, asked)
    if has_tools and "tool_use" in by_name:
        return by_name["tool_use"]
    if "default" in by_name:
        return by_name["default"]
    raise ValueError(
        f"the tokenizer has no default chat template, only {', '.join(by_name) or 'none at all'}"
    )


def _turn(message: Any) -> dict[str, Any]:
    """A message as templates expect it: absent rather than null, and thoughts under the names that
    models look for."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise TypeError(f"a message must be a dictionary, got {type(message).__name__}")
    turn = {name: value for name, value in plain.items() if value is not None}
    thoughts = next((turn[name] for name in THOUGHTS if name in turn), None)
    return (
        turn if thoughts is None else {"thinking": thoughts, **turn, "reasoning_content": thoughts}
    )


def _plain(value: Any) -> Any:
    """A value of the types that JSON has: of anything else a template could call methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    for kind, convert in BARE.items():
        if isinstance(value, kind):  # of a class of its own, which may have other methods
            return convert(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "model_dump"):  # pydantic's
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _marked(turns: list[dict[str, Any]]) -> str:
    """Marks the end of the final message and returns its text. Raises ValueError for one without
    text."""
    content = turns[-1].get("content") if turns else None
    if isinstance(content, str):
        turns[-1]["content"] = content + CONTINUED
        return content
    for part in reversed(content or ()):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + CONTINUED
            return text
    raise ValueError("the final message has no content to continue")


def _cut(text: str, final: str) -> str:
    """A text as far as the final message goes. Raises ValueError where the template left a part of
    it out."""
    place = text.rfind(CONTINUED.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError(
            "the chat template does not write the whole final message, so that it cannot be "
            "continued"
        )
    is_whole = text.startswith(CONTINUED, place)  # else the template removes spaces at the end
    return text[:place] if is_whole else text[:place].rstrip()


def _shows(template: str, content: object) -> bool:
    """Whether a template writes this content of a message."""
    variables: dict[str, Any] = dict.fromkeys(
        ("bos_token", "eos_token", "pad_token", "unk_token"), ""
    )
    try:
        text = render(
            template,
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            **variables,
        )
    except Exception:  # noqa: BLE001  templates are programs, and many take no pieces
        return False
    return SAMPLE in text


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> BoundedEnvironment:
    """The variables that transformers gives templates."""
    environment = BoundedEnvironment(
        {"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dictionaries(),
        "namespace": _PublicNamespace,
    }
    return environment


class _Generation(Extension):
    """The tag around what an answer is in a conversation to train on: its text."""

    tags = {"generation"}  # noqa: RUF012  jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        """The content between the tag and its end."""
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Dictionaries:
    """`dict`, without what hangs on the class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary of one value."""
        return dict.fromkeys(keys, value)


class _PublicNamespace(Namespace):
    """`namespace`, that holds no name which begins with an underscore."""

    def __init__(self, /, *given: Any, **named: Any) -> None:
        attributes = dict(*given, **named)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace holds no name that begins with an underscore, got {name!r}"
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON with the characters as they are: jinja2's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> None:
    raise TemplateError(str(message))
