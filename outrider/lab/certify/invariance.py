"""Same seed, same text, whatever drafts: claimed by verifiers that choose with the target's own keyed noise, tested for them.

Plain decoding with the same noise is what every drafter and every draft length must repeat, to the last token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.build import Models, assemble
from outrider.draft_length.length import MAX_DRAFT_TOKENS
from outrider.errors import OutriderError
from outrider.lab.certify.certify_result import SameTexts
from outrider.lab.certify.subject import Subject, WatchedDecoder
from outrider.lab.certify.texts import TOGETHER, Texts, Way
from outrider.lab.configuration import Configuration
from outrider.lab.journal import Units
from outrider.sampling.params import SamplingParams


def not_claimed(why: str) -> SameTexts:
    """For verifiers whose sampled texts depend on the drafts."""
    return SameTexts(status="not claimed", why=why, runs=[], differences=[])


def invariance(
    subject: Subject, prompts: Sequence[list[int]], params: SamplingParams, seed: int, units: Units
) -> SameTexts:
    """Sampled texts of the configured drafter, of other lengths of it, and of n-gram lookup, with the seeds of plain ones."""
    if not subject.speculative.verifier.coupled:
        name = subject.speculative.verifier.name
        return not_claimed(f"'{name}' keeps the distribution, not the text: seeded texts may depend on the drafter")
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
