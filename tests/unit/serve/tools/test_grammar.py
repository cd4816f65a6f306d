"""Grammars of tool calls: what they force, what they leave free, and that readers find in it what
the schema promised."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from outrider.errors import CapabilityError, NumericalError, RequestError
from outrider.grammar import Grammars, Spec, choice, ebnf, json_schema, regex
from outrider.serve.tools.formats import CALLS
from outrider.serve.tools.use import ToolUse, tool_use
from tests.helpers import EOS, byte_tokenizer
from tests.unit.serve.written_tools import (
    BARE,
    CLOSED,
    FORMATS,
    TEMPLATES,
    TOOLS,
    WEATHER,
    Call,
    read,
    written,
)

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), [EOS])
NAMED = {"type": "function", "function": {"name": "now"}}
PARIS: Call = ("weather", {"city": "Paris"})
LONG: Call = ("weather", {"city": "Paris", "days": 3})
NOW: Call = ("now", {})


def use(
    name: str = "hermes",
    tools: Any = None,
    choice: Any = None,
    parallel: bool | None = None,
    tokenizer: Any = TOKENIZER,
) -> ToolUse:
    found = tool_use(
        tools or TOOLS, choice, parallel, template=TEMPLATES[name], tokenizer=tokenizer
    )
    assert found is not None
    return found


def accepts(found: ToolUse, text: str, form: Spec | None = None) -> bool:
    """Whether the answer may be exactly this text."""
    spec = found.spec_beside(form)
    assert spec is not None
    return allows(GRAMMARS, TOKENIZER, spec, text)


def tool(name: str, parameters: dict[str, Any], *, strict: bool = True) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}
    ]


def allows(grammars: Grammars, tokenizer: Any, spec: Spec, text: str) -> bool:
    """`tokenizer` splits the text; its tokens are the grammars'."""
    constraint = grammars.constraint(spec)
    try:
        constraint.commit(tokenizer(text)["input_ids"])
        return bool(constraint.is_over or constraint.allowed([[]])[0, EOS])
    except NumericalError:
        return False


def python(name: str, *calls: Call) -> str:
    """Python's syntax as grammars write it, with texts in JSON's quotes."""
    text = written(name, calls)
    return text.replace("'", '"') if name == "pythonic" else text


