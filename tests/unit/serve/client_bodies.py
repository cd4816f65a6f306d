"""Bodies as real clients send them, shortened: (client, path, body, fields that are ignored and
named)."""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "default": None}},
    "required": ["a"],
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA},
}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
]
NOT_SET = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def _turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


ASK = _turn("user", "Hi")
SYSTEM = _turn("system", "Be brief.")
RESULT = _turn("tool", "1", tool_call_id="call_1")

BODIES: list[tuple[str, str, dict[str, Any], str | None]] = [
    (
        "openai: model_dump() of an answer",
        CHAT,
        {"messages": [ASK, _turn("assistant", "Hello", **NOT_SET), ASK]},
        None,
    ),
    (
        "openai: model_dump() of a call",
        CHAT,
        {
            "messages": [ASK, _turn("assistant", None, **{**NOT_SET, "tool_calls": CALLS}), RESULT],
            "tools": [TOOL],
        },
        None,
    ),
    (
        "openai: model_dump() of a parsed answer",
        CHAT,
        {"messages": [ASK, _turn("assistant", "{}", **NOT_SET, parsed={"a": 1}), ASK]},
        "messages[].parsed",
    ),
    (
        "openai: answers of other servers",
        CHAT,
        {
            "messages": [
                _turn("developer", "Be brief."),
                ASK,
                _turn("assistant", "x", annotations=[], tool_calls=[]),
                ASK,
            ],
            "store": False,
            "service_tier": "auto",
            "safety_identifier": "me",
            "prompt_cache_key": "k",
            "verbosity": "low",
        },
        "store, service_tier, verbosity, messages[].annotations",
    ),
    (
        "LangChain",
        CHAT,
        {
            "messages": [
                _turn(
                    "user", [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
                )
            ],
            "stream": False,
            "max_completion_tokens": 8,
            "service_tier": "flex",
            "store": True,
            "logprobs": False,
        },
        "service_tier, store, messages[].content[].cache_control",
    ),
    (
        "LangChain: a tool's answer",
        CHAT,
        {
            "messages": [
                ASK,
                _turn("assistant", None, tool_calls=CALLS),
                {**RESULT, "name": "look"},
            ],
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "temperature": 0.0,
            "stream": False,
        },
        None,
    ),
    (
        "LangChain: completions",
        COMPLETIONS,
        {
            "prompt": "Hi",
            "frequency_penalty": 0,
            "logprobs": None,
            "max_tokens": 8,
            "n": 1,
            "presence_penalty": 0,
            "seed": None,
            "temperature": 0.7,
            "top_p": 1,
        },
        None,
    ),
    (
        "LiteLLM",
        CHAT,
        {
            "messages": [
                _turn(
                    "user", [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
                ),
                {"role": "assistant", "tool_calls": CALLS},
                {**RESULT, "name": "look"},
                _turn(
                    "assistant",
                    "Hello",
                    thinking_blocks=[],
                    provider_specific_fields={"refusal": None},
                ),
            ],
            "tools": [TOOL],
            "top_k": 5,
            **USAGE,
        },
        "messages[].content[].cache_control, messages[].thinking_blocks, messages[].provider_specific_fields",
    ),
    (
        "aider",
        CHAT,
        {
            "messages": [
                _turn(
                    "system",
                    [{"type": "text", "text": "Edit.", "cache_control": {"type": "ephemeral"}}],
                ),
                ASK,
            ],
            "temperature": 0,
            "stream": True,
        },
        "messages[].content[].cache_control",
    ),
    (
        "CodeCompanion",
        CHAT,
        {
            "messages": [
                _turn("system", "Code.", id=1, opts={"visible": False}),
                _turn("user", "Hi", id=2, opts={"visible": True}, cycle=1),
                _turn("assistant", "Hello", reasoning={"content": "Hm."}),
            ],
            "temperature": 1,
            "top_p": 1,
            "stop": None,
            "max_tokens": None,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "logit_bias": None,
            "user": None,
            **USAGE,
        },
        "messages[].id, messages[].opts, messages[].cycle, messages[].reasoning",
    ),
    (
        "Dify",
        CHAT,
        {
            "messages": [SYSTEM, ASK],
            "temperature": 0.7,
            "top_p": 0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": 512.0,
            "user": "abc-123",
            "stop": [],
            "response_format": {"type": "text"},
            "stream": True,
        },
        None,
    ),
    (
        "Continue",
        CHAT,
        {
            "messages": [
                SYSTEM,
                _turn("user", [{"type": "text", "text": "Hi"}]),
                _turn("assistant", " ", tool_calls=CALLS),
                RESULT,
            ],
            "max_tokens": 100,
            "stream": True,
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "stop": ["/src/", "#- coding: utf-8", "```"],
            "num_ctx": 8192,
            "keep_alive": 1800,
        },
        "num_ctx, keep_alive",
    ),
    (
        "Open WebUI",
        CHAT,
        {
            "messages": [ASK, _turn("assistant", "Hello"), ASK],
            "temperature": 0.8,
            "top_k": 40,
            "min_p": 0,
            "repeat_penalty": 1.0,
            "features": {"web_search": False},
            "metadata": {"chat_id": None, "tags": ["a"]},
            "seed": -1,
            **USAGE,
        },
        "repeat_penalty, features",
    ),
    (
        "Cline",
        CHAT,
        {
            "messages": [
                SYSTEM,
                _turn("user", [{"type": "text", "text": "<task>Hi</task>"}]),
                _turn(
                    "assistant",
                    None,
                    tool_calls=CALLS,
                    reasoning_details=[{"type": "reasoning.text", "text": "Hm."}],
                ),
                RESULT,
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "temperature": 0,
            **USAGE,
        },
        "messages[].reasoning_details",
    ),
    (
        "lm-eval-harness: chat",
        CHAT,
        {
            "messages": [_turn("user", "Hi", type="text")],
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
        "messages[].type",
    ),
    (
        "lm-eval-harness: likelihoods",
        COMPLETIONS,
        {
            "prompt": [[72, 105]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
        None,
    ),
    (
        "an evaluation client that knows no greedy decoding",
        CHAT,
        {
            "messages": [ASK],
            "temperature": 1e-8,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "n": 1,
            "use_beam_search": False,
        },
        "use_beam_search",
    ),
]
