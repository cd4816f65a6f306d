"""The forms of an entry: what each field becomes, and that every fault is named by its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lab.workload.formats import FORMS, UnusableError, read_entry
from outrider.lab.workload.types import WorkloadRequest

USER = {"role": "user", "content": "Hello"}
BOT = {"role": "assistant", "content": "Hi!"}


def one(entry: Any) -> WorkloadRequest:
    (request,) = read_entry(entry)
    return request


def reason(entry: Any) -> str:
    with pytest.raises(UnusableError) as error:
        read_entry(entry)
    return str(error.value)


# ---------------------------------------------------------------- ours


def test_prompt_with_everything() -> None:
    entry = {
        "prompt": " p\n",
        "id": 7,
        "task": "law",
        "reference": 18,
        "answer": "a",
        "max_tokens": 5,
        "temperature": 0.3,
        "model": "x",
    }
    assert one(entry) == WorkloadRequest("7", " p\n", None, "law", "18", "a", 5)


@pytest.mark.parametrize("name", ["answer", "response"])
def test_names_of_the_answer(name: str) -> None:
    assert one({"prompt": "p", name: "said"}).answer == "said"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_names_of_the_limit(name: str) -> None:
    assert (
        one({"prompt": "p", name: 9}).max_tokens == one({"prompt": "p", name: 9.0}).max_tokens == 9
    )


def test_null_is_absent() -> None:
    """Tables exported by pandas have every column in every line."""
    entry = {
        "prompt": "p",
        "messages": None,
        "id": None,
        "answer": None,
        "max_tokens": None,
        "conversations": None,
    }
    assert one(entry) == WorkloadRequest("", "p")


def test_messages_end_with_the_question() -> None:
    assert one({"messages": [USER]}) == WorkloadRequest("", None, (USER,), "chat")
    fine_tuning = one(
        {
            "messages": [
                {"role": "system", "content": "s"},
                USER,
                BOT,
                USER,
                {**BOT, "content": "last", "weight": 1},
            ]
        }
    )
    assert fine_tuning.messages == ({"role": "system", "content": "s"}, USER, BOT, USER)
    assert fine_tuning.answer == "last"
    assert one({"messages": [USER, BOT], "answer": "mine"}).answer == "mine"


def test_parts_of_text_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one({"messages": [{"role": "user", "content": parts}]}).messages == (
        {"role": "user", "content": "ab"},
    )
    image = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    assert "parts that are no text" in reason({"messages": [{"role": "user", "content": image}]})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": " \n"}, "'prompt' is empty"),
        ({"prompt": 5}, "'prompt' must be text"),
        ({"promt": "a"}, "Did you mean 'prompt'"),
        ({"text": "a", "label": 1}, "the fields text, label"),
        ({"prompt": "a", "messages": [USER]}, "both 'prompt' and 'messages'"),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' must be a whole number of at least 1"),
        ({"prompt": "a", "max_tokens": 2.5}, "'max_tokens' must be"),
        ({"prompt": "a", "id": [1]}, "'id' must be text"),
        ({"prompt": "a", "reference": {"x": 1}}, "'reference' must be text"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": ["hello"]}, "message 1 must be an object"),
        ({"messages": [USER, {"content": "x"}]}, "message 2 has the role 'none'"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 (user) has no text"),
        ({"messages": [USER, BOT, BOT]}, "ends with the role 'assistant'"),
        ({"messages": [{"role": "system", "content": "s"}]}, "ends with the role 'system'"),
        ({"messages": [{"role": "user", "content": " "}]}, "is empty"),
        ([], "not an object"),
        (None, "not an object"),
    ],
)
def test_faults_are_named(entry: Any, words: str) -> None:
    assert words in reason(entry)


# ---------------------------------------------------------------- ShareGPT


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


TALK = [
    turn("gpt", "left over"),
    turn("system", "be kind"),
    turn("human", "one"),
    turn("gpt", "1"),
    turn("human", "two"),
    turn("gpt", "2"),
]


def test_sharegpt_first_question() -> None:
    expected = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "one"})
    assert one({"id": "x_0", "conversations": TALK}) == WorkloadRequest(
        "x_0", None, expected, "chat", None, "1"
    )
    unanswered = one({"conversations": [turn("human", "q"), turn("human", "r"), turn("gpt", "a")]})
    assert unanswered.answer is None  # the answer belongs to the second question


def test_sharegpt_all_turns_keep_the_turns_before() -> None:
    first, second = read_entry({"id": "x", "conversations": [*TALK, turn("human", "three")]}, "all")
    assert (first.id, first.answer, second.id, second.answer) == ("x/1", "1", "x/2", "2")
    assert [m["content"] for m in second.messages or ()] == [
        "left over",
        "be kind",
        "one",
        "1",
        "two",
    ]
    assert [m["role"] for m in second.messages or ()] == [
        "assistant",
        "system",
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(
    ("conversations", "words"),
    [
        ([], "must be a list of turns"),
        ("hi", "must be a list of turns"),
        (["hi"], "message 1 must be an object"),
        ([turn("gpt", "a")], "has no question"),
        ([turn("human", " ")], "has no question"),
        ([turn("human", "a"), turn("martian", "b")], "message 2 has the role 'martian'"),
        ([{"from": "human"}], "message 1 (user) has no text"),
    ],
)
def test_sharegpt_faults(conversations: Any, words: str) -> None:
    assert words in reason({"conversations": conversations})


def test_sharegpt_without_answers_has_no_turns() -> None:
    with pytest.raises(UnusableError, match="turns='all'"):
        read_entry({"conversations": [turn("human", "a")]}, "all")


# ---------------------------------------------------------------- OpenAI


def batch(body: Any, **more: Any) -> dict[str, Any]:
    return {
        "custom_id": "r1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
        **more,
    }


def test_batch_requests() -> None:
    assert one(batch({"model": "m", "messages": [USER], "max_tokens": 3})) == WorkloadRequest(
        "r1", None, (USER,), "chat", max_tokens=3
    )
    plain = batch({"prompt": "p", "max_completion_tokens": 4}, url="https://host/v1/completions")
    assert one(plain) == WorkloadRequest("r1", "p", max_tokens=4)
    response = batch(
        {"input": "Hello", "instructions": "s", "max_output_tokens": 6}, url="/v1/responses"
    )
    assert one(response) == WorkloadRequest(
        "r1", None, ({"role": "system", "content": "s"}, USER), "chat", max_tokens=6
    )
    listed = batch(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}
    )
    assert one(listed).messages == (USER,)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (batch({"model": "m"}), "neither 'messages' nor 'prompt'"),
        (batch([1]), "no object with 'messages'"),
        (batch({"prompt": ["a", "b"]}), "'prompt' must be text"),
        ({"custom_id": "r1", "response": {"body": {}}, "error": None}, "no known form"),
    ],
)
def test_batch_faults(entry: Any, words: str) -> None:
    assert words in reason(entry)


def chat_response(text: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
    }


def test_stored_requests_with_their_responses() -> None:
    assert one(
        {"id": "r", "request": {"messages": [USER]}, "response": chat_response("Hi!")}
    ) == WorkloadRequest("r", None, (USER,), "chat", None, "Hi!")
    completion = {
        "id": "e1",
        "request": {"body": {"prompt": "p"}},
        "response": {"status_code": 200, "body": {"choices": [{"text": "t"}]}},
    }
    assert one(completion) == WorkloadRequest("e1", "p", answer="t")
    assert one({"request": {"prompt": "p"}, "response": "t"}).answer == "t"
    assert one({"messages": [USER], "response": chat_response("Hi!")}).answer == "Hi!"
    assert one({"request": {"messages": [USER, BOT]}}).answer == "Hi!"


@pytest.mark.parametrize(
    "response", [{"error": "boom"}, {"choices": []}, chat_response(None), {}, None]
)
def test_a_failed_response_leaves_the_request(response: Any) -> None:
    """The prompt is what a benchmark needs; throwing it away would bias the workload to what
    worked."""
    request = one({"request": {"messages": [USER]}, "response": response})
    assert (request.messages, request.answer) == ((USER,), None)


# ---------------------------------------------------------------- benchmarks


def test_gsm8k() -> None:
    entry = {"question": "How many? ", "answer": "3*4 = <<3*4=12>>12\n#### 1,212"}
    assert one(entry) == WorkloadRequest(
        "", "Question: How many?\nAnswer:", None, "reasoning", "1,212"
    )
    assert one({"question": "q", "answer": "#### marks come last\n#### 4"}).reference == "4"
    assert one({"question": "Who?", "answer": "Ada"}) == WorkloadRequest(
        "", "Question: Who?\nAnswer:", None, "qa", "Ada"
    )


def test_math() -> None:
    solution = "so $\\boxed{7}$, no: $\\boxed{\\frac{1}{2}}$."
    entry = {"problem": "p", "level": "Level 3", "type": "Algebra", "solution": solution, "idx": 12}
    assert one(entry) == WorkloadRequest("12", "Question: p\nAnswer:", None, "reasoning", "7")
    assert one({**entry, "answer": "x", "unique_id": "test/1"}).reference == "x"


def test_humaneval_is_not_graded() -> None:
    entry = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "canonical_solution": "    pass\n",
        "test": "t",
        "entry_point": "f",
    }
    assert one(entry) == WorkloadRequest("HumanEval/0", "def f():\n", None, "code")


def test_spec_bench() -> None:
    asked = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    first = WorkloadRequest("81", None, ({"role": "user", "content": "one"},), "chat")
    assert one(asked) == replace(first, later=("two",))
    assert read_entry(asked, "first") == [first]
    assert one({"prompt_id": 81, "category": "writing", "prompt": ["one", "two"]}) == one(asked)
    reasoning = {
        "question_id": 401,
        "category": "math_reasoning",
        "turns": ["How many?"],
        "reference": ["work\n#### 10"],
    }
    assert one(reasoning) == WorkloadRequest(
        "401", "Question: How many?\nAnswer:", None, "reasoning", "10"
    )
    for category in ("translation", "summarization", "qa", "rag"):
        found = one({"category": category, "turns": ["x"], "reference": ["r"]})
        assert (found.task, found.reference) == (category, None)
    assert "'turns' must be a list" in reason({"turns": []})
    assert "'turns' must be text" in reason({"turns": [3]})


# ---------------------------------------------------------------- anything

KEYS = sorted({*FORMS} | {"id", "role", "content", "from", "value", "choices", "input", "url"})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["user", "human", "gpt", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    value=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5) | JSON,
    turns=st.sampled_from(["auto", "first", "all"]),
)
def test_any_json_is_a_request_or_a_reason(value: Any, turns: Any) -> None:
    try:
        requests = read_entry(value, turns)
    except UnusableError:
        return
    assert requests
    for request in requests:
        assert (request.prompt is None) != (request.messages is None)
        assert all(isinstance(field, str) for field in (request.id, request.task))
        asked = request.prompt if request.messages is None else request.messages[-1]["content"]
        assert asked
        assert asked.strip()
