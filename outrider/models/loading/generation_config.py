"""Sampling defaults from a model's `generation_config.json`, for requests that leave them open, by
vLLM's rule.

vLLM takes `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `max_new_tokens`,
whatever `do_sample` says. transformers obeys more of the file; what of that would change a text and
is not taken is named in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from outrider.errors import CheckpointError, ConfigError
from outrider.lazy import transformers
from outrider.models.loaded import LoadedModel
from outrider.sampling.params import SamplingParams
from outrider.wellformed import load_object

if TYPE_CHECKING:
    from transformers import GenerationConfig

# the model's own file; no file. Anything else is a folder
AUTO = "auto"
NONE = "none"
FILE = "generation_config.json"
TAKEN = {  # field of the file -> of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# taken also where they equal our defaults: the server's are others
ALWAYS = ("temperature", "max_new_tokens")
FILTERS = ("top_k", "top_p", "min_p")
# on the text of an answer, or read elsewhere (end tokens, max_length), or about beams only
WITHOUT_EFFECT = frozenset((
    "do_sample", "max_length", "early_stopping", "length_penalty", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "use_mtp", "renormalize_logits", "remove_invalid_values", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id",
    "eos_token_id", "decoder_start_token_id", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type",
    "compile_config", "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size",
    "transformers_version",
))  # fmt: skip
SHOWN = 40  # characters of a value in a note


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of `SamplingParams` for requests that leave them open. Empty: those of
    `SamplingParams` hold."""

    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was taken, and what was not, for a person to read
    unused: str = ""  # with "none": what the model's file asks for

    def params(self, **given: Any) -> SamplingParams:
        """The defaults, and over them what a caller gave. Raises ConfigError."""
        return SamplingParams(**{**self.values, **given})


@dataclass(frozen=True)
class Asked:
    """The settings of a generation_config, as plain values."""

    # of TAKEN and `do_sample`, where it names one
    values: Mapping[str, Any] = field(default_factory=dict)
    # settings that change texts and that nothing here honours
    foreign: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None  # where it is another than transformers' own


def asked_of(config: GenerationConfig | None) -> Asked | None:
    """Plain values of transformers' object; None where there is none."""
    if config is None:
        return None
    idle = transformers.GenerationConfig._get_default_generation_params()
    foreign: dict[str, str] = {}
    for name in vars(transformers.GenerationConfig()):
        value = getattr(config, name, None)
        is_set = not (
            value is None or value is False or value in ([], {}) or value == idle.get(name)
        )
        if is_set and not name.startswith("_") and name not in TAKEN and name not in WITHOUT_EFFECT:
            text = json.dumps(value, default=str)
            foreign[name] = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    values = {name: getattr(config, name, None) for name in (*TAKEN, "do_sample")}
    length = getattr(config, "max_length", None)
    is_length = isinstance(length, int) and length != idle["max_length"]
    return Asked(
        {name: value for name, value in values.items() if value is not None},
        foreign,
        length if is_length else None,
    )


def checked_choice(choice: str) -> str:
    """`choice` itself. Raises ConfigError for what is neither auto, none nor a folder with the
    file."""
    if not isinstance(choice, str | Path) or not (
        choice in (AUTO, NONE) or (Path(choice) / FILE).is_file()
    ):
        raise ConfigError(
            f"generation_config must be auto, none or a folder with {FILE}, got '{choice}'"
        )
    return choice


def sampling_defaults(choice: str, model: LoadedModel, context: int) -> SamplingDefaults:
    """The defaults for a model that holds `context` tokens. `choice`: "auto", "none" or a folder.
    Raises ConfigError."""
    if checked_choice(choice) not in (AUTO, NONE):
        return _defaults_of(_read(Path(choice)), str(Path(choice) / FILE), context)
    if model.generation_config is None:
        return SamplingDefaults()
    file = Path(model.name) / FILE  # of hub ids there is no such path
    is_broken = file.is_file() and not _is_json(file)
    is_read = not is_broken and (file.is_file() or not Path(model.name).is_dir())
    source = FILE if is_read else "config.json"  # as transformers does
    if Path(model.name).is_file():  # a GGUF file
        source = "its metadata"
    defaults = _defaults_of(model.generation_config, source, context)
    if choice == NONE:
        asked = [*_words(defaults.values), *_foreign(model.generation_config, context)]
        return SamplingDefaults(unused=f"{source} asks for {', '.join(asked)}" if asked else "")
    if is_broken:
        defaults = replace(
            defaults,
            notes=(
                *defaults.notes,
                f"{FILE} is not JSON and was not read, nor were its end tokens",
            ),
        )
    return defaults


def _is_json(file: Path) -> bool:
    try:
        load_object(file)
    except (OSError, ValueError):
        return False
    return True


def _read(folder: Path) -> Asked:
    try:
        settings = asked_of(transformers.GenerationConfig.from_dict(load_object(folder / FILE)))
        assert settings is not None
        return settings
    except Exception as error:  # transformers checks values in many ways
        raise ConfigError(f"cannot read {folder / FILE}: {error}") from error


def _defaults_of(asked: Asked, source: str, context: int) -> SamplingDefaults:
    values: dict[str, Any] = {}
    notes = []
    for theirs, ours in TAKEN.items():
        value = asked.values.get(theirs)
        try:
            if value is not None and (
                theirs in ALWAYS or SamplingParams(**{ours: value}) != SamplingParams()
            ):
                values[ours] = getattr(SamplingParams(**{ours: value}), ours)
        except ConfigError as error:
            notes.append(f"{source} is ignored where it is wrong: {error}")
    if "temperature" not in values and (
        asked.values.get("do_sample") or any(name in values for name in FILTERS)
    ):
        values["temperature"] = 1.0  # what transformers and vLLM take
    if values.get("temperature") and asked.values.get("do_sample") is False:
        notes.append(
            f"{source} has do_sample=false, which is not looked at, as in vLLM: temperature 0 is "
            "greedy"
        )
    if values:
        notes.insert(
            0,
            f"sampling defaults from {source}: {', '.join(_words(values))} "
            "(generation_config=none ignores them)",
        )
    if foreign := _foreign(asked, context):
        notes.append(f"{source} asks for {', '.join(foreign)}: not supported here and ignored")
    return SamplingDefaults(values, tuple(notes))


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in values.items()]


def _foreign(asked: Asked, context: int) -> list[str]:
    """Settings that would change texts and that nothing here honours."""
    fields = [f"{name}={text}" for name, text in asked.foreign.items()]
    if (
        asked.max_length is not None
        and asked.max_length < context
        and "max_new_tokens" not in asked.values
    ):
        fields.append(f"max_length={asked.max_length}")
    return fields


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def eos_token_ids(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> frozenset[int]:
    """Every token id that ends a text: generation_config's (config's where that names none) and the
    tokenizer's eos_token.

    This is vLLM's rule. Fine-tunes often name the end of a turn in one place and the end of a
    document in the other. Ids outside the vocabulary, as some configs have them (-1), are left out.
    Raises CheckpointError for what is no id.
    """
    named, fallback, declared = (
        _eos_ids(source, vocab_size)
        for source in (module.generation_config, module.config, tokenizer)
    )
    return (named or fallback) | declared


def _eos_ids(source: Any, vocab_size: int) -> frozenset[int]:
    value = getattr(source, "eos_token_id", None)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) for token in ids):
        remedy = "mend it in generation_config.json or config.json"
        raise CheckpointError(
            f"'eos_token_id' must be a token id or a list of some, got {str(value)[:80]}: {remedy}."
        )
    return frozenset(token for token in ids if 0 <= token < vocab_size)
