"""From all texts of a run to its result: positions counted by what they have in common, and which tokens were confused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from outrider.build import Options
from outrider.lab.explain.advice import advise
from outrider.lab.explain.annotate import NONE, Labelled, as_columns
from outrider.lab.explain.causes import CAUSES, LUCK, Ledger
from outrider.lab.explain.counterfactual import counterfactuals, times_of, with_passes
from outrider.lab.explain.explain_result import (
    CauseRow,
    Confusion,
    Counterfactual,
    ExplainResult,
    GroupRow,
    LevelRow,
    RankRow,
    TextColumns,
    Times,
)
from outrider.lab.explain.explained import Explained
from outrider.lab.explain.regions import KINDS, SECTIONS
from outrider.lab.intervals import proportion
from outrider.models.tokens.token_bytes import token_name
from outrider.sampling.params import SamplingParams

ENTROPIES = (0.01, 0.1, 0.3, 1.0, 2.0)  # nats: ends of the ranges
RANKS = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "4-8": (4, 8), "9-64": (9, 64), "65 and beyond": (65, float("inf"))}
MAX_CONFUSIONS = 12
MIN_CONFUSIONS = 2  # times that a pair must have occurred


def summarise(run: Explained, options: Options, workload: str, max_shown: int) -> ExplainResult:
    """Everything that was found. Replays other drafters on the texts."""
    built, stats, pool = run.contender.built, run.stats, Pool(run.texts)
    tokenizer, verifier = built.target.tokenizer, built.decoder.verifier.name
    run.times = times_of(one.steps for one in run.texts)
    if run.times is not None:
        longest_text = max(len(one.text.prompt) + len(one.pieces) for one in run.texts)
        run.times = with_passes(run.times, built.target.lm, run.longest, longest_text)
    times, tau, shown = run.times, run.tau, _shown(run, max_shown)
    others, not_replayed = counterfactuals(run, tokenizer, built.target.lm.shape.vocab_size)
    result = ExplainResult(
        target=options.target, draft=options.draft, configuration=run.configuration.label, verifier=verifier,
        is_greedy=run.params.is_greedy, has_draft_probs=run.has_draft_probs, is_chain=run.is_chain,
        sampling=_sampling(run.params),
        num_draft_tokens=str(run.contender.config["num_draft_tokens"]), workload=workload, texts_read=len(run.texts),
        steps=stats.steps, emitted=stats.emitted, drafted=stats.drafted, tested=stats.tested,
        accepted=stats.accepted, ideal=pool.ledger.ideal, tau=tau, alpha=run.alpha,
        tokens_per_s=None if times is None else tau.value / times.step_s, times=times,
        other_cpu=max(one.other_cpu for one in run.recordings),
        causes=pool.causes(stats.steps, times), by_level=list(pool.by_level()), by_kind=pool.by_kind(),
        by_section=pool.by_section(), by_entropy=pool.by_entropy(), ranks=pool.ranks(),
        confusions=pool.confusions(tokenizer), counterfactuals=others, advice=[], texts=shown,
        notes=[*built.notes, *_remarks(run, others, len(shown)), *not_replayed],
    )  # fmt: skip
    result.advice = advise(result)
    return result


def _shown(run: Explained, max_shown: int) -> list[TextColumns]:
    """The first texts, as many as fit into so many tokens; one at least, if any are wanted."""
    found: list[TextColumns] = []
    room = max_shown
    for one in run.texts:
        room -= len(one.pieces)
        if max_shown <= 0 or (room < 0 and found):
            break
        found.append(as_columns(one, run.contender.built.target.tokenizer))
    return found


def _remarks(run: Explained, others: Sequence[Counterfactual], num_shown: int) -> Iterator[str]:
    if num_shown < len(run.texts):
        yield f"the first {num_shown} of {len(run.texts)} texts are shown; the numbers are of all of them"
    current = next((one for one in others if one.current and one.exact), None)
    if current is not None and round(current.steps) != run.stats.steps:
        yield (
            f"replayed at its own length this run has {current.steps:.0f} steps, recorded were {run.stats.steps}: some guesses "
            "are near ties, which rounding decides otherwise in a pass of another width"
        )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from greedy decoding without filters, and the number of tokens."""
    plain = asdict(SamplingParams())
    always = ("temperature", "max_tokens")
    return {name: value for name, value in asdict(params).items() if value != plain[name] or name in always}


