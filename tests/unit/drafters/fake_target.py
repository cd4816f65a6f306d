"""The speculative loop without a model: a target that is a function of the last token, so that a
test knows every output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, TargetOutput
from outrider.verifiers.greedy import greedy_verdict
from tests.helpers import make_row

Follow = Callable[[int], int]


def join(drafter: Drafter, rows: Rows, prompt: Sequence[int], max_tokens: int = 1000) -> None:
    """A greedy row joins."""
    row = make_row(prompt, SamplingParams(max_tokens=max_tokens), seed=0)
    rows.add(row)
    drafter.start(row)


def target_logits(rows: Rows, draft: Draft, follow: Follow) -> Tensor:
    """(B, N+1, V): behind each token fed, most for `follow(token)`, then less and less for the ids
    after it."""
    pending = torch.tensor([[row.tokens[-1]] for row in rows])
    fed = torch.cat([pending, draft.tokens], dim=1)
    best = torch.tensor([[follow(token) for token in row] for row in fed.tolist()])
    return -((torch.arange(rows.vocab_size) - best[..., None]) % rows.vocab_size).float()


def step(drafter: Drafter, rows: Rows, gamma: Sequence[int], follow: Follow) -> Draft:
    """One whole step of the loop; returns what was drafted."""
    draft = drafter.propose(rows, list(gamma))
    logits = target_logits(rows, draft, follow)
    verdict = greedy_verdict(draft, logits.argmax(dim=-1).tolist())
    rows.append(draft, verdict, logits)
    drafter.commit(rows, draft, verdict, TargetOutput(logits))
    return draft
