"""The result of `certify`. Every section has a status, the reason for it in one line, and its
numbers.

    passed          what the section claims was found to hold
    failed          it was found not to hold
    inconclusive    the check could not tell (`why` says why it could not)
    not claimed     nobody promised it for these settings, or it does not apply
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.lab.result import Record, Result

LEFT_OUT = "left out"  # how `why` begins in sections that were not run
FALSE_ALARMS = 1e-3  # chance that a faithful sampler fails any test of a certificate
POWER = 0.9

Status = Literal["passed", "failed", "inconclusive", "not claimed"]
Verdict = Literal["lossless", "not lossless", "lossy", "inconclusive"]
Sampler = Literal["speculative", "plain"]
Part = Literal["texts", "drafts"]
View = Literal["likeliest first", "by id", "preference"]
Cause = Literal["rounding", "verifier", "state"]


class Section(Record):
    status: Status
    why: str  # one sentence


class TextDifference(Record):
    """The first position where two texts that should be equal are not."""

    prompt: int
    run: str  # which of the section's runs
    position: int  # output token, from 0
    expected: int | None  # token id; None: the text had ended
    found: int | None
    expected_text: str
    found_text: str
    gap: float | None  # teacher-forced score of the expected token minus that of the found one
    gap_in_spacings: float | None  # spacing: 1 ulp of the model's dtype at that size
    moved_in_spacings: float | None  # of these logits between the run's pass and the forced one
    cause: Cause  # see ties.py


class TextRun(Record):
    """Texts of one way to decode, compared with plain decoding of every prompt alone."""

    name: str
    num_identical: int
    num_prompts: int
    num_tokens: int


class SameTexts(Section):
    """Token ids of several ways to decode, compared with plain decoding of each prompt alone."""

    runs: list[TextRun] = Field(default_factory=list)
    differences: list[TextDifference] = Field(default_factory=list)


class GStatistic(Record):
    """One finished G-test."""

    num_draws: int
    # of those, from distributions that leave a choice: all others can only be right or impossible
    num_uncertain: int
    num_cells: int
    g: float
    df: int  # degrees of freedom: cells minus groups
    p_value: float
    impossible: int  # tokens drawn to which the distribution gives probability 0


class DistributionTest(GStatistic):
    """One G-test of drawn tokens against the distributions they should come from.

    Emitted tokens against the target's teacher-forced conditionals, drafted ones against what the
    drafter reports of them, by their ranks (ranks.py). G = 2 sum O ln(O / E) over cells expected at
    least 5 times. docs/certify.md names the views.
    """

    part: Part
    sampler: Sampler
    view: View
    first: int  # token of the draft, from 1; of a text, from 0 with its prompt
    last: int  # the test is of all from the first to this one
    rejected: bool = False  # by Holm's procedure over all tests of the certificate
    # averaged over the draws, found with `power`
    detectable_total_variation: float | None = None


class SampledDistribution(Section):
    """Drawn tokens against the target's own conditionals, drafted ones against the drafter's."""

    temperature: float
    false_alarms: float = FALSE_ALARMS
    power: float = POWER
    num_texts: int = 0
    num_tokens: int = 0  # drawn
    origins: dict[str, int] = Field(default_factory=dict)  # of the speculative tokens
    tests: list[DistributionTest] = Field(default_factory=list)

    def finds(self, part: Part) -> float | None:
        """The smallest total variation that every speculative test of this part finds."""
        tests = [test for test in self.tests if (test.sampler, test.part) == ("speculative", part)]
        known = [test.detectable_total_variation for test in tests]
        return max((power for power in known if power is not None), default=None)

    @property
    def tested_range(self) -> tuple[int, int] | None:
        """The first and the last position that texts tested; None: none was long enough."""
        tests = [test for test in self.tests if test.part == "texts"]
        return (
            (min(test.first for test in tests), max(test.last for test in tests)) if tests else None
        )


class CertifyResult(Result):
    kind: Literal["certify"] = "certify"
    verdict: Verdict
    reasons: list[str]  # why this verdict, one line each
    settings: dict[str, Any]  # how it was decoded, resolved
    sampling: dict[str, Any]  # options of the sampled sections
    workload: str
    num_prompts: int
    max_new_tokens: int
    seed: int
    greedy: SameTexts  # at temperature 0
    sampled_distribution: SampledDistribution
    invariance: SameTexts  # at the sampling temperature, same seeds, several drafters and lengths
    elapsed_s: float = Field(ge=0)  # since it was started, or resumed

    @property
    def sections(self) -> dict[str, Section]:
        """By title, in the order of the report."""
        return {
            "Greedy text": self.greedy,
            "Sampled distribution": self.sampled_distribution,
            "Independence of the drafter": self.invariance,
        }


def verdict_of(sections: dict[str, Section], *, lossless: bool) -> tuple[Verdict, list[str]]:
    """The verdict that the worst section decides, and its reasons; `lossless`: what the parts say
    of themselves."""
    if not lossless:
        measured = [
            f"{title}: {section.why}"
            for title, section in sections.items()
            if not section.why.startswith(LEFT_OUT)
        ]
        return "lossy", ["lossy by design: no certificate of losslessness can be given", *measured]
    verdicts: tuple[tuple[Status, Verdict], ...] = (
        ("failed", "not lossless"),
        ("inconclusive", "inconclusive"),
        ("passed", "lossless"),
    )
    for status, verdict in verdicts:
        reasons = [
            f"{title}: {section.why}"
            for title, section in sections.items()
            if section.status == status
        ]
        if reasons:
            return verdict, reasons
    return "inconclusive", ["no section applies"]
