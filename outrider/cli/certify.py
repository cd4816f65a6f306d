"""`outrider certify TARGET`: does this pair, with these settings, say what the target alone would
say? Exit code 0 only if so. TARGET may be a server's URL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outrider.cli.lab import OutputOptions, Resume, answer, measure
from outrider.cli.options import (
    SAMPLING,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    FormOptions,
    ModelOptions,
    SamplingOptions,
    ServerTarget,
)
from outrider.cli.prompting import SELDOM_READING, PromptOptions, source
from outrider.cli.servers import SELDOM_SERVER, SERVERS, ServerOptions, is_server
from outrider.cli.verbs import gathered, given, option, refuse_unused
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


@dataclass(frozen=True, kw_only=True)
class ServerSides(ServerOptions):
    """A server with drafts, and the same one without."""

    baseline_url: str | None = option(
        None,
        SERVERS,
        "The same server without drafts.",
        show_default="TARGET, where its requests can switch drafts off",
        common=True,
    )
    concurrency: int = option(
        8, SERVERS, "Requests in flight, where several are asked at once.", min=1
    )


@gathered(
    sampling=SELDOM_SAMPLING,
    model_options=SELDOM_MODEL,
    reading=SELDOM_READING,
    server=("concurrency", *SELDOM_SERVER),
)
def certify(
    target: ServerTarget,
    model: ModelOptions,
    sampling: CertifySampling,
    form: FormOptions,
    evidence: EvidenceOptions,
    servers: ServerSides,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Test, bit by bit and with stated power, that speculation changes no output. Exit code 0 only
    if so. With a server's URL: that its drafts change no text."""
    check_lab("certify")
    if is_server(target):
        unused = [*given(model, form), *(["--resume"] if resume else [])]
        refuse_unused(unused, "when a server is certified: what it runs is set there")
        return _certify_server(target, servers, sampling, evidence, output)
    refuse_unused(given(servers), "without a server's URL as the target")
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


def _certify_server(
    url: str,
    servers: ServerSides,
    sampling: CertifySampling,
    evidence: EvidenceOptions,
    output: OutputOptions,
) -> int:
    """Ask both sides, show, write."""
    from outrider.lab.certify.server import ServerPlan, certify_server

    output.check()
    endpoints = servers.endpoints(url)
    plan = ServerPlan(
        samples=evidence.samples,
        sampling=dataclasses.replace(sampling.params(), seed=None),
        seed=sampling.seed,
        concurrency=servers.concurrency,
        api=servers.api,
        timeout_s=servers.stall_timeout,
    )
    workload = evidence.load(url, evidence.limit)
    return answer(
        output,
        lambda progress: certify_server(endpoints, workload, plan, progress=progress),
        lambda result: 0 if result.verdict == "lossless" else 1,
    )
