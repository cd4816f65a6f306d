"""The report of a certificate: the verdict, the claims with how they were checked and how sure that
makes them, what is not claimed, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.errors import counted
from outrider.lab.certify.certify_result import (
    CertifyResult,
    DistributionTest,
    Part,
    SameTexts,
    SampledDistribution,
    Status,
    TextDifference,
    TextRun,
    Verdict,
)
from outrider.report.document import (
    NOTHING,
    Block,
    Bullets,
    Cells,
    Document,
    Heading,
    Paragraph,
    Tone,
    table,
    word,
)
from outrider.report.next_step import DRAFTING, PROMPTS, command, step
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import number

TONES: dict[Verdict, Tone] = {
    "lossless": "good",
    "not lossless": "bad",
    "lossy": "caution",
    "inconclusive": "caution",
}
GREEDY = "greedy text is that of plain decoding, token by token"
SAMPLED = "sampled text follows the target's distribution"
DRAFTED = "draft tokens follow the distribution that the drafter reports"
SEEDED = "text of a seed is the same whatever drafts"
SETTINGS = (
    "target", "draft", "drafter", "num_draft_tokens", "verifier", "dtype", "quantise", "device",
    "threads", "runtime", "exact",
)  # fmt: skip
CAUSES = {
    "rounding": "rounding (a near-tie)",
    "verifier": "the verifier (its own scores favour another token)",
    "state": "cache, positions or masks (scores moved by more than rounding)",
}


class Claim(NamedTuple):
    """The verdict on the output, and its grounds."""

    claim: str
    result: Status
    how: str
    power: str = NOTHING


CLAIMS: Cells[Claim] = {
    "claim": lambda claim: claim.claim,
    "result": lambda claim: claim.result,
    "how it was checked": lambda claim: claim.how,
    "power": lambda claim: claim.power,
}


def document(result: CertifyResult) -> Document:
    """The whole report; everything in it is in the result."""
    claims = list(_claims(result))
    checked = [claim for claim in claims if claim.result != "not claimed"]
    blocks: list[Block] = [
        Paragraph(_headline(result, claims), TONES[result.verdict]),
        *([] if result.verdict == "lossless" else [Bullets(result.reasons)]),  # the table has them
        table(checked, CLAIMS, "Claims", lambda claim: claim.result == "failed"),
        *_not_claimed(result, claims),
        *_next(result),
        Heading("Evidence"),
        Paragraph(_decoded(result)),
        *_texts(result.greedy, "Greedy texts, against plain decoding of each prompt alone"),
        *_sampled(result.sampled_distribution),
        *_texts(result.invariance, "Sampled texts, against plain ones of the same seeds"),
        *to_keep_in_mind(result),
    ]
    subtitle = origin(result, f"{result.elapsed_s:.0f} s")
    return Document("Certificate of losslessness", subtitle, blocks)


def _headline(result: CertifyResult, claims: Sequence[Claim]) -> str:
    """The verdict in words, with the size of fault that would have been found."""
    if result.verdict == "lossy":
        return "Lossy: this verifier changes the model's distribution by design."
    if result.verdict == "inconclusive":
        return "Inconclusive: no fault was found, but a check could not tell."
    if result.verdict == "not lossless":
        broken = [f"not true: {claim.claim}" for claim in claims if claim.result == "failed"]
        return f"Not lossless: {'; '.join(['speculation changes the output', *broken])}."
    passed = [claim.claim for claim in claims if claim.result == "passed"]
    text = f"Lossless: {', and '.join(claim for claim in passed if claim != DRAFTED)}."
    sampled = result.sampled_distribution
    return f"{text}{power_of(sampled.finds('texts'), sampled.power)}"


def power_of(shift: float | None, power: float) -> str:
    """A sentence on the smallest shift of probability that was tested for; empty where none was."""
    if shift is None:
        return ""
    return (
        f" A shift of {shift:.1%} of the probability would have been found in {power:.0%} of cases."
    )


def _claims(result: CertifyResult) -> Iterator[Claim]:
    exact = "exact: one other token fails, on these prompts"
    yield Claim(GREEDY, result.greedy.status, result.greedy.why, exact)
    yield from _sampled_claim(SAMPLED, "texts", result.sampled_distribution)
    yield from _sampled_claim(DRAFTED, "drafts", result.sampled_distribution)
    yield Claim(SEEDED, result.invariance.status, result.invariance.why, exact)


def _sampled_claim(claim: str, part: Part, section: SampledDistribution) -> Iterator[Claim]:
    """A section that failed may have a part that did not."""
    tests = [test for test in section.tests if test.part == part]
    passed = section.status == "passed" or (
        section.status == "failed" and not any(test.rejected for test in tests)
    )
    if not tests or not passed:
        if tests or part == "texts":
            yield Claim(claim, section.status, section.why)
        return
    draws = max(test.num_draws for test in tests)
    finds = section.finds(part)
    first, last = min(test.first for test in tests), max(test.last for test in tests)
    yield Claim(
        claim,
        "passed",
        f"{counted(len(tests), 'G-test')} of {draws} tokens, temperature {section.temperature:g}, "
        f"positions {first} to {last} of a {part.removesuffix('s')}",
        f"finds a total variation of {number(finds, 3)} in {section.power:.0%} of cases",
    )


def _not_claimed(result: CertifyResult, claims: Sequence[Claim]) -> Iterator[Block]:
    yield Heading("Not claimed", 3)
    where = result.sampled_distribution.tested_range
    late = [] if where is None else [f"positions of a text from {where[1] + 1} on"]
    yield Bullets(
        [
            *(f"{claim.claim}: {claim.how}" for claim in claims if claim.result == "not claimed"),
            ", ".join(["anything about other prompts", "other machines and versions", *late]),
            "speed, and whether the target is the model that its authors published",
        ]
    )


def _next(result: CertifyResult) -> list[Block]:
    target = str(result.settings.get("target", ""))
    if not target:
        return []
    if result.verdict in ("lossless", "lossy"):
        serve = command(result, "serve", target, also=DRAFTING)
        return step("Serve with these settings:", serve)
    also = (*DRAFTING, *PROMPTS)
    if result.verdict == "not lossless":
        if "runtime=" in result.command or result.settings.get("runtime") == "eager":
            return []
        eager = command(result, "certify", target, ["--model-options", "runtime=eager"], also)
        return step("Find out whether the fault is in the fast passes or in the rule:", eager)
    more = command(result, "certify", target, ["--limit", "32", "--samples", "20000"], also)
    return step("Test more prompts and tokens:", more)


def _decoded(result: CertifyResult) -> str:
    settings = result.settings
    named = [(name, settings.get(name)) for name in SETTINGS]
    for options in ("drafter_options", "verifier_options"):
        named += settings.get(options, {}).items()
    words = [f"{name} {word(value)}" for name, value in named if value not in (None, "")]
    return (
        f"Decoded with {', '.join(words)}. Prompts: {result.num_prompts} of {result.workload}, "
        f"up to {result.max_new_tokens} new tokens; seed {result.seed}."
    )


def _texts(texts: SameTexts, title: str) -> Iterator[Block]:
    if texts.runs:
        yield table(texts.runs, RUNS, title)
    if texts.differences:
        yield table(texts.differences, DIFFERENCES, "First differing token of each text")


RUNS: Cells[TextRun] = {
    "decoded": lambda run: run.name,
    "identical texts": lambda run: f"{run.num_identical} of {run.num_prompts}",
    "tokens": lambda run: str(run.num_tokens),
}
DIFFERENCES: Cells[TextDifference] = {
    "decoded": lambda difference: difference.run,
    "cause": lambda difference: CAUSES[difference.cause],
    "prompt": lambda difference: str(difference.prompt + 1),
    "token": lambda difference: str(difference.position + 1),
    "plain says": lambda difference: repr(difference.expected_text),
    "it says": lambda difference: repr(difference.found_text),
    "gap": lambda difference: number(difference.gap_in_spacings, 1),
    "moved": lambda difference: number(difference.moved_in_spacings, 1),
}
TESTS: Cells[DistributionTest] = {
    "tested": lambda test: f"{test.part}, {test.sampler}",
    "result": lambda test: "deviates" if test.rejected else "follows",
    "p": lambda test: f"{test.p_value:.2g}",
    "tokens tested": lambda test: f"{test.first} to {test.last}",
    "order": lambda test: test.view,
    "draws": lambda test: str(test.num_draws),
    "G (df)": lambda test: f"{test.g:.1f} ({test.df})",
    "finds": lambda test: number(test.detectable_total_variation, 3),
}


def _sampled(section: SampledDistribution) -> Iterator[Block]:
    if not section.tests:
        return
    title = "G-tests of tokens, against the target's and the drafter's own distributions"
    yield table(section.tests, TESTS, title, lambda test: test.rejected)
    origins = ", ".join(f"{count} {origin}" for origin, count in sorted(section.origins.items()))
    yield Paragraph(
        f"By Holm's procedure a faithful sampler fails any of them once in "
        f"{1 / section.false_alarms:.0f} certificates. Tokens of the "
        f"{counted(section.num_texts, 'text')}: {origins}."
    )
