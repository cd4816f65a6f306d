"""Token ids of whole texts, compared: each prompt's plain text alone is what every other way must
repeat.

Greedy text is decoded alone, in batches, and with a sampled row. Only in the last case the
configured verifier decides on greedy rows, as point masses: a batch without sampled rows compares
token ids.

Same seed, same text, whatever drafts, is claimed by verifiers that choose with the target's own
keyed noise, and tested for them: with every drafter and every draft length, to the last token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.build import Models, assemble
from outrider.configuration import Configuration
from outrider.draft_length.length import MAX_DRAFT_TOKENS
from outrider.errors import OutriderError, counted
from outrider.lab.certify.certify_result import SameTexts, Status, TextDifference, TextRun
from outrider.lab.certify.subject import Subject, WatchedDecoder
from outrider.lab.certify.ties import RowComparison, difference
from outrider.lab.journal import Journal
from outrider.sampling.params import SamplingParams

MAX_EXPLAINED = 10  # differences per batch; each costs a few passes over the text
CAUSES = {
    "rounding": "a near-tie within the rounding of the model's dtype",
    "verifier": "the token kept is not the one that the run's own scores favour",
    "state": "the scores moved by more than rounding explains",
}
TOGETHER = 8  # prompts of a batch


@dataclass(frozen=True)
class Way:
    """One way to decode all prompts."""

    name: str
    decoder: WatchedDecoder
    together: int = 1  # prompts at a time
    # a sampled row joins every batch, so greedy rows go through the verifier
    with_sampled: bool = False


@dataclass
class Texts:
    """Prompts with their options, to be decoded in several ways."""

    subject: Subject
    prompts: list[list[int]]
    params: list[SamplingParams]  # of each prompt, seed included
    journal: Journal
    kind: str  # of the section, for the journal

    def section(self, title: str, ways: Sequence[Way]) -> SameTexts:
        """All ways, compared with the plain texts."""
        count = len(self.prompts)
        num_batches = sum(len(batches(count, way.together)) for way in ways)
        self.journal.progress.stage(title, count + num_batches)
        expected = [
            self.journal.unit(f"{self.kind}/plain/{number}", self._plain, number)
            for number in range(count)
        ]
        section = SameTexts(status="passed", why="")
        for way in ways:
            run = TextRun(name=way.name, num_identical=0, num_prompts=count, num_tokens=0)
            for numbers in batches(count, way.together):
                key = f"{self.kind}/{way.name}/{numbers[0]}"
                batch = self.journal.unit(key, self._batch, way, numbers, expected)
                section.differences += map(TextDifference.model_validate, batch["differences"])
                run.num_identical += batch["num_identical"]
                run.num_tokens += batch["num_tokens"]
            section.runs.append(run)
        section.status, section.why = judge(section.runs, section.differences)
        return section

    def _plain(self, number: int) -> list[int]:
        """One prompt alone."""
        prompts = [self.prompts[number]]
        return self.subject.texts(self.subject.plain, prompts, [self.params[number]])[0]

    def _batch(self, way: Way, numbers: Sequence[int], expected: list[list[int]]) -> dict[str, Any]:
        wanted = [expected[number] for number in numbers]
        prompts = [self.prompts[number] for number in numbers]
        params = [self.params[number] for number in numbers]
        if way.with_sampled:
            prompts.append(prompts[0])
            params.append(replace(params[0].drawn(), seed=numbers[0]))
        comparison = RowComparison(way.decoder, wanted)
        with way.decoder.watched(comparison):
            texts = self.subject.texts(way.decoder, prompts, params, together=len(prompts))
        texts = texts[: len(numbers)]
        comparison.finish(texts)
        differences = [
            difference(
                self.subject, prompts[i], numbers[i], way.name, params[i], wanted[i], parting
            ).model_dump()
            for i, parting in list(comparison.partings.items())[:MAX_EXPLAINED]
        ]
        return {
            "num_identical": len(numbers) - len(comparison.partings),
            "num_tokens": sum(map(len, texts)),
            "differences": differences,
        }


def batches(count: int, size: int) -> list[range]:
    """0 .. count - 1 in groups."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def judge(runs: Sequence[TextRun], differences: Sequence[TextDifference]) -> tuple[Status, str]:
    """Identical: passed. Different by rounding alone: no verifier decided it, so inconclusive. Else
    failed."""
    tokens = sum(run.num_tokens for run in runs)
    total = sum(run.num_prompts for run in runs)
    missing = total - sum(run.num_identical for run in runs)
    if not missing:
        ways = f"{counted(len(runs), 'way')} to decode {counted(runs[0].num_prompts, 'prompt')}"
        return "passed", f"{tokens} tokens in {ways}: every token id is plain decoding's"
    parted = f"{missing} of {total} texts differ from plain decoding's"
    bad = next((difference for difference in differences if difference.cause != "rounding"), None)
    if bad is None:
        return (
            "inconclusive",
            f"{parted}, each at {CAUSES['rounding']}: neither identical nor wrong",
        )
    where = f"{bad.run}, prompt {bad.prompt}, token {bad.position}"
    return "failed", f"{parted}; {where}: {CAUSES[bad.cause]}"


