"""What happened in every step, kept while decoding by an observer of steps.

A note is a handful of lists that the step has on the host anyway, so recording costs next to nothing; laws, entropies and ranks
come afterwards, from one pass of each model over the finished text (`outrider/lab/explain/`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.step import StepFacts


@dataclass(slots=True)
class Step:
    """One step of one row. Draft nodes as in `types.Draft`: parents before children, -1 = the pending token."""

    start: int  # output tokens before this step
    asked: int  # nodes that the drafter was asked for
    tokens: list[int]  # the draft's nodes
    parents: list[int] | None  # None: a chain
    sampled: list[bool] | None  # per node, drawn from the draft's law (True) or placed; None: none was drawn
    path: list[int]  # nodes kept by the verifier
    next_token: int  # that the verifier added
    complete: bool  # the path ends at a leaf: nothing was rejected there
    taken: int  # tokens the row took: len(path) + 1, or fewer where it ended
    rows: int  # rows in this step
    seconds: float  # of the step, feeding new prompts excluded
    at_s: float  # its end, on `time.perf_counter`'s clock
    draft_s: float = 0.0  # of `seconds`, those in the drafter
    replacement: bool = False  # drawn siblings may repeat

    @property
    def parent_list(self) -> list[int]:
        """The parent of every node; in a chain the node before it."""
        return self.parents if self.parents is not None else list(range(-1, len(self.tokens) - 1))

    @property
    def num_levels(self) -> int:
        """The levels of the draft: a chain's tokens, a tree's depth."""
        levels = [0]
        for parent in self.parent_list:
            levels.append(levels[parent + 1] + 1)
        return max(levels)


@dataclass
class StepRecorder:
    """`steps[request]` are the steps of a row since `clear`."""

    steps: dict[int, list[Step]] = field(default_factory=dict)

    def observe(self, facts: StepFacts) -> None:
        """A step is over."""
        now, rows, draft, verdict = time.perf_counter(), facts.rows, facts.draft, facts.verdict
        tokens, lengths = draft.lists
        paths, counts, next_tokens, complete = verdict.lists
        parents = None if draft.parents is None else draft.parent_lists
        sampled = None if draft.probs is None else draft.is_sampled().tolist()
        for index, row in enumerate(rows):
            length, recorded = lengths[index], self.steps.setdefault(row.request, [])
            start = recorded[-1].start + recorded[-1].taken if recorded else 0
            recorded.append(
                Step(
                    start, facts.asked[index], tokens[index][:length], None if parents is None else parents[index][:length],
                    None if sampled is None else sampled[index][:length], paths[index][: counts[index]], next_tokens[index],
                    complete[index], len(row.tokens) - row.num_prompt - start, len(rows), facts.seconds, now, facts.draft_s,
                    facts.draft.replacement,
                )
            )  # fmt: skip

    def clear(self) -> None:
        """Forget all steps; requests are numbered anew by every call of `LLM.generate`."""
        self.steps = {}