@pytest.mark.parametrize("name", FORMATS)
def test_enforced_calls(name: str) -> None:
    """Catches a grammar that lets plain text, a wrong name, a missing argument or a second call
    through."""
    required = use(name, choice="required")
    for calls in ([PARIS], [LONG], [PARIS, NOW], [NOW, NOW, LONG]):
        assert accepts(required, python(name, *calls)), calls
    weather = python(name, PARIS)
    wrong = (
        python(name, ("weather", {})),
        python(name, ("weather", {"city": "Paris", "days": "x"})),
        python(name, ("wether", {})),
    )
    for text in ("Hello", "", weather[:-3], weather + "x", *wrong):
        assert not accepts(required, text), text
    assert not accepts(use(name, choice="required", parallel=False), python(name, PARIS, NOW))
    named = use(name, choice=NAMED)
    assert accepts(named, python(name, NOW))
    assert not accepts(named, weather)
    assert not accepts(named, python(name, NOW, NOW))


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
BOTH = [
    *STRICT,
    {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}},
]
WRONG: list[Call] = [
    ("weather", {"town": "Paris"}), ("weather", {}), ("weather", {"city": "Paris", "days": 1.5}),
    ("weather", {"city": "Paris", "more": 1}), ("wether", {"city": "Paris"}),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_hold_the_model_only_in_its_calls(name: str) -> None:
    """Catches `strict` accepted and ignored where the model is free to call or not, and a model
    that cannot talk any more."""
    free = use(name, tools=STRICT)
    assert not free.is_enforced
    for text in (
        "",
        "Hello.",
        "a < b [1] {x}\n(see <tool and <function)",
        python(name, PARIS),
        python(name, LONG, PARIS),
    ):
        assert accepts(free, text), text
    before = "" if name in BARE else "Hm. "
    behind = " Done." if name in CLOSED else ""
    assert accepts(free, before + python(name, LONG) + behind)
    for call in WRONG:
        # a list of unknown things is no call to the reader either
        is_text = name == "pythonic" and call[0] == "wether"
        assert accepts(free, before + python(name, call) + behind) == is_text, call
        assert not accepts(free, python(name, PARIS, call)), call
    assert name in CLOSED or not accepts(free, python(name, PARIS) + " Done."), (
        "it would have to be a call"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_tools_that_are_not_strict_are_free_beside_one_that_is(name: str) -> None:
    free = use(name, tools=BOTH)
    for given in ({}, {"text": "x", "n": "2"}):
        assert accepts(free, python(name, ("note", given), PARIS)), given
    assert not accepts(free, python(name, ("note", {}), ("weather", {})))
    assert use(name, tools=BOTH, parallel=False).spec is not None


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_strict_grammar_lets_through_follows_the_schema(name: str) -> None:
    """Catches any way around: a reader more generous than the grammar, in which a wrong call would
    look like text."""
    free = use(name, tools=STRICT)
    draws = random.Random(name)
    spec = free.spec
    assert spec is not None
    text = ("" if name in BARE else "Hm. ") + python(name, LONG, PARIS)
    letters = sorted({*text, "x", "9", "\n", " "})
    num_read = 0
    for _ in range(150):
        at = draws.randrange(len(text))
        size = draws.choice((0, 1, 1, 2, 8))
        changed = (
            text[:at]
            + "".join(draws.choices(letters, k=draws.choice((0, 1, 1, 2))))
            + text[at + size :]
        )
        if not allows(GRAMMARS, TOKENIZER, spec, changed):
            continue
        for tool, arguments in read(FORMATS[name], [changed])[1]:
            given = json.loads(arguments)
            num_read = num_read + 1
            assert tool == "weather", changed
            assert {"city"} <= set(given) <= {"city", "days"}, changed
            assert isinstance(given["city"], str), changed
            assert type(given.get("days", 0)) is int, changed
    assert num_read >= 5
    assert allows(GRAMMARS, TOKENIZER, spec, text), (
        "what was refused for one answer broke the grammar for the next"
    )


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].markers])
def test_marks_that_are_tokens(name: str, special: bool) -> None:
    """Catches a grammar that asks for letters where the model has a token, and one that lets the
    letters through beside it. Qwen 2.5 and 3 publish their marks as tokens that are not special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(marker, special=special, normalized=False) for marker in FORMATS[name].markers]
    )
    grammars = Grammars(tokenizer, len(tokenizer), [EOS])
    strict, required = (
        use(name, tools=STRICT, choice=choice, tokenizer=tokenizer)
        for choice in ("auto", "required")
    )
    assert set(strict.marks) == set(FORMATS[name].markers)
    assert set(strict.written.values()) == (set(FORMATS[name].markers) if special else set())
    tag = "<|python_tag|>" if name == "llama3" else ""
    before = "" if name in BARE else "Hm. "
    for spec, start in ((strict.spec, before + tag), (strict.spec, ""), (required.spec, "")):
        assert spec is not None
        assert allows(grammars, tokenizer, spec, start + python(name, LONG))
        assert allows(grammars, tokenizer, spec, start + python(name, LONG, PARIS))
        for call in WRONG:
            assert not allows(grammars, tokenizer, spec, start + python(name, call)), call
    assert strict.spec is not None
    assert not allows(grammars, byte_tokenizer(), strict.spec, written(name, [WRONG[0]])), (
        "the mark, spelled out in letters"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_are_masked_as_their_tokens_are(name: str) -> None:
    """Catches a grammar that cannot go back: text that ends lazily, or JSON inside of it, looked at
    ahead and left again."""
    spec = use(name, tools=BOTH).spec
    assert spec is not None
    tokens = TOKENIZER(("" if name in BARE else "Hm. ") + python(name, LONG, ("note", {"a": "b"})))[
        "input_ids"
    ]
    ahead = GRAMMARS.constraint(spec)
    behind = GRAMMARS.constraint(spec)
    for at in range(0, len(tokens), 15):
        paths = [tokens[at : at + size] for size in (15, 0, 4, 15)] + [
            [*tokens[at : at + 3], tokens[0]]
        ]
        first = ahead.allowed(paths)
        for path, mask in zip(paths[:4], first, strict=False):
            fresh = GRAMMARS.constraint(spec)
            fresh.commit(tokens[:at] + path)
            assert torch.equal(mask, fresh.allowed([[]])[0])
        ahead.commit(tokens[at : at + 15])
        behind.commit(tokens[at : at + 15])
        assert torch.equal(ahead.allowed([[]]), behind.allowed([[]]))


def test_texts_between_tags() -> None:
    """Catches bounds and options that are lost where a text has no quotes, and a text that ends its
    own tag."""
    properties = {
        "word": {"type": "string", "minLength": 2, "maxLength": 4},
        "unit": {"$ref": "#/$defs/unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "integer"}},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["word"],
        "$defs": {"unit": {"enum": ["C", "F", None]}},
    }
    tools = tool("f", schema)
    good = [
        {"word": "ab"},
        {"word": "a\n\n"},
        {"word": "p>", "unit": "C", "note": "a\nb <parameter> </x>", "list": [1, 2]},
        {"word": "äöüß", "unit": "null", "note": ""},
    ]
    read_back = [*good[:3], {**good[3], "unit": None}]
    bad = [
        {"word": "a"},
        {"word": "abcde"},
        {"word": "ab", "unit": "K"},
        {"word": "ab", "list": ["x"]},
        {"unit": "C", "word": "ab"},
    ]
    for name in ("qwen3-coder", "glm", "glm-tight"):
        for choice_ in ("auto", "required"):
            found = use(name, tools=tools, choice=choice_)
            assert [accepts(found, written(name, [("f", given)])) for given in good] == [
                True
            ] * len(good), name
            assert [accepts(found, written(name, [("f", given)])) for given in bad] == [
                False
            ] * len(bad), name
            texts = [
                read(FORMATS[name], [written(name, [("f", given)])], schemas={"f": schema})[1][0][1]
                for given in good
            ]
            assert [json.loads(text) for text in texts] == read_back
    torn = "<tool_call>\n<function=f>\n<parameter=word>\nab</parameter>\n</function>\n</tool_call>"
    assert not accepts(use("qwen3-coder", tools=tools, choice="required"), torn), (
        "its own line end belongs to the tag"
    )
    free = written("qwen3-coder", [("f", {"word": "ab", "note": "x"})]).replace("x\n</", "x</")
    assert accepts(use("qwen3-coder", tools=tools, choice="required"), free)


def test_a_text_cannot_begin_another_parameter() -> None:
    """Catches what a reader takes for a tag that the model forgot to end: `days` would be a text."""
    for bound in ({}, {"maxLength": 300}):
        schema = {
            **WEATHER,
            "properties": {"city": {"type": "string", **bound}, "days": {"type": "integer"}},
        }
        found = use("qwen3-coder", tools=tool("weather", schema))
        for end in FORMATS["qwen3-coder"].tags.ends:  # type: ignore[union-attr]
            assert not accepts(
                found, written("qwen3-coder", [("weather", {"city": f"Rome{end}days>x"})])
            ), end
            assert accepts(
                found, written("qwen3-coder", [("weather", {"city": f"Rome{end[:-1]}"})])
            ) != bool(bound), end
        assert accepts(found, written("qwen3-coder", [("weather", {"city": "Rome"})])), (
            "rows share what a grammar has learnt"
        )


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "glm-tight"])
def test_names_and_options_with_a_mark_in_them_are_letters(name: str) -> None:
    """Catches an option or a name written with the token of a mark, where only its text was meant."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in FORMATS[name].markers]
    )
    grammars = Grammars(tokenizer, len(tokenizer), [EOS])
    mark = FORMATS[name].opening
    key = mark if name != "qwen3-coder" else "tag"  # whose tag ends at ">"
    schema = {"type": "object", "properties": {key: {"enum": [f"a{mark}b", ""]}}}
    before, between, behind = re.split("[KV]", written(name, [("f", {"K": "V"})]))
    for option, enforced in itertools.product((f"a{mark}b", ""), ("auto", "required")):
        spec = use(name, tools=tool("f", schema), choice=enforced, tokenizer=tokenizer).spec
        assert spec is not None
        constraint = grammars.constraint(spec)
        for marked, letters in ((before, key), (between, option), (behind, "")):
            constraint.commit([*tokenizer(marked)["input_ids"], *TOKENIZER(letters)["input_ids"]])
        assert constraint.is_over or constraint.allowed([[]])[0, EOS]


