"""The part that `LLM` and `AsyncLLM` share: the options that models are loaded with, and how prompts,
messages and sampling parameters are read."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

import torch

from outrider.build import Built, Options
from outrider.errors import ConfigError, RequestError
from outrider.messages import (
    Message,
    holds_messages,
    read_conversations,
    render,
    template_text,
)
from outrider.models.loading.generation_config import SamplingDefaults, checked_choice
from outrider.models.tokens.model_tokenizer import whole_tokenizer
from outrider.options import Runtime
from outrider.prompts import Prompt, ReadPrompt, read_prompts
from outrider.sampling.params import SamplingParams
from outrider.version import __version__
from outrider.wellformed import checked_text

Status = Callable[[str], None]
Prediction = Prompt  # what an answer is expected to be


class BaseLLM(ABC):
    """A loaded model with its tokenizer, chat template and sampling defaults."""

    _built: Built
    sampling_defaults: SamplingDefaults  # of calls without `sampling_params`
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
        prefill: str | None = None,
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
        status: Status = lambda line: None,
    ) -> None:
        """Load a model and what drafts for it. Give options by name; their defaults are in the
        signature above.

        target, model           the model: "demo", a local folder, a .gguf file or a hub id; `model` is vLLM's name for the same
        draft                   a smaller model that drafts, or a trained head (folder, GGUF file, hub id); "auto": what was
                                made for this target and is on this machine
        draft_endpoint          a draft service that drafts: "grpc://HOST:PORT"
        drafter                 who drafts; "auto": what drafts with `draft`, else a head in the checkpoint, else "suffix"
        drafter_options         settings of the drafter (`outrider ls DRAFTER` lists them)
        num_draft_tokens        draft tokens per target pass: 5; "auto", "auto:12": as many as pay; "1:5,8:0": none from 8 rows on
        verifier                acceptance rule; "auto": "block", for trees "traversal", with a seed "gumbel"
        verifier_options        settings of the verifier
        lossy                   allows a verifier that changes the text
        prefill                 reads a share of long prompts alone, which changes answers: "keep=0.2 draft=early:8"
        dtype                   "auto" (the checkpoint's), "bfloat16", "float32", ...
        quantise                4 or 8: bits that the target's linear layers are rounded to on loading (CPU): another model then
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
        """
        if (target is None) == (model is None):
            raise TypeError(
                f"{type(self).__name__}() takes one model, as 'target' or 'model': 'demo', a local "
                "folder, a .gguf file or a hub id"
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
            prefill=prefill,
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
        self._keeps_verifier = verifier != "auto"
        self._load(options, generation_config, status)

    @abstractmethod
    def _load(self, options: Options, generation_config: str, status: Status) -> None:
        """Load models, and set `_built` and `sampling_defaults`."""

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
        return f"{type(self).__name__}({target.label!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

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
        """Token ids of one conversation under a chat template.

        messages                {"role": "user", "content": "..."} for each turn
        chat_template           the text of a Jinja template; None: the model's own
        add_generation_prompt   ends the prompt where the assistant begins; None: unless the last message is continued
        continue_final_message  the answer continues the last message
        tools                   functions that the model may call, as the template takes them
        chat_template_kwargs    further variables of the template

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

    def _read(self, prompts: Any) -> list[ReadPrompt]:
        return read_prompts(prompts, self._tokenizer)

    def _read_one(self, given: Any, method: str, advice: str) -> ReadPrompt:
        """One prompt, or one conversation under the model's chat template. `method` was called;
        `advice`: what takes several."""
        if holds_messages(given):
            return ReadPrompt(token_ids=self.chat_prompt(given))
        prompts = self._read(given)
        if len(prompts) != 1:
            raise RequestError(f"{method} takes one prompt, got {len(prompts)}: {advice}")
        return prompts[0]

    def _prompt_ids(self, prompt: ReadPrompt, called: str = "the prompt") -> list[int]:
        """Token ids of a prompt. Raises RequestError for an empty text: some tokenizers make a
        begin token out of nothing."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        if not prompt.text:
            raise RequestError(f"{called} is empty: there is nothing to continue")
        return list(self._tokenizer(checked_text(called, prompt.text))["input_ids"])

    def _prediction_ids(self, prediction: ReadPrompt) -> list[int]:
        """Token ids of what an answer is expected to be."""
        if prediction.token_ids is not None:
            return prediction.token_ids
        text = checked_text("the prediction", prediction.text or "")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _one_params(self, given: SamplingParams | None, method: str, advice: str) -> SamplingParams:
        """Sampling of one answer. Raises ConfigError for what is none, and for `n` above 1.
        `method` was called; `advice`: what makes several."""
        params = self._params(given, 1)[0]
        if params.n != 1:
            raise ConfigError(f"{method} makes one answer, got n={params.n}: {advice}")
        return params

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
