"""The names that vLLM, SGLang, transformers and llama.cpp use: an unknown name is answered with
ours, or the nearest one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable
from functools import cache, wraps
from typing import Any, TypeVar

FOREIGN = {  # ours -> theirs
    "target": "m hf-repo model model-id model-name model-path",
    "draft-model": "m hf-repo model-id model-name model-path",
    "model": "m hf-repo model-id model-name model-path target",
    "draft": (
        "md head heads eagle medusa mtp draft-head draft-model draft-model-path drafter-model model-draft spec-draft-model "
        "speculative-model speculative-draft-model-path assistant-model"
    ),
    "drafters": "drafter spec-type speculative-algorithm speculative-config speculative-method",
    "drafter": (
        "draft-type method spec-method spec-type speculative-algorithm speculative-config speculative-method "
        "draft-min draft-p-min prompt-lookup-max prompt-lookup-min speculative-eagle-topk"
    ),
    "num-draft-tokens": (
        "gamma k draft-max draft-n num-assistant-tokens num-speculative-tokens spec-draft-n-max spec-tokens "
        "speculative-num-draft-tokens speculative-num-steps"
    ),
    "max-tokens": "n-predict predict max-completion-tokens max-new-tokens max-output-tokens",
    "max-model-len": "c ctx-size context-length context-size max-context-length max-length max-seq-len n-ctx",
    "kv-memory": "gpu-memory-utilization kv-cache-memory kv-cache-memory-bytes mem-fraction-static",
    "max-num-seqs": "batch-size max-batch-size max-running-requests np num-slots parallel",
    "batch-size": "max-batch-size max-num-seqs",
    "prefix-share": "cache-ram enable-prefix-caching",
    "served-model-name": "a alias model-alias",
    "reasoning-parser": "enable-reasoning reasoning-format",
    "ssl-certfile": "ssl-cert-file",
    "ssl-keyfile": "ssl-key-file",
    "runtime": "cuda-graphs enforce-eager",
    "quantise": "load-in-4bit load-in-8bit quantization quantize",
    "threads": "t num-threads n-threads",
    "temperature": "temp",
    "repetition-penalty": "repeat-penalty",
    "prompt": "p",
    "prompts": "dataset dataset-name dataset-path",
    "limit": "num-prompts",
    "system": "sys system-prompt system-prompt-file",
    "out": "o output output-dir output-file",
}  # fmt: skip
ABSENT = {  # what a name asks for -> the names
    "this engine runs a model on one device": (
        "tp tp-size tensor-parallel-size pp pp-size pipeline-parallel-size dp dp-size data-parallel-size split-mode tensor-split"
    ),
    "the whole model is on one device: no layers are left out": "gpu-layers n-gpu-layers ngl",
    "calls of tools are read by what the chat template shows": "enable-auto-tool-choice jinja tool-call-parser",
}
LIKENESS = 0.7  # that the nearest name must have at least
Made = TypeVar("Made")


def meant(asked: str, known: Collection[str]) -> tuple[str | None, str | None]:
    """(why there is no such thing, which of the `known` names is meant), for a name with '-'
    between its words."""
    if why := [why for why, names in ABSENT.items() if asked in names.split()]:
        return why[0], None
    foreign = [ours for ours, names in FOREIGN.items() if asked in names.split()]
    near = [] if foreign else difflib.get_close_matches(asked, known, n=1, cutoff=LIKENESS)
    return None, next(iter([ours for ours in foreign if ours in known] or near), None)


def names_checked(cls: type[Made]) -> type[Made]:
    """A class whose arguments' names are checked, its signature as it was: `help` and editors show
    that."""
    kind: Any = cls
    make = kind.__init__

    @wraps(make)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        check_arguments(cls, named)
        make(self, *values, **named)

    kind.__init__ = checked
    return cls


def check_arguments(cls: type, given: Iterable[str]) -> None:
    """Raises TypeError, as Python does, for an argument that a class does not take; the message has
    the name that is meant."""
    known = _arguments(cls)
    for name in given:
        if known is not None and name not in known.values():
            why, close = meant(name.replace("_", "-"), known)
            hint = f": {why}" if why else f". Did you mean '{known[close]}'?" if close else ""
            raise TypeError(f"{cls.__name__}() has no argument '{name}'{hint}")


@cache
def _arguments(cls: type) -> dict[str, str] | None:
    """Names of what a class takes, by the same with '-' between words; None: anything."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # of `made` itself, not of its instances
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {name.replace("_", "-"): name for name in parameters}
