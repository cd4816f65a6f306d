"""`LLM`: load a target once, then generate, in batches or as a stream. The names are vLLM's where
the thing is the same.

    llm = LLM("meta-llama/Llama-3.1-8B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct") for done
    in llm.generate(["Why is the sky blue?"], SamplingParams(temperature=0.7, max_tokens=200)):
        print(done.text, done.stats.tau)

A thin driver around `Decoder.step`: it turns prompts into rows, keeps up to `max_num_seqs` of them
running, and turns finished rows into completions. One call runs at a time: those of other threads
wait.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from outrider.admission import checked_prediction, detokenizer_for, new_row
from outrider.build import Built, Needs, Options, assemble, choose, load_models
from outrider.engine.warmup import calibrate_alone
from outrider.errors import ConfigError, NumericalError, RequestError
from outrider.foreign import names_checked
from outrider.messages import Message, read_conversations, render, template_text
from outrider.models.loading.generation_config import (
    SamplingDefaults,
    checked_choice,
    sampling_defaults,
)
from outrider.models.tokens.model_tokenizer import whole_tokenizer
from outrider.options import Runtime
from outrider.outputs import Completion, StreamChunk
from outrider.prompts import Prompt, ReadPrompt, read_predictions, read_prompts
from outrider.rows import Row
from outrider.run import run_rows
from outrider.sampling.params import SamplingParams
from outrider.verifiers.invariant import invariant_verifier
from outrider.version import __version__
from outrider.wellformed import checked_text

WAIT_S = 0.05  # between two looks at what another thread's call is

Prediction = Prompt  # what an answer is expected to be


@names_checked
class LLM:
    """A target model, decoded speculatively.

    target, model           the model: "demo", a local folder, a .gguf file or a hub id; `model` is vLLM's name for the same
    draft                   a smaller model that drafts, or the folder or GGUF file of a trained head
    draft_endpoint          a draft service that drafts: "grpc://HOST:PORT"
    drafter                 who drafts; "auto": what drafts with `draft`, else a head in the target's checkpoint, else "ngram"
    drafter_options         settings of the drafter (`outrider ls DRAFTER` lists them)
    num_draft_tokens        draft tokens per target pass: 5; "auto", "auto:12": as many as pay; "1:5,8:0": none from 8 rows on
    verifier                acceptance rule; "auto": "block", for trees "traversal", with a seed "gumbel"
    verifier_options        settings of the verifier
    lossy                   allows a verifier that changes the text
    dtype                   "auto" (the checkpoint's), "bfloat16", "float32", ...
    quantise                4 or 8: bits that the target's linear layers are rounded to on loading (CPU); it is another model then
    device                  "auto", "cpu", "cuda" or "cuda:N"
    threads                 CPU threads; None: as many as this process may use
    runtime                 how passes run: "native", "graphs", "eager"; "auto": the first that device and model allow
    max_num_seqs            answers that are decoded together, at most
    max_model_len           longest prompt with its answer, in tokens; None: the model's
    trust_remote_code       runs code that comes with the checkpoint
    revision                the target's branch, tag or commit on the hub
    generation_config       sampling of calls without `sampling_params`: "auto" (the model's generation_config.json), "none"
                            (greedy), or a folder with such a file
    status                  called with one line for what takes long while loading

    With `verifier="auto"` a sampled answer with a seed is verified by `gumbel`: the same seed gives
    the same text, whatever is drafted. So is one without a seed where a best-first tree is drafted,
    because such trees are then cheaper. A verifier that is named here is kept, and then the text
    also depends on the drafts.
    """

    _keeps_verifier = True  # for seeded answers, too

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        model: str | Path | None = None,
        drafter: str = "auto",
        draft: str | Path | None = None,
        draft_endpoint: str | None = None,
        num_draft_tokens: int | str | None = None,
        drafter_options: dict[str, Any] | None = None,
        verifier: str = "auto",
        verifier_options: dict[str, Any] | None = None,
        lossy: bool = False,
        dtype: str = "auto",
        quantise: Literal[4, 8] | None = None,
        device: str = "auto",
        threads: int | None = None,
        runtime: Runtime = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        generation_config: str = "auto",
        status: Callable[[str], None] = lambda line: None,
    ) -> None:
        if (target is None) == (model is None):
            raise TypeError(
                "LLM() takes one model, as 'target' or 'model': 'demo', a local folder, a .gguf "
                "file or a hub id"
            )
        options = Options(
            target=str(model if target is None else target),
            drafter=drafter,
            draft=None if draft is None else str(draft),
            draft_endpoint=draft_endpoint,
            num_draft_tokens=num_draft_tokens,
            drafter_options=drafter_options or {},
            verifier=verifier,
            verifier_options=verifier_options or {},
            lossy=lossy,
            dtype=dtype,
            quantise=quantise,
            device=device,
            threads=threads,
            runtime=runtime,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
        checked_choice(generation_config)
        options, parts = choose(options)
        built = assemble(load_models(options, Needs.of(parts), status), parts)
        calibrate_alone(built, built.decoder, parts, status)
        self._use(built, sampling_defaults(generation_config, built.target, built.context))
        self._keeps_verifier = verifier != "auto"

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

    def __repr__(self) -> str:
        target = self._built.target
        draft = self._built.draft
        options = self._built.options
        shown = {
            "drafter": options.drafter,
            **({} if draft is None else {"draft": draft.label}),
            "num_draft_tokens": options.num_draft_tokens,
            "verifier": options.verifier,
            "dtype": options.dtype,
            "device": options.device,
            "runtime": options.runtime,
        }
        return f"LLM({target.label!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the target, which is loaded when it is asked for."""
        return whole_tokenizer(self._tokenizer)

    @property
    def _tokenizer(self) -> Any:
        return self._built.target.tokenizer

    @property
    def config(self) -> dict[str, Any]:
        """Every option as it was resolved: no "auto" left."""
        return self._built.config()

    @property
    def memory(self) -> dict[str, Any]:
        """Estimated bytes: weights, KV per token, the draft's share."""
        return self._built.memory.as_dict()

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how this runs, one line each."""
        return [*self._built.notes, *self.sampling_defaults.notes]

    @property
    def versions(self) -> dict[str, str]:
        return {
            "outrider": __version__,
            "torch": torch.__version__,
            "transformers": installed("transformers"),
            "python": platform.python_version(),
        }

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

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of calls without `sampling_params`. Give keywords to change some:
        `llm.sampling_defaults.params(seed=1)`."""
        return self.sampling_defaults.params()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(template_text(self._tokenizer))

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of one conversation under a chat template, the model's own unless one is given.

        Raises ConfigError where there is no template or it does not know an option, RequestError
        for messages that are none.
        """
        conversations = read_conversations(messages)
        if len(conversations) != 1:
            raise RequestError(
                f"chat_prompt takes one conversation, got {len(conversations)}: chat takes several"
            )
        return self._rendered(
            conversations[0],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def _rendered(
        self, messages: list[dict[str, Any]], *, called: str = "", **options: Any
    ) -> list[int]:
        """Token ids of a conversation. `called`: what errors call it, where it is one of several."""
        try:
            return render(self._tokenizer, self._built.target.label, messages, **options)
        except RequestError as error:
            raise RequestError(f"{called}: {error}" if called else str(error)) from error

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or several, each a list of messages. Further arguments:
        `chat_prompt`'s and `generate`'s."""
        conversations = read_conversations(messages)
        rendered = [
            self._rendered(
                prompt,
                called=f"conversation {number}" if len(conversations) > 1 else "",
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
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
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Complete every prompt; results in the order given. A bad prompt raises RequestError
        before anything runs.

        `prompts`: one or many, in the forms that `outrider.prompts` lists. With `n` above 1 a
        result has them all in `outputs`. `prediction`: what the answers are expected to be, one for
        all prompts or one for each (None where nothing is expected). The texts are the same with
        and without. ConfigError where the drafter does not use it.
        """
        batch = self._read(prompts)
        params = self._params(sampling_params, len(batch))
        asked = [
            (p, single.answer(number), number)
            for p, single in enumerate(params)
            for number in range(single.n)
        ]
        rows = [
            self._row(number, _content(batch[p]), single, streaming=False, called=f"prompt {p}")
            for number, (p, single, _) in enumerate(asked)
        ]
        predictions = read_predictions(prediction, len(batch))
        for row, (p, _, _) in zip(rows, asked, strict=True):
            self._predict(row, predictions[p])
        done: dict[int, Completion] = {}
        with tqdm(total=len(rows), unit="answer", disable=not use_tqdm) as bar:
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
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
    ) -> Iterator[StreamChunk]:
        """One prompt, a chunk per step. The last chunk has the completion; `last_completion` has it
        after an interruption."""
        prompts = self._read(prompt)
        if len(prompts) != 1:
            raise RequestError(
                f"stream takes one prompt, got {len(prompts)}: generate takes several"
            )
        params = self._params(sampling_params, 1)[0]
        if params.n != 1:
            raise ConfigError(f"stream makes one answer, got n={params.n}: generate makes several")
        row = self._row(0, _content(prompts[0]), params, streaming=True)
        self._predict(row, read_predictions(prediction, 1)[0])
        return self._stream(row, prompts[0].text)

    def _read(self, prompts: Any) -> list[ReadPrompt]:
        return read_prompts(prompts, self._tokenizer)

    last_completion: Completion | None = None

    def _stream(self, row: Row, prompt: str | None) -> Iterator[StreamChunk]:
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
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        streaming: bool,
        called: str = "the prompt",
    ) -> Row:
        if isinstance(prompt, str):
            if not prompt:  # some tokenizers make a begin token out of nothing
                raise RequestError(f"{called} is empty: there is nothing to continue")
            prompt = list(self._tokenizer(checked_text(called, prompt))["input_ids"])
        row = new_row(self._built, number, prompt, params, with_text=streaming, called=called)
        if not self._keeps_verifier:
            wanted = True if self._decoder.drafter.prefers_shared_noise else None
            row.verifier = invariant_verifier(params, self._decoder.verifier, wanted=wanted)
        return row

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Sampling of each prompt. Raises ConfigError for what is none, and for another number of
        them."""
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, list | tuple) or not all(
            isinstance(entry, SamplingParams) for entry in given
        ):
            raise ConfigError(
                "sampling_params must be SamplingParams, or a list with one for each prompt, got "
                f"{given!r:.80}"
            )
        if len(given) != count:
            raise ConfigError(
                f"{len(given)} sampling_params for {count} prompts; give one, or one for each"
            )
        return list(given)

    def _predict(self, row: Row, prediction: ReadPrompt | None) -> None:
        if prediction is None:
            return
        if not self._built.takes_prediction:
            raise ConfigError(
                f"drafter '{self._built.options.drafter}' does not look at a prediction: use "
                "drafter 'prediction', or "
                "'composite' with it among the parts"
            )
        tokens = _content(prediction)
        if isinstance(tokens, str):
            tokens = list(
                self._tokenizer(checked_text("the prediction", tokens), add_special_tokens=False)[
                    "input_ids"
                ]
            )
        row.prediction = checked_prediction(
            tokens, self._built.target.lm.shape.vocab_size, self._built.context
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
            lossless=verifier.lossless,
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


def _content(prompt: ReadPrompt) -> str | list[int]:
    return prompt.token_ids if prompt.token_ids is not None else prompt.text or ""
