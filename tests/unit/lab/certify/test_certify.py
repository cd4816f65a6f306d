"""Whole certificates: sound pairs get one, and every fault is found by the section that should find
it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DraftError
from outrider.lab.certify.certify import CertifyPlan, certify, identity, settings_of, tokens_of
from outrider.lab.certify.certify_result import CertifyResult, Section, verdict_of
from outrider.lab.certify.subject import Subject, UnsoundError
from outrider.lab.journal import Journal
from outrider.lab.result import read_result
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.unit.lab.certify.conftest import PROMPTS, Open

pytestmark = pytest.mark.usefixtures("shorter_texts")
PLAN = CertifyPlan(samples=400, sampling=SamplingParams(max_tokens=10))
REQUESTS = [
    WorkloadRequest(str(n), " ".join(f"w{t}" for t in prompt))
    for n, prompt in enumerate(PROMPTS[:3])
]
WORKLOAD = Workload("words", tuple(REQUESTS))


def run(subject: Subject, plan: CertifyPlan = PLAN) -> CertifyResult:
    return certify(subject, WORKLOAD, tokens_of(subject, WORKLOAD, plan), plan, Journal())


def statuses(result: CertifyResult) -> list[str]:
    """Of greedy text, sampled distribution, independence."""
    return [section.status for section in result.sections.values()]


@pytest.mark.parametrize(
    ("drafter", "verifier", "options", "independence"),
    [
        pytest.param("draft-model", "block", {}, "not claimed", marks=pytest.mark.slow),
        pytest.param(
            "draft-model",
            "token",
            {"num_draft_tokens": "auto"},
            "not claimed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "draft-model",
            "traversal",
            {"drafter_options": {"tree": "2x2"}},
            "not claimed",
            marks=pytest.mark.nightly,
        ),
        ("draft-model", "gumbel", {}, "passed"),
        pytest.param("ngram", "block", {}, "not claimed", marks=pytest.mark.nightly),
    ],
)
def test_sound_pairs_are_lossless(
    open_subject: Open,
    tmp_path: Path,
    drafter: str,
    verifier: str,
    options: dict[str, Any],
    independence: str,
) -> None:
    result = run(open_subject(drafter, verifier, **options))
    assert result.verdict == "lossless", result.reasons
    assert statuses(result) == ["passed"] * 2 + [independence]
    assert (result.settings["drafter"], result.settings["verifier"]) == (drafter, verifier)
    assert result.sampling["temperature"] == 1.0
    assert any("no --temperature" in note for note in result.notes)
    result.write(tmp_path / "certificate.json")
    assert read_result(tmp_path / "certificate.json") == result


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        ("resamples", ["passed", "failed", "not claimed"]),
        ("clips", ["passed", "failed", "not claimed"]),
        ("not-invariant", ["passed", "passed", "failed"]),
    ],
)
def test_faulty_verifiers_get_no_certificate(
    open_subject: Open, verifier: str, expected: list[str]
) -> None:
    """Each found where it should be, and nowhere else."""
    result = run(open_subject(verifier=verifier), CertifyPlan(samples=1000, sampling=PLAN.sampling))
    assert result.verdict == "not lossless"
    assert statuses(result) == expected
    assert len(result.reasons) == expected.count("failed")


def test_lossy_verifiers_are_called_lossy(open_subject: Open) -> None:
    """With what was measured of them."""
    result = run(open_subject(verifier="typical", lossy=True))
    assert result.verdict == "lossy"
    assert set(statuses(result)) == {"not claimed"}
    assert any("greedy texts" in reason for reason in result.reasons)


@pytest.mark.usefixtures("broken")
def test_a_verifier_that_breaks_while_decoding_is_named(open_subject: Open) -> None:
    """One line about it, no traceback of ours."""
    subject = open_subject(verifier="raises")
    subject.speculative.verifier.verify = lambda *given: [][0]  # type: ignore[method-assign]
    with pytest.raises(UnsoundError, match="verifier 'raises' raised IndexError"):
        run(subject)


def test_a_drafter_that_misstates_its_distributions_is_named(open_subject: Open) -> None:
    """No certificate at all: what a verifier makes of numbers that are no law says nothing about
    it."""
    subject = open_subject()
    drafter = subject.speculative.drafter
    propose = subject.speculative.drafter.propose

    def halved(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        return draft if draft.probs is None else replace(draft, probs=draft.probs / 2)

    drafter.propose = halved  # type: ignore[method-assign]
    with pytest.raises(
        DraftError,
        match=r"drafter 'draft-model' drafted with probabilities that sum to 0\.5, not 1",
    ):
        run(subject)


def test_plain_decoding_is_nothing_to_certify(open_subject: Open) -> None:
    with pytest.raises(ConfigError, match="nothing to certify"):
        open_subject("none")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (["passed", "passed", "not claimed"], "lossless"),
        (["passed", "inconclusive", "not claimed"], "inconclusive"),
        (["inconclusive", "failed", "passed"], "not lossless"),
    ],
)
def test_verdicts(found: list[str], verdict: str) -> None:
    """The worst section decides, and is the reason."""
    sections = {
        f"section {n}": Section(status=status, why=f"why {n}") for n, status in enumerate(found)
    }
    decided, reasons = verdict_of(sections, lossless=True)
    assert decided == verdict
    assert reasons
    assert all(
        f"why {n}" not in " ".join(reasons)
        for n, status in enumerate(found)
        if status == "not claimed"
    )


def test_settings_name_what_the_user_named(
    open_subject: Open, tiny_pair: tuple[Path, Path]
) -> None:
    subject = open_subject()
    found = settings_of(subject)
    assert (found["target"], found["draft"]) == tuple(map(str, tiny_pair))
    assert found["num_draft_tokens"] == 5
    assert found["exact"] is True


def test_another_plan_is_another_run(open_subject: Open) -> None:
    """A journal of other prompts, options, samples or seeds must not be gone on with."""
    subject = open_subject()
    plans = [
        PLAN,
        CertifyPlan(samples=401, sampling=PLAN.sampling),
        CertifyPlan(400, SamplingParams(max_tokens=11)),
        CertifyPlan(400, PLAN.sampling, seed=1),
    ]
    found = [str(identity(subject, PROMPTS, plan)) for plan in plans] + [
        str(identity(subject, PROMPTS[:2], PLAN))
    ]
    assert len(set(found)) == 5


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples"):
        CertifyPlan(samples=0)
