"""Tool calls out of texts: every format, whatever pieces the text arrives in; and what is no call stays content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import CapabilityError, ConfigError, OutriderError, RequestError
from outrider.grammar import Grammars, Spec, choice, ebnf, json_schema, regex
from outrider.serve.tools import ToolUse, merged_calls, tool_use
from outrider.serve.tools_formats import FORMATS, MISTRAL_ARGS, format_of
from outrider.serve.tools_reader import ToolReader
from tests.helpers import EOS, byte_tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATES = {
    "hermes": "{% for t in tools %}{{ t }}{% endfor %}<tool_call>",
    "mistral": "{% for t in tools %}{{ t }}{% endfor %}[TOOL_CALLS]",
    "llama3": "{% for t in tools %}{{ t }}{% endfor %}<|python_tag|>",
    "pythonic": "{% for t in tools %}{{ t }}{% endfor %}[func_name1(params_name1=params_value1)]",
}
PARIS, ROME = {"city": "Paris"}, {"city": 'Rome "x" \\ {[', "days": 3}

Calls = list[tuple[str, Any]]
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [("weather", PARIS)]),
    (
        "hermes",
        "Let me look.\n\n<tool_call>\n" + json.dumps({"name": "weather", "arguments": ROME}) + "\n</tool_call>\n<tool_call>\n"
        '{"arguments": {}, "name": "now"}\n</tool_call>',
        "Let me look.",
        [("weather", ROME), ("now", {})],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [("now", {})]),
    ("hermes", "a < b, <tool_ca and <tool_call is no mark ", "a < b, <tool_ca and <tool_call is no mark ", []),
    ("hermes", "<tool_call>\nno JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]', "",
     [("weather", PARIS), ("now", {})]),
    ("mistral", 'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "Hm.", [("weather", PARIS), ("now", {})]),
    ("mistral", "It is [TOOL_ sunny].", "It is [TOOL_ sunny].", []),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [("weather", PARIS)]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}', "",
     [("now", {}), ("weather", PARIS)]),
    ("llama3", '{"name": "Bob", "parameters": {"age": 3}} is JSON', '{"name": "Bob", "parameters": {"age": 3}} is JSON', []),
    ("llama3", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3", " Hello {there}", " Hello {there}", []),
    ("pythonic", '[weather(city="Paris"), now()]', "", [("weather", PARIS), ("now", {})]),
    ("pythonic", "[weather(city='Rome \"x\" \\\\ {[', days=3)]", "", [("weather", ROME)]),
    ("pythonic", '[weather(city="a", f=[true, None, -1.5, {"k": false}])]', "",
     [("weather", {"city": "a", "f": [True, None, -1.5, {"k": False}]})]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[weather(", "[weather(", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
]  # fmt: skip


def read(name: str, text: str, size: int, *, parallel: bool = True) -> tuple[str, Calls, list[dict[str, Any]], ToolReader]:
    """What a client puts together from pieces of `size` letters."""
    reader = ToolReader(FORMATS[name], ["weather", "now"], parallel=parallel)
    deltas = [delta for at in range(0, len(text), size) for delta in reader.push(text[at : at + size])]
    deltas += reader.end()
    calls = merged_calls(deltas)
    said = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return "".join(delta.get("content", "") for delta in deltas), said, deltas, reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_read(name: str, text: str, content: str, calls: Calls, size: int) -> None:
    """Catches a mark split over two pieces, text held back for ever, white space invented, a brace inside a string."""
    found, said, _, reader = read(name, text, size)
    assert (found, said) == (content, calls)
    assert reader.finish_reason == ("tool_calls" if calls else None)


def test_arguments_stream() -> None:
    """Catches a reader that waits for the end of a call: name first, then the arguments as they are written."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
    deltas = read("hermes", text, 5)[2]
    first, *rest = [delta["tool_calls"][0] for delta in deltas]
    assert (first["type"], first["function"], first["index"]) == ("function", {"name": "weather", "arguments": ""}, 0)
    assert first["id"].startswith("call_")
    assert len(rest) >= 6
    assert all(set(part) == {"index", "function"} for part in rest)


def test_a_call_that_breaks_off() -> None:
    """Catches "tool_calls" said of half a call; half of a name is content, so nothing the model said is lost."""
    reader = ToolReader(FORMATS["hermes"], ["weather"], parallel=True)
    deltas = reader.push('<tool_call>{"name": "weather", "arguments": {"ci') + reader.end()
    assert merged_calls(deltas)[0]["function"]["arguments"] == '{"ci'
    assert reader.finish_reason is None
    assert read("hermes", '<tool_call>{"na', 4)[0] == '<tool_call>{"na'


def test_without_parallel_calls_only_the_first_is_told() -> None:
    for name, text, _, calls in CASES:
        assert read(name, text, 4, parallel=False)[1] == calls[:1]


def test_mistral_has_ids_its_template_takes() -> None:
    deltas = read("mistral", "[TOOL_CALLS]now{}", 3)[2]
    assert len(deltas[0]["tool_calls"][0]["id"]) == 9


# ---------------------------------------------------------------- requests


def use(name: str = "hermes", tools: Any = None, choice: Any = None, parallel: bool | None = None) -> ToolUse:
    found = tool_use(tools or TOOLS, choice, parallel, template=TEMPLATES[name], tokenizer=byte_tokenizer())
    assert found is not None
    return found


def test_formats_are_known_by_their_template() -> None:
    assert [format_of(template).name for template in TEMPLATES.values()] == list(TEMPLATES)
    assert format_of(TEMPLATES["mistral"] + "[ARGS]") is MISTRAL_ARGS
    assert format_of("no format at all", "llama3").name == "llama3"
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        format_of("", "hermse")


