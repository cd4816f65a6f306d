"""The recommendation as options of other engines: what makes them do the same, and where they cannot.

An `Engine` each. Option names drift between versions, so notes say where.
No engine has every drafter: where one lacks the recommended drafter, its words are about the best that it has, and say so. Speeds
were measured here, on this machine: other engines have other costs; acceptance carries over.
"""

from __future__ import annotations

from outrider.lab.tune.export.choice import tuned
from outrider.lab.tune.export.others import LLAMACPP, TENSORRT, TRANSFORMERS
from outrider.lab.tune.export.sglang import SGLANG
from outrider.lab.tune.export.vllm import VLLM
from outrider.lab.tune.tune_result import TuneResult, Words

ENGINES = (VLLM, SGLANG, TENSORRT, TRANSFORMERS, LLAMACPP)


def in_other_words(result: TuneResult) -> list[Words]:
    """One entry an engine, about all traffic."""
    advice, found = tuned(result), []
    for engine in ENGINES:
        choice, notes = advice.ask(engine)
        text, language = ("", "") if choice is None else (engine.text(choice, advice), engine.language)
        found.append(Words(engine=engine.name, text=text, language=language, notes=notes))
    return found
