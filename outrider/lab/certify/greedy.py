"""Greedy text must be plain decoding's to the last token id: alone, in batches, and beside sampled rows.

The last of these is not a repetition: a batch without sampled rows compares token ids and skips the verifier, while beside a
sampled row greedy rows are point masses that the configured verifier itself decides on.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.lab.certify.certify_result import SameTexts
from outrider.lab.certify.subject import Subject
from outrider.lab.certify.texts import Texts, Way
from outrider.lab.certify.units import Units
from outrider.sampling.params import SamplingParams

TOGETHER = 8  # prompts of a batch


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
