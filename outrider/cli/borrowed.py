"""Options as vLLM and llama.cpp call them, where they mean the same: taken for ours.
`outrider/foreign.py` names the others."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from outrider.errors import ConfigError, did_you_mean
from outrider.wellformed import parsed_json

SAME = {  # theirs -> ours
    "-n": "--max-tokens", "--n-predict": "--max-tokens", "--max-new-tokens": "--max-tokens",
    "-c": "--max-model-len", "--ctx-size": "--max-model-len",
    "-md": "--draft", "--model-draft": "--draft", "--speculative-model": "--draft", "--assistant-model": "--draft",
    "--num-speculative-tokens": "--num-draft-tokens",
    "-np": "--max-num-seqs", "--parallel": "--max-num-seqs",
    "-t": "--threads", "-s": "--seed", "--temp": "--temperature", "--repeat-penalty": "--repetition-penalty",
    "-a": "--served-model-name", "--alias": "--served-model-name",
}  # fmt: skip
TARGET = ("-m", "--model")
PROMPT = ("-p", "--prompt")
SPECULATIVE = "--speculative-config"  # vLLM's, one JSON object
METHODS = {
    "ngram": "ngram", "suffix": "suffix", "draft_model": "draft-model", "eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa",
    "mtp": "mtp",
}  # fmt: skip
KEYS = {  # of SPECULATIVE, besides method and model: the option of the drafter
    "num_speculative_tokens": "k", "prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram",
    "suffix_decoding_max_tree_depth": "max_depth", "suffix_decoding_max_spec_factor": "alpha",
    "suffix_decoding_min_token_prob": "min_probability",
}  # fmt: skip


def ours(arguments: Sequence[str], options: Collection[str], takes: Collection[str]) -> list[str]:
    """A verb's arguments with its own names for options. Raises ConfigError for a speculative
    configuration that is none.

    `options`: as the verb calls them; `takes`: its arguments, which have no name on the command
    line.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    target: list[str] = []
    prompt: list[str] = []
    words: list[str] = []
    waiting = iter(arguments[:end])
    for argument in waiting:
        name, equals, value = (
            argument.partition("=") if argument.startswith("--") else (argument, "", "")
        )
        if name in TARGET and "target" in takes and name not in options:
            target.append(value if equals else next(waiting, ""))
        elif name in PROMPT and "prompt" in takes and name not in options:
            prompt.append(value if equals else next(waiting, ""))
        elif name == SPECULATIVE and "--drafter" in options:
            words += _drafting(value if equals else next(waiting, ""))
        elif name not in options and SAME.get(name) in options:
            words.append(SAME[name] + equals + value)
        else:
            words.append(argument)
    return [*target, *words, *prompt, *arguments[end:]]


def _drafting(text: str) -> list[str]:
    """`--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'` as our options."""
    try:
        config = parsed_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{SPECULATIVE} takes a JSON object, got '{text[:60]}': {error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{SPECULATIVE} takes a JSON object, got '{text[:60]}'")
    method = config.pop("method", "draft_model")
    if method not in METHODS:
        nearest = did_you_mean(str(method), METHODS)
        raise ConfigError(
            f"{SPECULATIVE}: method '{method}' is none of {', '.join(METHODS)}.{nearest}"
        )
    model = config.pop("model", None)
    unknown = sorted(config.keys() - KEYS)
    if unknown:
        nearest = did_you_mean(unknown[0], KEYS)
        raise ConfigError(
            f"{SPECULATIVE}: '{unknown[0]}' means nothing here.{nearest} See --drafter and "
            "'outrider ls'"
        )
    settings = [f"{KEYS[name]}={value}" for name, value in config.items()]
    drafter = ["--drafter", " ".join([METHODS[method], *map(shlex.quote, settings)])]
    return drafter if model is None or method == "ngram" else [*drafter, "--draft", str(model)]
