"""Chat templates within bounds: they are programs of a stranger's, and may loop, or write without
end.

    BoundedEnvironment().from_string(template).render(...)      raises TemplateBoundError, a jinja2.TemplateError

The sandbox of jinja2 keeps a template from Python and bounds `range` alone. Here one rendering has
MAX_SECONDS of its thread, and MAX_STEPS for iterations, calls of macros and characters; no value
that it makes is larger than MAX_VALUE. What makes much of little is looked at before it runs:
products, formats, fillings, joined and replaced texts, lists in lists.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 3.0  # of the thread that renders
MAX_STEPS = 1 << 26  # iterations, calls of macros, and characters written
# characters of a text that a template makes, or of all texts in a list, whose parts count PART each
MAX_VALUE = 1 << 23
PART = 8
MAX_COUNT = 100_000  # an argument that is a number, as in `range`
# characters of a text that cost one step: what a method or filter makes, and `~` or `+`
SHARE = 4
SHARE_JOINED = 32
PLACES = re.compile(r"%|\{")
WIDTH = re.compile(r"\d{6}")  # in a format: a hundred thousand columns


class TemplateBoundError(TemplateError):
    """A template that takes too long, or makes too much."""


class _Spent(threading.local):
    """The work done so far by the rendering in this thread."""

    depth = 0
    steps = 0
    until = 0.0


_spent = _Spent()


class _BoundedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text. Raises TemplateError."""
        with _counting():
            return "".join(super().generate(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """The text piece by piece."""
        with _counting():
            yield from super().generate(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose templates stay within bounds. `filters`: more of them by name;
    `options`: jinja2's."""

    template_class = _BoundedTemplate
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(
        self, filters: Mapping[str, Callable[..., Any]] | None = None, **options: Any
    ) -> None:
        super().__init__(**options, finalize=_written)
        every = {**self.filters, **(filters or {})}
        self.filters = {name: _bounded_filter(name, function) for name, function in every.items()}
        self.globals.pop("lipsum")  # text for layouts, without end

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A product, a power, a remainder or format, or a sum."""
        _check_operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return _made(result, SHARE_JOINED) if operator == "+" else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The replacement of the string method `format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _check_text("format", value.__self__, args, kwargs)
            return _made(wrapped(*args, **kwargs))

        return formatted

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a function or method."""
        if function in _HELPERS:
            return function(*args)
        _check_counts((*args, *kwargs.values()))
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str):
            _check_text(name, owner, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        return _made(result) if isinstance(owner, str) or isinstance(result, dict) else result


class _Counting(NodeTransformer):
    """Puts a count into each loop and macro, and a check around what makes texts and lists."""

    def get_visitor(self, node: nodes.Node) -> Callable[..., nodes.Node] | None:
        """The replacement of a node of this kind; None: only its children change."""
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            return self._counted
        if isinstance(node, nodes.Concat):
            return self._joined
        is_made = isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        )
        return self._checked if is_made else None

    def _counted(self, node: Any) -> nodes.Node:
        written = sum(len(text.data) for part in node.body for text in _texts(part))
        self.generic_visit(node)
        count = nodes.ExprStmt(
            _call("step", [nodes.Const(written)], node.lineno), lineno=node.lineno
        )
        node.body = [count, *node.body]
        return node

    def _joined(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _checked(self, node: Any) -> nodes.Node:
        parts = [pair.value for pair in node.items] if isinstance(node, nodes.Dict) else node.items
        is_plain = all(isinstance(part, nodes.Const) for part in parts)
        self.generic_visit(node)
        return node if is_plain else _call("checked", [node], node.lineno)


def _texts(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _call(name: str, args: list[Any], line: int) -> nodes.Call:
    function = nodes.ImportedName(f"{__name__}.{name}", lineno=line)
    return nodes.Call(function, args, [], None, None, lineno=line)


@contextmanager
def _counting() -> Iterator[None]:
    """Count what is spent inside; a rendering inside another one spends its share."""
    if not _spent.depth:
        _spent.steps = 0
        _spent.until = time.thread_time() + MAX_SECONDS
    _spent.depth += 1
    try:
        yield
    finally:
        _spent.depth -= 1


def step(written: int) -> None:
    """Counts an iteration, or a call of a macro. `written`: characters of the template's own in it."""
    _spent.steps += 1 + written
    if _spent.steps > MAX_STEPS:
        raise TemplateBoundError(f"it takes more than {MAX_STEPS} steps or characters")
    if time.thread_time() > _spent.until and _spent.depth:
        raise TemplateBoundError(f"it takes longer than {MAX_SECONDS:g} s")


def joined(*parts: Any) -> Any:
    """The texts of some values, joined (`~`)."""
    return _made("".join(str(part) for part in parts), SHARE_JOINED)


def checked(value: Any) -> Any:
    """A list, tuple or dictionary that a template makes."""
    return _made(value)


_HELPERS = (step, joined, checked)


def _written(value: Any) -> Any:
    """The output of `{{ value }}`."""
    if isinstance(value, str):
        step(len(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _check_counts((*args, *kwargs.values()))
        arguments = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if arguments:
            _check_text(name, arguments[0], arguments[1:], kwargs)
        result = function(*args, **kwargs)
        return _made(result) if isinstance(result, str | list | dict) else result

    return filtered


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                _check_size(_size(many) * max(0, times))
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_size(max(1, left.bit_length()) * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        _check_size(len(left) + len(right))


def _check_text(name: str, text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a method or filter whose result would be too large. `text`: what it is called on."""
    values = (*args, *kwargs.values())
    texts = [value for value in values if isinstance(value, str)]
    longest = max(map(len, texts), default=0)
    if name == "join":
        is_filter = not isinstance(text, str)
        parts, between = (text, longest) if is_filter else (values[0] if values else (), len(text))
        _check_size(_size(parts) * (1 + between))
    elif name in ("replace", "indent", "wordwrap", "expandtabs") and isinstance(text, str):
        counts = [
            value for value in values if isinstance(value, int) and not isinstance(value, bool)
        ]
        places = (
            text.count(texts[0])
            if name == "replace" and texts
            else text.count("\n") + text.count("\t")
        )
        _check_size(len(text) + (places + 1) * max(longest, *counts, 8))
    elif name in ("format", "format_map") and isinstance(text, str):
        _check_format(text, values)


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    """Refuse a format that fills up to many columns, or writes long values many times."""
    if WIDTH.search(text) or any(
        isinstance(value, int) and abs(value) > MAX_COUNT for value in values if "*" in text
    ):
        raise TemplateBoundError("it has a format with more columns than any text")
    _check_size(len(text) + len(PLACES.findall(text)) * max(map(_size, values), default=0))


def _check_counts(values: tuple[Any, ...]) -> None:
    """Refuse numbers that would fill up, repeat or count to more than `range` may."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise TemplateBoundError(
                f"it gives {str(value)[:20]} for a number, {MAX_COUNT} at most"
            )


def _check_size(size: int) -> None:
    if size > MAX_VALUE:
        raise TemplateBoundError(
            f"it makes a text or list of more than {MAX_VALUE} characters or parts"
        )


def _made(value: Any, share: int = SHARE) -> Any:
    """A value that a template made: counted, and refused where it is too large."""
    if isinstance(value, str | list | tuple | dict):
        size = _size(value)
        _check_size(size)
        step(size // share)
    return value


def _size(value: Any) -> int:
    """Characters and parts of a value, those of parts inside each time they occur; counted as far
    as MAX_VALUE."""
    if isinstance(value, str):
        return len(value)
    size = 1
    left = [value]
    while left and size <= MAX_VALUE:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            size += PART * len(part)
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            size += PART * len(part)
            left += part
    return size
