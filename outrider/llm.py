"""`LLM`: load a target once, then generate, in batches or as a stream. The names are vLLM's where the thing is the same.

    llm = LLM("meta-llama/Llama-3.1-8B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
    for done in llm.generate(["Why is the sky blue?"], SamplingParams(temperature=0.7, max_tokens=200)):
        print(done.text, done.stats.tau)

A thin driver around `Decoder.step`: it turns prompts into rows, keeps up to `max_num_seqs` of them running, and turns
finished rows into completions. Not thread-safe: one call at a time.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from outrider.admission import checked_prediction, detokenizer_for, new_row
from outrider.build import Built, Needs, Options, assemble, choose, load_models
from outrider.engine.calibrate import calibrate_alone
from outrider.errors import ConfigError, NumericalError, RequestError
from outrider.outputs import Completion, StreamChunk
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.version import __version__
from outrider.wellformed import checked_text

Prompt = str | Sequence[int]
Prediction = str | Sequence[int]  # what an answer is expected to be


class LLM:
    """A target model, decoded speculatively. `target` is "demo", a local folder or a hub id; options: `Options`."""

    def __init__(
        self, target: str | Path, *, drafter: str = "auto", draft: str | Path | None = None,
        num_draft_tokens: int | str | None = None, drafter_options: dict[str, Any] | None = None,
        verifier: str = "auto", verifier_options: dict[str, Any] | None = None, lossy: bool = False,
        dtype: str = "auto", device: str = "auto", threads: int | None = None,
        compile: str = "auto", max_num_seqs: int = 8, max_model_len: int | None = None,
        trust_remote_code: bool = False, revision: str | None = None,
        status: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        options = Options(
            target=str(target), drafter=drafter, draft=None if draft is None else str(draft),
            num_draft_tokens=num_draft_tokens, drafter_options=drafter_options or {}, verifier=verifier,
            verifier_options=verifier_options or {}, lossy=lossy, dtype=dtype, device=device, threads=threads,
            compile=compile, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            trust_remote_code=trust_remote_code, revision=revision,
        )  # fmt: skip
        options, parts = choose(options)
        built = assemble(load_models(options, Needs.of(parts), status), parts)
        calibrate_alone(built, built.decoder, parts, status)
        self._use(built)

    @classmethod
    def around(cls, built: Built) -> LLM:
        """An LLM of parts that are there already; several may share models, one call at a time."""
        llm = cls.__new__(cls)
        llm._use(built)
        return llm

    def _use(self, built: Built) -> None:
        self._built = built
        self._decoder = built.decoder

    @property
    def tokenizer(self) -> Any:
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
        """What a person should know about how this runs, one line each."""
        return self._built.notes

    @property
    def versions(self) -> dict[str, str]:
        return {
            "outrider": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }

    @property
    def control(self) -> dict[str, Any]:
        """How many nodes were drafted and, with num_draft_tokens="auto", what was measured to decide it."""
        return self._decoder.control.summary()

    def close(self) -> None:
        """Let the drafter save what it was told to keep. Also the end of a `with` block."""
        self._decoder.drafter.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template. Raises ConfigError when it has none."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(f"'{self._built.target.name}' has no chat template; use generate with a plain prompt")
        try:
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error
        return list(encoded["input_ids"])

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, prediction: Prediction | Sequence[Prediction | None] | None = None, use_tqdm: bool = False,
    ) -> list[Completion]:  # fmt: skip
        """Complete every prompt; results in the order given. A bad prompt raises RequestError before anything runs.

        `prediction`: what the answers are expected to be, one for all prompts or one for each (None where nothing is expected).
        The texts are the same with and without. ConfigError where the drafter is none that looks at it.
        """
        batch = _as_batch(prompts)
        params = _broadcast(sampling_params, len(batch))
        rows = [self._row(number, p, s, streaming=False) for number, (p, s) in enumerate(zip(batch, params, strict=True))]
        for row, expected in zip(rows, _predictions(prediction, len(batch)), strict=True):
            self._predict(row, expected)
        done: dict[int, Completion] = {}
        with tqdm(total=len(rows), unit="prompt", disable=not use_tqdm) as bar:
            for row in self._run(rows):
                if row.finish_reason:
                    done[row.request] = self._completion(row)
                    bar.update()
        return [done[number] for number in range(len(rows))]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, prediction: Prediction | None = None
    ) -> Iterator[StreamChunk]:
        """One prompt, a chunk per step. The last chunk has the completion; `last_completion` has it after an interruption."""
        row = self._row(0, prompt, sampling_params or SamplingParams(), streaming=True)
        self._predict(row, prediction)
        return self._stream(row)

    last_completion: Completion | None = None

    def _stream(self, row: Row) -> Iterator[StreamChunk]:
        shown = 0
        try:
            for _ in self._run([row]):
                new = slice(shown, len(row.origins))
                shown = len(row.origins)
                pieces = row.pieces[new]
                chunk = StreamChunk("".join(pieces), row.output[new], row.origins[new], pieces)
                if row.finish_reason:
                    chunk.completion = self._completion(row)
                yield chunk
        finally:
            self.last_completion = self._completion(row)

    def _run(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Decode rows, at most max_num_seqs at a time; yields each row after each step that changed it."""
        waiting, decoder = deque(rows), self._decoder
        if decoder.target.kv.num_rows:
            raise RequestError("another generate() or stream() on this model still runs; read it to its end or close it first")
        started, failed = time.perf_counter(), False
        try:
            while waiting or len(decoder.rows):
                while waiting and len(decoder.rows) < self._built.options.max_num_seqs:
                    decoder.add(waiting.popleft())
                decoder.step()
                now = time.perf_counter() - started
                stepped = list(decoder.rows)
                for index in reversed(range(len(stepped))):
                    if stepped[index].finish_reason:
                        decoder.remove(index)
                for row in stepped:
                    _time(row, now)
                    yield row
        except NumericalError:
            failed = True
            raise
        finally:
            while len(decoder.rows):
                decoder.remove(0)
            if failed:
                self._scrub_caches()

    def _scrub_caches(self) -> None:
        """After NaN: it must not reach the next call through positions that are masked (0 times NaN is NaN)."""
        for model in (self._built.target, self._built.draft):
            if model is not None:
                model.lm.kv.scrub()

    def _row(self, number: int, prompt: Prompt, params: SamplingParams, *, streaming: bool) -> Row:
        called = f"prompt {number}"
        if isinstance(prompt, str):
            if not prompt:  # some tokenizers make a begin token out of nothing
                raise RequestError(f"{called} is empty: there is nothing to continue")
            prompt = self.tokenizer(checked_text(called, prompt))["input_ids"]
        return new_row(self._built, number, [int(t) for t in prompt], params, with_text=streaming, called=called)

    def _predict(self, row: Row, prediction: Prediction | None) -> None:
        if prediction is None:
            return
        if not self._built.takes_prediction:
            raise ConfigError(
                f"drafter '{self._built.options.drafter}' does not look at a prediction: use drafter 'prediction', or "
                "'composite' with it among the parts"
            )
        if isinstance(prediction, str):
            prediction = self.tokenizer(checked_text("the prediction", prediction), add_special_tokens=False)["input_ids"]
        vocab_size = self._built.target.lm.shape.vocab_size
        row.prediction = checked_prediction([int(token) for token in prediction], vocab_size, self._built.context)

    def _completion(self, row: Row) -> Completion:
        text = row.text if row.detokenizer is not None else self._decode_all(row)
        return Completion(
            prompt_token_ids=row.tokens[: row.num_prompt],
            text=text,
            token_ids=row.output,
            finish_reason=row.finish_reason or "abort",
            origins=row.origins,
            logprobs=None if row.params.logprobs is None else row.logprobs,
            stats=row.stats,
            lossless=self._decoder.verifier.lossless,
            seed=row.seed,
            stop_reason=row.stop_reason,
        )

    def _decode_all(self, row: Row) -> str:
        """The text of a row nobody watched: the same pieces a stream would have released."""
        detokenizer = detokenizer_for(self.tokenizer, row.tokens[: row.num_prompt], row.params)
        return "".join([*(detokenizer.push(token) for token in row.shown), detokenizer.flush()])


def _time(row: Row, now_s: float) -> None:
    """Time since the call began, split at the row's first token."""
    stats = row.stats
    if stats.steps == 1:
        stats.ttft_s = now_s
    stats.decode_s = now_s - stats.ttft_s


def _as_batch(prompts: Any) -> list[Prompt]:
    """A single prompt, text or token ids, is a batch of one."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def _predictions(given: Any, count: int) -> list[Prediction | None]:
    """One for each prompt. A text, or token ids, is one for all."""
    if given is None or isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int)):
        return [given] * count
    if len(given) != count:
        raise ConfigError(f"{len(given)} predictions for {count} prompts; give one, or one for each")
    return list(given)


def _broadcast(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return list(params)
