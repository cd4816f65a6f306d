"""The result of `certify URL`: whether a server's text with drafts is that of the same server
without.

Statuses are those of `certify_result`. Texts are compared by their characters: HTTP shows no token
ids.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.lab.certify.certify_result import (
    FALSE_ALARMS,
    POWER,
    GStatistic,
    Section,
    Status,
    TextRun,
)
from outrider.lab.result import Record, Result

ServerVerdict = Literal["lossless", "not lossless", "not deterministic", "inconclusive"]
# error: the plain server clearly prefers its own token; length: one text is the beginning of the
# other, and both ended at max_tokens
ServerCause = Literal["rounding", "error", "length", "unknown"]
DrawnWith = Literal["all", "with seeds", "without seeds"]
SampledView = Literal["beginning", "end"]  # of the text, by characters


class ServerTextDifference(Record):
    """The first character where two texts that should be equal are not."""

    prompt: int
    run: str  # which of the section's runs
    position: int  # character, from 0
    expected_text: str  # from there, a few characters; empty: the text had ended
    found_text: str
    # of the plain server's own token there over the other one, in nats; None: not known
    gap: float | None
    is_least: bool  # the other token was not among those listed: the gap is at least this
    cause: ServerCause


class ServerTexts(Section):
    """Texts that should be equal to those of the server without drafts, each asked for alone."""

    runs: list[TextRun] = Field(default_factory=list)
    differences: list[ServerTextDifference] = Field(default_factory=list)


class TwoSampleTest(GStatistic):
    """One G-test of homogeneity: do sampled texts of both servers begin, or end, alike
    (beginnings.py)?

    `num_draws` and `num_uncertain` are of each server.
    """

    drawn: DrawnWith
    view: SampledView
    rejected: bool = False  # by Holm's procedure over all tests of the section
    # between the two servers, averaged over the uncertain draws, found with `power`
    detectable_total_variation: float | None = None


class ShortTexts(Section):
    """Short sampled texts of one server against those of the other."""

    temperature: float
    num_tokens: int  # of each text, at most
    num_prompts: int = 0
    false_alarms: float = FALSE_ALARMS
    power: float = POWER
    tests: list[TwoSampleTest] = Field(default_factory=list)

    @property
    def finds(self) -> float | None:
        """The smallest total variation that both tests of all draws find; None: there was no
        choice."""
        known = [test.detectable_total_variation for test in self.tests if test.drawn == "all"]
        found = [one for one in known if one is not None]
        return max(found) if found and len(found) == len(known) else None


class AskedServer(Record):
    """One of the two servers, and what it counted while it was asked."""

    url: str
    model: str
    engine: str  # as it names itself; empty: it does not
    fields: dict[str, Any]  # that were added to every request, to switch drafts off
    num_requests: int = 0
    failures: list[str] = Field(default_factory=list)
    # target passes with a draft, or drafted tokens, by section; None: it does not say
    drafted: dict[str, int | None] = Field(default_factory=dict)


class ServerCertifyResult(Result):
    kind: Literal["certify-server"] = "certify-server"
    verdict: ServerVerdict
    reasons: list[str]  # why this verdict, one line each
    plain: AskedServer
    speculative: AskedServer
    sampling: dict[str, Any]  # options of the sampled section
    workload: str
    num_prompts: int
    max_new_tokens: int
    concurrency: int  # requests in flight where several are asked at once
    seed: int
    determinism: ServerTexts  # of the server without drafts
    greedy: ServerTexts
    sampled: ShortTexts
    elapsed_s: float = Field(ge=0)

    @property
    def sections(self) -> dict[str, Section]:
        """By title, in the order of the report."""
        return {
            "Determinism": self.determinism,
            "Greedy text": self.greedy,
            "Sampled text": self.sampled,
        }


def server_verdict(result: ServerCertifyResult) -> tuple[ServerVerdict, list[str]]:
    """The verdict that the sections decide, and its reasons."""

    def reasons(status: Status) -> list[str]:
        return [
            f"{title}: {section.why}"
            for title, section in result.sections.items()
            if section.status == status
        ]

    if "failed" in (result.greedy.status, result.sampled.status):
        return "not lossless", reasons("failed")
    if result.determinism.status == "failed":
        return "not deterministic", reasons("failed")
    if unsure := reasons("inconclusive"):
        return "inconclusive", unsure
    return "lossless", reasons("passed")
