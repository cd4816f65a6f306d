"""The report of a certificate: the verdict, its reasons, and every section with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outrider.errors import counted
from outrider.lab.certify.certify_result import (
    CertifyResult,
    DistributionTest,
    SameTexts,
    SampledDistribution,
    Section,
    TextDifference,
    TextRun,
    Verdict,
)
from outrider.report.document import (
    Block,
    Bullets,
    Column,
    Document,
    Fact,
    Heading,
    Paragraph,
    Table,
    Tone,
    table,
    word,
)
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import number

TONES: dict[Verdict, Tone] = {
    "lossless": "good",
    "not lossless": "bad",
    "lossy": "caution",
    "inconclusive": "caution",
}
HEADLINES: dict[Verdict, str] = {
    "lossless": "Lossless: every check passed; nothing was found that speculation changes.",
    "not lossless": "Not lossless: a check failed, so speculation changes the output.",
    "lossy": "Lossy: this verifier changes the model's distribution by design.",
    "inconclusive": "Inconclusive: nothing was found to be wrong, but a check could not tell.",
}
SETTINGS = (
    "target", "draft", "drafter", "num_draft_tokens", "verifier", "dtype", "quantise", "device",
    "threads", "runtime", "exact",
)  # fmt: skip
SPACINGS = "in spacings of the model's dtype at the size of those logits (ulp)"
CAUSES = {
    "rounding": "rounding (a near-tie)",
    "verifier": "the verifier (its own scores favour another token)",
    "state": "cache, positions or masks (scores moved by more than rounding)",
}


def document(result: CertifyResult) -> Document:
    """The whole report; everything in it is in the result."""
    blocks: list[Block] = [
        Paragraph(HEADLINES[result.verdict], TONES[result.verdict]),
        *([] if result.verdict == "lossless" else [Bullets(result.reasons)]),  # the table has them
        *_power(result.sampled_distribution),
        _overview(result.sections),
        Paragraph(_decoded(result)),
        Heading("Greedy text"),
        Paragraph("Token ids at temperature 0, compared with plain decoding of each prompt alone."),
        *_texts(result.greedy),
        *_sampled(result.sampled_distribution),
    ]
    if result.invariance.runs:
        blocks.append(Heading("Independence of the drafter"))
        blocks.append(
            Paragraph("Token ids of sampled texts, compared with plain ones of the same seeds.")
        )
        blocks += _texts(result.invariance)
    blocks += to_keep_in_mind(result)
    subtitle = origin(result, f"{result.elapsed_s:.0f} s")
    return Document("Certificate of losslessness", subtitle, blocks)


def _power(section: SampledDistribution) -> Iterator[Block]:
    """The size of fault that would have been found, and where."""
    if not section.tests:
        return
    parts = []
    missing = "No text was long enough to be tested."
    if (tested := section.tested_range) is not None:
        first, last = tested
        parts.append(f"{number(section.finds('texts'), 3)} at positions {first} to {last}")
        missing = f"Nothing is known about positions from {last + 1} on."
    if (drafts := section.finds("drafts")) is not None:
        parts.append(f"{number(drafts, 3)} between what the drafter draws and what it reports")
    yield Paragraph(
        f"It would have found, in {section.power:.0%} of cases, a total variation of "
        f"{', of '.join(parts)}. {missing}"
    )


def _overview(sections: Mapping[str, Section]) -> Table:
    rows = [[title, section.status, section.why] for title, section in sections.items()]
    columns = [Column("Check", "left"), Column("Result", "left"), Column("Found", "left")]
    return Table(columns, rows)


def _decoded(result: CertifyResult) -> str:
    settings = result.settings
    named = [(name, settings.get(name)) for name in SETTINGS]
    for options in ("drafter_options", "verifier_options"):
        named += settings.get(options, {}).items()
    words = [f"{name} {word(value)}" for name, value in named if value is not None]
    return (
        f"Settings: {', '.join(words)}. Prompts: {result.num_prompts} of {result.workload}, "
        f"up to {result.max_new_tokens} new tokens; seed {result.seed}."
    )


def _texts(texts: SameTexts) -> Iterator[Block]:
    runs: list[Fact[TextRun]] = [
        Fact("Decoded", lambda run: run.name, align="left"),
        Fact("Identical texts", lambda run: f"{run.num_identical} of {run.num_prompts}"),
        Fact("Tokens", lambda run: str(run.num_tokens)),
    ]
    if texts.runs:
        yield table(texts.runs, runs)
    if texts.differences:
        yield _differences(texts.differences)


def _differences(differences: Sequence[TextDifference]) -> Table:
    facts: list[Fact[TextDifference]] = [
        Fact("Decoded", lambda one: one.run, align="left"),
        Fact("Prompt", lambda one: str(one.prompt + 1)),
        Fact("Token", lambda one: str(one.position + 1)),
        Fact("Plain says", lambda one: repr(one.expected_text), align="left"),
        Fact("It says", lambda one: repr(one.found_text), align="left"),
        Fact(
            "Gap",
            lambda one: number(one.gap_in_spacings, 1),
            f"the target's score of the plain token minus that of the other one, {SPACINGS}",
        ),
        Fact(
            "Moved",
            lambda one: number(one.moved_in_spacings, 1),
            f"how far those scores are from plain decoding's, {SPACINGS}",
        ),
        Fact("Cause", lambda one: CAUSES[one.cause], align="left"),
    ]
    return table(differences, facts, "First differing token of each text")


def _sampled(section: SampledDistribution) -> Iterator[Block]:
    if not section.tests:
        return
    yield Heading("Sampled distribution")
    yield Paragraph(
        "Seeded texts, by the ranks of their tokens, against the target's own conditionals from teacher-forced passes; "
        "drafted tokens against what the drafter reports. One G-test per row, at temperature "
        f"{section.temperature:g}."
    )
    facts: list[Fact[DistributionTest]] = [
        Fact("Tested", lambda one: one.part, align="left"),
        Fact("Sampler", lambda one: one.sampler, align="left"),
        Fact(
            "Tokens",
            lambda one: str(one.first) if one.first == one.last else f"{one.first} to {one.last}",
            "of the draft, from 1; of a text, from 0 with its prompt",
        ),
        Fact(
            "View",
            lambda one: one.view,
            "the order in which a token has its rank; preference: of the draft's q over the "
            "target's p",
            "left",
        ),
        Fact("Draws", lambda one: str(one.num_draws)),
        Fact(
            "G (df)",
            lambda one: f"{one.g:.1f} ({one.df})",
            "2 Σ O ln(O / E) over cells expected at least 5 times, over Williams' factor; about as "
            "large as its degrees of freedom where the distribution is right",
        ),
        Fact("p", lambda one: f"{one.p_value:.2g}"),
        Fact(
            "Finds",
            lambda one: number(one.detectable_total_variation, 3),
            f"the smallest total variation found with probability {section.power:g}",
        ),
        Fact(
            "Result",
            lambda one: "deviates" if one.rejected else "follows",
            f"Holm: a faithful sampler fails any once in {1 / section.false_alarms:.0f}",
            "left",
        ),
    ]
    marked = frozenset(index for index, test in enumerate(section.tests) if test.rejected)
    yield table(section.tests, facts, marked=marked)
    origins = ", ".join(f"{count} {origin}" for origin, count in sorted(section.origins.items()))
    yield Paragraph(f"Tokens of the {counted(section.num_texts, 'text')}: {origins}.")
