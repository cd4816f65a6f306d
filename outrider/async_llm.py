"""`AsyncLLM`: many requests at once over one engine, for programs with an event loop.

    async with AsyncLLM("meta-llama/Llama-3.1-8B-Instruct") as llm:
        async for chunk in llm.generate("Why is the sky blue?"):
            print(chunk.text, end="", flush=True)

The engine is the server's (`outrider/engine`): its thread decodes, and hands what each step brought
to the event loop. Prompts are read in a further thread, one after another, so that the loop never
waits for a tokenizer or a grammar.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import uuid4

from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings, Finish, Request, Speculation, Update
from outrider.errors import OutriderError, UnavailableError
from outrider.foreign import names_checked
from outrider.llm_base import BaseLLM, Prediction, Status
from outrider.messages import Message
from outrider.outputs import Completion, StreamChunk
from outrider.prompts import Prompt, read_predictions
from outrider.sampling.params import SamplingParams

SEVERAL = "call it once for each, at the same time"


@names_checked
class AsyncLLM(BaseLLM):
    """A target model that answers many requests at once, for programs with an event loop.

        async with AsyncLLM("Qwen/Qwen2.5-7B-Instruct", draft="Qwen/Qwen2.5-0.5B-Instruct") as llm:
            async for chunk in llm.generate("Why is the sky blue?"):
                print(chunk.text, end="", flush=True)

    Options are those of `LLM`. Requests join and leave the running batch at any step, `max_num_seqs`
    of them are decoded together, and the others wait in the order in which they came. A greedy or
    seeded text does not depend on what runs at the same time.

    Close it in the end, with `async with` or `close`: a thread of its own decodes.
    """

    _engine: Engine

    def _load(self, options: Options, generation_config: str, status: Status) -> None:
        # nobody is turned away: whoever asks holds the prompts in memory already
        settings = EngineSettings(max_num_seqs=options.max_num_seqs, max_queue=sys.maxsize)
        engine = make_engine(options, settings, generation_config=generation_config, status=status)
        self._engine = engine
        self._built = engine.built
        self.sampling_defaults = engine.sampling_defaults
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reading prompts")
        self._is_closed = False
        engine.start()

    async def close(self) -> None:
        """End what still runs, and the engine; let the drafter save what its options ask to keep.
        Generators that are still read raise UnavailableError."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._engine.stop)
            self._reader.shutdown(wait=False)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Answer one prompt or one conversation; yields a chunk for each step, the last one with the
        completion.

        prompt             a prompt, in the forms that `outrider.prompts` lists, or a list of messages. For other
                           options of the chat template give {"prompt_token_ids": llm.chat_prompt(messages, ...)}
        sampling_params    None: the model's own defaults, else greedy with 256 tokens
        prediction         what the answer is expected to be; the text is the same with and without

        Ends at once, and makes room for others, when the generator is closed: by `aclose()`, when
        the task that reads it is cancelled, or when a `for` loop over it is left. The engine does
        not wait for a slow reader: steps that it has not taken arrive as one larger chunk, so no
        more waits for it than the rest of its answer. Errors are raised where the generator is
        read: RequestError and ConfigError for what cannot be answered, UnavailableError after
        `close`, and what went wrong in the engine.
        """
        if self._is_closed:
            raise UnavailableError("this AsyncLLM is closed: make another one")
        params = self._one_params(sampling_params, "generate", SEVERAL)
        answer = _Answer(self._engine)
        loop = asyncio.get_running_loop()
        try:
            request, text = await loop.run_in_executor(
                self._reader, self._submit, answer, prompt, params, prediction
            )
            while True:
                update = await answer.next()
                finish = update.finish
                chunk = StreamChunk(update.text, update.token_ids, update.origins, update.pieces)
                if finish is not None:
                    _check(finish, answer)
                    verifier = self._engine.verifier_of(request)
                    chunk.completion = answer.completion(request, finish, text, verifier)
                yield chunk
                if finish is not None:
                    return
        finally:
            answer.leave()

    def _submit(
        self,
        answer: _Answer,
        given: Prompt | Sequence[Message],
        params: SamplingParams,
        prediction: Prediction | None,
    ) -> tuple[Request, str | None]:
        """Read a prompt and queue it. Returns the request, and the text that was given."""
        prompt = self._read_one(given, "generate", SEVERAL)
        predicted = read_predictions(prediction, 1)[0]
        request = Request(
            id=answer.request_id,
            prompt=self._prompt_ids(prompt),
            params=params,
            # a verifier that was named verifies seeded answers, too
            speculation=Speculation(invariant=False if self._keeps_verifier else None),
            prediction=None if predicted is None else self._prediction_ids(predicted),
        )
        answer.submit(request)
        return request, prompt.text


@dataclass
class _Answer:
    """One answer on its way from the engine's thread to its reader. Made and read in one event
    loop; `submit` is for any thread."""

    engine: Engine
    request_id: str = field(default_factory=lambda: uuid4().hex)
    updates: list[Update] = field(default_factory=list)  # that were read
    _waiting: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _is_left: threading.Event = field(default_factory=threading.Event)

    def submit(self, request: Request) -> None:
        """Queue its request, and take that back where the reader has left meanwhile."""
        self.engine.submit(request, self._listen)
        if self._is_left.is_set():
            self.engine.cancel(request.id)

    def leave(self) -> None:
        """The reader has left: the engine does no more for it."""
        self._is_left.set()
        self.engine.cancel(self.request_id)

    async def next(self) -> Update:
        """All that has come since the last call, as one update."""
        updates = [await self._waiting.get()]
        while not self._waiting.empty():
            updates.append(self._waiting.get_nowait())
        update = Update.joined(updates)
        self.updates.append(update)
        return update

    def completion(
        self, request: Request, finish: Finish, prompt: str | None, verifier: str
    ) -> Completion:
        """The whole answer, once it has ended."""
        whole = Update.joined(self.updates)
        return Completion(
            prompt_token_ids=request.prompt,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=finish.reason,
            origins=whole.origins,
            logprobs=None if request.params.logprobs is None else whole.logprobs,
            stats=finish.stats,
            lossless=finish.lossless,
            prompt_share=finish.prompt_share,
            seed=finish.seed,
            verifier=verifier,
            stop_reason=finish.stop_reason,
            prompt=prompt,
        )

    def _listen(self, update: Update) -> None:
        """In the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, update)
        except RuntimeError:  # the loop is closed: nobody is left to read it
            self.engine.cancel(self.request_id)


def _check(finish: Finish, answer: _Answer) -> None:
    """Raises what ended an answer before its end."""
    if finish.reason == "error":
        raise finish.error or OutriderError("the request failed inside the engine")
    if finish.reason == "abort":
        count = sum(len(update.token_ids) for update in answer.updates)
        raise UnavailableError(
            f"the answer was cut off after {count} tokens: the AsyncLLM was closed"
        )
