"""Workloads with a name (docs/workloads.md): public benchmarks where the user has their files,
small embedded sets otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cache import cache_folder
from outrider.errors import ConfigError, did_you_mean
from outrider.lab.workload.types import Turns

EMBEDDED = Path(__file__).parent / "embedded"
KINDS = ("reasoning", "math", "code", "chat", "translation", "summarization", "qa", "rag")
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
SUBJECTS = (
    "algebra", "counting-probability", "geometry", "intermediate-algebra", "number-theory", "prealgebra", "precalculus",
)  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """A set of prompts: a benchmark's file under its usual names, or embedded sets."""

    names: tuple[str, ...] = ()  # in a data folder; empty: always embedded
    embedded: tuple[str, ...] = ()  # one or several of KINDS, or "demo"
    fields: tuple[str, ...] = ()  # entries in which one of these fields ...
    values: tuple[str, ...] = ()  # ... has one of these values, written as `_word` does; empty: all
    turns: Turns | None = None  # of its conversations, whatever is asked for


@dataclass(frozen=True)
class Builtin:
    """A name, and what may follow it after a colon."""

    prompts: Prompts
    parts: Mapping[str, Prompts] = field(default_factory=dict)
    home: str = ""  # where its file is to be had


GSM8K = ("gsm8k/test.jsonl", "gsm8k/main/test.jsonl", "gsm8k_test.jsonl", "gsm8k.jsonl")
GSM8K_TRAIN = ("gsm8k/train.jsonl", "gsm8k/main/train.jsonl", "gsm8k_train.jsonl")
MATH = (
    "math/problems.jsonl",
    "math/test.jsonl",
    "MATH-500/test.jsonl",
    "math500/test.jsonl",
    "math.jsonl",
)
HUMANEVAL = (
    "humaneval/problems.jsonl", "humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz",
    "human-eval/data/HumanEval.jsonl.gz", "HumanEval.jsonl", "HumanEval.jsonl.gz",
)  # fmt: skip
SPEC_BENCH = (
    "spec_bench/question.jsonl",
    "spec-bench/question.jsonl",
    "Spec-Bench/data/spec_bench/question.jsonl",
)


def _spec_bench(embedded: str, *categories: str) -> Prompts:
    return Prompts(SPEC_BENCH, (embedded,), ("category",), categories)


_CODE = Builtin(Prompts(HUMANEVAL, ("code",)), home="https://github.com/openai/human-eval")
BUILTIN = {
    "demo": Builtin(Prompts(embedded=("demo",))),
    "agent": Builtin(Prompts(embedded=("agent",), turns="all")),
    "gsm8k": Builtin(
        Prompts(GSM8K, ("reasoning",)),
        {"test": Prompts(GSM8K, ("reasoning",)), "train": Prompts(GSM8K_TRAIN, ("reasoning",))},
        "https://github.com/openai/grade-school-math",
    ),
    "math": Builtin(
        Prompts(MATH, ("math",)),
        {
            subject: Prompts(MATH, ("math",), ("type", "subject"), (subject,))
            for subject in SUBJECTS
        },
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
    ),
    "humaneval": _CODE,
    "code": _CODE,
    "spec-bench": Builtin(
        Prompts(SPEC_BENCH, ("chat", "translation", "summarization", "qa", "reasoning", "rag")),
        {
            "mt-bench": _spec_bench("chat", *MT_BENCH),
            **{
                name: _spec_bench(name, name)
                for name in ("translation", "summarization", "qa", "rag")
            },
            "math-reasoning": _spec_bench("reasoning", "math-reasoning"),
            **{
                name: _spec_bench("code" if name == "coding" else "chat", name) for name in MT_BENCH
            },
        },
        "https://github.com/hemingkx/Spec-Bench",
    ),
    "embedded": Builtin(
        Prompts(embedded=KINDS), {kind: Prompts(embedded=(kind,)) for kind in KINDS}
    ),
}


def is_builtin(name: str) -> bool:
    """Whether `name`, or what comes before its colon, is in the table."""
    return name.partition(":")[0] in BUILTIN


def part_of(name: str) -> Prompts:
    """The prompts of a name. Raises ConfigError for an unknown part."""
    base, colon, part = name.partition(":")
    builtin = BUILTIN[base]
    if not colon:
        return builtin.prompts
    if not builtin.parts:
        raise ConfigError(f"the workload '{base}' has no parts; write '{base}'")
    if _word(part) not in builtin.parts:
        raise ConfigError(
            f"the workload '{base}' has no part '{part}'.{did_you_mean(part, builtin.parts)}"
        )
    return builtin.parts[_word(part)]


def find(name: str, prompts: Prompts, data: Path | None) -> tuple[Path | None, str]:
    """The first file that exists, None for embedded prompts; and a note that does not tell where it
    is.

    Raises ConfigError for a data folder without the file.
    """
    if not prompts.names:
        return None, f"{name}: embedded in outrider"
    if data is not None and not data.is_dir():
        raise ConfigError(f"the data folder {data} does not exist")
    home = BUILTIN[name.partition(":")[0]].home
    named = os.environ.get("OUTRIDER_DATA")
    usual = [*([Path(named).expanduser()] if named else []), cache_folder() / "data"]
    for folder in [data] if data is not None else usual:
        for relative in prompts.names:
            if (folder / relative).is_file():
                return folder / relative, f"{name}: {relative}"
    if data is not None:
        raise ConfigError(
            f"{data} has no file for the workload '{name}'; looked for {', '.join(prompts.names)}. "
            f"Its home: {home}. For the embedded prompts leave the data folder out"
        )
    return None, (
        f"{name}: no {prompts.names[0]} found, so a small embedded set stands in: too small for claims about {name}; "
        f"get it from {home}, name its folder with --reading data=FOLDER or $OUTRIDER_DATA"
    )


def is_wanted(entry: dict[str, Any], prompts: Prompts) -> bool:
    """Whether an entry is of this part of a benchmark; without the field it is a bad line, not
    another part's."""
    values = [entry[name] for name in prompts.fields if entry.get(name) is not None]
    return not prompts.values or not values or _word(values[0]) in prompts.values


def _word(value: Any) -> str:
    """A category as one writes it on a command line: 'Counting & Probability' ->
    'counting-probability'."""
    return re.sub(r"[^a-z]+", "-", str(value).lower()).strip("-")
