"""Every option that more than one verb has, defined once, grouped as a verb wants them.

A verb takes a whole group as one argument (`model: ModelOptions`); `verbs.with_groups` spreads the
group's fields over the command line and hands the verb the filled-in object. Names follow the field
(vLLM, llama.cpp, transformers), defaults follow `outrider.LLM` and `outrider.SamplingParams`: a
test compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.verbs import as_typed, given, listed, option, refuse_unused
from outrider.errors import ConfigError
from outrider.settings_file import read_settings
from outrider.wellformed import read_json, read_text

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.sampling.params import SamplingParams
    from outrider.sampling.structured import StructuredOutputsParams

DRAFTING = "Drafting"
MODEL = "Model and machine"
SAMPLING = "Sampling"

# written in one text by verbs that run studies: `verbs.gathered`
SELDOM_MODEL = (
    "dtype", "quantise", "runtime", "max_model_len", "revision", "trust_remote_code", "lossy", "prefill", "draft_endpoint",
)  # fmt: skip
SELDOM_SAMPLING = (
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "ignore_eos",
    "json_schema", "regex", "choice", "grammar",
)  # fmt: skip

RuntimeName = Literal["auto", "native", "graphs", "eager"]
Target = Annotated[
    str,
    typer.Argument(help="'demo', a local folder, a .gguf file, or a hub id.", show_default=False),
]
ServerTarget = Annotated[
    str,
    typer.Argument(
        help="'demo', a local folder, a .gguf file, a hub id, or the URL of an OpenAI-compatible "
        "server.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option(help="Standard output is one JSON object, nothing else.")]
ShowDrafts = Annotated[bool, typer.Option(help="Mark the tokens that came from the drafter.")]
TOP_K = "Keep the K likeliest tokens; 0 is off."
TOP_P = "Keep the likeliest tokens up to this mass; 1 is off, 0 greedy."
MIN_P = "Drop tokens below this share of the likeliest; 0 is off."
PREFILL = (
    "Lossy: read a share of long prompts alone, which a draft chooses: early:N, the target's first N "
    "layers, or a model."
)
GENERATION_CONFIG = (
    "Where what is not given about sampling comes from: auto (the model's generation_config.json), "
    "none, or a folder with one."
)
GenerationConfig = Annotated[str, listed(SAMPLING, GENERATION_CONFIG, metavar="auto|none|FOLDER")]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """How models are loaded and where they run; `draft` is the draft model of every drafter that
    wants one."""

    draft: str | None = option(
        None,
        DRAFTING,
        "A smaller model that drafts: a local folder, a .gguf file or a hub id; auto: one that was "
        "made for this target, where it is on this machine.",
        common=True,
    )
    dtype: str = option(
        "auto", MODEL, "auto (the checkpoint's), bfloat16, float32, ...", common=True
    )
    quantise: int | None = option(
        None,
        MODEL,
        "Round the target's linear layers to 4 or 8 bits on loading (CPU): another model, smaller "
        "and faster.",
        metavar="4|8",
    )
    device: str = option("auto", MODEL, "auto, cpu, cuda or cuda:N.", common=True)
    threads: int | None = option(
        None, MODEL, "CPU threads.", show_default="as many as this process may use", common=True
    )
    runtime: RuntimeName = option(
        "auto",
        MODEL,
        "How passes run: native (one call of our own library, on a CPU), graphs (CUDA graphs), "
        "eager (PyTorch's "
        "modules, the reference); auto takes the first that this device and model allow.",
    )
    max_model_len: int | None = option(
        None, MODEL, "Longest prompt plus answer.", show_default="the model's"
    )
    revision: str | None = option(None, MODEL, "The target's branch, tag or commit on the hub.")
    trust_remote_code: bool = option(False, MODEL, "Run code that comes with the checkpoint.")

    def options(self, target: str) -> Options:
        """For `load_models`: what it says about drafting plays no part."""
        from outrider.build import Options

        return Options(
            target=target,
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(MachineOptions)
            },
        )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MachineOptions):
    """Which model runs where, and who drafts for it: the arguments of `outrider.LLM`."""

    draft: str | None = option(
        None,
        DRAFTING,
        "A smaller model that drafts, or a trained head (eagle, eagle3, mtp, medusa, block): a "
        "folder, a GGUF file or a hub id; auto: what was made for this target and is on this "
        "machine ('outrider ls drafters-for MODEL').",
        common=True,
    )
    draft_endpoint: str | None = option(
        None,
        DRAFTING,
        "A draft service drafts: grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH.",
        metavar="ADDRESS",
        common=True,
    )
    settings: Path | None = option(
        None,
        DRAFTING,
        "Options from a file of 'outrider tune'; options given here win.",
        metavar="FILE",
        common=True,
    )
    drafter: str = option(
        "auto",
        DRAFTING,
        'Who drafts, with its options: suffix, "suffix k=auto:12 max_depth=32"; see \'outrider '
        "ls'. auto: what drafts with "
        "--draft, else the head in the target's checkpoint (mtp, block), else suffix.",
        common=True,
    )
    num_draft_tokens: str | None = option(
        None,
        DRAFTING,
        "Draft tokens per target pass: 5; auto, auto:12: as many as pay; 1:5,8:0: 5, and none "
        "from 8 requests on.",
        show_default="the drafter's",
        common=True,
    )
    verifier: str = option(
        "auto",
        DRAFTING,
        "Acceptance rule: see 'outrider ls verifiers'. auto: block, for trees traversal; with a "
        "seed gumbel.",
        common=True,
    )
    lossy: bool = option(False, DRAFTING, "Allow a verifier that changes the text.")
    prefill: str | None = option(None, DRAFTING, PREFILL, metavar='"keep=0.2 draft=..."')

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `outrider.LLM`. One prompt at a time. Raises ConfigError for a bad
        settings file."""
        from outrider.configuration import spelled_out

        values = spelled_out(vars(self))
        chosen = self._with_file(values, values.pop("settings"))
        if chosen["drafter"] == "none":
            unused = [name for name in given(self) if name == "--num-draft-tokens"]
            refuse_unused(unused, "with drafter 'none', which drafts nothing")
        return chosen | {"max_num_seqs": 1}

    def with_free_length(self) -> ModelOptions:
        """See `Options.with_free_length`."""
        from outrider.options import Options

        chosen = Options(target="", **self.llm_arguments())
        free = chosen.with_free_length()
        return self if free is chosen else dataclasses.replace(self, num_draft_tokens="auto")

    def _with_file(self, values: dict[str, Any], file: Path | None) -> dict[str, Any]:
        """`values`, and from the file what was not given."""
        if file is None:
            return values
        from outrider.configuration import spelled_out

        options = spelled_out(read_settings(file).options)
        if values["drafter"] not in ("auto", options.get("drafter")):
            raise ConfigError(
                f"--drafter {values['drafter']} and --settings {file}, which is about "
                f"'{options.get('drafter')}': leave one out"
            )
        for name, value in options.items():
            if isinstance(value, dict):
                values[name] = {**value, **values[name]}
            elif values[name] is None or (
                values[name] == "auto" and name != "num_draft_tokens"
            ):  # there it is an answer
                values[name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when to stop. `SamplingParams` checks the ranges and words the
    error."""

    max_tokens: str | None = option(
        None,
        SAMPLING,
        "The answer's greatest length, in tokens; none: to the end of the context.",
        metavar="N|none",
        show_default="256",
        common=True,
    )
    temperature: float | None = option(
        None, SAMPLING, "0 is greedy.", show_default="0", common=True
    )
    top_k: int | None = option(None, SAMPLING, TOP_K, show_default="0")
    top_p: float | None = option(None, SAMPLING, TOP_P, show_default="1")
    min_p: float | None = option(None, SAMPLING, MIN_P, show_default="0")
    repetition_penalty: float | None = option(
        None, SAMPLING, "Of tokens seen in prompt or output; 1 is off.", show_default="1"
    )
    presence_penalty: float = option(0.0, SAMPLING, "Once per token seen in the output; 0 is off.")
    frequency_penalty: float = option(0.0, SAMPLING, "Per occurrence in the output; 0 is off.")
    seed: int | None = option(
        None,
        SAMPLING,
        "Same seed, same text, whatever is drafted: verifier gumbel. Another --verifier is kept, "
        "and then the drafts must be the same, too.",
        show_default="a new one each run",
        common=True,
    )
    stop: list[str] | None = option(
        None, SAMPLING, "Stop before this text; may be given again.", metavar="<str>"
    )

    def params(
        self, logprobs: int | None = None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The library's form; `defaults` fill in what was not given. Raises ConfigError for a value
        out of range."""
        from outrider.sampling.params import SamplingParams

        given = {name: value for name, value in vars(self).items() if value is not None}
        if "max_tokens" in given:
            given["max_tokens"] = _length(given["max_tokens"])
        return SamplingParams(**{**(defaults or {}), **given, "logprobs": logprobs})


def _length(text: str | int) -> int | None:
    """A number of tokens, or 'none' for no limit. Raises ConfigError."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise ConfigError(
            f"--max-tokens takes a number, or none for the end of the context, got '{text}'"
        ) from None


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """Structured outputs; at most one of these."""

    json_schema: Path | None = option(
        None, SAMPLING, "Answers of the JSON schema in this file.", metavar="FILE"
    )
    regex: str | None = option(None, SAMPLING, "Answers that match this pattern as a whole.")
    choice: list[str] | None = option(
        None, SAMPLING, "Answers that are this text, or another that is given so.", metavar="<str>"
    )
    grammar: Path | None = option(
        None, SAMPLING, "Answers of the grammar in this file: GBNF or Lark.", metavar="FILE"
    )

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """For `SamplingParams`. Raises ConfigError for two forms or an unreadable file,
        RequestError for a form that is wrong, before a model is loaded."""
        from outrider.grammar import form_of, refuse_wrong
        from outrider.sampling.structured import StructuredOutputsParams

        given = [
            name
            for name in ("json_schema", "regex", "choice", "grammar")
            if getattr(self, name) is not None
        ]
        if not given:
            return None
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(map(as_typed, given))}: an answer has one form; give one of them"
            )
        name = as_typed(given[0])
        if self.json_schema is not None:
            wanted = StructuredOutputsParams(
                json=read_json(self.json_schema, f"{name} {self.json_schema}")
            )
        elif self.grammar is not None:
            wanted = StructuredOutputsParams(
                grammar=read_text(self.grammar, f"{name} {self.grammar}")
            )
        else:
            wanted = StructuredOutputsParams(regex=self.regex, choice=self.choice)
        refuse_wrong(form_of(wanted, name))
        return wanted
