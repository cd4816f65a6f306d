"""The recommendation as options of other engines: what makes them do the same, and where they cannot.

One module an engine, each a function from `EngineAdvice` to `Words`. Option names drift between versions, so notes say where.
No engine has every drafter: where one lacks the recommended drafter, its words are about the best that it has, and say so. Speeds
were measured here, on this machine: other engines have other costs; acceptance carries over.
"""

from __future__ import annotations

from outrider.lab.tune.export import llamacpp, sglang, tensorrt, transformers, vllm
from outrider.lab.tune.export.choice import Tuned
from outrider.lab.tune.tune_result import TuneResult, Words

ENGINES = (vllm.words, sglang.words, tensorrt.words, transformers.words, llamacpp.words)


def in_other_words(result: TuneResult) -> list[Words]:
    """One entry an engine, about all traffic."""
    advice = Tuned(result)
    return [words(advice) for words in ENGINES]
