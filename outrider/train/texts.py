"""Texts to train on, and their order: prompts with the responses that the target gave to them.

Which text is in which batch depends on (seed, epoch) alone, so a run that is cut and resumed meets
the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError

# batches among which texts are sorted by length: less padding, and the order stays random
WINDOW = 16


@dataclass(frozen=True)
class TrainingText:
    """One prompt and one response, as the target's token ids."""

    id: str
    prompt: list[int]
    response: list[int]
    task: str = "other"

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


@dataclass(frozen=True)
class TextBatch:
    """Texts, padded. Row b is text `numbers[b]` of the set it was drawn from."""

    numbers: tuple[int, ...]
    tokens: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, as in FeatureBatch
    lengths: Tensor  # (B,) int64


def fitting(texts: Iterable[TrainingText], max_length: int) -> list[TrainingText]:
    """Texts cut to `max_length` tokens, from the end; those left without two response tokens are
    dropped.

    Raises ConfigError when none is left.
    """
    all_texts = list(texts)
    cut = [
        TrainingText(
            text.id, text.prompt, text.response[: max(0, max_length - len(text.prompt))], text.task
        )
        for text in all_texts
    ]
    usable = [one for one in cut if one.prompt and len(one.response) >= 2]
    if not usable:
        raise ConfigError(
            f"none of {len(all_texts)} texts has a prompt and two response tokens within "
            f"max_length = {max_length}: "
            "raise max_length, or look at the responses"
        )
    return usable


def split(
    texts: Sequence[TrainingText], held_out: float, seed: int
) -> tuple[list[TrainingText], list[TrainingText]]:
    """(to train on, held out). All texts of one prompt fall on one side. Raises ConfigError below
    two prompts."""
    prompts = list(dict.fromkeys(tuple(text.prompt) for text in texts))
    if len(prompts) < 2:
        raise ConfigError(
            "training needs at least two different prompts: one to train on and one held out"
        )
    random.Random(seed).shuffle(prompts)
    count = min(max(1, round(held_out * len(prompts))), len(prompts) - 1)
    away = set(prompts[:count])
    return [t for t in texts if tuple(t.prompt) not in away], [
        t for t in texts if tuple(t.prompt) in away
    ]


def epoch_order(
    texts: Sequence[TrainingText], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Numbers of the texts of each batch of an epoch; the last batch may be smaller."""
    draw = random.Random(f"{seed}/{epoch}")
    numbers = list(range(len(texts)))
    draw.shuffle(numbers)
    wide = WINDOW * batch_size
    batches = []
    for start in range(0, len(numbers), wide):
        window = sorted(
            numbers[start : start + wide],
            key=lambda n: (len(texts[n].prompt) + len(texts[n].response), n),
        )
        batches += [
            window[begin : begin + batch_size] for begin in range(0, len(window), batch_size)
        ]
    draw.shuffle(batches)
    return batches


def collate(
    texts: Sequence[TrainingText], numbers: Sequence[int], device: torch.device
) -> TextBatch:
    """Pad texts to one batch."""
    rows = [texts[number].tokens for number in numbers]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    prompts = torch.tensor([len(texts[number].prompt) for number in numbers], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    columns = torch.arange(width, device=device)[None]
    mask = (columns >= prompts[:, None] - 1) & (columns < lengths[:, None] - 1)
    return TextBatch(tuple(numbers), tokens, mask, lengths)


def token_counts(texts: Iterable[TrainingText], vocab_size: int) -> Tensor:
    """(V,) int64: how often each token stands in the responses."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.response), minlength=vocab_size)[:vocab_size]
    return counts
