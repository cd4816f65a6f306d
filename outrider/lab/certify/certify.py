"""`certify`: all sections, then the verdict (docs/certify.md).

What was finished before an interruption comes from the journal, which is checked against
`identity`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.drafters.proposals import laws_checked
from outrider.errors import ConfigError
from outrider.lab.certify.certify_result import (
    LEFT_OUT,
    CertifyResult,
    SameTexts,
    SampledDistribution,
    verdict_of,
)
from outrider.lab.certify.sampled import ORIGINS, Draws
from outrider.lab.certify.subject import Subject
from outrider.lab.certify.texts import greedy, invariance
from outrider.lab.journal import Journal
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import Workload
from outrider.sampling.params import SamplingParams
from outrider.version import __version__

DETECTED = 0.06  # total variation that the default number of samples finds (18 cells)
NOT_CERTIFIED = f"{LEFT_OUT}: a lossy verifier changes the model's distribution"


@dataclass(frozen=True)
class CertifyPlan:
    """How much evidence. Raises ConfigError for what makes no sense."""

    samples: int = 5000  # draws in each test: enough to find DETECTED
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples must be at least 1, got {self.samples}")

    @property
    def drawing(self) -> SamplingParams:
        """Options of the sampled sections: temperature 1 in place of 0."""
        return self.sampling.drawn() if self.sampling.is_greedy else self.sampling


def tokens_of(subject: Subject, workload: Workload, plan: CertifyPlan) -> list[list[int]]:
    """Prompts as the target reads them. Raises ConfigError where one does not fit the context
    together with its answer."""
    tokenizer = subject.built.target.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    max_tokens = plan.sampling.required_max_tokens
    prepared = prepare(
        workload,
        tokenizer,
        context=subject.built.context,
        max_tokens=max_tokens,
        chat_template=has_template,
    )
    return [prompt.tokens for prompt in prepared.prompts]


def identity(subject: Subject, prompts: Sequence[list[int]], plan: CertifyPlan) -> dict[str, Any]:
    """The facts that a resumed run must share with the interrupted one."""
    return {
        "settings": {name: str(value) for name, value in settings_of(subject).items()},
        "prompts": hashlib.sha256(repr(list(prompts)).encode()).hexdigest(),
        "plan": asdict(plan),
        "outrider": __version__,
    }


def settings_of(subject: Subject) -> dict[str, Any]:
    """How it is decoded, resolved; models under the names that the user gave them."""
    config = {**subject.built.config(), "target": subject.asked.target}
    if subject.built.draft is not None:
        config["draft"] = subject.asked.draft or "demo draft"
    config.pop("max_num_seqs")  # the certificate decodes both alone and in batches
    return config


@laws_checked()
def certify(
    subject: Subject,
    workload: Workload,
    prompts: Sequence[list[int]],
    plan: CertifyPlan,
    journal: Journal,
) -> CertifyResult:
    """Every section that applies; `prompts` are `tokens_of` the workload."""
    began = time.perf_counter()
    subject.constraint([], plan.sampling)  # refuses a wrong grammar now
    text = greedy(subject, list(prompts), plan.sampling, journal)
    if subject.is_lossless:
        sampled = Draws(subject, prompts, plan.drawing, plan.samples, plan.seed, journal).section()
        same = invariance(subject, list(prompts), plan.drawing, plan.seed, journal)
    else:
        text = _lossy(text)
        same = SameTexts(status="not claimed", why=NOT_CERTIFIED)
        sampled = SampledDistribution(
            status="not claimed", why=NOT_CERTIFIED, temperature=plan.drawing.temperature
        )
    result = CertifyResult(
        verdict="inconclusive",
        reasons=[],
        settings=settings_of(subject),
        sampling=asdict(plan.drawing),
        workload=workload.name,
        num_prompts=len(prompts),
        max_new_tokens=plan.sampling.required_max_tokens,
        seed=plan.seed,
        greedy=text,
        sampled_distribution=sampled,
        invariance=same,
        notes=list(_notes(subject, workload, plan, sampled)),
        elapsed_s=time.perf_counter() - began,
    )
    verdict, reasons = verdict_of(result.sections, lossless=subject.is_lossless)
    return result.model_copy(update={"verdict": verdict, "reasons": reasons})


def _lossy(section: SameTexts) -> SameTexts:
    """Measured all the same: how far such a verifier goes."""
    runs = [run for run in section.runs if run.name.startswith("speculative")]
    same = sum(run.num_identical for run in runs)
    total = sum(run.num_prompts for run in runs)
    why = f"the verifier is lossy: {same} of {total} greedy texts are plain decoding's"
    return section.model_copy(update={"status": "not claimed", "why": why})


def _notes(
    subject: Subject, workload: Workload, plan: CertifyPlan, sampled: SampledDistribution
) -> Iterator[str]:
    yield from [*subject.built.notes, *workload.notes]
    if plan.sampling.is_greedy:
        yield "no --temperature was given: the sampled sections run at temperature 1"
    if str(subject.built.options.num_draft_tokens).startswith("auto"):
        yield f"the sampled sections draft {subject.max_drafted} tokens a step, the most that auto may choose"
    if sampled.origins:
        for name in ORIGINS:
            if not sampled.origins.get(name):
                yield f"no {name} token was among the sampled tokens"
    if not subject.built.config()["exact"]:
        yield "passes of different shapes differ by rounding here, so greedy texts may part at near-ties"
