"""What to say about an option that a verb does not have: what other engines call by that name, or the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FOREIGN = {  # ours -> names of vLLM, SGLang, transformers and llama.cpp
    "target": "m hf-repo model model-id model-name model-path",
    "model": "m hf-repo model-id model-name model-path target",
    "model-or-target": "m hf-repo model-id model-name model-path target",
    "draft": (
        "md head heads eagle medusa mtp draft-head draft-model draft-model-path drafter-model model-draft spec-draft-model "
        "speculative-model speculative-draft-model-path assistant-model"
    ),
    "drafters": "drafter spec-type speculative-algorithm speculative-config speculative-method",
    "drafter": "draft-type method spec-method spec-type speculative-algorithm speculative-config speculative-method",
    "num-draft-tokens": (
        "gamma k draft-max draft-n num-assistant-tokens num-speculative-tokens spec-draft-n-max spec-tokens "
        "speculative-num-draft-tokens speculative-num-steps"
    ),
    "drafter-option": "draft-min draft-p-min prompt-lookup-max prompt-lookup-min speculative-eagle-topk",
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
    "'--device' takes the whole model: no layers are left out": "gpu-layers n-gpu-layers ngl",
    "calls of tools are read by what the chat template shows": "enable-auto-tool-choice jinja tool-call-parser",
}
LIKENESS = 0.7  # that the nearest name must have at least


def unknown_option(given: str, known: Iterable[str]) -> str:
    """What to say about an option that a verb does not have, among the options and arguments `known` that it has."""
    forms = {_bare(name): _form(name) for name in known}
    asked = _bare(given)
    if asked in forms:
        return f"'{given}' is written {forms[asked]}"
    message = f"unknown option '{given}'"
    if why := [why for why, names in ABSENT.items() if asked in names.split()]:
        return f"{message}: {why[0]}"
    foreign = [ours for ours, names in FOREIGN.items() if asked in names.split()]
    alike = [] if foreign else difflib.get_close_matches(asked, forms, n=1, cutoff=LIKENESS)
    close = [ours for ours in foreign if ours in forms] or alike
    return f"{message}. Did you mean '{forms[close[0]]}'?" if close else message


def _form(name: str) -> str:
    """How a name is typed; an argument, which has none on the command line, in capitals."""
    if name.startswith("--set "):
        return f"{name}=VALUE"
    return name if name.startswith("-") else f"{name.upper()} without a name in front"


def _bare(name: str) -> str:
    return name.removeprefix("--set ").lstrip("-").replace("_", "-")
