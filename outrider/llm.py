"""`LLM`: load a target once, then generate, in batches or as a stream. The names are vLLM's where
the thing is the same.

    llm = LLM("meta-llama/Llama-3.1-8B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
    params = SamplingParams(temperature=0.7, max_tokens=200)
    for done in llm.generate(["Why is the sky blue?"], params):
        print(done.text, done.stats.tau)

A thin driver around `Decoder.step`: it turns prompts into rows, keeps up to `max_num_seqs` of them
running, and turns finished rows into completions. One call runs at a time: those of other threads
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

from tqdm import tqdm

from outrider.admission import checked_prediction, detokenizer_for, new_row
from outrider.build import Built, Needs, Options, assemble, choose, load_models
from outrider.engine.warmup import calibrate_alone
from outrider.errors import ConfigError, NumericalError, RequestError
from outrider.foreign import names_checked
from outrider.llm_base import BaseLLM, Prediction, Status
from outrider.messages import Message, read_conversations
from outrider.models.loading.generation_config import SamplingDefaults, sampling_defaults
from outrider.outputs import Completion, StreamChunk
from outrider.prompts import Prompt, ReadPrompt, read_predictions
from outrider.rows import Row
from outrider.run import run_rows
from outrider.sampling.params import SamplingParams
from outrider.verifiers.invariant import invariant_verifier

WAIT_S = 0.05  # between two looks at what another thread's call is


@names_checked
class LLM(BaseLLM):
    """A target model, decoded speculatively, one call at a time.

        with LLM("Qwen/Qwen2.5-7B-Instruct", draft="Qwen/Qwen2.5-0.5B-Instruct") as llm:
            answers = llm.generate(["Why is the sky blue?", "Name a fish."])

    `generate` completes prompts, `chat` answers conversations, `stream` yields one answer while it
    is made. For many requests that come and go, see `AsyncLLM`.

    With `verifier="auto"` a sampled answer with a seed is verified by `gumbel`: the same seed gives
    the same text, whatever is drafted. So is one without a seed where a best-first tree is drafted,
    because such trees are then cheaper. A verifier that is named here is kept, and then the text
    also depends on the drafts.
    """

    def _load(self, options: Options, generation_config: str, status: Status) -> None:
        options, parts = choose(options)
        built = assemble(load_models(options, Needs.of(parts), status), parts)
        calibrate_alone(built, built.decoder, parts, status)
        self._use(built, sampling_defaults(generation_config, built.target, built.context))

    @classmethod
    def around(cls, built: Built) -> LLM:
        """An LLM of parts that are there already; several may share models, one call at a time. It
        has no sampling defaults, and its verifier verifies seeded answers, too."""
        llm = cls.__new__(cls)
        llm._use(built)
        return llm

    def _use(self, built: Built, defaults: SamplingDefaults | None = None) -> None:
        self._built = built
        self.sampling_defaults = defaults or SamplingDefaults()
        self._decoder = built.decoder
        self._running = threading.Lock()  # while rows of a call are decoded
        self._is_streaming = False

    @property
    def control(self) -> dict[str, Any]:
        """How many nodes were drafted and, with num_draft_tokens="auto", what was measured to
        decide it."""
        return self._decoder.control.summary()

    @property
    def drafter_summary(self) -> list[str]:
        """Notes for the user on how drafting went, one line each."""
        return self._decoder.drafter.summary

    @property
    def drafter_counters(self) -> dict[str, float]:
        """The drafter's counters besides drafts: of a draft service hits, waits, misses and
        troubles."""
        return self._decoder.drafter.counters

    def close(self) -> None:
        """Let the drafter save what its options ask to keep. Also the end of a `with` block."""
        self._decoder.drafter.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        prediction: Prediction | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[StreamChunk, None, None]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Any = None,
        *,
        stream: bool = False,
        prediction: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion] | Generator[StreamChunk, None, None]:
        """Answer a conversation, or several, each a list of messages.

        messages           {"role": "user", "content": "..."} for each turn, or a list of such lists
        sampling_params    as for `generate`
        stream             False: a list of results, one for each conversation; True: the answer to one
                           conversation, a chunk per step, as `stream` yields it
        prediction         as for `generate`
        use_tqdm           as for `generate`

        The others are those of `chat_prompt`.
        """
        template_options: dict[str, Any] = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        if stream:
            prompt = self.chat_prompt(cast(Sequence[Message], messages), **template_options)
            return self.stream({"prompt_token_ids": prompt}, sampling_params, prediction=prediction)
        conversations = read_conversations(messages)
        rendered = [
            self._rendered(
                prompt,
                called=f"conversation {number}" if len(conversations) > 1 else "",
                **template_options,
            )
            for number, prompt in enumerate(conversations)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in rendered]
        return self.generate(prompts, sampling_params, prediction=prediction, use_tqdm=use_tqdm)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Completion]:
        """Complete every prompt; results in the order given. A bad prompt raises RequestError
        before anything runs.

        prompts            one or many, in the forms that `outrider.prompts` lists
        sampling_params    one for all prompts, or a list with one for each; None: the model's own defaults, else
                           greedy with 256 tokens. With `n` above 1 a result has all answers in `outputs`
        prediction         what the answers are expected to be, one for all prompts or one for each (None where
                           nothing is expected): texts are the same with and without. ConfigError where the
                           drafter does not use it
        use_tqdm           True: a progress bar on standard error for several prompts, where that is a terminal;
                           False: none; a callable that makes a bar, like `tqdm.notebook.tqdm`: always that one
        """
        batch = self._read(prompts)
        params = self._params(sampling_params, len(batch))
        asked = [
            (p, single.answer(number), number)
            for p, single in enumerate(params)
            for number in range(single.n)
        ]
        rows = [
            self._row(number, batch[p], single, streaming=False, called=f"prompt {p}")
            for number, (p, single, _) in enumerate(asked)
        ]
        predictions = read_predictions(prediction, len(batch))
        for row, (p, _, _) in zip(rows, asked, strict=True):
            self._predict(row, predictions[p])
        done: dict[int, Completion] = {}
        with _bar(use_tqdm, num_prompts=len(batch), num_answers=len(rows)) as bar:
            for row in self._run(rows):
                if row.finish_reason:
                    p, _, index = asked[row.request]
                    done[row.request] = self._completion(row, batch[p].text, index)
                    bar.update()
        results: list[Completion] = []
        for number, (_, _, index) in enumerate(asked):
            (results if index == 0 else results[-1].others).append(done[number])
        return results

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Answer one prompt or one conversation, a chunk per step. The last chunk has the completion.

        prompt             a prompt, in the forms that `outrider.prompts` lists, or a list of messages
        sampling_params    None: the model's own defaults, else greedy with 256 tokens
        prediction         as for `generate`

        Closing the generator ends the answer; `last_completion` then has what there is of it.
        """
        single = self._read_one(prompt, "stream", "generate takes several")
        params = self._one_params(sampling_params, "stream", "generate makes several")
        row = self._row(0, single, params, streaming=True)
        self._predict(row, read_predictions(prediction, 1)[0])
        return self._stream(row, single.text)

    last_completion: Completion | None = None

    def _stream(self, row: Row, prompt: str | None) -> Generator[StreamChunk, None, None]:
        shown = 0
        try:
            for _ in self._run([row], streams=True):
                new = slice(shown, len(row.origins))
                shown = len(row.origins)
                pieces = row.pieces[new]
                chunk = StreamChunk("".join(pieces), row.output[new], row.origins[new], pieces)
                if row.finish_reason:
                    chunk.completion = self._completion(row, prompt)
                yield chunk
        finally:
            row.release()  # an interruption may come while text is held back
            self.last_completion = self._completion(row, prompt)

    def _run(self, rows: Sequence[Row], *, streams: bool = False) -> Iterator[Row]:
        """Decode rows, at most max_num_seqs at a time; yields each row after each step that changed
        it. A call of another thread waits until this one is over, unless this one is a stream,
        which may never be read to its end."""
        while not self._running.acquire(timeout=WAIT_S):
            self._refuse_beside(self._is_streaming)
        try:
            self._is_streaming = streams
            # of an LLM that shares the model
            self._refuse_beside(self._decoder.target.kv.num_rows > 0)
            for stepped in run_rows(self._decoder, rows, self._built.options.max_num_seqs):
                yield from stepped
        except NumericalError:
            self._scrub_caches()
            raise
        finally:
            self._is_streaming = False
            self._running.release()

    def _refuse_beside(self, another_runs: bool) -> None:
        if another_runs:
            raise RequestError(
                "another generate() or stream() on this model still runs; read it to its end or "
                "close it first"
            )

    def _scrub_caches(self) -> None:
        """After NaN: it must not reach the next call through positions that are masked (0 times NaN
        is NaN)."""
        for cache in (self._decoder.target.kv, *self._decoder.drafter.caches):
            cache.scrub()

    def _row(
        self,
        number: int,
        prompt: ReadPrompt,
        params: SamplingParams,
        *,
        streaming: bool,
        called: str = "the prompt",
    ) -> Row:
        tokens = self._prompt_ids(prompt, called)
        row = new_row(self._built, number, tokens, params, with_text=streaming, called=called)
        if not self._keeps_verifier:
            wanted = True if self._decoder.drafter.prefers_shared_noise else None
            row.verifier = invariant_verifier(params, self._decoder.verifier, wanted=wanted)
        return row

    def _predict(self, row: Row, prediction: ReadPrompt | None) -> None:
        if prediction is None:
            return
        if not self._built.takes_prediction:
            raise ConfigError(
                f"drafter '{self._built.options.drafter}' does not look at a prediction: use "
                "drafter 'prediction', or "
                "'composite' with it among the parts"
            )
        row.prediction = checked_prediction(
            self._prediction_ids(prediction),
            self._built.target.lm.shape.vocab_size,
            self._built.context,
        )

    def _completion(self, row: Row, prompt: str | None, index: int = 0) -> Completion:
        text = row.text if row.detokenizer is not None else self._decode_all(row)
        verifier = row.verifier or self._decoder.verifier
        return Completion(
            prompt_token_ids=row.tokens[: row.num_prompt],
            text=text,
            token_ids=row.output,
            finish_reason=row.finish_reason or "abort",
            origins=row.origins,
            logprobs=None if row.params.logprobs is None else row.logprobs,
            stats=row.stats,
            lossless=self._built.promises(verifier),
            prompt_share=row.prompt_share,
            verifier=verifier.name,
            seed=row.seed,
            prompt=prompt,
            index=index,
            stop_reason=row.stop_reason,
        )

    def _decode_all(self, row: Row) -> str:
        """The text of a row nobody watched: the same pieces a stream would have released."""
        detokenizer = detokenizer_for(self._tokenizer, row.tokens[: row.num_prompt], row.params)
        return "".join([*(detokenizer.push(token) for token in row.shown), detokenizer.flush()])


def _bar(wanted: bool | Callable[..., Any], *, num_prompts: int, num_answers: int) -> Any:
    """A progress bar that counts answers. tqdm leaves out the default one where standard error is
    no terminal (`disable=None`)."""
    if not isinstance(wanted, bool):
        return wanted(total=num_answers, unit="answer")
    is_off = not wanted or num_prompts < 2
    return tqdm(total=num_answers, unit="answer", disable=True if is_off else None)