NAMED = {"type": "function", "function": {"name": "now"}}
WRONG: list[tuple[dict[str, Any], type[OutriderError], str]] = [
    ({"tools": None, "tool_choice": "required"}, RequestError, "there are no tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, RequestError, "Did you mean 'weather'"),
    ({"tool_choice": "always"}, RequestError, "none, auto, required or a function"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, RequestError, "two tools are called 'now'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, RequestError, r"tools.0.function.name"),
    ({"template": "{{ messages }}"}, CapabilityError, "does not render them"),
    ({"template": "{{ tools }}"}, CapabilityError, "hermes, mistral, llama3, pythonic"),
]


@pytest.mark.parametrize(("changes", "error", "match"), WRONG)
def test_refusals(changes: dict[str, Any], error: type[OutriderError], match: str) -> None:
    given = {"tools": TOOLS, "template": TEMPLATES["hermes"], "tokenizer": byte_tokenizer(), **changes}
    with pytest.raises(error, match=match):
        tool_use(**given)


def test_choices() -> None:
    assert tool_use(None, "auto", template=None, tokenizer=None) is None
    assert use(choice="none").rendered is None
    assert use(choice="none").reader().push("<tool_call>") == [{"content": "<tool_call>"}]
    assert use().rendered == TOOLS
    assert use().spec is None, "the model is free"
    assert [use(choice=choice).is_enforced for choice in ("none", "auto", "required", NAMED)] == [False, False, True, True]
    reader = use(choice=NAMED).reader()
    reader.push('<tool_call>{"name": "now"}</tool_call>')
    assert reader.finish_reason == "stop"


def test_special_tokens_that_begin_calls_are_text_here() -> None:
    """Catches answers of models whose marks are special tokens, which their text leaves out: they would be content."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    found = tool_use(TOOLS, "required", template=TEMPLATES["mistral"], tokenizer=tokenizer)
    assert found is not None
    mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert found.text_of([5, mark, 6], ["a", "", "b"]) == "a[TOOL_CALLS]b"
    assert found.spec is not None
    assert f"<[{mark}]>" in found.spec.text


# ---------------------------------------------------------------- grammars

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), [EOS])


def accepts(found: ToolUse, text: str, form: Spec | None = None) -> bool:
    """Whether the answer may be exactly this text."""
    spec = found.spec_beside(form)
    assert spec is not None
    constraint = GRAMMARS.constraint(spec)
    for token in TOKENIZER(text)["input_ids"]:
        if not constraint.allowed([[]])[0, token]:
            return False
        constraint.commit([token])
    return bool(constraint.allowed([[]])[0, EOS])


CALLS = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "\n",
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    "llama3": ('{"name": "weather", "parameters": {"city": "Paris"}}', "; ", '{"name": "now", "parameters": {}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_enforced_calls(name: str) -> None:
    """Catches a grammar that lets plain text, a wrong name, a missing argument or a second call through."""
    weather, between, now = CALLS[name]
    required = use(name, choice="required")
    assert accepts(required, weather)
    assert accepts(required, weather + between + now)
    for wrong in ("Hello", weather.replace("Paris", "Paris\n"), weather.replace('"city": "Paris"', ""), weather[:-3]):
        assert not accepts(required, wrong), wrong
    assert not accepts(use(name, choice="required", parallel=False), weather + between + now)
    named = use(name, choice=NAMED)
    assert accepts(named, now)
    assert not accepts(named, weather)
    assert not accepts(named, now + between + now)


def test_enforced_calls_of_other_formats() -> None:
    weather = '{"name": "weather", "arguments": {"city": "Paris"}}'
    assert accepts(use("mistral", choice="required"), f"[TOOL_CALLS][{weather}, {weather}]")
    assert not accepts(use("mistral", choice="required", parallel=False), f"[TOOL_CALLS][{weather}, {weather}]")
    python = use("pythonic", choice="required")
    assert accepts(python, '[weather(city="Paris", days=3), now()]')
    assert accepts(python, '[weather(city="Paris")]')
    assert not accepts(python, "[weather(days=3)]")
    with_args = tool_use(TOOLS, "required", template=TEMPLATES["mistral"] + "[ARGS]", tokenizer=TOKENIZER)
    assert with_args is not None
    assert accepts(with_args, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}')


def test_strict_tools_hold_the_model_only_in_its_calls() -> None:
    """Catches `strict` accepted and ignored where the model is free to call or not."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    weather = CALLS["hermes"][0]
    free = use(tools=strict)
    assert not free.is_enforced
    for text in ("Hello.", weather, f"Let me see. {weather}", f"{weather}\n{weather} Done."):
        assert accepts(free, text), text
    assert not accepts(free, "Hm. " + weather.replace('"city"', '"town"'))
    with pytest.raises(CapabilityError, match="Use tool_choice required"):
        _ = use("llama3", tools=strict).spec


@pytest.mark.parametrize("name", CALLS)
def test_a_response_format_beside_tools(name: str) -> None:
    """Catches a response format that makes calls impossible, or tools that switch it off."""
    weather, between, now = CALLS[name]
    schema = json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    slashes = regex(r"a\/b\\/\nc"), "a/b\\/\nc"
    for form, content in ((schema, '{"n": 3}'), (regex("a/b+"), "a/bb"), slashes, (choice(["y", 'a "b"']), 'a "b"')):
        for text in (weather, weather + between + now, content):
            assert accepts(use(name), text, form), text
        assert not accepts(use(name), "free text", form)
        assert use(name, choice="none").spec_beside(form) == form
        assert not accepts(use(name, choice="required"), content, form)
    with pytest.raises(RequestError, match="cannot be put together"):
        use(name).spec_beside(ebnf('root ::= "a"'))
