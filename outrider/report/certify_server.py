"""The report of `certify URL`: the verdict, the claims with how they were checked, what is not
claimed, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.errors import counted
from outrider.lab.certify.server_result import (
    AskedServer,
    ServerCause,
    ServerCertifyResult,
    ServerTextDifference,
    ServerVerdict,
    TwoSampleTest,
)
from outrider.report.certify import CLAIMS, RUNS, Claim, power_of
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
)
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import number

TONES: dict[ServerVerdict, Tone] = {
    "lossless": "good",
    "not lossless": "bad",
    "not deterministic": "caution",
    "inconclusive": "caution",
}
REPEATS = "the server without drafts repeats its greedy text"
GREEDY = "greedy text with drafts is that without, character by character"
SAMPLED = "short sampled texts with drafts are as those without"
CAUSES: dict[ServerCause, str] = {
    "rounding": "rounding (a near-tie)",
    "error": "error (no near-tie)",
    "length": "error (another length)",
    "unknown": "cannot tell",
}


def document(result: ServerCertifyResult) -> Document:
    """The whole report; everything in it is in the result."""
    claims = list(_claims(result))
    checked = [claim for claim in claims if claim.result != "not claimed"]
    blocks: list[Block] = [
        Paragraph(_headline(result), TONES[result.verdict]),
        *([] if result.verdict == "lossless" else [Bullets(result.reasons)]),  # the table has them
        table(checked, CLAIMS, "Claims", lambda claim: claim.result == "failed"),
        Heading("Not claimed", 3),
        Bullets(list(_not_claimed(result, claims))),
        Heading("Evidence"),
        Paragraph(_asked(result)),
        table([result.plain, result.speculative], SERVERS, "Servers"),
        *_texts(result),
        *_sampled(result),
        *_failures(result),
        *to_keep_in_mind(result),
    ]
    return Document("Certificate of a server", origin(result, f"{result.elapsed_s:.0f} s"), blocks)


def _headline(result: ServerCertifyResult) -> str:
    """The verdict in words."""
    if result.verdict == "not lossless":
        return "Not lossless: the server's text with drafts is not that without."
    if result.verdict == "not deterministic":
        return "Not deterministic: no claim. The server without drafts does not repeat itself."
    if result.verdict == "inconclusive":
        return "Inconclusive: no fault was found, but a check could not tell."
    text = f"Lossless, as far as HTTP shows: {GREEDY}, and {SAMPLED}."
    return f"{text}{power_of(result.sampled.finds, result.sampled.power)}"


def _claims(result: ServerCertifyResult) -> Iterator[Claim]:
    exact = "exact: one other character fails, on these prompts"
    yield Claim(REPEATS, result.determinism.status, result.determinism.why, exact)
    yield Claim(GREEDY, result.greedy.status, result.greedy.why, exact)
    sampled = result.sampled
    power = NOTHING
    if sampled.finds is not None:
        power = (
            f"finds a total variation of {number(sampled.finds, 3)} in {sampled.power:.0%} of cases"
        )
    yield Claim(SAMPLED, sampled.status, sampled.why, power)


def _not_claimed(result: ServerCertifyResult, claims: list[Claim]) -> Iterator[str]:
    for claim in claims:
        if claim.result == "not claimed":
            yield f"{claim.claim}: {claim.how}"
    sampled = result.sampled
    yield (
        f"anything about other prompts, later than {result.max_new_tokens} tokens of greedy text "
        f"and {sampled.num_tokens} of sampled text, other loads and versions"
    )
    yield "token ids: two ways to cut the same text into tokens look alike"
    if result.plain.url != result.speculative.url:
        yield "that both servers run the same model, on the same machine, with the same options"
    for who, server in (("without", result.plain), ("with", result.speculative)):
        if any(count is None for count in server.drafted.values()):
            yield f"whether the server {who} drafts drafted: it does not say"
    yield "speed, and what the distribution is: only that both are alike"


def _asked(result: ServerCertifyResult) -> str:
    return (
        f"Prompts: {result.num_prompts} of {result.workload}, up to {result.max_new_tokens} "
        f"tokens; {result.concurrency} requests at once; seed {result.seed}."
    )


def _drafted(server: AskedServer) -> str:
    counts = [
        f"{section} {NOTHING if count is None else count}"
        for section, count in server.drafted.items()
    ]
    return ", ".join(counts) or NOTHING


SERVERS: Cells[AskedServer] = {
    "URL": lambda server: server.url,
    "model": lambda server: server.model,
    "engine": lambda server: server.engine or NOTHING,
    "added to requests": lambda server: str(server.fields) if server.fields else NOTHING,
    "requests": lambda server: str(server.num_requests),
    "drafted, by its own count": _drafted,
}
DIFFERENCES: Cells[ServerTextDifference] = {
    "asked": lambda difference: difference.run,
    "cause": lambda difference: CAUSES[difference.cause],
    "prompt": lambda difference: str(difference.prompt + 1),
    "character": lambda difference: str(difference.position + 1),
    "without drafts": lambda difference: repr(difference.expected_text),
    "with drafts": lambda difference: repr(difference.found_text),
    "gap (nats)": lambda difference: (
        ("≥ " if difference.is_least else "") + number(difference.gap, 3)
    ),
}
TESTS: Cells[TwoSampleTest] = {
    "drawn": lambda test: test.drawn,
    "by their": lambda test: test.view,
    "result": lambda test: "deviates" if test.rejected else "alike",
    "p": lambda test: f"{test.p_value:.2g}",
    "draws": lambda test: str(test.num_draws),
    "cells": lambda test: str(test.num_cells),
    "G (df)": lambda test: f"{test.g:.1f} ({test.df})",
    "finds": lambda test: number(test.detectable_total_variation, 3),
}


def _texts(result: ServerCertifyResult) -> Iterator[Block]:
    runs = [*result.determinism.runs, *result.greedy.runs]
    yield table(runs, RUNS, "Greedy texts, against those without drafts, each asked for alone")
    if result.greedy.differences:
        yield table(result.greedy.differences, DIFFERENCES, "First differing character of each")


def _sampled(result: ServerCertifyResult) -> Iterator[Block]:
    sampled = result.sampled
    title = "G-tests of sampled texts, one server against the other"
    yield table(sampled.tests, TESTS, title, lambda test: test.rejected)
    yield Paragraph(
        f"Up to {sampled.num_tokens} tokens after each of {counted(sampled.num_prompts, 'prompt')}, "
        f"temperature {sampled.temperature:g}; draws are of each server. By Holm's procedure two "
        f"equal servers fail any of the tests once in {1 / sampled.false_alarms:.0f} certificates."
    )


def _failures(result: ServerCertifyResult) -> Iterator[Block]:
    failures = [
        f"{who}: {failure}"
        for who, server in (("plain", result.plain), ("speculative", result.speculative))
        for failure in server.failures
    ]
    if failures:
        yield Heading("Failures")
        yield Bullets(failures)
