"""Token ids of whole texts, compared: each prompt's plain text alone is what every other way to decode it must repeat.

Greedy text is decoded alone, in batches, and beside sampled rows. The last of these is not a repetition: a batch without sampled
rows compares token ids and skips the verifier, while beside a sampled row greedy rows are point masses that the configured
verifier itself decides on.

Same seed, same text, whatever drafts, is claimed by verifiers that choose with the target's own keyed noise, and tested for them:
plain decoding with the same noise is what every drafter and every draft length must repeat, to the last token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.build import Models, assemble
from outrider.counted import counted
from outrider.draft_length.length import MAX_DRAFT_TOKENS
from outrider.errors import OutriderError
from outrider.lab.certify.certify_result import SameTexts, Status, TextDifference, TextRun
from outrider.lab.certify.subject import Subject, WatchedDecoder
from outrider.lab.certify.ties import RowComparison, difference
from outrider.lab.configuration import Configuration
from outrider.lab.journal import Units
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
    beside_sampled: bool = False  # a sampled row joins every batch, so greedy rows go through the verifier


@dataclass
class Texts:
    """Prompts with their options, their plain texts, and the runs that were compared with them."""

    subject: Subject
    prompts: list[list[int]]
    params: list[SamplingParams]  # of each prompt, seed included
    units: Units
    kind: str  # of the section, for the journal

    def section(self, title: str, plain: WatchedDecoder, ways: Sequence[Way]) -> tuple[SameTexts, list[list[int]]]:
        """All ways, and the plain texts that they were compared with."""
        num_batches = sum(len(batches(len(self.prompts), way.together)) for way in ways)
        self.units.progress.stage(title, len(self.prompts) + num_batches)
        expected = self.reference(plain)
        found = [self.compare(way, expected) for way in ways]
        runs, differences = [run for run, _ in found], [one for _, several in found for one in several]
        status, why = judge(runs, differences)
        return SameTexts(status=status, why=why, runs=runs, differences=differences), expected

    def reference(self, decoder: WatchedDecoder) -> list[list[int]]:
        """Every prompt alone."""

        def text(number: int) -> list[int]:
            return self.subject.texts(decoder, [self.prompts[number]], [self.params[number]])[0]

        return [self.units.get(f"{self.kind}/plain/{number}", text, number) for number in range(len(self.prompts))]

    def compare(self, way: Way, expected: list[list[int]]) -> tuple[TextRun, list[TextDifference]]:
        """Decode in batches and compare."""
        differences: list[TextDifference] = []
        identical = tokens = 0
        for numbers in batches(len(self.prompts), way.together):
            found = self.units.get(f"{self.kind}/{way.name}/{numbers[0]}", self._batch, way, numbers, expected)
            differences += [TextDifference.model_validate(one) for one in found["differences"]]
            identical += found["num_identical"]
            tokens += found["num_tokens"]
        return TextRun(name=way.name, num_identical=identical, num_prompts=len(self.prompts), num_tokens=tokens), differences

    def _batch(self, way: Way, numbers: Sequence[int], expected: list[list[int]]) -> dict[str, Any]:
        wanted = [expected[number] for number in numbers]
        prompts, params = [self.prompts[n] for n in numbers], [self.params[n] for n in numbers]
        if way.beside_sampled:
            prompts, params = [*prompts, prompts[0]], [*params, replace(params[0].drawn(), seed=numbers[0])]
        comparison = RowComparison(way.decoder, wanted)
        with way.decoder.watched(comparison):
            texts = self.subject.texts(way.decoder, prompts, params, together=len(prompts))[: len(numbers)]
        comparison.finish(texts)
        differences = [
            difference(self.subject, prompts[i], numbers[i], way.name, params[i], wanted[i], parting)
            for i, parting in list(comparison.partings.items())[:MAX_EXPLAINED]
        ]
        return {
            "num_identical": len(numbers) - len(comparison.partings),
            "num_tokens": sum(map(len, texts)),
            "differences": [one.model_dump() for one in differences],
        }


def batches(count: int, size: int) -> list[range]:
    """0 .. count - 1 in groups."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def judge(runs: Sequence[TextRun], differences: Sequence[TextDifference]) -> tuple[Status, str]:
    """Identical: passed. Different by rounding alone: nobody can say, since no verifier decided it. Else failed."""
    tokens, total = sum(run.num_tokens for run in runs), sum(run.num_prompts for run in runs)
    missing = total - sum(run.num_identical for run in runs)
    if not missing:
        ways = f"{counted(len(runs), 'way')} to decode {counted(runs[0].num_prompts, 'prompt')}"
        return "passed", f"{tokens} tokens in {ways}: every token id is plain decoding's"
    parted = f"{missing} of {total} texts differ from plain decoding's"
    bad = [one for one in differences if one.cause != "rounding"]
    if not bad:
        return "inconclusive", f"{parted}, each at {CAUSES['rounding']}: neither identical nor wrong"
    first = bad[0]
    where = f"{first.run}, prompt {first.prompt}, token {first.position}"
    return "failed", f"{parted}; {where}: {CAUSES[first.cause]}"


