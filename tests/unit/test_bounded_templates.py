"""Chat templates that would loop, or write without end: each is refused in time, and others say
what they always did."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider import bounded_templates
from outrider.bounded_templates import BoundedEnvironment, TemplateBoundError
from outrider.errors import RequestError
from outrider.messages import render
from outrider.templates import render as render_text
from tests.helpers import byte_tokenizer

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>x</think> Hi"},
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "{% macro f() %}{% for a in range(99999) %}{% for b in range(99999) %}{{ 'aaaa' }}{% endfor %}"
    "{% endfor %}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% filter upper %}{% for a in range(99999) %}{% for b in range(99999) %}a{% endfor %}{% endfor %}{% endfilter %}",
]
TOO_LARGE = [
    "{{ 'a' * 10**10 }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}{{ ns.x }}",
    "{% macro f(x, n) %}{% if n %}{{ f((x, x), n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('a', 60) }}",
    "{{ 'a'|center(10000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 3 }}",
    "{{ '%*d' % (10000000000, 3) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ ('{0}' * 1000000).format('a' * 1000000) }}",
    "{{ 10 ** 10000000000 }}",
    "{{ ['a' * 1000000] * 100000 }}",
    "{{ (['a' * 100000] * 100000)|join }}",
    "{{ ('b' * 1000000).join(('a' * 100000)|list) }}",
    "{{ ('a' * 100000)|list|join('b' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'a' * 1000000) }}",
    "{{ ('a' * 1000000)|replace('', 'a' * 1000000) }}",
    "{{ ('a\\n' * 1000000)|indent(100000) }}",
    "{{ [1]|batch(10000000000, 'x')|list }}",
    "{{ ('\\t' * 1000000).expandtabs(100000) }}",
    "{{ range(99999)|map('string')|map('center', 99999)|list }}",
    "{% set x %}{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}{{ x }}",
]


OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": ["jinja2.ext.loopcontrols"],
}


def environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(**OPTIONS)


def bounded() -> BoundedEnvironment:
    return BoundedEnvironment(**OPTIONS)


@pytest.fixture(autouse=True)
def _half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 0.5)


@pytest.mark.parametrize("template", ENDLESS)
def test_one_that_loops_is_ended(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateBoundError, match="it takes"):
        bounded().from_string(template).render()
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("template", TOO_LARGE)
def test_one_that_makes_much_of_little_is_refused(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 10.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateBoundError, match=r"it (makes|gives|has|takes more than)"):
        bounded().from_string(template).render()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "a gigabyte"


USUAL = [
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] | trim }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{%- set ns = namespace(x='', n=0) %}{% for m in messages %}"
    "{% set ns.x = ns.x ~ m.content ~ loop.index %}{% endfor %}{{ ns.x }}",
    "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip() + '|' }}{% endfor %}{{ '%s-%03d' % ('a', 7) }}",
    "{% macro show(m, n=1) %}[{{ m.role }}:{{ n * 2 }}]"
    "{% endmacro %}{{ show(messages[0]) }}{{ show(messages[1], n=5) }}",
    "{% set loop_messages = messages[1:] if messages[0].role == 'user' else messages %}{{ loop_messages | length }}",
    "{{ [1, 2, messages[0].content] + [3] }}{{ {'a': messages[0].role} }}{{ (1, messages | length) }}"
    "{{ ['a', 'b'] | join(', ') }}",
    "{% for m in messages if m.role == 'user' %}{{ m.items() | list }}{% else %}none{% endfor %}"
    "{% for k, v in {'a': 1}.items() %}{{ k }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | upper }}{% break %}"
    "{% endfor %}{{ 2 ** 3 + 7 % 4 }}",
    "{{ 'a,b'.replace(',', ';') | indent(4, true) }}{{ '{0:>5}|{1}'.format(1, 'x') }}"
    "{{ messages | map(attribute='role') | join('-') }}",
    "{% set parts %}{% for m in messages %}{{ m.role }}{% endfor %}"
    "{% endset %}{{ parts | replace('user', 'u') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
]


@pytest.mark.parametrize("template", USUAL)
def test_others_say_what_they_always_did(template: str) -> None:
    values: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": True}
    expected = environment().from_string(template).render(**values)
    assert bounded().from_string(template).render(**values) == expected
    assert "".join(bounded().from_string(template).generate(**values)) == expected


def test_a_long_conversation_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as contexts are, by one that writes and by one that puts together."""
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 3.0)
    messages = [{"role": "user", "content": "word " * 1000}] * 500
    template = (
        "{% for message in messages %}{{ message.role }}{{ message.content.strip() }}{% endfor %}"
    )
    assert len(bounded().from_string(template).render(messages=messages)) > 2_000_000
    template = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}"
    assert len(bounded().from_string(template).render(messages=messages)) == 2_500_000


@pytest.mark.slow
def test_conversations_are_rendered_within_bounds() -> None:
    """With a tokenizer, too; the message is one line."""
    endless = ENDLESS[0]
    with pytest.raises(TemplateBoundError):
        render_text(endless, MESSAGES)
    asked: dict[str, Any] = dict.fromkeys(
        ("add_generation_prompt", "tools", "chat_template_kwargs")
    )
    with pytest.raises(RequestError, match="refused the messages: it takes longer than") as caught:
        render(
            byte_tokenizer(),
            "it",
            [*MESSAGES],
            chat_template=endless,
            continue_final_message=False,
            **asked,
        )
    assert len(str(caught.value).splitlines()) == 1


def test_filters_of_our_own_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 10.0)
    for template in (
        "{{ ('\\n' * 8000000) | tojson | length }}",
        "{{ [1] | tojson(indent=200000) }}",
    ):
        with pytest.raises(TemplateBoundError, match=r"it (makes|gives)"):
            render_text(template, MESSAGES)


def test_one_that_renders_nothing_is_refused_by_name() -> None:
    asked: dict[str, Any] = dict.fromkeys(
        ("add_generation_prompt", "tools", "chat_template_kwargs")
    )
    with pytest.raises(
        RequestError, match="the chat template refused the messages: it renders nothing of them"
    ):
        render(
            byte_tokenizer(),
            "my-model",
            [*MESSAGES],
            chat_template="{# #}",
            continue_final_message=False,
            **asked,
        )
