"""What the report of a certificate says: the verdict in words, and no number that is not in the result."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.certify.result import (
    CaseFound,
    CertifyResult,
    Difference,
    ExactLaw,
    FirstToken,
    FirstTokenLaw,
    Greedy,
    Invariance,
    LawTest,
    Place,
    Run,
    SampledLaw,
)
from outrider.report.document import Bullets, Document, Paragraph, Table
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from outrider.report.render import render

DIFFERENCE = Difference(
    prompt=1, run="speculative, alone", position=6, expected=108, found=None, expected_text=" <b>", found_text="(end)", gap=0.1,
    spacing=0.01, gap_in_spacings=10.0, moved_in_spacings=None, noise_in_spacings=0.5, cause="verifier",
)  # fmt: skip


def law_test(sampler: str, *, rejected: bool = False) -> LawTest:
    return LawTest(
        sampler=sampler, view="tokens", position=1, num_draws=900, num_uncertain=870, num_cells=40, g=31.5, df=32, p_value=0.49,
        rejected=rejected, impossible=0, detectable_total_variation=0.0734,
    )  # fmt: skip


def certificate(**changes: Any) -> CertifyResult:
    facts: dict[str, Any] = {
        "verdict": "lossless", "reasons": ["Exact distribution of the verifier: fine"], "workload": "words", "num_prompts": 4,
        "settings": {"target": "demo", "verifier": "block", "exact": True, "drafter_options": {"tree": "chain"}},
        "sampling": {"temperature": 1.0}, "max_new_tokens": 48, "seed": 7, "elapsed_s": 61.0, "notes": ["a note"],
        "exact_law": ExactLaw(
            status="passed", why="84 cases", num_cases=84, limit=1e-9, max_total_variation=2e-16,
            by_kind={"chain: drawn": 2e-16, "chain: none": None}, failures=[],
        ),
        "first_token": FirstTokenLaw(status="passed", why="8 places", limit=1e-4, max_total_variation=3e-7, places=[
            FirstToken(place=0, draft="drawn", covered=0.99, total_variation=3e-7)]),
        "greedy": Greedy(status="passed", why="all identical", differences=[], runs=[
            Run(name="speculative, alone", num_identical=4, num_prompts=4, num_tokens=192)]),
        "sampled_law": SampledLaw(
            status="passed", why="1000 continuations", temperature=1.0, false_alarms=1e-3, power=0.9, num_samples=1000,
            num_tokens=3,
            origins={"accepted": 5, "bonus": 2},
            places=[Place(prompt=0, num_output_tokens=3, entropy_nats=1.25)],
            tests=[law_test("speculative"), law_test("plain")], detectable_total_variation=0.0734,
        ),
        "invariance": Invariance(status="not claimed", why="the distribution, not the text", runs=[], differences=[]),
    }  # fmt: skip
    return CertifyResult(**(facts | changes))


def tables(document: Document) -> list[Table]:
    return [block for block in document.blocks if isinstance(block, Table)]


def paragraphs(document: Document) -> list[Paragraph]:
    return [block for block in document.blocks if isinstance(block, Paragraph)]


@pytest.mark.parametrize(("verdict", "word", "tone"), [
    ("lossless", "Lossless:", "good"), ("not lossless", "Not lossless:", "bad"),
    ("lossy", "Lossy:", "caution"), ("inconclusive", "Inconclusive:", "caution"),
])  # fmt: skip
def test_the_verdict_comes_first_in_words_and_in_tone(verdict: str, word: str, tone: str) -> None:
    first = paragraphs(render(certificate(verdict=verdict)))[0]
    assert first.text.startswith(word)
    assert first.tone == tone


def test_reasons_are_given_where_there_is_no_certificate() -> None:
    """The table of a lossless one has them already."""
    def bullets(verdict: str) -> list[Any]:
        return [list(block.items) for block in render(certificate(verdict=verdict)).blocks if isinstance(block, Bullets)]

    assert bullets("lossless") == [["a note"]]
    assert bullets("not lossless") == [["Exact distribution of the verifier: fine"], ["a note"]]


def test_every_section_is_in_the_overview() -> None:
    found = tables(render(certificate()))[0]
    assert [row[1] for row in found.rows] == ["passed"] * 4 + ["not claimed"]
    whys = ["84 cases", "8 places", "all identical", "1000 continuations", "the distribution, not the text"]
    assert [row[2] for row in found.rows] == whys


def test_settings_and_evidence_are_told() -> None:
    text = " ".join(paragraph.text for paragraph in paragraphs(render(certificate())))
    told = ("target demo", "verifier block", "exact yes", "tree=chain", "4 of words", "48 new tokens", "seed 7")
    for fact in (*told, "5 accepted, 2 bonus"):
        assert fact in text, fact


def test_power_is_told_for_every_test() -> None:
    found = next(table for table in tables(render(certificate())) if table.columns[0].heading == "Sampler")
    headings = [column.heading for column in found.columns]
    assert found.rows[0][headings.index("Finds")] == "0.073"
    assert "0.9" in found.columns[headings.index("Finds")].help
    assert "once in 1000" in found.columns[headings.index("Result")].help


def test_what_deviates_is_marked() -> None:
    law = certificate().sampled_law
    law = law.model_copy(update={"tests": [law_test("plain"), law_test("speculative", rejected=True)]})
    found = next(table for table in tables(render(certificate(sampled_law=law))) if table.columns[0].heading == "Sampler")
    assert [row[-1] for row in found.rows] == ["follows", "deviates"]
    assert found.marked == {1}


def test_failed_cases_and_differences_are_listed() -> None:
    failures = [
        CaseFound(kind="k", name="case one", total_variation=0.25),
        CaseFound(kind="k", name="case two", total_variation=None, problem="KeyError: 3"),
    ]
    exact = certificate().exact_law.model_copy(update={"status": "failed", "failures": failures})
    text = certificate().greedy.model_copy(update={"status": "failed", "differences": [DIFFERENCE]})
    document = render(certificate(verdict="not lossless", exact_law=exact, greedy=text))
    cases = next(table for table in tables(document) if table.title == "Cases that failed")
    assert [list(row) for row in cases.rows] == [["case one", "0.25"], ["case two", "KeyError: 3"]]
    parted = next(table for table in tables(document) if table.title.startswith("First differing"))
    assert list(parted.rows[0][:5]) == ["speculative, alone", "2", "7", "' <b>'", "'(end)'"]
    assert parted.rows[0][5:8] == ["10.0", "-", "0.5"]
    assert "verifier" in parted.rows[0][8]


def test_every_writer_takes_it() -> None:
    """With text of the model in it, which is escaped."""
    text = certificate().greedy.model_copy(update={"differences": [DIFFERENCE]})
    document = render(certificate(greedy=text))
    assert "&lt;b&gt;" in to_html(document)
    assert "Lossless" in to_markdown(document)


def test_a_certificate_without_samples_has_no_table_of_them() -> None:
    law = certificate().sampled_law.model_copy(update={"status": "not claimed", "tests": [], "places": []})
    assert all(table.columns[0].heading != "Sampler" for table in tables(render(certificate(sampled_law=law))))
