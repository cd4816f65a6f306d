"""Chat templates: the texts that transformers renders, of published templates and of all that
templates may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from outrider import templates
from outrider.messages import as_turn
from outrider.templates import conversation_text, render, takes_parts, variables_of
from tests.helpers import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("OUTRIDER_LLAMA_VOCABULARIES", ROOT / ".peers" / "vocabularies"))
PUBLISHED = sorted(FOLDER.glob("*.jinja"))  # of llama.cpp's sources: `make vocabularies`
DEMO = (ROOT / "outrider/demo/models/target/chat_template.jinja").read_text(encoding="utf-8")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

USER = [{"role": "user", "content": " Why is\nthe sky blue? 🙂 <b>&amp;"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "It scatters. "},
    *USER,
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a place, \"now\" & <here>.",
        "parameters": {
            "type": "object", "required": ["place"],
            "properties": {"place": {"type": "string", "description": "A town in Österreich"}, "days": {"type": "integer"}},
        },
    },
}  # fmt: skip
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Wien", "days": 2}},
}
CALLED = [
    *TURNS,
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I must look."},
    {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"sun": true}'},
]
THOUGHT = [
    *USER,
    {"role": "assistant", "content": "Red.", "reasoning_content": "Dusk?", "tool_calls": None},
    *USER,
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": USER, "add_generation_prompt": True},
    "turns": {"messages": TURNS},
    "tools": {"messages": USER, "tools": [WEATHER], "add_generation_prompt": True},
    "called": {"messages": CALLED, "tools": [WEATHER], "add_generation_prompt": True},
    "thoughts": {"messages": THOUGHT, "add_generation_prompt": True, "enable_thinking": False},
    "continued": {"messages": TURNS[:3], "continue_final_message": True},
}
USES = {
    "filter": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 'ä', 'a': 1} | tojson(sort_keys=true) }}",
    "tag": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0]['content'] }}{% endgeneration %}{{ x }}",
    "function": "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}",
    "dictionary": "{{ dict(a=messages[0]['content'])['a'] }}{{ dict.fromkeys(['k'], 3) }}{{ dict.mro is defined }}",
    "namespace": "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.b }}{{ messages[0]['content'] }}",
    "hidden names": "{% set ns = namespace(_a=1) %}x",
    "a hidden name later": "{% set ns = namespace(a=1) %}{% set ns._b = 2 %}x",
    "refusal": "{{ raise_exception('one at a time') }}",
    "what a sandbox forbids": "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    "loop controls": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "no template": "{% for m in messages %}",
}


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What `apply_chat_template` does before it tokenizes."""
    turns = [
        {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]
    (text,), _ = chat_template_utils.render_jinja_template(
        [turns], chat_template=template, **options
    )
    return str(text)


def outcome(
    write: Any, template: str, messages: list[dict[str, Any]], **options: Any
) -> str | bool:
    """The text; False where it is refused."""
    try:
        return str(write(template, messages, **options))
    except (TemplateError, ValueError, TypeError):
        return False


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates(path: Path, kind: str) -> None:
    template = path.read_text(encoding="utf-8")
    conversation = {**TOKENS, **CONVERSATIONS[kind]}
    assert outcome(render, template, **conversation) == outcome(
        by_transformers, template, **conversation
    )


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED, reason="no templates here: make vocabularies")
def test_most_published_templates_are_rendered() -> None:
    """Two refusals are equal, too. Some templates want tools, or functions."""
    refused = {path.stem: path.read_text(encoding="utf-8") for path in PUBLISHED}
    for more in ({}, {"tools": [WEATHER], "functions": "none"}):
        options = {**TOKENS, **more, "add_generation_prompt": True}
        refused = {
            name: text
            for name, text in refused.items()
            if not outcome(render, text, USER, **options)
        }
    assert len(PUBLISHED) >= 50
    assert len(refused) <= 0.05 * len(PUBLISHED), list(refused)


@pytest.mark.parametrize("what", USES)
def test_what_templates_may_use(what: str) -> None:
    """Names that begin with an underscore are refused by 5.23; 5.17 takes them."""
    ours, theirs = (
        outcome(write, USES[what], TURNS, **TOKENS) for write in (render, by_transformers)
    )
    assert ours == (False if "hidden" in what else theirs)