def test_a_tag_that_is_no_token_begins_no_call_of_llama() -> None:
    assert not accepts(use("llama3", tools=STRICT), "<|python_tag|>" + python("llama3", WRONG[0]))
    assert accepts(use("llama3", tools=STRICT), "It writes <|python_tag|>{...}")


@pytest.mark.parametrize(
    ("name", "end"), [("qwen3-coder", "</parameter>"), ("glm", "</arg_value>")]
)
def test_an_end_tag_inside_of_json_is_no_end(name: str, end: str) -> None:
    """Catches a list cut in two: a strict grammar allows any text in its strings."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    text = written(name, [("f", {"a": ["x", f'"{end}']})])
    assert accepts(use(name, tools=tool("f", schema)), text)
    for pieces in ([text], list(text)):
        ((_, given),) = read(FORMATS[name], pieces, schemas={"f": schema})[1]
        assert json.loads(given) == {"a": ["x", f'"{end}']}


CANNOT: list[tuple[str, dict[str, Any], str]] = [
    ("glm", {"a": {"type": "string", "pattern": "^x"}}, "is a text with 'pattern'"),
    ("qwen3-coder", {"a": {"type": "string", "format": "date"}}, "is a text with 'format'"),
    ("qwen3-coder", {"a": {"type": ["string", "integer"]}}, "a text or something else"),
    ("qwen3-coder", {"a": {"enum": ["</parameter>"]}}, "would end its own tag"),
    ("qwen3-coder", {"a>b": {"type": "integer"}}, "cannot stand in a tag"),
    ("glm", {" a": {"type": "integer"}}, "cannot stand in a tag"),
    ("pythonic", {"a-b": {"type": "integer"}}, "cannot be an argument in Python"),
    ("pythonic", {"class": {"type": "integer"}}, "cannot be an argument in Python"),
]


@pytest.mark.parametrize(("name", "properties", "match"), CANNOT)
def test_what_calls_cannot_be_held_to_is_refused(
    name: str, properties: dict[str, Any], match: str
) -> None:
    """Catches part of a strict schema that is ignored, and a tool that is not strict refused for
    what nobody promised."""
    schema = {"type": "object", "properties": properties}
    with pytest.raises(CapabilityError, match=match):
        _ = use(name, tools=tool("f", schema)).spec
    if "text" in match:
        lenient = use(name, tools=tool("f", schema, strict=False), choice="required")
        assert accepts(lenient, written(name, [("f", {"a": "y"})]))


@pytest.mark.parametrize("more", [{"anyOf": []}, {"minProperties": 1}, {"required": ["b"]}])
@pytest.mark.parametrize("name", ["qwen3-coder", "pythonic"])
def test_what_parameters_one_by_one_cannot_show_is_refused(name: str, more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    with pytest.raises(CapabilityError, match="one parameter after the other"):
        _ = use(name, tools=tool("f", schema)).spec


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"properties": {"a": 3}},
        {"required": "a"},
        {"required": [1], "properties": {}},
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_schemas_that_are_none(name: str, schema: dict[str, Any]) -> None:
    """Catches a tool that makes our own code stumble: a 500 for a mistake of the client's."""
    with pytest.raises(RequestError, match=r"^tools\.0\.function\.parameters\."):
        use(name, tools=tool("f", schema), choice="required")


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_type_is_the_clients_mistake(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strange"}}, "required": ["a"]}
    found = use(name, tools=tool("f", schema), choice="required")
    with pytest.raises(RequestError, match="strange"):
        GRAMMARS.constraint(found.spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_a_response_format_beside_tools(name: str) -> None:
    """Catches a response format that makes calls impossible, or tools that switch it off."""
    one = python(name, PARIS)
    both = python(name, PARIS, NOW)
    schema = json_schema(
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    )
    slashes = regex(r"a\/b\\/\nc"), "a/b\\/\nc"
    for form, content in (
        (schema, '{"n": 3}'),
        (regex("a/b+"), "a/bb"),
        slashes,
        (choice(["y", 'a "b"']), 'a "b"'),
    ):
        for text in (one, both, content):
            assert accepts(use(name), text, form), text
        assert not accepts(use(name), "free text", form)
        assert use(name, choice="none").spec_beside(form) == form
        assert not accepts(use(name, choice="required"), content, form)
    with pytest.raises(RequestError, match="cannot be put together"):
        use(name).spec_beside(ebnf('root ::= "a"'))


def test_only_the_calls_of_one_section_are_held_together() -> None:
    """DeepSeek writes all calls between one pair of marks; a call outside of it is none."""
    found = use("deepseek", choice="required")
    assert accepts(found, python("deepseek", PARIS, NOW))
    assert not accepts(found, python("deepseek", PARIS) + python("deepseek", NOW))
    assert read(FORMATS["deepseek"], [python("deepseek", NOW).replace(CALLS, "", 1)])[1] == []
