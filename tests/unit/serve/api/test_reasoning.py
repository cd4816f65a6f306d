"""A model's thoughts are separated from its answer: every family, whole or streamed, beside tools,
forms and stop strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.errors import ConfigError
from outrider.serve.api.reasoning_formats import FORMATS, NAMES, format_of
from outrider.serve.schema.answers import ChatAnswer, ChatChunk
from outrider.serve.settings import ServedModel
from tests.unit.serve.fake_engine import FakeEngine, engine
from tests.unit.serve.served_app import chat, error_of, events, serving
from tests.unit.serve.written_tools import TEMPLATES, TOOLS, written

URL = "/v1/chat/completions"
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENS = "{% if add_generation_prompt %}<think>\n{% endif %}"
HARMONY = "{# <|channel|> <|message|> to=functions #}"
MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
ANSWERS = {
    "think": "<think>\nhm\n</think>\n\nyes", "mistral": "[THINK]hm[/THINK]yes", "gemma4": "<|channel>thought\nhm\n<channel|>yes",
    "seed_oss": "<seed:think>hm</seed:think>yes", "cohere": "<|START_THINKING|>hm<|END_THINKING|>yes",
    "apertus": "<|inner_prefix|>hm<|inner_suffix|>yes",
    "granite": "Here is my thought process: hm\n\nHere is my response: yes",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
}  # fmt: skip


def answered(client: TestClient, **fields: Any) -> tuple[str | None, str | None, dict[str, Any]]:
    """(thoughts, content, the first choice), which are the same whole and as a stream."""
    whole = client.post(URL, json=chat(**fields))
    assert whole.status_code == 200, whole.text
    answer = ChatAnswer.model_validate_json(whole.text, strict=True)
    message = whole.json()["choices"][0]["message"]
    chunks = events(
        client.post(URL, json=chat(stream=True, stream_options={"include_usage": True}, **fields))
    )
    assert chunks[-1]["usage"] == whole.json()["usage"]
    deltas = [
        ChatChunk.model_validate(chunk).choices[0].delta for chunk in chunks if chunk["choices"]
    ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name) or "" for delta in deltas) == (message.get(name) or "")
    assert message.get("reasoning") == message.get("reasoning_content")
    assert "".join(delta.content or "" for delta in deltas) == (message["content"] or "")
    assert answer.usage is not None
    return (
        message.get("reasoning"),
        message["content"],
        {**whole.json()["choices"][0], "usage": whole.json()["usage"]},
    )


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, as_tokens: bool) -> None:
    """Known by the template, with marks that are special tokens, which text does not show, or
    written letter by letter."""
    form = FORMATS[name]
    more = f"{{# {' '.join([*FORMATS[name].signs, *FORMATS[name].closing])} #}}"
    tokens = MARKS if form.is_harmony else (form.opening[0], form.closing[0])
    if form.is_harmony:
        tokens = (*MARKS, "final")
        as_tokens = True
    with serving(engine(ANSWERS[name], more, tokens if as_tokens else ())) as client:
        thought, content, choice = answered(client)
        assert (thought, content) == ("hm", "yes")
        assert choice["finish_reason"] == "stop"
        shown = answered(client, skip_special_tokens=False)
        assert shown[0] == "hm"
        assert str(shown[1]).startswith("yes"), "and the end token"
        cut = answered(client, max_tokens=12 if not as_tokens else 4)
        assert cut[2]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("reply", "more", "expected"),
    [
        ("hm</think>yes", OPENS, ("hm", "yes")),
        ("\n<think>hm</think>\n\nyes <think>", "{# </think> #}", ("hm", "yes <think>")),
        ("yes", "{# </think> #}", (None, "yes")),
        (" yes </think>", "{# </think> #}", (None, " yes </think>")),
        ("hm", OPENS, ("hm", None)),
        ("<think></think>yes", "{# </think> #}", (None, "yes")),
        ("yes <think>x</think>", SWITCH, (None, "yes <think>x</think>")),
    ],
)
def test_what_the_prompt_opens(
    reply: str, more: str, expected: tuple[str | None, str | None]
) -> None:
    """Open, closed by a switch, or left to the model; only thoughts at the beginning are some.
    Templates of models that open the mark themselves do not show the closing one."""
    switched = {"chat_template_kwargs": {"enable_thinking": False}} if more == SWITCH else {}
    with serving(engine(reply, more + "{# </think> #}")) as client:
        assert answered(client, **switched)[:2] == expected


def test_thoughts_that_come_again() -> None:
    """Marks that are special tokens, which no text holds by accident, may come anywhere; thoughts
    are reported in order."""
    reply = "Well.[THINK]hm[/THINK] So.[THINK]so[/THINK]yes"
    with serving(engine(reply, "{# [/THINK] #}", ("[THINK]", "[/THINK]"))) as client:
        thought, content, choice = answered(client, logprobs=True)
        assert (thought, content) == ("hm\nso", "Well.So.yes")
        assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
        stopped = answered(client, stop=["so", "ye"])
    assert stopped[:2] == ("hm\nso", "Well.So.")


def test_thoughts_are_counted() -> None:
    """Tokens of marks do not count, and nothing counts where thoughts are not separated."""
    with serving(
        engine("<think>hmm</think>yes", tokens=("<think>", "</think>"), special=False)
    ) as client:
        usage = client.post(URL, json=chat(n=2)).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
        assert usage["completion_tokens"] == 2 * (1 + 3 + 1 + 3 + 1)
        completion = client.post("/v1/completions", json={"prompt": "Hi"}).json()
        assert "completion_tokens_details" not in completion["usage"]
    with serving(FakeEngine()) as client:
        assert "completion_tokens_details" not in answered(client)[2]["usage"]


def test_a_client_may_leave_them_out_or_leave_them_in() -> None:
    with serving(engine(ANSWERS["think"])) as client:
        without, content, choice = answered(client, include_reasoning=False)
        assert (without, content) == (None, "yes")
        assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert answered(client, separate_reasoning=False)[:2] == (None, ANSWERS["think"])
        assert answered(client, separate_reasoning=True, include_reasoning=True)[:2] == (
            "hm",
            "yes",
        )


def test_an_answer_that_goes_on() -> None:
    """`continue_final_message`: behind a thought that was begun, and behind one that was closed."""
    last = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# </think> #}"
    made = engine("hm</think>yes")
    made.tokenizer.chat_template = last
    with serving(made) as client:
        for begun, expected in (
            ("<think>So", ("hm", "yes")),
            ("<think>So</think>Well", (None, "hm</think>yes")),
        ):
            messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
            body = {"messages": messages, "continue_final_message": True}
            message = client.post(URL, json=body).json()["choices"][0]["message"]
            assert (message.get("reasoning"), message["content"]) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_read_behind_thoughts_only(stream: bool) -> None:
    """A call that the model only thinks of is none."""
    call = written("hermes", [("now", {})])
    reply = f"<think>Maybe {call}?</think>\n\n{call}"
    with serving(engine(reply, f"{{# {TEMPLATES['hermes']} </think> #}}")) as client:
        answer = client.post(URL, json=chat(tools=TOOLS, stream=stream))
        choices = (
            [one["choices"][0] for one in events(answer)] if stream else answer.json()["choices"]
        )
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    assert "".join(part.get("reasoning") or "" for part in parts) == f"Maybe {call}?"
    calls = [call for part in parts for call in part.get("tool_calls") or []]
    assert [one["function"]["name"] for one in calls if one["function"].get("name")] == ["now"]
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tokens", [("<think>", "</think>"), ()])
def test_what_the_engine_gets(tokens: tuple[str, ...]) -> None:
    """Stop strings and a budget apply in the engine, where the text is made; draft lengths follow
    marks that are tokens."""
    made = engine("hm</think>yes", OPENS + "{# </think> #}", tokens)
    with serving(made) as client:
        client.post(URL, json=chat())
        client.post(URL, json=chat(stop="m"))
        budget = client.post(URL, json=chat(thinking_token_budget=5))
        form = client.post(URL, json=chat(response_format={"type": "json_object"}))
    plain, stopping, *held = (request.params.thinking for request in made.seen)
    assert (plain is None) == (not tokens)
    assert stopping is not None
    assert stopping.is_open
    assert bool(stopping.closing_ids) == bool(tokens)
    if tokens:
        assert [one.budget for one in held if one is not None] == [5, None]
    else:
        assert "no single token closes them" in error_of(budget, 400)["message"]
        assert "no form can be enforced" in error_of(form, 400)["message"]


def test_a_form_holds_from_the_beginning_where_thoughts_would_be_text() -> None:
    """The model may think and need not; a grammar cannot wait for a mark of many tokens, so it does
    not."""
    made = engine('{"a": 1}')
    with serving(made) as client:
        assert answered(client, response_format={"type": "json_object"})[:2] == (None, '{"a": 1}')
    assert made.seen[0].constraint is not None
    assert made.seen[0].params.thinking is None


@pytest.mark.parametrize("stream", [False, True])
def test_harmony_with_tools(stream: bool) -> None:
    """Thoughts twice, a preamble, and a call; a broken call has the engine's finish reason."""
    reply = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": "b"}<|call|>'
    )
    made = engine(reply, HARMONY, (*MARKS, "final"))
    with serving(made) as client:
        answer = client.post(URL, json=chat(tools=TOOLS, stream=stream))
        short = client.post(
            URL, json=chat(tools=TOOLS, max_tokens=len(made.tokenizer(reply)["input_ids"]) - 3)
        ).json()
        forced = client.post(URL, json=chat(tools=TOOLS, tool_choice="required"))
        choices = (
            [one["choices"][0] for one in events(answer)] if stream else answer.json()["choices"]
        )
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    assert "".join(part.get("reasoning") or "" for part in parts) == "hm\nso"
    assert "".join(part.get("content") or "" for part in parts) == "Let me look."
    arguments = "".join(
        call["function"].get("arguments", "")
        for part in parts
        for call in part.get("tool_calls") or []
    )
    assert json.loads(arguments) == {"a": "b"}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert short["choices"][0]["finish_reason"] == "length"
    assert "cannot be enforced" in error_of(forced, 400)["message"]


