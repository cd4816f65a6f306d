"""Token ids must be those of `outrider.LLM`, and nothing may be cut without a word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.demo import demo_paths
from outrider.errors import ConfigError, RequestError
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import PreparedPrompt, fit, prepare, to_tokens
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.llm import LLM
from outrider.prompts import ReadPrompt
from tests.helpers import byte_tokenizer

PLAIN = byte_tokenizer()
ASKED = WorkloadRequest("r1", messages=({"role": "user", "content": "How many?"},))


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_paths().target)


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("w", requests)


@pytest.mark.slow
def test_equal_to_what_llm_feeds() -> None:
    """Special tokens doubled or forgotten would measure another prompt than the user's."""
    llm = LLM("demo", drafter="none", max_num_seqs=1)
    plain = load_workload("demo", limit=1).requests[0]
    chat = load_workload("embedded:chat").requests[8]
    assert chat.messages is not None
    assert to_tokens(plain, llm.tokenizer) == llm._prompt_ids(ReadPrompt(plain.prompt))
    assert to_tokens(chat, llm.tokenizer) == llm.chat_prompt([dict(m) for m in chat.messages])


def test_begin_token_and_template(words: PreTrainedTokenizerBase) -> None:
    plain = WorkloadRequest("r", "Question: How many?\nAnswer:")
    assert to_tokens(plain, words)[0] == words.bos_token_id
    assert to_tokens(plain, words).count(words.bos_token_id) == 1
    assert to_tokens(ASKED, words) == to_tokens(plain, words)  # the demo's template


