"""Chooses positions at which distributions are tested: in the middle of the target's own answers,
at tokens of which it was unsure.

At a place where one token has all the probability every sampler looks right; where thousands share
it, few draws say little about each. So those are taken whose entropy is nearest to WANTED, among
those where the drafter proposes something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from outrider.lab.certify.certify_result import TestPoint
from outrider.lab.certify.gtest import normalised
from outrider.lab.certify.subject import Seen, Subject, clear, share_prefix
from outrider.lab.progress import Progress
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import fit_width
from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.types import Draft

WANTED = 1.5  # nats
TRIES = 10  # tokens at which the drafter is asked, per test point wanted
CHUNK = 32  # tokens, or rows, of a teacher-forced pass

Beginning = tuple[int, ...]  # tokens drawn so far


@dataclass(frozen=True)
class Spot:
    """A test point with its text."""

    prompt_number: int
    prompt: list[int]
    output: list[int]  # tokens of the answer before the test point
    entropy: float

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def as_record(self) -> TestPoint:
        return TestPoint(
            prompt=self.prompt_number, num_output_tokens=len(self.output), entropy_nats=self.entropy
        )


def find_spots(
    subject: Subject,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    params: SamplingParams,
    count: int,
    progress: Progress,
) -> list[Spot]:
    """At most `count`, the answers sharing them as evenly as they can."""
    progress.stage("positions to test", count)
    candidates = [
        Spot(number, prompt, answer[:position], entropy)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        for position, entropy in enumerate(
            map(_entropy, probs_along(subject, subject.target, prompt, answer, params))
        )
    ]
    candidates.sort(key=lambda spot: abs(spot.entropy - WANTED))
    max_of_answer = -(-count // len(prompts)) + 1  # of one answer
    chosen: list[Spot] = []
    for spot in candidates[: TRIES * count]:
        num_of_answer = sum(one.prompt_number == spot.prompt_number for one in chosen)
        if (
            len(chosen) < count
            and num_of_answer < max_of_answer
            and first_draft(subject, spot, params) is not None
        ):
            chosen.append(spot)
            progress.advance()
    return chosen or candidates[:count]


def _entropy(probs: np.ndarray) -> float:
    """In nats."""
    return float(stats.entropy(probs))


@torch.inference_mode()
def first_draft(subject: Subject, spot: Spot, params: SamplingParams) -> Seen | None:
    """What a first step at the test point sees; None where the drafter proposes nothing."""
    decoder = subject.drafting
    decoder.add(
        subject.row(0, spot.tokens, len(spot.prompt), params, seed=0, room=subject.max_drafted + 1)
    )
    try:
        with decoder.watched():
            decoder.step()
    finally:
        clear(decoder)
    return decoder.seen if decoder.seen.draft.lists[1][0] else None


@torch.inference_mode()
def probs_along(
    subject: Subject, lm: LM, prompt: list[int], answer: list[int], params: SamplingParams
) -> Iterator[np.ndarray]:
    """The distribution before every token of an answer, (V,) fp64 each. Teacher-forced; `lm` as in
    `conditionals`."""
    if not answer:
        return
    vocab_size = subject.target.shape.vocab_size
    lm.kv.add_row()
    try:
        lm.catch_up([prompt])
        for start in range(0, len(answer), CHUNK):
            piece = answer[start : start + CHUNK]
            fed = torch.tensor(
                [[*prompt[-1:], *answer][start : start + len(piece)]], device=lm.device
            )
            logits = fit_width(
                lm.forward(fed, columns=torch.arange(len(piece), device=lm.device)).logits,
                vocab_size,
            )
            lm.kv.advance(0, len(piece))
            yield from normalised(
                _probs(subject, logits, [piece[:-1]], prompt, answer[:start], params)[0].numpy()
            )
    finally:
        lm.kv.swap_remove(0)


@torch.inference_mode()
def conditionals(
    subject: Subject, lm: LM, spot: Spot, texts: Sequence[Beginning], params: SamplingParams
) -> Iterator[tuple[Beginning, np.ndarray]]:
    """The distribution (V,) fp64 after every beginning of every text, the empty one and the text
    itself included, once each.

    Teacher-forced: the beginnings are fed as they are, no drafter and no verifier takes part. `lm`:
    the target, or a draft, whose logits are brought to the target's width as its drafter does.
    """
    known: set[Beginning] = set()
    for start in range(0, len(texts), CHUNK):
        rows = texts[start : start + CHUNK]
        probs = _teacher_forced(subject, lm, spot, rows, params)
        for text, own in zip(rows, probs, strict=True):
            for length in range(len(text) + 1):
                if text[:length] not in known:
                    known.add(text[:length])
                    yield text[:length], normalised([own[length].cpu().numpy()])[0]


def _teacher_forced(
    subject: Subject, lm: LM, spot: Spot, texts: Sequence[Beginning], params: SamplingParams
) -> Tensor:
    """(B, longest + 1, V)"""
    longest = max(map(len, texts))
    fed = torch.tensor(
        [[spot.tokens[-1], *text] + [0] * (longest - len(text)) for text in texts], device=lm.device
    )
    for _ in texts:
        lm.kv.add_row()
    try:
        share_prefix(lm, spot.tokens, len(texts))
        logits = fit_width(lm.forward(fed).logits, subject.target.shape.vocab_size)
        return _probs(subject, logits, texts, spot.prompt, spot.output, params)
    finally:
        for row in reversed(range(len(texts))):
            lm.kv.swap_remove(row)


def _probs(
    subject: Subject,
    logits: Tensor,
    texts: Sequence[Sequence[int]],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
) -> Tensor:
    """(B, M, V): `texts` follow prompt + output, one row each; penalties, bans and grammar as for
    committed text."""
    num_rows, width, size = logits.shape
    tokens = torch.tensor(
        [[*text] + [0] * (width - 1 - len(text)) for text in texts], dtype=torch.int64
    )
    draft = Draft(tokens.view(num_rows, width - 1), torch.tensor([len(text) for text in texts]))
    history = (
        History.start([prompt] * num_rows, [output] * num_rows, size)
        if params.needs_history
        else None
    )
    constraint = subject.constraint(output, params)
    sampling = BatchSampling.of([params] * num_rows, size, constraints=[constraint] * num_rows)
    return distribution(logits.cpu(), sampling, history, draft)