def test_which_format_a_model_has() -> None:
    """The template decides, else the vocabulary, unless an operator names a format."""
    for name, form in FORMATS.items():
        assert format_of("auto", " ".join([*form.signs, *form.closing]), []) is form
        assert format_of(name, "", form.opening) is form
    assert format_of("auto", "{{ messages }}", []) is None
    assert format_of("auto", "{{ messages }}", ["<think>", "</think>"]) is FORMATS["think"]
    assert format_of("none", "</think>", ["<think>"]) is None
    assert {
        format_of(name, "", ["<|channel|>", "<|START_THINKING|>", "[THINK]"])
        for name in ("qwen3", "openai_gptoss")
    } == {
        FORMATS["think"],
        FORMATS["harmony"],
    }
    with pytest.raises(ConfigError, match=r"'qwen4'.*qwen3"):
        format_of("qwen4", "", [])
    with pytest.raises(ConfigError, match=r"no token '\[THINK\]'"):
        format_of("mistral", "", ["<think>"])
    assert {"auto", "none", "deepseek_r1", "glm45", "gemma4"} <= set(NAMES)


def test_the_operator_names_the_parser() -> None:
    """Unknown names are refused before anything loads, one that does not fit when the model is
    there."""
    from outrider.build import Options
    from outrider.serve.served import ServerState
    from outrider.serve.settings import ServerSettings

    def state(parser: str) -> ServerState:
        model = ServedModel(name="fake", options=Options(target="fake"), reasoning_parser=parser)
        return ServerState(ServerSettings(models=(model,)))

    with pytest.raises(
        ConfigError, match=r"unknown reasoning parser 'qwen33'. Did you mean 'qwen3'"
    ):
        state("qwen33")
    made = engine(ANSWERS["think"])
    with pytest.raises(ConfigError, match="no token"):
        state("mistral").serve([made], created=0)
    off = state("none")
    off.serve([made], created=0)
    assert off.models["fake"].reasoning is None
