"""Why draft tokens were rejected, by kind of step.

Where decoding is greedy every rejection has one exact cause, the draft disagrees; what would help depends on how. The first
that fits wins, laws at temperature 1:

    near tie        the target gives the draft's token at least half the probability of its own: either would nearly have done
    second guess    the text's token is the draft's second or third guess: a tree has room for it
    doubt           the draft gave its own token less than even odds: a stop rule could have ended the draft before it
    sure            none of these: the draft is confidently wrong, and only a better draft helps

Where tokens are drawn, the causes of `explain/causes.py` are exact and add up, and they say more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.lab.explain.annotate import NONE
from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.result import Confusion
from outrider.lab.reasoning.acceptance import ALL
from outrider.lab.reasoning.kinds import KINDS
from outrider.lab.reasoning.result import KindRejections
from outrider.lab.reasoning.solved import Solved
from outrider.models.token_bytes import token_name

NEAR_TIE, SECOND_GUESS, DOUBT, SURE = "near tie", "second guess", "doubt", "sure"
REASONS = (NEAR_TIE, SECOND_GUESS, DOUBT, SURE)
TIED = 0.5  # of the text's token's probability
GUESSES = 3
EVEN = 0.5
MOST_PAIRS, FEWEST_PAIRS = 4, 2  # confusions shown, and how often one must have occurred


def rejections(solved: Sequence[Solved], tokenizer: Any, *, greedy: bool) -> list[KindRejections]:
    """"all" first, then every kind with a rejection."""
    pool = _Pool(solved)
    found = [_of(pool, np.ones(len(pool.kind), dtype=bool), ALL, tokenizer, greedy=greedy)]
    found += [_of(pool, pool.kind == place, name, tokenizer, greedy=greedy) for place, name in enumerate(KINDS)]
    return [one for one in found if one.count or one.kind == ALL]


class _Pool:
    """All texts' columns, one after the other."""

    def __init__(self, solved: Sequence[Solved]) -> None:
        self._solved = solved
        self.kind = np.concatenate([one.kind for one in solved])
        self.kept = np.concatenate([one.kept for one in solved])
        self.parts = np.concatenate([one.text.annotated.ledger.parts for one in solved])

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of `explain/annotate.Positions`."""
        return np.concatenate([getattr(one.text.annotated.positions, name) for one in self._solved])


def _of(pool: _Pool, here: np.ndarray, name: str, tokenizer: Any, *, greedy: bool) -> KindRejections:
    rejected, kept = here & (pool.kept == 0), here & (pool.kept == 1)
    lost = pool.parts[here].sum(0).tolist()
    return KindRejections(
        kind=name,
        count=int(rejected.sum()),
        reasons=_reasons(pool, rejected) if greedy else {},
        lost={cause: tokens for cause, tokens in zip(CAUSES, lost, strict=True) if abs(tokens) >= 0.05},
        confusions=_confusions(pool, rejected, tokenizer),
        target_entropy=_mean(pool["p_entropy"][rejected]), draft_entropy=_mean(pool["q_entropy"][rejected]),
        target_entropy_kept=_mean(pool["p_entropy"][kept]), draft_entropy_kept=_mean(pool["q_entropy"][kept]),
    )  # fmt: skip


def _reasons(pool: _Pool, rejected: np.ndarray) -> dict[str, int]:
    choices = [
        pool["p_draft"] >= TIED * pool["p_token"], pool["rank_token"] <= GUESSES, pool["q_draft"] < EVEN,
        np.ones(len(rejected), dtype=bool),
    ]  # fmt: skip
    place = np.select(choices, range(len(REASONS)))[rejected]
    return {reason: int((place == number).sum()) for number, reason in enumerate(REASONS)}


def _confusions(pool: _Pool, rejected: np.ndarray, tokenizer: Any) -> list[Confusion]:
    draft, token = pool["draft"][rejected], pool["token"][rejected]
    apart = (draft != NONE) & (draft != token)
    pairs = Counter(zip(draft[apart].tolist(), token[apart].tolist(), strict=True))
    return [
        Confusion(draft=token_name(tokenizer, wrong), text=token_name(tokenizer, right), count=count)
        for (wrong, right), count in pairs.most_common(MOST_PAIRS)
        if count >= FEWEST_PAIRS
    ]


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
