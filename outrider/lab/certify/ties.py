"""Why two texts part that should be equal: a near-tie that rounding turned over, or something that
must not happen.

Three causes (docs/certify.md, "When texts differ") are distinguished by the scores the run itself
saw at the first differing token, and by the target's scores when it is fed the common text once
more, token by token as plain decoding does. Gaps are in spacings: the distance of neighbouring
numbers of the model's dtype at the size of those logits (1 ulp).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.lab.certify.certify_result import TextDifference
from outrider.lab.certify.subject import Subject, WatchedDecoder
from outrider.models.lm import LM
from outrider.models.tokens.token_bytes import token_name
from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import RowStreams, gumbel_choice
from outrider.step import StepFacts

# Spacings that two correct orders of summation may differ by. Half types round every layer's
# output; in fp32 sums over thousands of terms err by many spacings of their result.
ROUNDING = {torch.bfloat16: 16.0, torch.float16: 16.0, torch.float32: 512.0, torch.float64: 512.0}


@dataclass(frozen=True)
class Departure:
    """The position at which a run left the expected text, and what it saw there. None: one of the
    texts had ended."""

    position: int  # output token, from 0
    expected: int | None
    found: int | None
    logits: Tensor | None = None  # (V,) fp32, the run's own
    choice: int | None = None  # what they favour


@dataclass
class RowComparison:
    """An observer that compares rows with expected texts while they grow. `partings[request]` is
    the first difference."""

    decoder: WatchedDecoder
    expected: list[list[int]]  # by request
    partings: dict[int, Departure] = field(default_factory=dict)
    _compared: Counter[int] = field(default_factory=Counter)  # tokens of each request

    def observe(self, facts: StepFacts) -> None:
        seen = self.decoder.seen
        for index, row in enumerate(facts.rows):
            if row.request >= len(self.expected) or row.request in self.partings:
                continue
            begin = self._compared[row.request]
            self._compared[row.request] = len(row.output)
            wanted = self.expected[row.request][begin : len(row.output)]
            news = row.output[begin:]
            position = next(
                (i for i, (a, b) in enumerate(zip(wanted, news, strict=False)) if a != b), None
            )
            if position is not None:
                column = [0, *(node + 1 for node in seen.verdict.lists.path[index])][position]
                logits = seen.logits[index, column].float().cpu()
                choice = chosen(
                    seen.probs[index, column],
                    row.params,
                    row.seed,
                    row.num_prompt + begin + position,
                )
                self.partings[row.request] = Departure(
                    begin + position, wanted[position], news[position], logits, choice
                )

    def finish(self, texts: list[list[int]]) -> None:
        """Texts of which one is the beginning of the other."""
        for number, (wanted, text) in enumerate(zip(self.expected, texts, strict=True)):
            if number not in self.partings and wanted != text:
                at = min(len(wanted), len(text))
                self.partings[number] = Departure(at, _at(wanted, at), _at(text, at))


def _at(text: list[int], position: int) -> int | None:
    return text[position] if position < len(text) else None


def chosen(probs: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token that a distribution (V,) leads to: its largest when greedy, else the winner of the
    noise at that text position."""
    if params.is_greedy:
        return int(probs.argmax())
    return int(gumbel_choice(probs.cpu(), RowStreams(seed).gumbel(position, probs.shape[0])))


def difference(
    subject: Subject,
    prompt: list[int],
    number: int,
    run: str,
    params: SamplingParams,
    text: list[int],
    parting: Departure,
) -> TextDifference:
    """Everything about one difference from the expected `text`."""
    parting_text = TextDifference(
        prompt=number,
        run=run,
        position=parting.position,
        expected=parting.expected,
        found=parting.found,
        expected_text=_text(subject, parting.expected),
        found_text=_text(subject, parting.found),
        gap=None,
        gap_in_spacings=None,
        moved_in_spacings=None,
        cause="state",
    )
    if parting.expected is None or parting.found is None or parting.logits is None:
        return parting_text
    common = text[: parting.position]
    pair = [parting.expected, parting.found]
    reference = teacher_forced(subject.target, [*prompt, *common], len(prompt))
    unit = spacing(float(reference[pair].abs().max()), subject.target.dtype)
    moved = float((parting.logits[pair] - reference[pair]).abs().max()) / unit
    parting_text.moved_in_spacings = moved
    parting_text.gap = _gap(reference, prompt, common, params, *pair)
    parting_text.gap_in_spacings = None if parting_text.gap is None else parting_text.gap / unit
    limit = ROUNDING.get(subject.target.dtype, 16.0)
    if parting.choice != parting.found:
        parting_text.cause = "verifier"
    elif (
        parting_text.gap is not None
        and moved <= limit
        and abs(parting_text.gap) <= 2 * limit * unit
    ):
        parting_text.cause = "rounding"
    return parting_text


@torch.inference_mode()
def teacher_forced(lm: LM, tokens: list[int], num_prompt: int) -> Tensor:
    """Logits (V,) fp32 after `tokens`: the prompt, then token by token, as plain decoding feeds
    them."""
    row = lm.kv.add_row()
    lm.catch_up([tokens[:num_prompt]])
    for token in tokens[num_prompt - 1 :]:
        logits = lm.forward(torch.tensor([[token]], device=lm.device)).logits
        lm.kv.advance(row, 1)
    lm.kv.swap_remove(row)
    return logits[0, -1].float().cpu()


def spacing(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at the size of `value`: 1 ulp."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(abs(value), info.tiny)))
    return info.eps * 2.0**exponent


def _gap(
    logits: Tensor,
    prompt: list[int],
    common: list[int],
    params: SamplingParams,
    expected: int,
    token: int,
) -> float | None:
    """The score of `expected` minus that of `token`: penalties, bias and noise included, filters
    not."""
    size = logits.shape[0]
    soft = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    history = History.start([prompt], [common], size)
    sampling = BatchSampling.of([soft], size)
    probs = distribution(logits[None, None], sampling, history, dtype=torch.float64)[0, 0].log()
    gap = float(probs[expected] - probs[token])
    if not params.is_greedy:
        noise = RowStreams(params.seed or 0).gumbel(len(prompt) + len(common), size)
        gap += params.temperature * float(noise[expected] - noise[token])
    return gap if math.isfinite(gap) else None


def _text(subject: Subject, token: int | None) -> str:
    tokenizer = subject.built.target.tokenizer
    if token is None:
        return "(end)"
    return str(token) if tokenizer is None else token_name(tokenizer, token)
