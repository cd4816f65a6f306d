"""Long texts for a draft model, a few chunks a step: what keeps a new prompt from holding up the rows beside it.

A row whose text the draft has not read to its end yet decodes plainly meanwhile, so nobody waits for the draft: not the others
for a long prompt, and not the new row for its first token. The chunks are `LM.catch_up`'s, so keys have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.models.lm import LM, PREFILL_CHUNK


class Turns:
    """Whose text is read next: each step begins with another row, so a long one delays the others by a chunk at most."""

    def __init__(self) -> None:
        self._number = 0

    def read(self, lm: LM, texts: Sequence[Sequence[int]], indices: Sequence[int], budget: int) -> list[int]:
        """Feed and commit what the cache of `lm` lacks of texts[i], i in `indices`, all but the last token: a chunk each in turn
        until `budget` tokens are used up. Returns the chunks' sizes, in the order read."""
        waiting = list(indices)
        if not waiting:
            return []
        first = self._number % len(waiting)
        waiting = waiting[first:] + waiting[:first]
        sizes: list[int] = []
        self._number += 1
        while waiting and sum(sizes) < budget:
            index = waiting.pop(0)
            done, end = lm.kv.lengths[index], len(texts[index]) - 1
            chunk = texts[index][done : min(done + PREFILL_CHUNK, end)]
            if not chunk:
                continue
            column = torch.zeros(1, dtype=torch.int64, device=lm.device)
            lm.forward(torch.tensor([list(chunk)], device=lm.device), columns=column, first_row=index)
            lm.kv.advance(index, len(chunk))
            sizes.append(len(chunk))
            waiting.append(index)
        return sizes
