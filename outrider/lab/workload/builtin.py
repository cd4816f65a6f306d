"""Workloads with a name (docs/workloads.md): public benchmarks where the user has their files, small embedded sets otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cache import cache_folder
from outrider.errors import ConfigError, did_you_mean
from outrider.lab.workload.fields import Fields, Turns
from outrider.lab.workload.files import RequestFile, Wanted

EMBEDDED = Path(__file__).parent / "embedded"
KINDS = ("reasoning", "math", "code", "chat", "translation", "summarization", "qa", "rag")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SUBJECTS = ("algebra", "counting-probability", "geometry", "intermediate-algebra", "number-theory", "prealgebra", "precalculus")


@dataclass(frozen=True)
class Files:
    """A set of prompts: a benchmark's file under its usual names, or embedded sets."""

    names: tuple[str, ...] = ()  # in a data folder; empty: always embedded
    embedded: tuple[str, ...] = ()  # one or several of KINDS, or "demo"
    fields: tuple[str, ...] = ()  # entries in which one of these fields ...
    values: tuple[str, ...] = ()  # ... has one of these values, written as `_word` does; empty: all


@dataclass(frozen=True)
class Builtin:
    """A name, and what may follow it after a colon."""

    summary: str
    files: Files
    parts: Mapping[str, Files] = field(default_factory=dict)
    home: str = ""  # where its file is to be had


GSM8K = ("gsm8k/test.jsonl", "gsm8k/main/test.jsonl", "gsm8k_test.jsonl", "gsm8k.jsonl")
GSM8K_TRAIN = ("gsm8k/train.jsonl", "gsm8k/main/train.jsonl", "gsm8k_train.jsonl")
MATH = (
    "math/problems.jsonl", "math/test.jsonl", "MATH-500/test.jsonl", "math500/test.jsonl", "math_test.jsonl", "math.jsonl",
    "MATH-500.jsonl", "math500.jsonl",
)  # fmt: skip
HUMANEVAL = (
    "humaneval/problems.jsonl", "humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz", "human-eval/data/HumanEval.jsonl.gz",
    "HumanEval.jsonl", "HumanEval.jsonl.gz", "humaneval.jsonl",
)  # fmt: skip
SPEC_BENCH = (
    "spec_bench/question.jsonl", "spec-bench/question.jsonl", "Spec-Bench/data/spec_bench/question.jsonl", "spec_bench.jsonl",
)  # fmt: skip


def _spec_bench(embedded: str, *categories: str) -> Files:
    return Files(SPEC_BENCH, (embedded,), ("category",), categories)


BUILTIN = {
    "demo": Builtin(
        "64 word problems that the embedded pair was not trained on", Files(embedded=("demo",))
    ),
    "gsm8k": Builtin(
        "grade-school word problems with answers, test split",
        Files(GSM8K, ("reasoning",)),
        {"test": Files(GSM8K, ("reasoning",)), "train": Files(GSM8K_TRAIN, ("reasoning",))},
        "https://github.com/openai/grade-school-math",
    ),
    "math": Builtin(
        "competition problems with answers (MATH, MATH-500); by subject",
        Files(MATH, ("math",)),
        {subject: Files(MATH, ("math",), ("type", "subject"), (subject,)) for subject in SUBJECTS},
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
    ),
    "humaneval": Builtin(
        "heads of Python functions to complete", Files(HUMANEVAL, ("code",)), home="https://github.com/openai/human-eval"
    ),
    "code": Builtin("another name of humaneval", Files(HUMANEVAL, ("code",)), home="https://github.com/openai/human-eval"),
    "spec-bench": Builtin(
        "Spec-Bench: six kinds of work; by category",
        Files(SPEC_BENCH, ("chat", "translation", "summarization", "qa", "reasoning", "rag")),
        {
            "mt-bench": _spec_bench("chat", *MT_BENCH),
            **{name: _spec_bench(name, name) for name in ("translation", "summarization", "qa", "rag")},
            "math-reasoning": _spec_bench("reasoning", "math-reasoning"),
            **{name: _spec_bench("code" if name == "coding" else "chat", name) for name in MT_BENCH},
        },
        "https://github.com/hemingkx/Spec-Bench",
    ),
    "embedded": Builtin(
        "a dozen prompts of each kind, always at hand; by kind",
        Files(embedded=KINDS),
        {kind: Files(embedded=(kind,)) for kind in KINDS},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Located:
    """The location of the prompts of a name."""

    sources: tuple[RequestFile, ...]
    note: str


def is_builtin(name: str) -> bool:
    """Whether `name`, or what stands before its colon, is in the table."""
    return name.partition(":")[0] in BUILTIN


def locate(name: str, data: Path | None, turns: Turns) -> Located:
    """The sources of a built-in name. Raises ConfigError for an unknown part, or a data folder without the file."""
    builtin, files = _files(name)
    if not files.names:
        return Located(_embedded(name, files, turns), f"{name}: embedded in outrider")
    path, found_as = _find(name, files, data, builtin.home)
    if path is None:
        missing = f"{name}: no {files.names[0]} found, so a small embedded set stands in: too small for claims about {name}"
        remedy = f"get it from {builtin.home}, name its folder with --set data=FOLDER or $OUTRIDER_DATA"
        return Located(_embedded(name, files, turns), f"{missing}; {remedy}")
    source = RequestFile(path, name, turns=turns, wanted=_wanted(files))
    return Located((source,), f"{name}: {found_as}")


def _files(name: str) -> tuple[Builtin, Files]:
    base, colon, part = name.partition(":")
    builtin = BUILTIN[base]
    if not colon:
        return builtin, builtin.files
    if not builtin.parts:
        raise ConfigError(f"the workload '{base}' has no parts; write '{base}'")
    if _word(part) not in builtin.parts:
        raise ConfigError(f"the workload '{base}' has no part '{part}'.{did_you_mean(part, builtin.parts)}")
    return builtin, builtin.parts[_word(part)]


def _find(name: str, files: Files, data: Path | None, home: str) -> tuple[Path | None, str]:
    """The first file that exists, and how to name it without telling where it is."""
    if data is not None and not data.is_dir():
        raise ConfigError(f"the data folder {data} does not exist")
    folders = [data] if data is not None else _usual_folders()
    for folder in folders:
        for relative in files.names:
            if (folder / relative).is_file():
                return folder / relative, relative
    if data is not None:
        raise ConfigError(
            f"{data} has no file for the workload '{name}'; looked for {', '.join(files.names)}. Its home: {home}. "
            "For the embedded prompts leave the data folder out"
        )
    return None, ""


def _usual_folders() -> list[Path]:
    named = os.environ.get("OUTRIDER_DATA")
    return [*([Path(named).expanduser()] if named else []), cache_folder() / "data"]


def _embedded(name: str, files: Files, turns: Turns) -> tuple[RequestFile, ...]:
    return tuple(RequestFile(EMBEDDED / f"{kind}.jsonl", name, turns=turns) for kind in files.embedded)


def _wanted(files: Files) -> Wanted | None:
    if not files.values:
        return None

    def wanted(entry: Fields) -> bool:
        found = [entry[name] for name in files.fields if entry.get(name) is not None]
        return not found or _word(found[0]) in files.values  # without the field it is a bad line, not another part's

    return wanted


def _word(value: Any) -> str:
    """A category as one writes it on a command line: 'Counting & Probability' -> 'counting-probability'."""
    return re.sub(r"[^a-z]+", "-", str(value).lower()).strip("-")
