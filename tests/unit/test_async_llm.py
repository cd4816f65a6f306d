"""`AsyncLLM`: many requests at once are each what they are alone, and one that is left costs nothing
more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, Completion, SamplingParams, StreamChunk
from outrider.engine.batch import Batch
from outrider.errors import ConfigError, OutriderError, RequestError, UnavailableError
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)
PROMPTS = ["to be or not to be", "x", "1, 2, 3, 1, 2, 3", "ab" * 40, "y z"]
SECONDS = 30.0  # in which something that does not happen is taken for lost
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and a draft that mostly guesses right."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_llama(257, sharpness=4.0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return (
        save_checkpoint(root / "target", target, tokenizer),
        save_checkpoint(root / "draft", disturbed(target, 0.05), tokenizer),
    )


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[AsyncLLM]:
    """Shared by tests that leave it idle."""
    target, draft = folders
    made = AsyncLLM(target, draft=draft, max_num_seqs=3, threads=1)
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def idle(llm: AsyncLLM) -> Iterator[None]:
    """What a test leaves running would be the next one's load."""
    yield
    asyncio.run(until(lambda: not len(llm._engine._mailbox)))
    llm._engine.check_integrity()


async def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < limit, "it never happened"
        await asyncio.sleep(0.005)


async def whole(answer: AsyncGenerator[StreamChunk, None]) -> tuple[list[StreamChunk], Completion]:
    chunks = [chunk async for chunk in answer]
    assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    completion = chunks[-1].completion
    assert completion is not None
    return chunks, completion


def test_many_at_once_have_the_texts_of_each_alone(
    llm: AsyncLLM, folders: tuple[Path, Path]
) -> None:
    """Greedy and seeded, with drafts, more of them than fit into the batch: as plain decoding has
    them one by one."""
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.8, seed=7, logprobs=2, ignore_eos=True),
    ]
    asked = [(prompt, each) for prompt in PROMPTS for each in params]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, llm._engine.snapshot().running)
            await asyncio.sleep(0.001)

    async def everything() -> list[tuple[list[StreamChunk], Completion]]:
        watching = asyncio.create_task(watch())
        answers = [whole(llm.generate(prompt, each)) for prompt, each in asked]
        done = await asyncio.gather(*answers)
        watching.cancel()
        return done

    done = asyncio.run(everything())
    plain = LLM(folders[0], drafter="none", threads=1)
    for (prompt, each), (chunks, completion) in zip(asked, done, strict=True):
        (alone,) = plain.generate(prompt, each)
        assert completion.token_ids == alone.token_ids
        assert completion.text == alone.text == "".join(chunk.text for chunk in chunks)
        assert completion.prompt_token_ids == alone.prompt_token_ids
        assert (completion.prompt, completion.finish_reason) == (prompt, "length")
        assert (completion.logprobs is None) == (alone.logprobs is None)
        assert completion.verifier == ("block" if each.seed is None else "gumbel")
        assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
    assert sum(completion.stats.accepted for _, completion in done) > 100
    assert most > 1, "they never ran together: the test tests nothing"


def test_messages_are_answered_under_the_chat_template(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)

    async def both() -> tuple[Completion, Completion]:
        _, given = await whole(llm.generate(HI, params))
        _, rendered = await whole(llm.generate("<user>Hi<assistant>", params))
        return given, rendered

    given, rendered = asyncio.run(both())
    assert given.prompt_token_ids == rendered.prompt_token_ids
    assert given.token_ids == rendered.token_ids
    assert given.prompt is None


async def left_by_closing(answer: AsyncGenerator[StreamChunk, None]) -> None:
    await anext(answer)
    await answer.aclose()


async def left_by_break(answer: AsyncGenerator[StreamChunk, None]) -> None:
    async for _ in answer:
        break