class Pool:
    """All texts' columns, one after the other."""

    def __init__(self, texts: Sequence[Labelled]) -> None:
        self.texts = texts
        self.ledger = Ledger.joined([one.ledger for one in texts])
        self.kept, self.expected = self.ledger.kept, self.ledger.expected
        self.tested = self.kept >= 0
        self.lost = np.concatenate([one.lost_to_rejections for one in texts])

    def column(self, name: str) -> np.ndarray:
        """A column of `annotate.Positions`."""
        return np.concatenate([getattr(one.positions, name) for one in self.texts])

    def by_level(self) -> Iterator[LevelRow]:
        """Chains and trees alike: the n-th level of a draft."""
        for level in range(int(self.ledger.level.max(initial=0)) + 1):
            here = self.tested & (self.ledger.level == level)
            if here.any():
                yield LevelRow(
                    level=level + 1, tested=int(here.sum()), kept=int(self.kept[here].sum()),
                    share=proportion(int(self.kept[here].sum()), int(here.sum())),
                    expected=float(self.expected[here].mean()),
                )  # fmt: skip

    def by_kind(self) -> list[GroupRow]:
        return list(self._groups(KINDS, np.array([kind for one in self.texts for kind in one.kinds])))

    def by_section(self) -> list[GroupRow]:
        """Empty where nothing is marked."""
        rows = list(self._groups(SECTIONS, np.array([section for one in self.texts for section in one.sections])))
        return rows if len(rows) > 1 else []

    def by_entropy(self) -> list[GroupRow]:
        """Groups by the entropy of the target's distribution."""
        index = np.searchsorted(ENTROPIES, self.column("p_entropy"), side="right")
        ends = [0.0, *ENTROPIES]
        names = [f"{low:g}-{high:g}" for low, high in pairwise(ends)] + [f"{ends[-1]:g} and more"]
        return list(self._groups(names, np.array(names)[index]))

    def ranks(self) -> list[RankRow]:
        """Ranks of the text's token in the draft's distribution, at rejections; empty where there is no distribution."""
        ranks = self.column("rank_token")[self.kept == 0]
        ranks = ranks[np.isfinite(ranks)]
        if not len(ranks):
            return []
        return [
            RankRow(rank=name, rejections=int(((ranks >= low) & (ranks <= high)).sum())) for name, (low, high) in RANKS.items()
        ]

    def confusions(self, tokenizer: Any) -> list[Confusion]:
        """The commonest pairs of a rejected draft token and the text's."""
        draft, token = self.column("draft"), self.column("token")
        here = (self.kept == 0) & (draft != NONE) & (draft != token)
        pairs = Counter(zip(draft[here].tolist(), token[here].tolist(), strict=True))
        return [
            Confusion(draft=token_name(tokenizer, wrong), text=token_name(tokenizer, right), count=count)
            for (wrong, right), count in pairs.most_common(MAX_CONFUSIONS)
            if count >= MIN_CONFUSIONS
        ]

    def causes(self, steps: int, times: Times | None) -> list[CauseRow]:
        """What each cost. Luck comes with what it could have been."""
        total = self.ledger.parts.sum(0)
        seconds = None if times is None else steps * times.step_s
        spread = math.sqrt(self.ledger.luck_variance)
        return [
            CauseRow(
                cause=name, tokens=float(total[index]), tokens_per_step=float(total[index]) / steps,
                tokens_per_s=None if seconds is None else float(total[index]) / seconds,
                spread=spread if index == LUCK else None,
            )
            for index, name in enumerate(CAUSES)
        ]  # fmt: skip

    def _groups(self, names: Sequence[str], group: np.ndarray) -> Iterator[GroupRow]:
        """In the order of `names`, without empty ones."""
        disagreement, entropy = self.column("tv"), self.column("p_entropy")
        for name in names:
            here = group == name
            if here.any():
                tested = here & self.tested
                num_tested, num_kept = int(tested.sum()), int(self.kept[tested].sum())
                yield GroupRow(
                    name=name, tokens=int(here.sum()), tested=num_tested, kept=num_kept,
                    share=proportion(num_kept, num_tested) if num_tested else None,
                    expected=_mean(self.expected[tested]), lost=float(self.lost[here].sum()),
                    disagreement=_mean(disagreement[here]), entropy=_mean(entropy[here]),
                )  # fmt: skip


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