def greedy(
    subject: Subject, prompts: list[list[int]], params: SamplingParams, units: Units
) -> tuple[SameTexts, list[list[int]]]:
    """The section, and the plain texts. `params` as the user gave them; here at temperature 0."""
    chosen = replace(params, temperature=0.0)
    texts = Texts(subject, prompts, [chosen] * len(prompts), units, "greedy")
    together = min(TOGETHER, len(prompts))
    several = [
        Way("plain, several at once", subject.plain, together),
        Way("speculative, several at once", subject.speculative, together),
    ]
    ways = [
        Way("speculative, alone", subject.speculative),
        *(several if together > 1 else []),
        Way("speculative, beside a sampled row", subject.speculative, together, beside_sampled=True),
    ]
    return texts.section("greedy text", subject.plain, ways)


def invariance(
    subject: Subject, prompts: Sequence[list[int]], params: SamplingParams, seed: int, units: Units
) -> SameTexts:
    """Sampled texts of the configured drafter, of other lengths of it, and of n-gram lookup, with the seeds of plain ones."""
    if not subject.speculative.verifier.coupled:
        name = subject.speculative.verifier.name
        why = f"'{name}' keeps the distribution, not the text: seeded texts may depend on the drafter"
        return SameTexts(status="not claimed", why=why)
    seeds = [int(value) for value in np.random.SeedSequence([seed, 1]).generate_state(len(prompts))]
    texts = Texts(subject, list(prompts), [replace(params, seed=one) for one in seeds], units, "invariance")
    return texts.section("independence of the drafter", subject.plain, _ways(subject, min(TOGETHER, len(prompts))))[0]


def _ways(subject: Subject, together: int) -> list[Way]:
    """The configured decoder alone and in batches, and others on the same models."""
    own = _configuration(subject)
    ways = [Way(f"{own.label}, alone", subject.speculative)]
    if together > 1:
        ways.append(Way(f"{own.label}, several at once", subject.speculative, together))
    for other in _others(subject, own):
        try:
            built = assemble(_models(subject), other.parts())
        except OutriderError:
            continue  # these models cannot carry it (a tree of one node, say): one witness fewer
        ways.append(Way(other.label, WatchedDecoder.like(built.decoder), together))
    return ways


def _configuration(subject: Subject) -> Configuration:
    """The configuration that was asked for, with the drafter's name and length resolved."""
    asked, resolved = subject.asked, subject.built.options
    return Configuration(
        resolved.drafter, resolved.num_draft_tokens, asked.drafter_options, asked.verifier, asked.verifier_options
    )


def _others(subject: Subject, own: Configuration) -> list[Configuration]:
    longest = subject.max_drafted
    lengths = [length for length in (1, longest + 2) if length <= MAX_DRAFT_TOKENS]
    found = [replace(own, num_draft_tokens=length) for length in lengths]
    if own.drafter != "ngram":
        found.append(replace(own, drafter="ngram", drafter_options={}, num_draft_tokens=4))
    return found


def _models(subject: Subject) -> Models:
    built = subject.built
    return Models(built.target, built.draft, built.options, built.memory, built.context, [])