async def left_by_error(answer: AsyncGenerator[StreamChunk, None]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in answer:
            raise ZeroDivisionError


async def left_by_cancelling(answer: AsyncGenerator[StreamChunk, None]) -> None:
    has_begun = asyncio.Event()

    async def read() -> None:
        async for _ in answer:
            has_begun.set()

    task = asyncio.create_task(read())
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left_by_time_limit(answer: AsyncGenerator[StreamChunk, None]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await whole(answer)


async def left_before_it_began(answer: AsyncGenerator[StreamChunk, None]) -> None:
    """Its prompt is still being read in another thread."""
    task = asyncio.create_task(whole(answer))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [
        left_by_closing,
        left_by_break,
        left_by_error,
        left_by_cancelling,
        left_by_time_limit,
        left_before_it_began,
    ],
)
def test_an_answer_that_is_left_is_decoded_no_further(
    llm: AsyncLLM, leave: Callable[[AsyncGenerator[StreamChunk, None]], Awaitable[None]]
) -> None:
    """While the loop still runs; others have their texts."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    async def run() -> Completion:
        other = asyncio.create_task(whole(llm.generate("x", params)))
        await leave(llm.generate("endless", ENDLESS))
        _, completion = await other
        await until(lambda: not len(llm._engine._mailbox))
        return completion

    began = llm._engine._loop.steps
    completion = asyncio.run(run())
    assert len(completion.token_ids) == 40
    assert llm._engine._loop.steps - began < 300, "it was decoded to its end"


def test_a_request_that_is_left_while_its_prompt_is_read_does_not_run(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a cancellation that comes before the submission and is forgotten."""
    is_reading = threading.Event()
    may_go_on = threading.Event()
    submit = llm._engine.submit

    def slowly(*arguments: Any) -> None:
        is_reading.set()
        assert may_go_on.wait(SECONDS)
        submit(*arguments)

    monkeypatch.setattr(llm._engine, "submit", slowly)

    async def run() -> None:
        task = asyncio.create_task(whole(llm.generate("endless", ENDLESS)))
        await asyncio.to_thread(is_reading.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()

    began = llm._engine._loop.steps
    asyncio.run(run())
    llm._reader.submit(lambda: None).result(SECONDS)
    assert llm._engine._loop.steps - began < 300


def test_a_slow_reader_gets_larger_chunks_and_holds_up_nobody(llm: AsyncLLM) -> None:
    """No more waits for it than the rest of its answer, as one chunk."""
    params = SamplingParams(max_tokens=300, ignore_eos=True)

    async def run() -> tuple[list[StreamChunk], Completion, Completion]:
        slow = llm.generate("x", params)
        first = await anext(slow)
        _, other = await whole(llm.generate("y z", params))
        await until(lambda: not len(llm._engine._mailbox))
        rest, completion = await whole(slow)
        return [first, *rest], completion, other

    chunks, completion, other = asyncio.run(run())
    assert len(chunks) == 2
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert len(completion.token_ids) == len(other.token_ids) == 300


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, RequestError, "the prompt is empty"),
        (["a", "b"], None, RequestError, "generate takes one prompt, got 2: call it once for each"),
        ([HI, HI], None, RequestError, "chat_prompt takes one conversation, got 2"),
        ([{"content": "Hi"}], None, RequestError, "message 0 of conversation 0 needs a 'role'"),
        ([1, 257], None, RequestError, "token id 257, outside the vocabulary"),
        ("a", SamplingParams(n=2), ConfigError, "generate makes one answer, got n=2"),
        ("a", SamplingParams(bad_words=["\N{SNOWMAN}"], max_tokens=1), None, ""),
        ("a", {"temperature": 1}, ConfigError, "sampling_params must be SamplingParams"),
        ("a", SamplingParams(logit_bias={999: 1.0}), ConfigError, "999"),
    ],
)
def test_errors_are_raised_where_the_answer_is_read(
    llm: AsyncLLM, prompt: Any, params: Any, error: type[Exception] | None, message: str
) -> None:
    async def run() -> None:
        await whole(llm.generate(prompt, params))

    if error is None:
        asyncio.run(run())
        return
    with pytest.raises(error, match=message):
        asyncio.run(run())


def test_a_failure_in_the_engine_reaches_the_reader(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine goes on."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        answer = llm.generate("x", ENDLESS)
        await anext(answer)
        monkeypatch.setattr(Batch, "step", fails)
        with pytest.raises(OutriderError, match="ZeroDivisionError"):
            await whole(answer)
        monkeypatch.undo()
        await whole(llm.generate("x", SamplingParams(max_tokens=3)))

    asyncio.run(run())


def test_closing_ends_what_runs(folders: tuple[Path, Path]) -> None:
    """The reader of a half answer must not take it for a whole one."""

    async def run() -> None:
        async with AsyncLLM(folders[0], drafter="ngram", threads=1) as other:
            answer = other.generate("x", ENDLESS)
            await anext(answer)
            thread = other._engine._thread
            assert thread is not None
            assert thread.is_alive()
        assert not thread.is_alive()
        with pytest.raises(UnavailableError, match=r"cut off after \d+ tokens"):
            await whole(answer)
        with pytest.raises(UnavailableError, match="is closed"):
            await whole(other.generate("x"))
        await other.close()

    asyncio.run(run())


def test_a_named_verifier_verifies_seeded_answers(folders: tuple[Path, Path]) -> None:
    """As in `LLM`."""
    params = SamplingParams(max_tokens=5, temperature=1, seed=3, ignore_eos=True)

    async def run() -> str:
        async with AsyncLLM(folders[0], drafter="ngram", verifier="block", threads=1) as other:
            return (await whole(other.generate("x", params)))[1].verifier

    assert asyncio.run(run()) == "block"


def test_the_options_are_those_of_llm(folders: tuple[Path, Path]) -> None:
    with pytest.raises(TypeError, match=r"AsyncLLM\(\) has no argument 'gamma'. Did you mean"):
        AsyncLLM(folders[0], gamma=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"AsyncLLM\(\) takes one model"):
        AsyncLLM()