def greedy(
    subject: Subject, prompts: list[list[int]], params: SamplingParams, journal: Journal
) -> SameTexts:
    """The section. `params` as the user gave them; here at temperature 0."""
    chosen = [replace(params, temperature=0.0)] * len(prompts)
    together = min(TOGETHER, len(prompts))
    ways = [Way("speculative, alone", subject.speculative)]
    if together > 1:
        ways.append(Way("plain, several at once", subject.plain, together))
        ways.append(Way("speculative, several at once", subject.speculative, together))
    name = "speculative, alongside a sampled row"
    ways.append(Way(name, subject.speculative, together, with_sampled=True))
    return Texts(subject, prompts, chosen, journal, "greedy").section("greedy text", ways)


def invariance(
    subject: Subject, prompts: list[list[int]], params: SamplingParams, seed: int, journal: Journal
) -> SameTexts:
    """Sampled texts of this drafter, of other lengths of it, and of n-gram lookup, with the plain
    ones' seeds."""
    verifier = subject.speculative.verifier
    if not verifier.coupled:
        why = f"'{verifier.name}' keeps the distribution, not the text: seeded texts may depend on the drafter"
        return SameTexts(status="not claimed", why=why)
    seeds = np.random.SeedSequence([seed, 1]).generate_state(len(prompts)).tolist()
    seeded = [replace(params, seed=seed) for seed in seeds]
    texts = Texts(subject, prompts, seeded, journal, "invariance")
    ways = _ways(subject, min(TOGETHER, len(prompts)))
    return texts.section("independence of the drafter", ways)


def _ways(subject: Subject, together: int) -> list[Way]:
    """The configured decoder alone and in batches, and others on the same models."""
    asked = subject.asked
    built = subject.built
    resolved = built.options
    this = Configuration(
        resolved.drafter,
        resolved.num_draft_tokens,
        asked.drafter_options,
        asked.verifier,
        asked.verifier_options,
    )
    ways = [Way(f"{this.label}, alone", subject.speculative)]
    if together > 1:
        ways.append(Way(f"{this.label}, several at once", subject.speculative, together))
    lengths = [length for length in (1, subject.max_drafted + 2) if length <= MAX_DRAFT_TOKENS]
    others = [replace(this, num_draft_tokens=length) for length in lengths]
    if this.drafter != "ngram":
        others.append(replace(this, drafter="ngram", drafter_options={}, num_draft_tokens=4))
    models = Models(built.target, built.draft, resolved, built.memory, built.context, [])
    for other in others:
        try:
            decoder = assemble(models, other.parts()).decoder
        except OutriderError:
            continue  # these models cannot carry it (a tree of one node, say): one witness fewer
        ways.append(Way(other.label, WatchedDecoder.like(decoder), together))
    return ways
