"""A client's program, as it is typed: every line of it must pass `mypy --strict`. Read by mypy,
never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from functools import partial
from pathlib import Path
from typing import assert_type

import outrider
from outrider import (
    LLM,
    AsyncLLM,
    Completion,
    DecodeStats,
    OutriderError,
    SamplingParams,
    StreamChunk,
    StructuredOutputsParams,
)

assert_type(outrider.__version__, str)

params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None, seed=1, stop="END", n=2)
listed = SamplingParams(
    stop=["a", "b"], stop_token_ids=[2], logit_bias={5: -1.0}, allowed_token_ids=[1, 2]
)
form = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))

LLM("demo")
LLM(target=Path("model"), drafter_options={"tree": "2x2"}, status=print)
with LLM(model="demo", draft="draft", num_draft_tokens="auto:12", max_num_seqs=4) as llm:
    assert_type(llm, LLM)
    answers = llm.generate(["Why?", "How?"], [params, listed], prediction=[None, "so"])
    assert_type(answers, list[Completion])
    llm.generate("Why?")
    llm.generate([1, 2, 3], form)
    llm.generate([[1, 2], [3]], params)
    llm.generate({"prompt": "Why?"})
    llm.chat([{"role": "user", "content": "Why?"}], params)
    llm.chat([[{"role": "user", "content": "Why?"}], [{"role": "user", "content": "How?"}]])
    assert_type(llm.get_default_sampling_params(), SamplingParams)
    for chunk in llm.stream("Why?", params):
        assert_type(chunk, StreamChunk)
        print(chunk.text, end="")
    messages = [{"role": "user", "content": "Why?"}]
    assert_type(llm.stream(messages), Generator[StreamChunk, None, None])
    assert_type(llm.chat(messages, params, stream=True), Generator[StreamChunk, None, None])
    assert_type(llm.chat(messages, stream=False, use_tqdm=False), list[Completion])
    llm.generate(["Why?", "How?"], use_tqdm=partial(print, "bar"))


async def ask() -> None:
    async with AsyncLLM("demo", draft="draft", max_num_seqs=4) as several:
        assert_type(several, AsyncLLM)
        answer = several.generate("Why?", params, prediction="so")
        assert_type(answer, AsyncGenerator[StreamChunk, None])
        await answer.aclose()
        async for chunk in several.generate([{"role": "user", "content": "Why?"}]):
            assert_type(chunk.completion, Completion | None)
        several.generate({"prompt_token_ids": several.chat_prompt(messages, tools=[])})
    await several.close()


for answer in answers:
    assert_type(answer.text, str)
    assert_type(answer.stats, DecodeStats)
    assert_type(answer.stats.tau, float | None)
    assert_type(answer.outputs, list[Completion])
    tau = answer.stats.tau
    print(answer.text, "no step" if tau is None else f"{tau:.2f} tokens per target pass")

try:
    llm.generate("x" * 10**6)
except OutriderError as error:
    print(error.exit_code)
