"""`outrider certify TARGET`: does this pair, with these settings, say what the target alone would
say? Exit code 0 only if so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outrider.cli.lab import OutputOptions, Resume, measure
from outrider.cli.options import (
    SAMPLING,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    FormOptions,
    ModelOptions,
    SamplingOptions,
    Target,
)
from outrider.cli.prompting import SELDOM_READING, PromptOptions, source
from outrider.cli.verbs import gathered, option
from outrider.extras import check_lab
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress

if TYPE_CHECKING:
    from outrider.lab.certify.certify import CertifyPlan
    from outrider.lab.certify.certify_result import CertifyResult

EVIDENCE = "Evidence"


@dataclass(frozen=True, kw_only=True)
class CertifySampling(SamplingOptions):
    """Options of the decoding that is certified; greedy text is always tested as well."""

    max_tokens: int = option(128, SAMPLING, "Max tokens of a greedy answer.", min=1, common=True)  # type: ignore[assignment]
    temperature: float = option(
        0.0,
        SAMPLING,
        "Of the sampled sections.",
        show_default="0: greedy, and the sampled sections at 1",
        common=True,
    )
    seed: int = option(0, SAMPLING, "Same seed, same certificate.", min=0, common=True)


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(PromptOptions):
    """How much is tested, on which prompts."""

    otherwise: ClassVar[str] = "embedded"

    prompts: str | None = source(otherwise)
    limit: int = option(
        8, EVIDENCE, "Greedy texts to compare, one for each prompt.", min=1, common=True
    )
    samples: int = option(
        5000,
        EVIDENCE,
        "Draws in each sampled test: more find smaller deviations.",
        min=1,
        common=True,
    )

    def plan(self, sampling: CertifySampling, form: FormOptions) -> CertifyPlan:
        """The certificate that the options ask for.

        Raises ConfigError for sampling options out of range, and as `structured_outputs`.
        """
        from outrider.lab.certify.certify import CertifyPlan

        params = dataclasses.replace(
            sampling.params(), seed=None, structured_outputs=form.structured_outputs()
        )
        return CertifyPlan(self.samples, params, sampling.seed)


@gathered(sampling=SELDOM_SAMPLING, model_options=SELDOM_MODEL, reading=SELDOM_READING)
def certify(
    target: Target,
    model: ModelOptions,
    sampling: CertifySampling,
    form: FormOptions,
    evidence: EvidenceOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Test, bit by bit and with stated power, that speculation changes no output. Exit code 0 only
    if so."""
    check_lab("certify")
    from outrider.build import Options
    from outrider.lab.certify.certify import certify as run_certify
    from outrider.lab.certify.certify import identity, tokens_of
    from outrider.lab.certify.subject import Subject

    output.check()
    plan = evidence.plan(sampling, form)
    workload = evidence.load(target, evidence.limit)
    options = Options(target=target, **model.llm_arguments())

    def run(path: Path, *, resume: bool, progress: Progress) -> CertifyResult:
        subject = Subject.open(options, progress.say)
        prompts = tokens_of(subject, workload, plan)
        facts = identity(subject, prompts, plan)
        with Journal.open(path, facts, resume=resume, progress=progress) as journal:
            result = run_certify(subject, workload, prompts, plan, journal)
        subject.built.decoder.drafter.close()
        return result

    return measure(
        "certify",
        output,
        run,
        resume=resume,
        finish=lambda result: 0 if result.verdict == "lossless" else 1,
    )
