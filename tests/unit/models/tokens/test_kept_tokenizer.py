"""A kept tokenizer and the templates that are rendered without transformers: the same answers as transformers' own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from outrider.messages import as_turn
from outrider.models.tokens import kept_tokenizer
from outrider.models.tokens.kept_tokenizer import KeptTokenizer
from outrider.models.tokens.token_bytes import token_bytes
from tests.helpers import byte_tokenizer, word_tokenizer

DEMO = (Path(kept_tokenizer.__file__).parents[2] / "demo/models/target/chat_template.jinja").read_text(encoding="utf-8")
USER = [{"role": "user", "content": " Why is\nthe sky blue? 🙂"}]
TURNS = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "It scatters."}, *USER]
PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{{ add_generation_prompt }}"
)
STRICT = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages[0]['content'] }}"
ITS_OWN = {  # what each needs of transformers
    "filter": "{{ messages | tojson }}",
    "tag": "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}",
    "function": "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}",
    "dictionary": "{{ dict(a=messages[0]['content'])['a'] }}",
    "namespace": "{% set ns = namespace({'a': 1}) %}{{ ns.a }}{{ messages[0]['content'] }}",
}


def pair(template: str | None = None) -> tuple[KeptTokenizer, Any]:
    real = byte_tokenizer()
    real.chat_template, real.bos_token = template, real.eos_token
    kept = kept_tokenizer.written(real)
    assert kept is not None
    return KeptTokenizer(kept, lambda: real), real


def rendered_by_transformers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled by every call of transformers' renderer."""
    calls: list[bool] = []
    render = chat_template_utils.render_jinja_template
    monkeypatch.setattr(chat_template_utils, "render_jinja_template", lambda **a: calls.append(True) or render(**a))
    return calls


@pytest.mark.parametrize("template", [PLAIN, DEMO], ids=["plain", "demo"])
@pytest.mark.parametrize("messages", [USER, TURNS], ids=["user", "turns"])
@pytest.mark.parametrize("begins", [True, False])
def test_templates_that_jinja_renders(
    template: str, messages: list[dict[str, str]], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, real = pair(template)
    expected = real.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False)
    tokens = real.apply_chat_template(messages, add_generation_prompt=begins)["input_ids"]
    calls = rendered_by_transformers(monkeypatch)
    assert kept.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False) == expected
    assert kept.apply_chat_template(messages, add_generation_prompt=begins)["input_ids"] == tokens
    assert calls == []


@pytest.mark.parametrize("what", ITS_OWN)
def test_templates_that_need_transformers(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = pair(ITS_OWN[what])
    expected = real.apply_chat_template(USER, tokenize=False)
    calls = rendered_by_transformers(monkeypatch)
    assert kept.apply_chat_template(USER, tokenize=False) == expected
    assert calls == [True]


def test_a_sandbox_refuses_what_transformers_refuses() -> None:
    """Names that begin with an underscore (transformers 5.17 takes them), and whatever a template itself refuses."""
    for template in ("{% set ns = namespace(_a=1) %}x", "{% set ns = namespace(a=1) %}{% set ns._b = 2 %}x", STRICT):
        kept, real = map(rendered, pair(template))
        assert kept == real
    assert isinstance(real, tuple)


def rendered(tokenizer: Any) -> str | tuple[type, str]:
    """The chat as a text, or the class and message of what refuses it."""
    try:
        return tokenizer.apply_chat_template(TURNS, tokenize=False)
    except Exception as error:  # noqa: BLE001  templates raise what they like
        return type(error), str(error)


def test_more_than_roles_and_texts_is_transformers_to_render() -> None:
    kept, real = pair(PLAIN)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for options in ({"tools": tools}, {"eos_token": "!"}, {"continue_final_message": True}, {"return_tensors": "pt"}):
        expected, found = (one.apply_chat_template(TURNS[:3], **options)["input_ids"] for one in (real, kept))
        assert list(map(str, found)) == list(map(str, expected))


IDEFICS = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
)
LLAVA = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
EITHER = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "in_parts"), [(IDEFICS, True), (LLAVA, True), (PLAIN, False), (DEMO, False), (EITHER, False)]
)
def test_templates_that_write_pieces_alone_are_given_pieces(template: str, in_parts: bool) -> None:
    """Of a plain text they wrote nothing, and the model was asked an empty question."""
    turns = [as_turn(message, template) for message in USER]
    assert (turns[0]["content"] != USER[0]["content"]) == in_parts
    kept, real = pair(template)
    text = kept.apply_chat_template(turns, tokenize=False)
    assert text == real.apply_chat_template(turns, tokenize=False)
    assert USER[0]["content"].strip() in text


def test_encoding_and_decoding() -> None:
    kept, real = pair()
    ids = real("Zwölf\n 🙂")["input_ids"]
    assert kept("Zwölf\n 🙂")["input_ids"] == kept("Zwölf\n 🙂", add_special_tokens=False, verbose=False)["input_ids"] == ids
    assert kept.decode(ids, clean_up_tokenization_spaces=False) == real.decode(ids) == kept.decode(ids)
    assert kept(["a", "bc"])["input_ids"] == real(["a", "bc"])["input_ids"]
    offsets = {"return_offsets_mapping": True}
    assert kept("abc", **offsets)["offset_mapping"] == real("abc", **offsets)["offset_mapping"]
    assert (kept.get_vocab(), len(kept), kept.eos_token_id) == (real.get_vocab(), len(real), real.eos_token_id)
    assert copy.deepcopy(kept)("abc") == kept("abc")
    ours, theirs = token_bytes(kept), token_bytes(real)
    assert ours is not None
    assert theirs is not None
    assert (ours.shape, ours.special_ids, ours.is_joined) == (theirs.shape, theirs.special_ids, theirs.is_joined)


def test_a_class_with_code_of_its_own_is_not_kept() -> None:
    class Own(type(word_tokenizer(5))):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **named: Any) -> str:
            return "own"

    assert kept_tokenizer.written(Own(tokenizer_object=word_tokenizer(5).backend_tokenizer)) is None
