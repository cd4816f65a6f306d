"""`outrider certify TARGET`: does this pair, with these settings, say what the target alone would say? Exit code 0 only if so."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli import session
from outrider.cli.lab import OUTPUT, OutputOptions, command_line, deliver, shown_progress
from outrider.cli.options import SAMPLING, ModelOptions, SamplingOptions, Target, with_groups

if TYPE_CHECKING:
    from outrider.lab.certify.certify import CertifyPlan
    from outrider.lab.certify.result import CertifyResult
    from outrider.lab.journal import Journal
    from outrider.lab.workload.types import Workload

INTERRUPTED = 130
EVIDENCE = "Evidence"
UNFINISHED = "outrider-certify.unfinished.jsonl"
DEMO = "demo"


def _option(panel: str, text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **extra)


MaxNewTokens = Annotated[
    int | None, _option(SAMPLING, "Most tokens of a greedy answer.", min=1, show_default="128; 48 with --quick")
]


@dataclass(frozen=True, kw_only=True)
class CertifySampling(SamplingOptions):
    """Options of the decoding that is certified; greedy text is always tested as well."""

    max_new_tokens: MaxNewTokens = None  # type: ignore[assignment]
    temperature: Annotated[
        float, _option(SAMPLING, "Of the sampled sections.", show_default="0: greedy, and the sampled sections at 1")
    ] = 0.0
    seed: Annotated[int, _option(SAMPLING, "Same seed, same certificate.", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    """How much is tested, on which prompts."""

    workload: Annotated[
        str | None,
        _option(EVIDENCE, "A prompts file or a built-in name; see docs/workloads.md.", show_default="demo or embedded"),
    ] = None
    prompts: Annotated[int | None, _option(EVIDENCE, "Greedy texts to compare.", min=1, show_default="8; 4 with --quick")] = None
    samples: Annotated[
        int | None,
        _option(EVIDENCE, "Sampled continuations: more find smaller deviations.", min=1, show_default="4000; 1000 with --quick"),
    ] = None
    quick: Annotated[bool, _option(EVIDENCE, "Less evidence, sooner.", "--quick")] = False
    data: Annotated[Path | None, _option(EVIDENCE, "Folder with the files of named workloads.", show_default=False)] = None
    on_bad: Annotated[Literal["refuse", "skip"], _option(EVIDENCE, "Bad lines of a prompts file.")] = "refuse"

    def load(self, target: str) -> Workload:
        """The first prompts. Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        count = self.prompts or (4 if self.quick else 8)
        name = self.workload or (DEMO if target == DEMO else "embedded")
        return load_workload(name, limit=count, on_bad=self.on_bad, data=self.data)

    def plan(self, sampling: CertifySampling) -> CertifyPlan:
        """Raises ConfigError for sampling options out of range."""
        from outrider.lab.certify.certify import CertifyPlan

        most = sampling.max_new_tokens or (48 if self.quick else 128)
        params = dataclasses.replace(sampling, max_new_tokens=most).params()
        return CertifyPlan(self.samples or (1000 if self.quick else 4000), dataclasses.replace(params, seed=None), sampling.seed)


Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.", rich_help_panel=OUTPUT)]


@with_groups
def certify(
    target: Target,
    model: ModelOptions,
    sampling: CertifySampling,
    evidence: EvidenceOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Prove, or test with stated power, that speculation leaves the output as it is. Exit code 0 only if it does."""
    output.check()
    plan, workload = evidence.plan(sampling), evidence.load(target)
    path = Path(UNFINISHED) if output.out is None else output.out.with_name(f"{output.out.stem}.unfinished.jsonl")
    if path.exists() and not resume:
        sys.stderr.write(f"note: {path} of an interrupted run is begun anew (--resume would have gone on with it)\n")
    try:
        result, journal = _run(target, model, plan, workload, path, resume)
    except KeyboardInterrupt:
        kept = f"; what is finished is in {path}: the same command with --resume goes on" if path.exists() else ""
        sys.stderr.write(f"interrupted{kept}\n")
        return INTERRUPTED
    deliver(result, output)
    journal.close()
    return 0 if result.verdict == "lossless" else 1


def _run(
    target: str, model: ModelOptions, plan: CertifyPlan, workload: Workload, path: Path, resume: bool
) -> tuple[CertifyResult, Journal]:
    from outrider.build import Options
    from outrider.lab.certify.certify import certify, identity, tokens_of
    from outrider.lab.certify.subject import Subject
    from outrider.lab.certify.units import Units
    from outrider.lab.journal import Journal

    options = Options(target=target, **model.llm_arguments())
    with session.progress(f"starting {target}") as status:
        session.quieten_libraries()
        subject = Subject.open(options, status)
    prompts = tokens_of(subject, workload, plan)
    journal = Journal.open(path, identity(subject, prompts, plan), resume=resume)
    with shown_progress() as progress:
        result = certify(subject, workload, prompts, plan, Units(journal, progress), command_line())
    subject.built.decoder.drafter.close()
    return result, journal
