"""What the suites of families compare with: transformers' own passes over texts of random tokens.

Where a pass over a text is not what `generate` writes, `generate` is asked: it counts the positions
of RoBERTa from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.models.lm import LM
from tests.contract.own_cache_families import VOCAB

ASKED_BY_GENERATING = ("roberta",)
TEXTS = (3, 11, 26)  # tokens of the ragged rows
GAMMA = 4  # tokens of a draft


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch: its sums then have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_text(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@torch.inference_mode()
def next_logits(module: Any, texts: Tensor) -> Tensor:
    """The logits (B, V) that `generate` takes the token behind each text (B, T) from."""
    made = module.generate(
        texts,
        max_new_tokens=1,
        do_sample=False,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.logits[0]


class Reference:
    """The families that `make` makes by name, as transformers runs them."""

    def __init__(self, make: Callable[[str], Any], tolerance: float) -> None:
        """`tolerance`: a share of the logits' range."""
        self.tolerance = tolerance
        self._make = make
        self.module = cache(self._made)

    @torch.inference_mode(False)
    def _made(self, name: str) -> Any:
        return self._make(name)

    @torch.inference_mode()
    def logits(self, name: str, text: list[int], count: int) -> Tensor:
        """The module's logits (count, V) of the last tokens of a text."""
        module = self.module(name)
        if name in ASKED_BY_GENERATING:
            ends = range(len(text) - count + 1, len(text) + 1)
            return torch.cat([next_logits(module, torch.tensor([text[:end]])) for end in ends])
        return module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -count:]

    def compare(self, name: str, ours: Tensor, text: list[int]) -> None:
        """Asserts that logits (n, V) of the text's last n tokens are the module's, up to rounding."""
        theirs = self.logits(name, text, len(ours))
        worst = (ours - theirs).abs().max() / theirs.abs().max()
        assert worst <= self.tolerance, f"off by {worst:.1e} of the logits' range"

    def same_text(self, name: str, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
        """Asserts that two greedy texts are equal, or part where the module's logits of two tokens
        are equal up to rounding."""
        assert len(ours) == len(theirs)
        parted = next(
            (
                index
                for index, pair in enumerate(zip(ours, theirs, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if parted is not None:
            logits = self.logits(name, [*prompt, *theirs[:parted]], 1)[0]
            apart = logits.max() - logits[[ours[parted], theirs[parted]]].min()
            assert apart <= self.tolerance * logits.abs().max(), (
                f"token {parted}: logits {apart:.1e} apart"
            )


@torch.inference_mode()
def begin(lm: LM, *texts: list[int]) -> None:
    """Rows that hold all of each text but its last token."""
    lm.kv.clear()
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)


@torch.inference_mode()
def score(lm: LM, *rows: list[int], first_row: int = 0) -> Tensor:
    """Logits (B, T, V) of one pass; rows begin with their pending tokens."""
    return lm.forward(torch.tensor(rows), first_row=first_row).logits


def reject_at_every_depth(lm: LM, check: Callable[[Tensor, list[int]], None]) -> None:
    """Rejects drafts at every depth, on ragged rows in one batch, with steps without drafts in
    between.

    `check` is called with the logits (n, V) of a text's last n tokens, and the text.
    """
    texts = [random_text(VOCAB, length, seed=length) for length in TEXTS]
    begin(lm, *texts)
    for step, depth in enumerate((0, 2, 4, 1, 0, 3, 4, 0)):
        drafts = [random_text(VOCAB, GAMMA, seed=100 * step + row) for row in range(len(texts))]
        logits = score(lm, *[[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)])
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            check(logits[row], text + draft)
            kept = (depth + row) % (GAMMA + 1)  # of the draft
            lm.kv.keep(row, range(kept + 1))
            text += [*draft[:kept], 7 + row]
        lm.kv.check_integrity()
        if step % 3 == 0:
            logits = score(lm, *[[text[-1]] for text in texts])
            for row, text in enumerate(texts):
                check(logits[row], text)
                lm.kv.keep(row, [0])
                text.append(30 + step)
