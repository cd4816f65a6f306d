"""Certificates of the embedded pair, through the command line's own door, and one that must not be
given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.build import Options
from outrider.drafters import DRAFTERS
from outrider.lab.certify.certify import DETECTED, CertifyPlan, certify, tokens_of
from outrider.lab.certify.certify_result import CertifyResult
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal
from outrider.lab.workload.load import load_workload
from outrider.registry import Entry
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS

PLAN = CertifyPlan(samples=320, sampling=SamplingParams(max_tokens=24))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(plan: CertifyPlan = PLAN, prompts: int = 2, **options: Any) -> CertifyResult:
    subject = Subject.open(Options(target="demo", threads=1, **options))
    workload = load_workload("demo", limit=prompts)
    return certify(subject, workload, tokens_of(subject, workload, plan), plan, Journal())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "draft-model", "verifier": "block"},
        {"drafter": "draft-model", "verifier": "gumbel"},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"drafter": "draft-model", "verifier": "token"},
                {
                    "drafter": "draft-model",
                    "verifier": "traversal",
                    "drafter_options": {"tree": "2x2"},
                },
                {"drafter": "ngram"},
            )
        ),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_embedded_pair_is_lossless(options: dict[str, Any]) -> None:
    result = run(**options)
    assert result.verdict == "lossless", result.reasons
    assert result.sampled_distribution.origins["accepted"] > 20
    assert result.settings["target"] == "demo"


@pytest.mark.slow
def test_with_the_users_own_sampling_options() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, max_tokens=24)
    assert run(CertifyPlan(320, params), drafter="draft-model").verdict == "lossless"


@pytest.mark.nightly  # its like by day: tests/unit/lab/certify/test_certify.py
def test_a_third_party_verifier_that_resamples_from_the_target_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a trained pair, whose distributions are peaked and alike: with the number of draws that a
    user gets."""
    entry = Entry("tests.unit.lab.certify.broken:ResamplesFromTarget", "faulty")
    monkeypatch.setitem(VERIFIERS._builtin, "resamples", entry)
    result = run(CertifyPlan(), prompts=8, drafter="draft-model", verifier="resamples")
    assert result.verdict == "not lossless"
    assert (result.greedy.status, result.sampled_distribution.status) == ("passed", "failed")


@pytest.mark.nightly  # its like by day: tests/unit/lab/certify/test_sampled.py
def test_defaults_find_a_drafter_that_reports_another_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """q^0.9: the number of draws, prompts and positions that a user gets who asks for nothing."""
    monkeypatch.setitem(
        DRAFTERS._builtin,
        "flattens",
        Entry("tests.unit.lab.certify.broken:FlattensItsReport", "faulty"),
    )
    result = run(CertifyPlan(), prompts=8, drafter="flattens", draft="demo")
    assert result.sampled_distribution.status == "failed"
    assert "another distribution than it reports" in result.sampled_distribution.why


@pytest.mark.nightly  # its like by day: tests/unit/lab/certify/test_long_texts.py
def test_defaults_find_a_rule_that_errs_only_beyond_position_300(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And at no position before that."""
    monkeypatch.setitem(
        VERIFIERS._builtin,
        "resamples-late",
        Entry("tests.unit.lab.certify.broken:ResamplesLate", "faulty"),
    )
    result = run(CertifyPlan(), prompts=8, drafter="draft-model", verifier="resamples-late")
    assert [section.status for section in result.sections.values()][:2] == ["passed", "failed"]
    rejected = [one for one in result.sampled_distribution.tests if one.rejected]
    assert {one.part for one in rejected} == {"texts"}
    assert all(one.last > 300 for one in rejected)


@pytest.mark.nightly
def test_defaults_pass_the_embedded_pair() -> None:
    result = run(CertifyPlan(), prompts=8, drafter="draft-model")
    assert result.verdict == "lossless", result.reasons
    assert (result.sampled_distribution.finds("texts") or 1) <= DETECTED
    assert result.sampled_distribution.tested_range == (41, 1023)
