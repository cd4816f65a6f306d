"""The report of a certificate: the verdict, its reasons, and every section with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outrider.counted import counted
from outrider.lab.certify.certify_result import (
    DRAFTS,
    CertifyResult,
    DistributionTest,
    ExactDistribution,
    FirstTokenDistribution,
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

TONES: dict[Verdict, Tone] = {"lossless": "good", "not lossless": "bad", "lossy": "caution", "inconclusive": "caution"}
HEADLINES: dict[Verdict, str] = {
    "lossless": "Lossless: every check passed. What each of them shows, exactly or with which power, stands below.",
    "not lossless": "Not lossless: a check failed.",
    "lossy": "Lossy: this verifier changes the model's distribution, so no certificate of losslessness can be given.",
    "inconclusive": "Inconclusive: nothing was found to be wrong, but a check could not tell.",
}
SETTINGS = (
    "target", "draft", "drafter", "num_draft_tokens", "verifier", "dtype", "quantise", "device", "threads", "runtime", "exact",
)  # fmt: skip
SPACINGS = "in spacings of the model's dtype at the size of those logits (ulp)"
CAUSES = {
    "rounding": "rounding (a near-tie)",
    "verifier": "the verifier (its own scores favour another token)",
    "state": "cache, positions or masks (scores moved by more than rounding)",
}


def document(result: CertifyResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [
        Paragraph(HEADLINES[result.verdict], TONES[result.verdict]),
        *([] if result.verdict == "lossless" else [Bullets(result.reasons)]),  # the table has them all
        *_power(result.sampled_distribution),
        _overview(result.sections),
        Paragraph(_decoded(result)),
        *_exact(result.exact_distribution),
        *_first(result.first_token),
        *_texts("Greedy text", "Token ids at temperature 0, compared with plain decoding of each prompt alone.", result.greedy),
        *_sampled(result.sampled_distribution),
        *_texts(
            "Independence of the drafter",
            "Token ids of seeded sampled texts, compared with plain decoding with the same seeds.",
            result.invariance,
        ),
    ]
    blocks += to_keep_in_mind(result)
    return Document("Certificate of losslessness", origin(result, f"{result.elapsed_s:.0f} s"), blocks)


def _power(found: SampledDistribution) -> Iterator[Block]:
    """The size of fault that would have been found, and where."""
    if not found.tests:
        return
    points = counted(len(found.places), "test point")
    parts = [f"{number(found.finds('continuations'), 3)} in the first {counted(found.num_tokens, 'token')} at {points}"]
    if (long := found.long_range) is not None:
        parts.append(f"{number(found.finds('long texts'), 3)} at positions {long[0]} to {long[1]} of long texts")
        missing = f"Nothing is known about positions from {long[1] + 1} on."
    else:
        missing = "No text was long enough to test late positions."
    if (drafts := found.finds(*DRAFTS)) is not None:
        parts.append(f"{number(drafts, 3)} between what the drafter draws and what it reports")
    yield Paragraph(
        f"It would have found, in {found.power:.0%} of cases, a total variation of {', of '.join(parts)}. {missing}"
    )


def _overview(sections: Mapping[str, Section]) -> Table:
    rows = [[title, section.status, section.why] for title, section in sections.items()]
    return Table([Column("Check", "left"), Column("Result", "left"), Column("Found", "left")], rows)


def _decoded(result: CertifyResult) -> str:
    settings = ", ".join(f"{name} {word(result.settings[name])}" for name in SETTINGS if result.settings.get(name) is not None)
    options = {**result.settings.get("drafter_options", {}), **result.settings.get("verifier_options", {})}
    with_options = "".join(f", {name}={word(value)}" for name, value in options.items() if value is not None)
    return (
        f"Settings: {settings}{with_options}. Prompts: {result.num_prompts} of {result.workload}, up to {result.max_new_tokens} "
        f"new tokens; seed {result.seed}."
    )


def _head(title: str, about: str) -> list[Block]:
    return [Heading(title), Paragraph(about)]


def _exact(found: ExactDistribution) -> Iterator[Block]:
    yield from _head(
        "Exact distribution of the verifier",
        "The verifier's own code over every outcome of small pairs of random tables (3 or 4 tokens, drafts of 2 or 3), in fp64, "
        f"no random number involved. A case passes below a total variation of {found.limit:.0e}.",
    )  # fmt: skip
    rows = [[kind, "raised" if worst is None else f"{worst:.1e}"] for kind, worst in found.by_kind.items()]
    yield Table([Column("Kind of draft", "left"), Column("Largest total variation")], rows)
    if found.failures:
        failures = [[one.name, one.problem or f"{one.total_variation:.3g}"] for one in found.failures]
        yield Table([Column("Case", "left"), Column("Total variation", "left")], failures, title="Cases that failed")


def _first(found: FirstTokenDistribution) -> Iterator[Block]:
    yield from _head(
        "Exact distribution of the first token",
        "The verifier on this pair's own distributions, whole vocabulary, precision of real runs: every draft of one token, "
        "every outcome of its coin, added up instead of drawn.",
    )  # fmt: skip
    if found.places:
        columns = [
            Column("Test point"), Column("Draft token", "left"),
            Column("Enumerated", help="probability of the draft tokens that were tried"),
            Column("Total variation", help="sum of the probability put on tokens beyond the target's; the limit is "
                   f"{found.limit:.0e}"),
        ]  # fmt: skip
        rows = [
            [str(one.place + 1), one.draft, f"{one.covered:.5f}", f"{one.total_variation:.1e}"] for one in found.places
        ]
        yield Table(columns, rows)


def _texts(title: str, about: str, found: SameTexts) -> Iterator[Block]:
    yield from _head(title, about)
    if found.runs:
        yield _runs(found.runs)
    if found.differences:
        yield _differences(found.differences)


def _runs(runs: Sequence[TextRun]) -> Table:
    columns = [Column("Decoded", "left"), Column("Identical texts"), Column("Tokens")]
    return Table(columns, [[run.name, f"{run.num_identical} of {run.num_prompts}", str(run.num_tokens)] for run in runs])


def _differences(differences: Sequence[TextDifference]) -> Table:
    facts: list[Fact[TextDifference]] = [
        Fact("Decoded", lambda one: one.run, align="left"),
        Fact("Prompt", lambda one: str(one.prompt + 1)),
        Fact("Token", lambda one: str(one.position + 1)),
        Fact("Plain says", lambda one: repr(one.expected_text), align="left"),
        Fact("It says", lambda one: repr(one.found_text), align="left"),
        Fact(
            "Gap", lambda one: number(one.gap_in_spacings, 1),
            f"the target's score of the plain token minus that of the other one, {SPACINGS}",
        ),
        Fact(
            "Moved", lambda one: number(one.moved_in_spacings, 1),
            f"how far those scores are from plain decoding's, {SPACINGS}",
        ),
        Fact(
            "Noise", lambda one: number(one.noise_in_spacings, 1),
            f"how far they move between teacher-forced passes of several shapes, {SPACINGS}",
        ),
        Fact("Cause", lambda one: CAUSES[one.cause], align="left"),
    ]  # fmt: skip
    return table(differences, facts, "First differing token of each text")


def _sampled(found: SampledDistribution) -> Iterator[Block]:
    yield from _head(
        "Sampled distribution",
        "Seeded continuations and long texts, counted, against the target's own conditionals from teacher-forced passes, and "
        f"drafted tokens against what the drafter reports: G-tests, at temperature {found.temperature:g}.",
    )  # fmt: skip
    if not found.tests:
        return
    facts: list[Fact[DistributionTest]] = [
        Fact("Tested", lambda one: one.part, align="left"),
        Fact("Sampler", lambda one: one.sampler, align="left"),
        Fact(
            "Tokens", lambda one: str(one.first) if one.first == one.last else f"{one.first} to {one.last}",
            "of the continuation or draft, from 1; of a long text, from 0 with its prompt",
        ),
        Fact(
            "View", lambda one: one.view,
            "tokens: single ones; preference: draws in the order of the draft's q over the target's p; likeliest first, by id: "
            "drafted tokens in these orders of what the drafter reports", "left",
        ),
        Fact("Draws", lambda one: str(one.num_draws)),
        Fact(
            "Uncertain", lambda one: str(one.num_uncertain),
            "draws that leave a choice; all others are right or impossible",
        ),
        Fact("Cells", lambda one: str(one.num_cells)),
        Fact("G", lambda one: number(one.g, 1), "2 Σ O ln(O / E) over cells expected at least 5 times, over Williams' factor"),
        Fact("Freedom", lambda one: str(one.df), "cells minus groups; a group is one beginning of the text"),
        Fact("p", lambda one: f"{one.p_value:.2g}"),
        Fact(
            "Finds", lambda one: number(one.detectable_total_variation, 3),
            f"the smallest total variation, averaged over the draws, found with probability {found.power:g}",
        ),
        Fact(
            "Result", lambda one: "deviates" if one.rejected else "follows",
            f"Holm over all tests: a faithful sampler fails any once in {1 / found.false_alarms:.0f}", "left",
        ),
    ]  # fmt: skip
    marked = frozenset(index for index, one in enumerate(found.tests) if one.rejected)
    yield table(found.tests, facts, marked=marked)
    entropies = [index.entropy_nats for index in found.places]
    origins = ", ".join(f"{count} {origin}" for origin, count in sorted(found.origins.items()))
    yield Paragraph(
        f"Speculative tokens of the continuations: {origins}. Test points: {len(found.places)}, with distributions of "
        f"{min(entropies):.2f} to {max(entropies):.2f} nats of entropy. Long texts: {found.num_long_texts}."
    )  # fmt: skip
