"""Problems solved while the draft goes as far as it may, step by step in the journal, then looked at with both models' laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outrider.lab.bench.material import Prompt
from outrider.lab.configuration import Configuration
from outrider.lab.explain.costs import Witness
from outrider.lab.explain.explain import Analyst
from outrider.lab.explain.forecast import Mode, TextWalk, walk_of
from outrider.lab.explain.labelled import Labelled
from outrider.lab.explain.recorded import Question, Recording, params_of, record
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.reasoning.kinds import KINDS, token_kinds
from outrider.lab.runner import Runner
from outrider.lab.workload.types import Request
from outrider.sampling.params import SamplingParams


@dataclass(frozen=True)
class Solved:
    """One solution. Columns over its tokens."""

    text: Labelled
    kinds: list[str]

    @property
    def kept(self) -> np.ndarray:
        """(n,) 1: a draft token stood there and was kept, 0: it was rejected, -1: none was tested."""
        return self.text.annotated.ledger.kept

    @property
    def level(self) -> np.ndarray:
        """(n,) tokens of the same step before it."""
        return self.text.annotated.ledger.level

    @cached_property
    def kind(self) -> np.ndarray:
        """(n,) places in `KINDS`."""
        return np.array([KINDS.index(kind) for kind in self.kinds], dtype=int)

    @cached_property
    def start_kind(self) -> np.ndarray:
        """(n,) kind of the token that its step began with."""
        return self.kind[np.arange(len(self.kinds)) - self.level]

    @property
    def is_complete(self) -> bool:
        """Whether it came to its own end."""
        return len(self.text.annotated.text.output) < self.text.annotated.text.limit


@dataclass(frozen=True)
class Solutions:
    """All problems at one temperature."""

    solved: list[Solved]
    walks: list[TextWalk]  # for drafts of other lengths
    tokens: int
    steps: int
    draft_token_s: float  # seconds of drafting / draft tokens, each text's first step, which reads the prompt, left out


def solve(
    runner: Runner, configuration: Configuration, prompts: Sequence[Prompt], params: SamplingParams, journal: Journal,
    progress: Progress,
) -> Solutions:  # fmt: skip
    """Decode every problem with `configuration`, a chain of the draft model, or take it from the journal; then read both laws."""
    analyst = Analyst(runner, configuration, params)
    contender = runner.open(configuration)
    contender.built.decoder.control = witness = Witness(contender.recorder)
    label = f"T = {params.temperature:g}"
    recordings = []
    progress.stage(f"solving and explaining, {label}", len(prompts))
    for number, prompt in enumerate(prompts):
        question = Question(prompt.tokens, prompt.request.id, prompt.request.task, prompt.max_tokens)
        own = params_of(params, question, number)
        if (key := f"solved {label} / {number}") not in journal:
            journal.add(key, record(contender, witness, question, own).as_json())
        recordings.append(Recording.from_json(journal[key]))
        analyst.explain_one(question, recordings[-1], own)
        progress.advance()
    mode: Mode = "guessed" if params.is_greedy else "block" if contender.built.decoder.verifier.name == "block" else "token"
    texts = analyst.found.texts
    return Solutions(
        solved=[Solved(text, token_kinds(asked(one.request), text.pieces)) for text, one in zip(texts, prompts, strict=True)],
        walks=[walk_of(text.annotated.positions, mode, text.annotated.text.limit) for text in texts],
        tokens=sum(len(text.pieces) for text in texts), steps=sum(len(one.steps) for one in recordings),
        draft_token_s=_draft_token_s(recordings),
    )  # fmt: skip


def _draft_token_s(recordings: Sequence[Recording]) -> float:
    """0 where nothing was drafted."""
    later = [pair for one in recordings for pair in list(zip(one.steps, one.draft_s, strict=True))[1:]]
    drafted = sum(len(step.tokens) for step, _ in later)
    return sum(seconds for _, seconds in later) / drafted if drafted else 0.0


def asked(request: Request) -> str:
    """The question as text."""
    return request.prompt if request.prompt is not None else "\n".join(one["content"] for one in request.messages or ())
