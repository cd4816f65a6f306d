"""Tool calls out of texts: every format, whatever pieces the text arrives in; and what is no call
stays content."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serve.tools.formats import CALL, CALL_END, CALLS, CALLS_END, SEP
from outrider.serve.tools.reader import ToolReader
from tests.unit.serve.written_tools import BARE, CLOSED, FORMATS, Call, read, written

PARIS = {"city": "Paris"}
ROME = {"city": 'Rome "x" \\ {[\n', "days": 3}
BOTH: list[Call] = [("weather", ROME), ("now", {})]


def read_at_once(name: str, text: str) -> tuple[str, list[Call]]:
    """(content, calls) of a text that comes at once."""
    content, calls, reason = read(FORMATS[name], [text])
    assert reason == ("tool_calls" if calls else None)
    return content, [(tool, json.loads(arguments)) for tool, arguments in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name: str) -> None:
    """Catches a brace inside a string, a lost call, text before or behind calls that is lost or
    spaced differently."""
    before = "" if name in BARE else "Let me\n look.\n\n"
    behind = " Done.\n" if name in CLOSED else ""
    assert read_at_once(name, before + written(name, BOTH) + behind) == (
        before.rstrip() + behind.rstrip("\n"),
        BOTH,
    )
    assert read_at_once(name, written(name, [("now", {})])) == ("", [("now", {})])


@pytest.mark.parametrize("name", FORMATS)
def test_every_split_says_the_same(name: str) -> None:
    """Catches a mark, a name or an escape that is torn into two pieces."""
    text = (
        ("" if name in BARE else "Hm. ")
        + written(name, BOTH)
        + (" Ok then" if name in CLOSED else "")
    )
    whole = read(FORMATS[name], [text])
    assert len(whole[1]) == 2
    assert read(FORMATS[name], list(text)) == whole, "letter by letter"
    for at in range(1, len(text)):
        assert read(FORMATS[name], [text[:at], text[at:]]) == whole, (text[:at], text[at:])


@pytest.mark.parametrize("name", FORMATS)
def test_every_beginning_is_read(name: str) -> None:
    """Catches "tool_calls" reported for an incomplete call, and words that are lost where an answer
    breaks off."""
    text = written(name, [("weather", PARIS)])
    for at in range(len(text)):
        content, calls, reason = read(FORMATS[name], list(text[:at]))
        assert content == "" if calls else content == text[:at]
        assert reason is None or calls == [("weather", json.dumps(PARIS))], text[:at]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pythonic"])
def test_arguments_stream(name: str) -> None:
    """Catches a reader that waits for the end of a call: name first, then the arguments as they are
    written."""
    reader = ToolReader(
        FORMATS[name], {"weather": {"properties": {"city": {"type": "string"}}}}, parallel=True
    )
    deltas = [
        delta
        for letter in written(name, [("weather", {"city": "x" * 50})])
        for delta in reader.push(letter)
    ]
    first, *rest = [delta["tool_calls"][0] for delta in deltas]
    assert (first["type"], first["function"], first["index"]) == (
        "function",
        {"name": "weather", "arguments": ""},
        0,
    )
    assert len(first["id"]) == (9 if "mistral" in name else len("call_") + 24)
    assert len(rest) >= 50
    assert all(set(part) == {"index", "function"} and part["index"] == 0 for part in rest)


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_only_the_first_is_returned(name: str) -> None:
    calls = read(FORMATS[name], list(written(name, BOTH)), parallel=False)[1]
    assert [tool for tool, _ in calls] == ["weather"]


NO_CALLS = [
    ("hermes", "a < b, <tool_ca and <tool_call is no mark "),
    ("hermes", "Hm.\n <tool_call>\nno JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}'),
    ("hermes", "<tool_call> </tool_call> is what it writes"),
    ("qwen3-coder", "Write <tool_call>, then <function=weather> and so on."),
    ("qwen3-coder", "<tool_call>\n<function=weather>{}</function>\n</tool_call>"),
    ("qwen3-coder", "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>"),
    (
        "qwen3-coder",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    ),
    ("glm", "<tool_call> weather in Paris </tool_call>"),
    ("glm", "<tool_call>weather\ncity: Paris\n</tool_call>"),
    ("deepseek", f"{CALLS}{CALL}weather: Paris{CALL_END}{CALLS_END}"),
    (
        "deepseek-fenced",
        f"{CALLS}{CALL}function{SEP}weather\n```python\nx = 3\n```{CALL_END}{CALLS_END}",
    ),
    ("mistral", "It is [TOOL_ sunny]."),
    ("mistral", "[TOOL_CALLS] none"),
    ("llama3", '{"name": "Bob", "parameters": {"age": 3}} is JSON'),
    ("llama3", '{"city": "Paris"}'),
    ("llama3", " Hello {there}"),
    ("llama3", '{"name": "weather"}'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[weather("),
    ("pythonic", "[other(a=1)] and so on"),
    ("pythonic", "[ weather(Paris) ]"),
    ("pythonic", "[weather(**{'city': 'Paris'})]"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    """Catches words of the model that a client never sees."""
    assert read_at_once(name, text) == (text, [])
    assert read(FORMATS[name], list(text))[:2] == (text, [])


ODD: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [("now", {})]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"x"</tool_call>', '\n<tool_call>{"x"</tool_call>',
     [("now", {})]),
    ("hermes", '<tool_call>{"name": "now"}<tool_call>{"x"</tool_call>', '<tool_call>{"x"</tool_call>', [("now", {})]),
    ("qwen3-coder", "Ok.<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>", "Ok.", [("weather", PARIS)]),
    ("qwen3-coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>3</function></tool_call>", "",
     [("weather", {"city": "Paris", "days": 3})]),
    ("qwen3-coder", "<tool_call><function=weather><parameter=city>\n\nParis\n\n</parameter></tool_call>", "",
     [("weather", {"city": "\nParis\n"})]),
    ("qwen3-coder", "<tool_call><function=now> <parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>Ok",
     "Ok", [("now", {"a": "1"})]),
    ("qwen3-coder", '<tool_call><function=now><parameter=a>"</parameter></function></tool_call>', "", [("now", {"a": '"'})]),
    ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("glm", "<tool_call>weather\n<arg_key>days</arg_key></tool_call> Hm.", " Hm.", [("weather", {})]),
    ("deepseek", f"{CALLS}{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}", "", [("now", {})]),
    ("mistral", 'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "Hm.", [("weather", PARIS), ("now", {})]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("pythonic", '[weather(city="a", f=[true, None, -1.5, {"k": false}])] It is', " It is",
     [("weather", {"city": "a", "f": [True, None, -1.5, {"k": False}]})]),
    ("pythonic", '[now(), weather({1, 2})] It is', "weather({1, 2})] It is", [("now", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), ODD)
def test_what_models_write_instead(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert read_at_once(name, text) == (content, calls)
    assert read(FORMATS[name], list(text)) == read(FORMATS[name], [text])


DEEP = "[" * 5000 + "]" * 5000
UNREADABLE = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": ' + DEEP + "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "\\ud83d"}</tool_call>'),
    (
        "qwen3-coder",
        f"<tool_call><function=weather><parameter=days>{DEEP}</parameter></function></tool_call>",
    ),
    (
        "glm",
        f"<tool_call>weather<arg_key>days</arg_key><arg_value>{'9' * 5000}</arg_value></tool_call>",
    ),
    ("pythonic", f"[weather(city={DEEP})]"),
    ("pythonic", f"[weather(days={'-' * 5000}1)]"),
    ("pythonic", "[weather(city={1, 2})]"),
    ("pythonic", "[weather(city={[]: 1})]"),
    ("pythonic", "[weather(city=b'x', days=1e999)]"),
    ("pythonic", "[weather(city='\\ud83d')]"),
]


@pytest.mark.parametrize(("name", "text"), UNREADABLE)
def test_nothing_a_model_says_is_an_error(name: str, text: str) -> None:
    """Catches texts that json and ast answer with other exceptions than their own: the answer would
    be a 500."""
    content, calls, _ = read(FORMATS[name], [text])
    assert content or calls


# ---------------------------------------------------------------- any text, any pieces

CITY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(
    "ab<>/[]{}\"'\\\n =|", max_size=12
)
ASKED: st.SearchStrategy[Call] = st.one_of(
    st.just(("now", {})),
    st.builds(lambda city: ("weather", {"city": city}), CITY),
    st.builds(lambda city, days: ("weather", {"city": city, "days": days}), CITY, st.integers()),
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[begin:end] for begin, end in itertools.pairwise(at)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(ASKED, min_size=1, max_size=3),
    before=st.text("ab <[tT{\n", max_size=8),
    cuts=CUTS,
)
def test_any_call_in_any_pieces(name: str, calls: list[Call], before: str, cuts: list[int]) -> None:
    """Catches values that are changed on their way: white space, quotes, escapes, letters of other
    planes."""
    before = "" if name in BARE else before
    ends = FORMATS[name].tags.ends if FORMATS[name].tags is not None else ()
    if any(end in str(value) for _, given in calls for value in given.values() for end in ends):
        return  # a text that holds its own end tag cannot be written in this format
    content, found, reason = read(FORMATS[name], pieces(before + written(name, calls), cuts))
    assert (content, reason) == (before.rstrip(), "tool_calls")
    assert [(tool, json.loads(arguments)) for tool, arguments in found] == calls


WORDS = [
    "weather",
    "now",
    "x",
    "[",
    "]",
    "{",
    "}",
    '"name"',
    ":",
    ",",
    " ",
    "\n",
    "(",
    ")",
    "<",
    "=",
    ">",
    "</",
    "```",
]


def fragments(name: str) -> list[str]:
    """Pieces of what models of this kind write, whole lines and small parts."""
    form = FORMATS[name]
    tags = (
        ()
        if form.tags is None
        else (*form.tags.name, *form.tags.key, *form.tags.value, form.tags.end)
    )
    marks = [mark for mark in (*form.markers, *form.around, *tags) if mark]
    return [
        *WORDS,
        *marks,
        *written(name, BOTH).splitlines(keepends=True),
        written(name, [("now", {})]),
    ]


FRAGMENTS = {name: fragments(name) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_any_text_in_any_pieces(name: str, data: Any, cuts: list[int]) -> None:
    """Catches every exception, every dependence on how a text arrives, and words that get lost
    where there is no call."""
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=14)))
    whole = read(FORMATS[name], [text])
    assert read(FORMATS[name], pieces(text, cuts)) == whole
    assert read(FORMATS[name], list(text)) == whole
    if not whole[1]:
        assert whole[0] == text