def test_the_model_s_turn_is_opened() -> None:
    """Without it a chat model would go on with the user's question."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert to_tokens(ASKED, tokenizer) == PLAIN("How many?>")["input_ids"]


def test_no_template_is_the_model_s_fault_and_named() -> None:
    with pytest.raises(
        ConfigError, match=r"request 'r1' is a conversation, and the model has no chat template"
    ):
        to_tokens(ASKED, PLAIN)
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(
            workload(ASKED), PLAIN, context=100, max_tokens=5, on_bad="skip"
        )  # skipping would leave nothing, silently


def test_plain_text_instead_of_a_template() -> None:
    with_system = WorkloadRequest(
        "r", messages=({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    )
    assert (
        to_tokens(with_system, PLAIN, chat_template=False) == PLAIN("Be kind.\n\nHi")["input_ids"]
    )
    long = WorkloadRequest(
        "r",
        messages=(
            *(ASKED.messages or ()),
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "Why?"},
        ),
    )
    with pytest.raises(RequestError, match="'r' has 3 turns"):
        to_tokens(long, PLAIN, chat_template=False)


def test_a_template_that_refuses_is_the_request_s_fault(words: PreTrainedTokenizerBase) -> None:
    wrong = WorkloadRequest("odd", messages=({"role": "wizard", "content": "x"},))
    with pytest.raises(RequestError, match="request 'odd': the chat template refused"):
        to_tokens(wrong, words)
    prepared = prepare(workload(wrong, ASKED), words, context=100, max_tokens=5, on_bad="skip")
    assert [p.request.id for p in prepared.prompts] == ["r1"]
    assert [one.split(":")[0] for one in prepared.skipped] == ["odd"]


def test_fit_counts_prompt_and_answer() -> None:
    assert fit([1] * 90, 100, 10) is None
    assert (
        fit([1] * 91, 100, 10)
        == "91 prompt tokens and 10 to answer make 101; the context holds 100"
    )


def test_what_does_not_fit_is_refused_or_left_out_by_name() -> None:
    requests = [WorkloadRequest(f"r{n}", "x" * n) for n in (5, 50, 96, 97, 200)]
    with pytest.raises(
        ConfigError,
        match=r"(?s)2 of 5 requests of w cannot run.*r97: 97 prompt tokens and 4.*r200.*--reading on_bad=skip",
    ):
        prepare(workload(*requests), PLAIN, context=100, max_tokens=4)
    prepared = prepare(workload(*requests), PLAIN, context=100, max_tokens=4, on_bad="skip")
    assert [len(p.tokens) for p in prepared.prompts] == [5, 50, 96]
    assert [one.split(":")[0] for one in prepared.skipped] == ["r97", "r200"]
    with pytest.raises(ConfigError, match="None is left"):
        prepare(workload(requests[-1]), PLAIN, context=100, max_tokens=4, on_bad="skip")


def test_a_log_may_ask_for_less_but_not_for_more() -> None:
    requests = [
        WorkloadRequest("less", "x" * 95, max_tokens=5),
        WorkloadRequest("more", "x" * 50, max_tokens=500),
        WorkloadRequest("none", "x"),
    ]
    prepared = prepare(workload(*requests), PLAIN, context=100, max_tokens=40)
    assert [p.max_tokens for p in prepared.prompts] == [5, 40, 40]


def test_no_tokens_is_an_error() -> None:
    class Silent:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

    with pytest.raises(RequestError, match="'r' is empty"):
        to_tokens(WorkloadRequest("r", "\u200b"), Silent())


def test_every_embedded_prompt_fits_the_demo(words: PreTrainedTokenizerBase) -> None:
    prepared = prepare(load_workload("embedded+demo"), words, context=1024, max_tokens=256)
    assert len(prepared.prompts) == 8 * 12 + 64


TALK = WorkloadRequest(
    "t", messages=({"role": "user", "content": "one"},), task="chat", later=("two", "three")
)


def talking() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    return tokenizer


def test_a_later_turn_follows_the_model_s_own_answers() -> None:
    asked: list[str] = []

    def answer(prompt: PreparedPrompt) -> str:
        asked.append(prompt.request.id)
        return f"A{prompt.request.turn}"

    tokenizer = talking()
    prepared = prepare(
        workload(TALK, ASKED), tokenizer, context=100, max_tokens=5, per_task=1, answer=answer
    )
    texts = [tokenizer.decode(prompt.tokens) for prompt in prepared.prompts]
    assert texts[:3] == ["uone.", "uone.aA1.utwo.", "uone.aA1.utwo.aA2.uthree."]
    assert texts[3:] == ["uHow many?."], "another task"
    assert [prompt.request.id for prompt in prepared.prompts] == ["t", "t/2", "t/3", "r1"]
    assert [prompt.request.turn for prompt in prepared.prompts] == [1, 2, 3, 1]
    assert [prompt.number for prompt in prepared.prompts] == [0, 1, 2, 0]
    assert asked == ["t", "t/2"], "the last question is not answered for anybody"
    assert TALK.turn_ids == ["t", "t/2", "t/3"]
    assert prepared.notes == [
        "2 later turns of conversations, each after the target's own greedy answers to the "
        "questions before it"
    ]


def test_a_conversation_ends_where_the_context_does() -> None:
    options: dict[str, Any] = {"context": 20, "max_tokens": 5, "answer": lambda prompt: "A"}
    prepared = prepare(workload(TALK), talking(), **options, on_bad="skip")
    assert [prompt.request.id for prompt in prepared.prompts] == ["t", "t/2"]
    assert prepared.skipped[0].startswith("t/3: ")
    with pytest.raises(ConfigError, match=r"t/3: .* prompt tokens"):
        prepare(workload(TALK), talking(), **options)


def test_first_questions_alone_are_said_to_be_that() -> None:
    prepared = prepare(workload(TALK), talking(), context=100, max_tokens=5)
    assert len(prepared.prompts) == 1
    assert prepared.notes == ["only the first question of 1 conversation is asked"]
    plain = prepare(
        workload(TALK), PLAIN, context=100, max_tokens=5, chat_template=False, answer=lambda _: "A"
    )
    assert (len(plain.prompts), plain.num_unasked) == (1, 1)


def test_per_task_counts_conversations() -> None:
    other = replace(TALK, id="s")
    prepared = prepare(
        workload(TALK, other),
        talking(),
        context=100,
        max_tokens=5,
        per_task=1,
        answer=lambda _: "A",
    )
    assert {prompt.request.id[0] for prompt in prepared.prompts} == {"t"}
