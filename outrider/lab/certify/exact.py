"""The configured verifier over the bank of small cases: exact distributions, no random number involved."""

from __future__ import annotations

from outrider.lab.certify.bank import Case, bank, steps_in_a_row
from outrider.lab.certify.certify_result import CaseFound, ExactDistribution, Status
from outrider.lab.progress import Progress
from outrider.verifiers.base import Verifier

LIMIT = 1e-9  # total variation; sound rules stay below 1e-12, the smallest known bug is at 0.003
MAX_FAILURES = 20  # listed


def cases_of(verifier: Verifier, *, trees: bool) -> list[Case]:
    """What applies to it: trees where the drafter grows them, steps in a row where coins are tossed."""
    return [*bank(trees=trees), *([] if verifier.coupled else [steps_in_a_row()])]


def run_case(case: Case, verifier: Verifier) -> CaseFound:
    """A verifier that raises has failed the case, whatever it raised: it may be anybody's code."""
    try:
        return CaseFound(kind=case.kind, name=case.name, total_variation=case.measure(verifier.verify))
    except Exception as error:  # noqa: BLE001
        return CaseFound(kind=case.kind, name=case.name, total_variation=None, problem=f"{type(error).__name__}: {error}")


def exact_distribution(verifier: Verifier, *, trees: bool, progress: Progress) -> ExactDistribution:
    """Every case."""
    cases = cases_of(verifier, trees=trees)
    progress.stage("exact distribution of the verifier", len(cases))
    found = []
    for case in cases:
        found.append(run_case(case, verifier))
        progress.advance()
    return judge(found, lossless=verifier.lossless)


def judge(found: list[CaseFound], *, lossless: bool) -> ExactDistribution:
    """The section."""
    failures = [one for one in found if not _is_exact(one)]
    by_kind: dict[str, float | None] = {}
    for one in found:
        before = by_kind.get(one.kind, 0.0)
        by_kind[one.kind] = None if before is None or one.total_variation is None else max(before, one.total_variation)
    known = [one.total_variation for one in found if one.total_variation is not None]
    worst = max(known, default=None)
    status, why = _judgement(found, failures, worst)
    if not lossless:
        status, why = "not claimed", f"a lossy verifier; {why}"
    return ExactDistribution(
        status=status, why=why, num_cases=len(found), limit=LIMIT, max_total_variation=worst, by_kind=by_kind,
        failures=failures[:MAX_FAILURES],
    )  # fmt: skip


def _is_exact(one: CaseFound) -> bool:
    return one.total_variation is not None and one.total_variation <= LIMIT  # NaN is not exact


def _judgement(found: list[CaseFound], failures: list[CaseFound], worst: float | None) -> tuple[Status, str]:
    if not failures:
        return "passed", f"{len(found)} enumerated cases agree with the target's distribution to {worst:.0e} total variation"
    raised = [one for one in failures if one.problem is not None]
    if raised:
        first = f"in '{raised[0].name}' it raised {raised[0].problem}"
    else:
        first = f"the largest total variation from the target's distribution is {worst:.2g}"
    return "failed", f"{len(failures)} of {len(found)} enumerated cases are off: {first}"
