"""Long texts for a draft model, a few chunks a step: what keeps a new prompt from holding up the
other rows of the batch.

A row whose text the draft has not read to its end yet decodes plainly meanwhile, so nobody waits
for the draft: not the others for a long prompt, and not the new row for its first token. The chunks
are `LM.catch_up`'s, so keys have the same bits.

Rows that lag a few tokens behind, after some steps without drafts, are read together: a pass for
each would cost sixteen rows what sixteen drafts do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.models.lm import LM, PREFILL_CHUNK

SHORT = 16  # tokens that a row may lack to be read with others


def read_together(lm: LM, texts: Sequence[Sequence[int]], indices: Sequence[int]) -> list[int]:
    """Feeds several short texts in one pass and commits them; returns how much of each was read.

    The texts are texts[i] but for the last token, for those i in `indices` that lack at most SHORT
    tokens. The pass covers the rows between, too. A single such row is left to the chunks.
    """
    missing = {index: texts[index][lm.kv.lengths[index] : -1] for index in indices}
    short = {index: list(tokens) for index, tokens in missing.items() if 0 < len(tokens) <= SHORT}
    if len(short) < 2:
        return []
    first = min(short)
    width = max(map(len, short.values()))
    padded = [short.get(index, []) for index in range(first, max(short) + 1)]
    tokens = torch.tensor([line + [0] * (width - len(line)) for line in padded], device=lm.device)
    lm.forward(tokens, columns=torch.zeros(1, dtype=torch.int64, device=lm.device), first_row=first)
    for index, line in short.items():
        lm.kv.advance(index, len(line))
    return [len(line) for line in short.values()]


class Turns:
    """The order in which texts are read: each step begins with another row, so a long one delays
    the others by a chunk at most."""

    def __init__(self) -> None:
        self._number = 0

    def read(
        self, lm: LM, texts: Sequence[Sequence[int]], indices: Sequence[int], budget: int
    ) -> list[int]:
        """Feed and commit what the cache of `lm` lacks of texts[i], i in `indices`, all but the
        last token: a chunk each in turn until `budget` tokens are used up. Returns the chunks'
        sizes, in the order read."""
        sizes = read_together(lm, texts, indices)
        waiting = [index for index in indices if lm.kv.lengths[index] < len(texts[index]) - 1]
        if not waiting:
            return sizes
        first = self._number % len(waiting)
        waiting = waiting[first:] + waiting[:first]
        self._number += 1
        while waiting and sum(sizes) < budget:
            index = waiting.pop(0)
            done = lm.kv.lengths[index]
            end = len(texts[index]) - 1
            chunk = texts[index][done : min(done + PREFILL_CHUNK, end)]
            if not chunk:
                continue
            column = torch.zeros(1, dtype=torch.int64, device=lm.device)
            lm.forward(
                torch.tensor([list(chunk)], device=lm.device), columns=column, first_row=index
            )
            lm.kv.advance(index, len(chunk))
            sizes.append(len(chunk))
            waiting.append(index)
        return sizes
