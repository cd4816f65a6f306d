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
from outrider.lab.explain.annotate import Annotated, annotate
from outrider.lab.explain.causes import AcceptanceRule, Drafting, rule_of
from outrider.lab.explain.distributions import forced_distributions
from outrider.lab.explain.explain_result import ExplainResult
from outrider.lab.explain.explained import Explained
from outrider.lab.explain.forecast import placed_walk, walk_of
from outrider.lab.explain.labelled import labelled
from outrider.lab.explain.recorded import Question, RecordedPrompt, finished_text, params_of, record
from outrider.lab.explain.summary import summarise
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress, Quiet
from outrider.lab.runner import Runner
from outrider.machine import versions
from outrider.sampling.params import SamplingParams

MAX_SHOWN = 4000  # tokens whose columns a result keeps: less than 3 MB


def explain(
    options: Options, configuration: Configuration, questions: Callable[[Runner], Sequence[Question]], params: SamplingParams,
    journal_path: Path, *, resume: bool = False, workload: str = "", max_shown: int = MAX_SHOWN,
    progress: Progress | None = None, status: Callable[[str], None] = lambda line: None,
) -> tuple[ExplainResult, Journal]:  # fmt: skip
    """`questions`: from the loaded models, whose tokenizer they need. Sampled prompts get the seeds params.seed (0), + 1, ...

    Close the journal when the result is safe. After Ctrl-C the result is of the prompts that were finished (`interrupted`), or
    KeyboardInterrupt is raised where none was. Raises ConfigError for plain decoding or a journal of another plan,
    CapabilityError where causes cannot be distinguished, RequestError for a prompt that cannot run.
    """
    progress = progress or Quiet()
    check(configuration, params, lossy=options.lossy)
    if not params.is_greedy and params.seed is None:
        params = replace(params, seed=0)
    analyst = Analyst(Runner(options, [configuration], status), configuration, params, lossy=options.lossy)
    asked = questions(analyst.runner)
    if not asked:
        raise ConfigError("there is no prompt to explain")
    journal = Journal.open(journal_path, _identity(options, configuration, asked, params), resume=resume)
    stopped = False
    try:
        analyst.read(asked, journal, progress)
    except KeyboardInterrupt:
        stopped = True
        if not analyst.found.texts:
            raise
    result = summarise(analyst.found, options, workload, max_shown, progress)
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
    rule_of(verifier.name, is_greedy=params.is_greedy)


def _identity(
    options: Options, configuration: Configuration, asked: Sequence[Question], params: SamplingParams
) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that goes on."""
    prompts = "\n".join(f"{one.id} {list(one.tokens)}" for one in asked)
    return {
        "verb": "explain", "models": asdict(options), "configuration": configuration.as_dict(), "sampling": asdict(params),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12], "versions": versions(),
    }  # fmt: skip


class Analyst:
    """One configuration, prompt by prompt. `found`: everything so far."""

    def __init__(self, runner: Runner, configuration: Configuration, params: SamplingParams, *, lossy: bool) -> None:
        self.runner = runner
        self._params = params
        self._contender = runner.open(configuration)
        self._rule = rule_of(self._contender.built.decoder.verifier.name, is_greedy=params.is_greedy)
        self.found = Explained(self._contender, configuration, params, self._rule, lossy=lossy)
        self._check_children()

    def read(self, questions: Sequence[Question], journal: Journal, progress: Progress) -> None:
        """All of them; what the journal has is not decoded again."""
        progress.stage("decoding and explaining", len(questions))
        for number, question in enumerate(questions):
            params = params_of(self._params, question, number)
            recording = journal.unit(str(number), self._recorded, question, params)
            self.explain_one(question, RecordedPrompt.from_json(recording), params)
            progress.advance()

    def _recorded(self, question: Question, params: SamplingParams) -> dict[str, Any]:
        return asdict(record(self._contender, question, params))

    def explain_one(self, question: Question, recording: RecordedPrompt, params: SamplingParams) -> None:
        """Look at one recorded prompt."""
        built, text = self._contender.built, finished_text(self._contender, question, recording, params)
        drafting = Drafting(
            self._rule, any(step.replacement for step in recording.steps), seed=len(self.found.texts) << 20,
            draws=not params.is_greedy,
        )  # fmt: skip
        found = annotate(text, recording.steps, forced_distributions(built.target.lm, built.decoder.drafter, text), drafting)
        self._split_ends(found)
        one = labelled(found, self.runner.tokenizer, recording.origins, id=question.id, task=question.task)
        self.found.add(one, recording)

    def _split_ends(self, found: Annotated) -> None:
        """What a draft that went on would have brought: along the text, from the distributions there."""
        if not found.positions.has_draft_probs:
            return
        limit, mode = found.text.limit, self.found.mode
        walk, placed = walk_of(found.positions, mode, limit), placed_walk(found.positions, limit)

        def gain(position: int, levels: int, weight: float, drawn: bool) -> float:
            chosen = walk if drawn or mode == "guessed" else placed
            return sum(chosen.survival(position, levels, weight))

        found.ledger.split_ends(gain)

    def _check_children(self) -> None:
        """Raises CapabilityError for drafts whose distributions cannot be had again."""
        drafter = self._contender.built.decoder.drafter
        if self._params.is_greedy or not isinstance(drafter, CompositeDrafter):
            return
        models = [part for part in drafter.parts if part.is_model]
        if self._rule is AcceptanceRule.RACE and models:
            raise CapabilityError(
                "with shared noise (verifier 'gumbel') the children of a composite's tree cannot be distinguished; explain its "
                "parts one by one, or use another verifier"
            )
        if models and drafter.model is None:
            raise CapabilityError(
                f"the distribution of the part '{models[0].name}' cannot be recomputed beside other parts; explain it alone, or "
                "with --temperature 0"
            )

