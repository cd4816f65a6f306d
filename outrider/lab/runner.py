"""Many configurations on models that are loaded once, each run recorded step by step.

    runner = Runner(Options("demo"), [plain, Configuration.parse("draft-model k=5")])
    contender = runner.open(configuration)         # raises what cannot be built
    traces = contender.run(prompts, params, batch_size=4)

Configurations take turns on the same models: their caches are empty between runs. One that learns
from texts, or whose draft length follows the clock, knows more after every run; `open` again for a
fresh start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.build import DEMO, Built, Models, Needs, Options, assemble, choose, load_models
from outrider.configuration import Configuration
from outrider.engine.step_costs import Sweep
from outrider.engine.warmup import step_times
from outrider.errors import ConfigError
from outrider.lab.disturbance import Disturbance
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.llm import LLM
from outrider.outputs import Completion
from outrider.parts import Parts
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.step import StepFacts
from outrider.verifiers import VERIFIERS

MAX_ROWS = 4096  # that `Options` takes: how many there are is decided run by run


@dataclass(slots=True)
class Step:
    """One step of one row. Draft nodes as in `types.Draft`: parents before children, -1 = the
    pending token."""

    start: int  # output tokens before this step
    asked: int  # nodes that the drafter was asked for
    tokens: list[int]  # the draft's nodes
    parents: list[int] | None  # None: a chain
    # per node, drawn from the draft's law (True) or placed; None: none was drawn
    sampled: list[bool] | None
    path: list[int]  # nodes kept by the verifier
    next_token: int  # that the verifier added
    complete: bool  # the path ends at a leaf: nothing was rejected there
    taken: int  # tokens the row took: len(path) + 1, or fewer where it ended
    rows: int  # rows in this step
    seconds: float  # of the step, feeding new prompts excluded
    at_s: float  # its end, on `time.perf_counter`'s clock
    draft_s: float = 0.0  # of `seconds`, those in the drafter
    replacement: bool = False  # drawn siblings may repeat

    @property
    def parent_list(self) -> list[int]:
        """The parent of every node; in a chain the node before it."""
        return self.parents if self.parents is not None else list(range(-1, len(self.tokens) - 1))

    @property
    def num_levels(self) -> int:
        """The levels of the draft: a chain's tokens, a tree's depth."""
        levels = [0]
        for parent in self.parent_list:
            levels.append(levels[parent + 1] + 1)
        return max(levels)


@dataclass
class StepRecorder:
    """`steps[request]` are the steps of a row in this run."""

    steps: dict[int, list[Step]] = field(default_factory=dict)

    def observe(self, facts: StepFacts) -> None:
        now = time.perf_counter()
        rows = facts.rows
        draft = facts.draft
        verdict = facts.verdict
        tokens, lengths = draft.lists
        paths, counts, next_tokens, complete = verdict.lists
        parents = None if draft.parents is None else draft.parent_lists
        sampled = None if draft.probs is None else draft.is_sampled().tolist()
        for index, row in enumerate(rows):
            length = lengths[index]
            recorded = self.steps.setdefault(row.request, [])
            start = recorded[-1].start + recorded[-1].taken if recorded else 0
            recorded.append(
                Step(
                    start,
                    facts.asked[index],
                    tokens[index][:length],
                    None if parents is None else parents[index][:length],
                    None if sampled is None else sampled[index][:length],
                    paths[index][: counts[index]],
                    next_tokens[index],
                    complete[index],
                    len(row.tokens) - row.num_prompt - start,
                    len(rows),
                    facts.seconds,
                    now,
                    facts.draft_s,
                    facts.draft.replacement,
                )
            )


@dataclass(frozen=True)
class Trace:
    """One prompt's run."""

    completion: Completion
    steps: list[Step]
    began_s: float  # when its `run` began, on `time.perf_counter`'s clock
    other_cpu: float  # share of the processors that others used meanwhile, 0..1

    @property
    def stats(self) -> DecodeStats:
        return self.completion.stats

    @property
    def ttft_s(self) -> float:
        """To the end of the first step: queue and prompt included."""
        return self.steps[0].at_s - self.began_s

    def seconds_to(self, num_tokens: int) -> float:
        """From the end of the first step until `num_tokens` output tokens were there: the last step
        counts by the share of its tokens that are wanted. So two runs of different lengths compare
        over the same number of tokens."""
        before = self.steps[0]
        for step in self.steps[1:]:
            there = step.start + step.taken
            if there >= num_tokens:
                share = max(num_tokens - step.start, 0) / step.taken
                return before.at_s - self.steps[0].at_s + share * (step.at_s - before.at_s)
            before = step
        return before.at_s - self.steps[0].at_s

    def decode_tokens(self) -> int:
        """Tokens after the first step's."""
        return max(len(self.completion.token_ids) - self.steps[0].taken, 0)

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the decode phase per token; 0 where the first step ended the text."""
        return (self.steps[-1].at_s - self.steps[0].at_s) / max(self.decode_tokens(), 1)


class Contender:
    """One configuration, ready to run."""

    def __init__(self, configuration: Configuration, built: Built) -> None:
        self.configuration = configuration
        self.built = built
        self.recorder = StepRecorder()
        built.decoder.observers.append(self.recorder)
        self._llm = LLM.around(built)

    @property
    def config(self) -> dict[str, Any]:
        return self._llm.config

    @property
    def keeps_learning(self) -> bool:
        """Whether a second run of the same prompt would start with what the first one taught."""
        return self.built.decoder.drafter.learns or str(
            self.built.options.num_draft_tokens
        ).startswith("auto")

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        batch_size: int = 1,
    ) -> list[Trace]:
        """All prompts, at most `batch_size` rows at a time; in the order given. Sampled rows want a
        seed each in `params`."""
        self.recorder.steps = {}  # requests are numbered anew by every call of `generate`
        self.built.options = replace(self.built.options, max_num_seqs=batch_size)
        others = Disturbance()
        began = time.perf_counter()
        completions = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        share = others.share()
        return [
            Trace(done, self.recorder.steps.get(n, []), began, share)
            for n, done in enumerate(completions)
        ]

    @contextmanager
    def sweeping(self, lengths: Sequence[int]) -> Iterator[Sweep]:
        """While it lasts, steps go round these draft lengths, none above the one that it was built
        for."""
        decoder = self.built.decoder
        control = decoder.control
        sweep = Sweep(lengths)
        decoder.control = sweep
        try:
            yield sweep
        finally:
            decoder.control = control

    def close(self) -> None:
        """Let the drafter save what its settings ask it to keep."""
        self._llm.close()


class Runner:
    """Loads models for all configurations together. Raises what cannot be refused later: unknown
    names, missing draft."""

    def __init__(
        self,
        options: Options,
        configurations: Sequence[Configuration],
        status: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._lossy = options.lossy
        self._target = options.target
        self._status = status
        needs = Needs.of_all([self._parts(configuration) for configuration in configurations])
        if needs.draft and options.draft is None and options.target != DEMO:
            names = ", ".join(
                configuration.drafter
                for configuration in configurations
                if self._parts(configuration).requirements.draft
            )
            raise ConfigError(
                f"these drafters need a draft model: {names}; give --draft FOLDER_OR_HUB_ID or "
                "leave them out"
            )
        if options.draft is not None and not needs.draft:
            raise ConfigError(
                f"none of these configurations uses a draft model, but draft='{options.draft}' "
                "was given"
            )
        if options.lossy and not any(_is_lossy(configuration) for configuration in configurations):
            raise ConfigError(
                "lossy was asked for, but the verifiers of all configurations are lossless"
            )
        self.models: Models = load_models(options, needs, status)
        self._plain: Contender | None = None  # opened for the first conversation

    @property
    def tokenizer(self) -> Any:
        return self.models.target.tokenizer

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.models.context

    def open(self, configuration: Configuration, *, any_length: bool = False) -> Contender:
        """A fresh decoder. Raises ConfigError or CapabilityError where it cannot be built on these
        models.

        Plain decoding, with which others are compared, reads prompts whole whatever `prefill` says.
        `any_length`: with drafting loops for any number of tokens up to the configuration's, at
        what that number costs.
        """
        models = replace(self.models, prefill=None) if configuration.is_plain else self.models
        return Contender(
            configuration,
            assemble(models, replace(self._parts(configuration), any_length=any_length)),
        )

    def answer(self, prompt: PreparedPrompt) -> str:
        """The target's own greedy answer, without drafts: what the next question of a conversation
        follows."""
        if self._plain is None:
            self._status("answering conversations, for their later turns")
            self._plain = self.open(Configuration())
        params = SamplingParams(max_tokens=prompt.max_tokens)
        [trace] = self._plain.run([prompt.tokens], params)
        return trace.completion.text

    def step_seconds(self, configuration: Configuration, rows: int) -> dict[int, float]:
        """Draft nodes -> seconds of a step of this many rows, timed now by a server's sweep, and kept
        for its next start."""
        built = self.open(configuration, any_length=True).built
        parts = replace(self._parts(configuration), any_length=True)
        return step_times(built, built.decoder, parts, rows, anew=True).seconds.get(rows, {})

    def _parts(self, configuration: Configuration) -> Parts:
        """`lossy` allows lossy verifiers, alongside which the others stay lossless. The demo's own
        heads need not be named."""
        lossy = self._lossy and _is_lossy(configuration)
        if self._target != DEMO:
            return configuration.parts(lossy=lossy)
        return choose(Options(DEMO, lossy=lossy, max_num_seqs=MAX_ROWS, **configuration.as_dict()))[
            1
        ]


def _is_lossy(configuration: Configuration) -> bool:
    """Whether a verifier changes the distribution. Raises ConfigError for a verifier that does not
    exist."""
    return configuration.verifier != "auto" and not VERIFIERS.load(configuration.verifier).lossless
