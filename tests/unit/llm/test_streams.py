"""Answers while they are made: `LLM.stream` and `LLM.chat(stream=True)`, and the progress bar of
several."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from tqdm import tqdm

from outrider import LLM, Completion, SamplingParams, StreamChunk
from outrider.errors import ConfigError, RequestError
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, tiny_llama(257, max_position_embeddings=64), tokenizer)
    return LLM(folder, drafter="prediction")


def ended(chunks: list[StreamChunk]) -> Completion:
    """The completion of the last chunk, which no other one has."""
    assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    completion = chunks[-1].completion
    assert completion is not None
    assert "".join(chunk.text for chunk in chunks) == completion.text
    return completion


@pytest.mark.parametrize(
    "stream",
    [
        lambda llm: llm.stream(HI, SHORT),
        lambda llm: llm.stream(tuple(HI), SHORT),
        lambda llm: llm.chat(HI, SHORT, stream=True),
        lambda llm: llm.chat([HI], SHORT, stream=True),
    ],
)
def test_a_conversation_is_streamed(llm: LLM, stream: Any) -> None:
    (whole,) = llm.chat(HI, SHORT)
    chunks = list(stream(llm))
    assert len(chunks) > 1
    assert ended(chunks).token_ids == whole.token_ids
    assert ended(chunks).prompt_token_ids == whole.prompt_token_ids


def test_a_streamed_chat_takes_all_options_of_a_chat(llm: LLM) -> None:
    """Catches one that is ignored."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    begun = [*HI, {"role": "assistant", "content": "Yo"}]
    for messages, options in (
        (HI, {"tools": [tool]}),
        (HI, {"add_generation_prompt": False}),
        (HI, {"chat_template": "{{ messages[0].content }}"}),
        (begun, {"continue_final_message": True}),
    ):
        (whole,) = llm.chat(messages, SHORT, **options)
        done = ended(list(llm.chat(messages, SHORT, stream=True, **options)))
        assert done.prompt_token_ids == whole.prompt_token_ids
    (whole,) = llm.chat(HI, SHORT)
    predicted = llm.chat(HI, SHORT, stream=True, prediction=whole.token_ids)
    assert ended(list(predicted)).stats.accepted > 0
    with pytest.raises(ConfigError, match="knows no 'sing'"):
        llm.chat(HI, SHORT, stream=True, chat_template_kwargs={"sing": True})


def test_one_conversation_is_streamed_at_a_time(llm: LLM) -> None:
    for call in (lambda: llm.stream([HI, HI]), lambda: llm.chat([HI, HI], stream=True)):
        with pytest.raises(RequestError, match="takes one conversation, got 2"):
            call()
    with pytest.raises(RequestError, match="message 0 of conversation 0 needs a 'role'"):
        llm.stream([{"content": "Hi"}])
    with pytest.raises(ConfigError, match="stream makes one answer, got n=2"):
        llm.chat(HI, SamplingParams(n=2), stream=True)


class Terminal(io.StringIO):
    """Standard error of somebody who watches."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, error: io.StringIO, call: Any) -> str:
    monkeypatch.setattr(sys, "stderr", error)
    call()
    monkeypatch.undo()
    return error.getvalue()


def test_a_bar_shows_the_progress_of_several_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, as vLLM has it; not for one prompt, and not where nobody watches."""
    bar = shown(monkeypatch, Terminal(), lambda: llm.generate(["a", "b"], SHORT))
    assert "2/2" in bar
    assert "2/2" in shown(monkeypatch, Terminal(), lambda: llm.chat([HI, HI], SHORT))
    for call in (
        lambda: llm.generate("a", SHORT),
        lambda: llm.generate("a", SamplingParams(max_tokens=8, n=2)),
        lambda: llm.generate(["a", "b"], SHORT, use_tqdm=False),
        lambda: llm.chat([HI, HI], SHORT, use_tqdm=False),
    ):
        assert shown(monkeypatch, Terminal(), call) == ""
    assert shown(monkeypatch, io.StringIO(), lambda: llm.generate(["a", "b"], SHORT)) == ""


def test_a_bar_of_ones_own_is_always_shown(llm: LLM) -> None:
    """A notebook has one, and no terminal."""
    output = io.StringIO()

    def bar(*arguments: Any, **options: Any) -> Any:
        return tqdm(*arguments, file=output, **options)

    llm.generate("a", SHORT, use_tqdm=bar)
    assert "1/1" in output.getvalue()
