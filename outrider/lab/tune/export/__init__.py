"""The recommendation as options of other engines: what makes them do the same, and where they cannot.

An `Engine` each. Option names drift between versions, so notes say where.
No engine has every drafter: where one lacks the recommended drafter, its words are about the best that it has, and say so. Speeds
were measured here, on this machine: other engines have other costs; acceptance carries over.
"""

from __future__ import annotations

from typing import Any

from outrider.lab.tune.export.choice import EngineChoice, lacking, tuned
from outrider.lab.tune.export.others import LLAMACPP, TENSORRT, TRANSFORMERS
from outrider.lab.tune.export.sglang import SGLANG
from outrider.lab.tune.export.vllm import VLLM
from outrider.lab.tune.tune_result import TuneResult, Words

ENGINES = (VLLM, SGLANG, TENSORRT, TRANSFORMERS, LLAMACPP)
DEPLOYED = (VLLM, SGLANG)  # that can run a settings file


def in_other_words(result: TuneResult) -> list[Words]:
    """One entry an engine, about all traffic."""
    advice, found = tuned(result), []
    for engine in ENGINES:
        choice, notes = advice.ask(engine)
        text, language = ("", "") if choice is None else (engine.text(choice, advice), engine.language)
        found.append(Words(engine=engine.name, text=text, language=language, notes=notes))
    return found


def next_best(result: TuneResult) -> list[dict[str, Any]]:
    """What the engines that `deploy` starts get instead, where they lack the recommended drafter: options, the best first."""
    advice = tuned(result)
    if not advice.speculate:
        return []
    instead = [advice.best_for(engine) for engine in DEPLOYED if lacking(advice.recommended, engine)]
    return [_options(choice, result) for choice in advice.choices if choice in instead]


def _options(choice: EngineChoice, result: TuneResult) -> dict[str, Any]:
    """Keyword arguments of `outrider.LLM`, with the lengths by load."""
    options = choice.configuration.options(result.tried.draft)
    if len(choice.schedule) > 1:
        options["num_draft_tokens"] = ",".join(f"{rows}:{size}" for rows, size in choice.schedule)
    return options
