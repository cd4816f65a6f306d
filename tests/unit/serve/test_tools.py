"""Requests with tools: what is allowed, and what the answer contains."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import CapabilityError, ConfigError, OutriderError, RequestError
from outrider.serve.tools.formats import DEEPSEEK_FENCED, GLM_TIGHT, MISTRAL_ARGS, format_of
from outrider.serve.tools.use import ToolUse, tool_use
from tests.helpers import byte_tokenizer
from tests.unit.serve.written_tools import FORMATS, TEMPLATES, TOOLS

NAMED = {"type": "function", "function": {"name": "now"}}


def use(choice: Any = None) -> ToolUse:
    found = tool_use(TOOLS, choice, template=TEMPLATES["hermes"], tokenizer=byte_tokenizer())
    assert found is not None
    return found


def test_formats_are_known_by_their_template() -> None:
    """Catches Qwen's and GLM's calls taken for Hermes', whose mark they share."""
    known = {name: form.name for name, form in FORMATS.items()}
    assert known == {
        name: name.removesuffix("-tight").removesuffix("-fenced").removesuffix("-args")
        for name in TEMPLATES
    }
    assert FORMATS["mistral-args"] is MISTRAL_ARGS
    assert FORMATS["glm-tight"] is GLM_TIGHT
    assert FORMATS["deepseek-fenced"] is DEEPSEEK_FENCED
    assert format_of("no format at all", "llama3").name == "llama3"
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        format_of("", "hermse")


WRONG: list[tuple[dict[str, Any], type[OutriderError], str]] = [
    ({"tools": None, "tool_choice": "required"}, RequestError, "there are no tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "wether"}}},
        RequestError,
        "Did you mean 'weather'",
    ),
    ({"tool_choice": "always"}, RequestError, "none, auto, required or a function"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, RequestError, "two tools are called 'now'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        RequestError,
        r"tools.0.function.name",
    ),
    ({"template": "{{ messages }}"}, CapabilityError, "does not render them"),
    (
        {"template": "{{ tools }}"},
        CapabilityError,
        "hermes, qwen3-coder, glm, deepseek, mistral, llama3, pythonic",
    ),
    ({"template": "{{ tools }}<tool_call><function="}, CapabilityError, "none of the ways"),
]


@pytest.mark.parametrize(("changes", "error", "match"), WRONG)
def test_refusals(changes: dict[str, Any], error: type[OutriderError], match: str) -> None:
    given = {
        "tools": TOOLS,
        "template": TEMPLATES["hermes"],
        "tokenizer": byte_tokenizer(),
        **changes,
    }
    with pytest.raises(error, match=match):
        tool_use(**given)


def test_choices() -> None:
    assert tool_use(None, "auto", template=None, tokenizer=None) is None
    assert use("none").rendered is None
    assert use("none").reader().push("<tool_call>") == [{"content": "<tool_call>"}]
    assert use().rendered == TOOLS
    assert use().spec is None, "the model is free"
    assert [use(choice).is_enforced for choice in ("none", "auto", "required", NAMED)] == [
        False,
        False,
        True,
        True,
    ]
    reader = use(NAMED).reader()
    reader.push('<tool_call>{"name": "now"}</tool_call>')
    assert reader.finish_reason == "stop"


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].markers])
def test_special_tokens_that_begin_calls_are_text_here(name: str) -> None:
    """Catches answers of models whose marks are special tokens, which their text leaves out: they
    would be content."""
    tokenizer = byte_tokenizer()
    marks = FORMATS[name].markers
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    found = tool_use(TOOLS, "required", template=TEMPLATES[name], tokenizer=tokenizer)
    assert found is not None
    token = tokenizer.convert_tokens_to_ids(marks[0])
    assert found.texts_of([5, token, 6], ["a", "", "b"]) == ["a", marks[0], "b"]
    assert found.spec is not None
    assert (f"<[{token}]>" in found.spec.text) == (name != "llama3"), (
        "only the bare calls of Llama 3 need no mark"
    )
