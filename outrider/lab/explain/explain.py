"""`explain`: run prompts, look at every rejection, say what caused it and what to do about it.

    record      each prompt decoded as a user would, step by step, into a journal: an interrupted run goes on where it was
    read        one more pass of both models over each finished text (`distributions.py`)
    causes      every token lost, by cause (`causes.py`); kinds of text (`regions.py`)
    replays     other choices on the same texts (`counterfactual.py`), and advice (`advice.py`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.drafters.composite import CompositeDrafter
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.explain.annotate import Annotated, Labelled, annotate, labelled
from outrider.lab.explain.causes import Drafting
from outrider.lab.explain.distributions import forced_distributions
from outrider.lab.explain.explain_result import ExplainResult
from outrider.lab.explain.explained import Explained, Question, RecordedPrompt, finished_text, params_of, record
from outrider.lab.explain.forecast import Mode, placed_walk, walk_of
from outrider.lab.explain.summary import summarise
from outrider.lab.journal import Journal
from outrider.lab.progress import QUIET, Progress
from outrider.lab.runner import Contender, Runner
from outrider.machine import versions
from outrider.sampling.params import SamplingParams

MAX_SHOWN = 4000  # tokens whose columns a result keeps: less than 3 MB


def explain(
    options: Options, configuration: Configuration, questions: Callable[[Runner], Sequence[Question]], params: SamplingParams,
    journal_path: Path, *, resume: bool = False, workload: str = "", max_shown: int = MAX_SHOWN,
    progress: Progress = QUIET,
) -> tuple[ExplainResult, Journal]:  # fmt: skip
    """`questions`: from the loaded models, whose tokenizer they need. Sampled prompts get the seeds params.seed (0), + 1, ...

    Close the journal when the result is safe. After Ctrl-C the result is of the prompts that were finished (`interrupted`), or
    KeyboardInterrupt is raised where none was. Raises ConfigError for plain decoding or a journal of another plan,
    CapabilityError where causes cannot be distinguished, RequestError for a prompt that cannot run.
    """
    check(configuration, params, lossy=options.lossy)
    if not params.is_greedy and params.seed is None:
        params = replace(params, seed=0)
    runner = Runner(options, [configuration], progress.say)
    found = Explained(runner.open(configuration), params, lossy=options.lossy)
    _check_children(found)
    asked = questions(runner)
    if not asked:
        raise ConfigError("there is no prompt to explain: give one, or --prompts FILE")
    journal = Journal.open(journal_path, _identity(options, configuration, asked, params), resume=resume)
    stopped = False
    try:
        _read(found, asked, journal, progress)
    except KeyboardInterrupt:
        stopped = True
        if not found.texts:
            raise
    result = summarise(found, options, workload, max_shown)
    if stopped:
        result.interrupted = True
        result.notes.append(f"the run was stopped: {result.texts_read} of {len(asked)} prompts were explained")
    return result, journal


def check(configuration: Configuration, params: SamplingParams, *, lossy: bool = False) -> None:
    """Before any model is read. Raises ConfigError or CapabilityError."""
    if configuration.is_plain:
        raise ConfigError("plain decoding drafts nothing, so there is nothing to explain; choose a drafter")
    verifier = configuration.parts(lossy=lossy).verifier
    if not verifier.lossless:
        raise CapabilityError(
            f"verifier '{verifier.name}' is lossy: what it keeps does not follow from how far target and draft agree, which is "
            "what explain takes apart; use a lossless one"
        )


def _identity(
    options: Options, configuration: Configuration, asked: Sequence[Question], params: SamplingParams
) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that goes on."""
    prompts = "\n".join(f"{one.id} {list(one.tokens)}" for one in asked)
    return {
        "verb": "explain", "models": asdict(options), "configuration": configuration.as_dict(), "sampling": asdict(params),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12], "versions": versions(),
    }  # fmt: skip


def _check_children(run: Explained) -> None:
    """Raises CapabilityError for drafts whose distributions cannot be had again."""
    drafter = run.contender.built.decoder.drafter
    if run.params.is_greedy or not isinstance(drafter, CompositeDrafter):
        return
    models = [part for part in drafter.parts if part.is_model]
    if run.judge.coupled and models:
        raise CapabilityError(
            "with shared noise (verifier 'gumbel') the children of a composite's tree cannot be distinguished; explain its "
            "parts one by one, or use another verifier"
        )
    if models and drafter.model is None:
        raise CapabilityError(
            f"the distribution of the part '{models[0].name}' cannot be recomputed beside other parts; explain it alone, or "
            "with --temperature 0"
        )


def _read(run: Explained, questions: Sequence[Question], journal: Journal, progress: Progress) -> None:
    """Decode and explain every question; what the journal has is not decoded again."""
    progress.stage("decoding and explaining", len(questions))
    for number, question in enumerate(questions):
        params = params_of(run.params, question, number)
        recording = RecordedPrompt.from_json(journal.unit(str(number), _recorded, run.contender, question, params))
        run.texts.append(_explained(run, question, recording, params))
        run.recordings.append(recording)
        progress.advance()


def _recorded(contender: Contender, question: Question, params: SamplingParams) -> dict[str, Any]:
    return asdict(record(contender, question, params))


def _explained(run: Explained, question: Question, recording: RecordedPrompt, params: SamplingParams) -> Labelled:
    """Look at one recorded prompt."""
    built, text = run.contender.built, finished_text(run.contender, question, recording, params)
    drafting = Drafting(
        run.judge, any(step.replacement for step in recording.steps), seed=len(run.texts) << 20, draws=not params.is_greedy
    )
    found = annotate(text, recording.steps, forced_distributions(built.target.lm, built.decoder.drafter, text), drafting)
    _split_ends(found, run.mode)
    return labelled(found, built.target.tokenizer, recording.origins, id=question.id, task=question.task)


def _split_ends(found: Annotated, mode: Mode) -> None:
    """What a draft that went on would have brought: along the text, from the distributions there."""
    if not found.positions.has_draft_probs:
        return
    limit = found.text.limit
    walk, placed = walk_of(found.positions, mode, limit), placed_walk(found.positions, limit)

    def gain(position: int, levels: int, weight: float, drawn: bool) -> float:
        chosen = walk if drawn or mode == "guessed" else placed
        return sum(chosen.survival(position, levels, weight))

    found.ledger.split_ends(gain)