def test_a_template_sees_plain_values_alone(tmp_path: Path) -> None:
    """Catches an object whose methods a template could call."""

    @dataclass
    class Picture:
        path: Path
        size: int

        def save(self) -> str:
            (tmp_path / "written").write_text("by a template")
            return "saved"

    class Shout(str):
        def lower(self) -> str:
            return "LOUD"

    messages = [
        {
            "role": Shout("USER"),
            "content": [Picture(Path("a"), 3)],
            "seen": np.bool_(False),
            "pair": (1, 2.5),
        }
    ]
    shown = "{{ messages[0].content[0].size }}{{ messages[0].content[0].path }}{{ messages[0].seen }}{{ messages[0].pair }}"
    assert render(shown, messages) == by_transformers(shown, messages)
    assert render("{{ messages[0].role.lower() }}", messages) == "user"
    with pytest.raises(TemplateError):
        render("{{ messages[0].content[0].save() }}", messages)
    assert not (tmp_path / "written").exists()


def test_a_final_message_that_a_template_leaves_out_cannot_be_continued() -> None:
    for template, messages in (
        ("{{ messages[0].role }}", USER),
        ("x", [{"role": "user", "content": []}]),
    ):
        with pytest.raises(ValueError, match=r"cannot be continued|no content to continue"):
            render(template, messages, continue_final_message=True)


@pytest.mark.parametrize("spaces", [" ", "\n", ""])
def test_a_continued_message_ends_where_the_template_ends_it(spaces: str) -> None:
    messages = [{"role": "user", "content": f"The sky is{spaces}"}]
    for template in ("{{ messages[0].content }}</s>", "{{ messages[0].content | trim }}</s>"):
        options = {"continue_final_message": True}
        assert render(template, messages, **options) == by_transformers(
            template, messages, **options
        )


def test_a_tokenizer_chooses_among_its_templates() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "D{{ eos_token }}", "tool_use": "T", "short": "S"}
    for options in (
        {},
        {"tools": [WEATHER]},
        {"chat_template": "short"},
        {"chat_template": "X{{ messages[0].role }}"},
    ):
        expected = tokenizer.apply_chat_template(USER, tokenize=False, **options)
        assert conversation_text(tokenizer, USER, **options) == expected
    for without in (None, {"short": "S"}):
        tokenizer.chat_template = without
        with pytest.raises(ValueError, match="no default chat template"):
            conversation_text(tokenizer, USER)


def test_a_tokenizer_with_a_renderer_of_its_own_keeps_it() -> None:
    class Own(type(byte_tokenizer())):  # type: ignore[misc]
        def apply_chat_template(self, *given: Any, **named: Any) -> str:
            return "its own"

    assert (
        conversation_text(Own(tokenizer_object=byte_tokenizer().backend_tokenizer), USER)
        == "its own"
    )


def test_variables() -> None:
    assert variables_of("{% generation %}{{ messages }}{{ thinks }}{% endgeneration %}") == {
        "messages",
        "thinks",
    }
    assert variables_of("{% for m in messages %}") == frozenset()


IDEFICS = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
)
LLAVA = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
EITHER = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "in_parts"),
    [(IDEFICS, True), (LLAVA, True), (PLAIN, False), (DEMO, False), (EITHER, False)],
)
def test_templates_that_write_pieces_alone_are_given_pieces(template: str, in_parts: bool) -> None:
    """Of a plain text they wrote nothing, and the model was asked an empty question."""
    turns = [as_turn(message, template) for message in USER]
    assert takes_parts(template) == in_parts == (turns[0]["content"] != USER[0]["content"])
    text = render(template, turns, **TOKENS)
    assert text == by_transformers(template, turns, **TOKENS)
    assert str(USER[0]["content"]).strip() in text


def test_templates_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    render("{{ messages }} once", USER)
    monkeypatch.setattr(templates, "_environment", lambda: pytest.fail("compiled again"))
    render("{{ messages }} once", USER)
