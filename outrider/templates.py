"""Chat templates that need nothing but jinja2: rendered without transformers, whose import takes longer than a short answer.

Which they are is read from the template. One that calls transformers' functions, uses its filter or its tags, or is given more
than roles and texts, is transformers' to render, and so is a conversation that a template refuses. The environment is
transformers' own: a sandbox, whose namespaces take no name that begins with an underscore, within the bounds of
`bounded_templates.py`, which hold for transformers' renderer, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.bounded_templates import TemplateBoundError, bounded
from outrider.lazy import transformers

ITS_OWN = frozenset(("strftime_now", "dict"))  # names that transformers gives templates
ITS_FILTER = "tojson"
SAMPLE = "Outrider's sample"
_ORIGINAL: list[Any] = []  # transformers' own function that compiles a template, once it is replaced


def rendered(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
    """The text of a conversation; None where it is not ours to render."""
    plain = all(message.keys() == {"role", "content"} for message in messages)
    values = [*variables.values(), *(text for message in messages for text in message.values())]
    if not plain or not all(type(value) in (str, bool) for value in values):
        return None
    compiled = _compiled(template)
    try:
        own = [dict(message) for message in messages]
        return None if compiled is None else compiled.render(messages=own, tools=None, documents=None, **variables)
    except TemplateBoundError:
        raise
    except TemplateError:
        return None


def bound_transformers() -> None:
    """Have transformers, which renders the other templates, do so within the same bounds."""
    module = transformers.utils.chat_template_utils
    if module._compile_jinja_template is not _compiled_by_transformers:
        _ORIGINAL.append(module._compile_jinja_template)
        module._compile_jinja_template = _compiled_by_transformers


@lru_cache(maxsize=32)
def _compiled_by_transformers(template: str) -> Template:
    return bounded(_ORIGINAL[0](template).environment).from_string(template)


@lru_cache(maxsize=8)
def takes_parts(template: str) -> bool:
    """Whether a template writes the pieces of a content alone and nothing of a plain text, as those of Idefics and SmolVLM."""
    compiled = _compiled(template)
    contents = (SAMPLE, [{"type": "text", "text": SAMPLE}])
    return compiled is not None and [_shows(compiled, content) for content in contents] == [False, True]


def _shows(compiled: Template, content: object) -> bool:
    variables = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    try:
        text = compiled.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True, **variables)
    except Exception:  # noqa: BLE001  templates are programs, and many take no pieces
        return False
    return SAMPLE in text


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template | None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment = bounded(plain)
    environment.globals["raise_exception"] = _refuse
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:  # a tag of transformers', or none of anybody's
        return None
    names = [found.name for found in tree.find_all(nodes.Name)]
    calls = [found for found in tree.find_all(nodes.Call) if _is_namespace(found)]
    attributes = [found.attr for found in tree.find_all(nodes.NSRef)]
    is_ours = (
        not ITS_OWN & set(names)
        and names.count("namespace") == len(calls)
        and not any(name.startswith("_") for name in attributes)
        and not any(found.name == ITS_FILTER for found in tree.find_all(nodes.Filter))
    )
    return environment.from_string(template) if is_ours else None


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _is_namespace(call: nodes.Call) -> bool:
    """Whether this makes a namespace of names that are written out, and that transformers' takes."""
    is_named = isinstance(call.node, nodes.Name) and call.node.name == "namespace"
    is_plain = not call.args and call.dyn_args is None and call.dyn_kwargs is None
    return is_named and is_plain and not any(keyword.key.startswith("_") for keyword in call.kwargs)
