"""Every option that more than one verb has, defined once, grouped as a verb wants them.

A verb takes a whole group as one argument (`model: ModelOptions`); `verbs.with_groups` spreads the group's fields over the
command line and hands the verb the filled-in object. Names follow the field (vLLM, llama.cpp, transformers), defaults follow
`outrider.LLM` and `outrider.SamplingParams`: a test compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.verbs import name_and_value, option, written
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.sampling.params import SamplingParams

DRAFTING = "Drafting"
MODEL = "Model and machine"
SAMPLING = "Sampling"

RuntimeName = Literal["auto", "native", "graphs", "eager"]
Target = Annotated[str, typer.Argument(help="'demo', a local folder, a .gguf file, or a hub id.", show_default=False)]
ServerTarget = Annotated[
    str,
    typer.Argument(
        help="'demo', a local folder, a .gguf file, a hub id, or the URL of an OpenAI-compatible server.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option(help="Standard output is one JSON object, nothing else.")]
ShowDrafts = Annotated[bool, typer.Option(help="Mark the tokens that came from the drafter.")]
TOP_K = "Keep the K likeliest tokens; 0 is off."
TOP_P = "Keep the likeliest tokens up to this mass; 1 is off, 0 greedy."
MIN_P = "Drop tokens below this share of the likeliest; 0 is off."
TopK = Annotated[int, option(SAMPLING, TOP_K)]
TopP = Annotated[float, option(SAMPLING, TOP_P)]
MinP = Annotated[float, option(SAMPLING, MIN_P)]
GENERATION_CONFIG = (
    "Where what is not given about sampling comes from: auto (the model's generation_config.json), none, or a folder with one."
)
GenerationConfig = Annotated[str, option(SAMPLING, GENERATION_CONFIG, metavar="auto|none|FOLDER")]
DrafterOption = Annotated[
    list[str] | None,
    option(
        DRAFTING, "A setting of the drafter ('outrider ls DRAFTER' lists them); may be given again.", metavar="NAME=VALUE",
        show_default=False,
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """How models are loaded and where they run; `draft` is the draft model of every drafter that wants one."""

    draft: Annotated[
        str | None, option(DRAFTING, "A smaller model that drafts: a local folder, a .gguf file or a hub id.", show_default=False)
    ] = None
    dtype: Annotated[str, option(MODEL, "auto (the checkpoint's), bfloat16, float32, ...")] = "auto"
    quantise: Annotated[
        int | None,
        option(
            MODEL, "Round the target's linear layers to 4 or 8 bits on loading (CPU): another model, smaller and faster.",
            metavar="4|8", show_default=False,
        ),
    ] = None  # fmt: skip
    device: Annotated[str, option(MODEL, "auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Annotated[int | None, option(MODEL, "CPU threads.", show_default="as many as this process may use")] = None
    runtime: Annotated[
        RuntimeName,
        option(
            MODEL,
            "How passes run: native (one call of our own library, on a CPU), graphs (CUDA graphs), eager (PyTorch's modules, "
            "the reference); auto takes the first that this device and model allow.",
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, option(MODEL, "Longest prompt plus answer.", show_default="the model's")
    ] = None
    revision: Annotated[
        str | None, option(MODEL, "The target's branch, tag or commit on the hub.", show_default=False)
    ] = None
    trust_remote_code: Annotated[
        bool, option(MODEL, "Run code that comes with the checkpoint.")
    ] = False

    def options(self, target: str) -> Options:
        """For `load_models`: what it says about drafting plays no part."""
        from outrider.build import Options

        return Options(target=target, **{field.name: getattr(self, field.name) for field in dataclasses.fields(MachineOptions)})


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MachineOptions):
    """Which model runs where, and who drafts for it: the arguments of `outrider.LLM`."""

    draft: Annotated[
        str | None,
        option(
            DRAFTING, "A smaller model that drafts, or the folder of a trained head (eagle, eagle3, mtp, medusa, block).",
            show_default=False,
        ),
    ] = None  # fmt: skip
    draft_endpoint: Annotated[
        str | None,
        option(
            DRAFTING, "A draft service drafts: grpc://HOST:PORT, grpcs://..., unix:/PATH; local: idle cores of this machine do, "
            "with --draft.",
            metavar="ADDRESS|local", show_default=False,
        ),
    ] = None  # fmt: skip
    settings: Annotated[
        Path | None,
        option(DRAFTING, "Options from a file of 'outrider tune'; options given here win.", metavar="FILE", show_default=False),
    ] = None
    drafter: Annotated[
        str, option(DRAFTING, "Who drafts: see 'outrider ls drafters'. auto: what drafts with --draft, else ngram.")
    ] = "auto"
    num_draft_tokens: Annotated[
        str | None,
        option(
            DRAFTING, "Draft tokens per target pass: 5; auto, auto:12: as many as pay; 1:5,8:0: 5, and none from 8 requests on.",
            show_default="the drafter's",
        ),
    ] = None  # fmt: skip
    drafter_option: DrafterOption = None
    verifier: Annotated[
        str, option(DRAFTING, "Acceptance rule: see 'outrider ls verifiers'. auto: block, for trees traversal.")
    ] = "auto"
    verifier_option: Annotated[
        list[str] | None,
        option(
            DRAFTING, "A setting of the verifier ('outrider ls VERIFIER' lists them); may be given again.", metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None  # fmt: skip
    lossy: Annotated[bool, option(DRAFTING, "Allow a verifier that changes the text.")] = False

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `outrider.LLM`. One prompt at a time. Raises ConfigError for a bad settings file."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for part in ("drafter", "verifier"):
            values[f"{part}_options"] = dict(
                name_and_value(written(f"{part}_option"), text) for text in values.pop(f"{part}_option") or []
            )
        return self._with_file(values, values.pop("settings")) | {"max_num_seqs": 1}

    def _with_file(self, values: dict[str, Any], file: Path | None) -> dict[str, Any]:
        """`values`, and from the file what was not given."""
        if file is None:
            return values
        from outrider.settings_file import read_settings

        options = read_settings(file).options
        if values["drafter"] not in ("auto", options.get("drafter")):
            raise ConfigError(
                f"--drafter {values['drafter']} and --settings {file}, which is about '{options.get('drafter')}': leave one out"
            )
        for name, value in options.items():
            if isinstance(value, dict):
                values[name] = {**value, **values[name]}
            elif values[name] is None or (values[name] == "auto" and name != "num_draft_tokens"):  # there it is an answer
                values[name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when to stop. `SamplingParams` checks the ranges and words the error."""

    max_tokens: Annotated[
        str | None,
        option(SAMPLING, "Max tokens to generate; none: to the end of the context.", metavar="N|none", show_default="256"),
    ] = None
    temperature: Annotated[float | None, option(SAMPLING, "0 is greedy.", min=0, metavar="<float>", show_default="0")] = None
    top_k: Annotated[int | None, option(SAMPLING, TOP_K, show_default="0")] = None
    top_p: Annotated[float | None, option(SAMPLING, TOP_P, show_default="1")] = None
    min_p: Annotated[float | None, option(SAMPLING, MIN_P, show_default="0")] = None
    repetition_penalty: Annotated[
        float | None, option(SAMPLING, "Of tokens seen in prompt or output; 1 is off.", show_default="1")
    ] = None
    presence_penalty: Annotated[float, option(SAMPLING, "Once per token seen in the output; 0 is off.")] = 0.0
    frequency_penalty: Annotated[float, option(SAMPLING, "Per occurrence in the output; 0 is off.")] = 0.0
    seed: Annotated[
        int | None,
        option(
            SAMPLING, "Same seed, same text, whatever is drafted: verifier gumbel. Another --verifier is kept, and then the "
            "drafts must be the same, too.",
            show_default="a new one each run",
        ),
    ] = None  # fmt: skip
    stop: Annotated[
        list[str] | None, option(SAMPLING, "Stop before this text; may be given again.", metavar="<str>", show_default=False)
    ] = None

    def params(self, logprobs: int | None = None, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """The library's form; `defaults` fill in what was not given. Raises ConfigError for a value out of range."""
        from outrider.sampling.params import SamplingParams

        given = {field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) is not None}
        if "max_tokens" in given:
            given["max_tokens"] = _length(given["max_tokens"])
        return SamplingParams(**{**(defaults or {}), **given, "logprobs": logprobs})


def _length(text: str | int) -> int | None:
    """A number of tokens, or 'none' for no limit. Raises ConfigError."""
    try:
        length = None if text == "none" else int(text)
    except ValueError:
        raise ConfigError(f"--max-tokens takes a number, or none for the end of the context, got '{text}'") from None
    if length is not None and length < 1:
        raise ConfigError(f"--max-tokens must be at least 1, or none for the end of the context, got {length}")
    return length
