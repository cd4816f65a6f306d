"""Drafting from the target's state at the last token of each row: what Medusa heads and assistants
have in common.

The state comes from the last chunk of the prompt (`read`), then from every pass (`commit`), and
travels with a row that leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.parallel import DistributionStop, Guesses, draft_chain, draft_tree
from outrider.models.signals import AFTER_NORM
from outrider.rows import PerRow, Row, Rows
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.trees.growth import Growth
from outrider.trees.plan import TreePlan
from outrider.types import Draft, TargetOutput, Verdict


class LastState(Drafter):
    """A drafter with one state (H,) a row, from after the target's final norm."""

    def __init__(self, settings: ConfidenceSettings, plan: TreePlan | None) -> None:
        """`settings`: when a chain ends early; `plan`: of trees; None: chains."""
        self._settings = settings
        self._plan = plan
        self._growths: list[Growth] = []  # of every row's tree, until it is judged
        # per row, at the last position that the target was fed
        self._states = PerRow[Tensor | None]()
        # newer ones: states (B, T, H), the column of each row
        self._last_pass: tuple[Tensor, list[int]] | None = None

    @property
    def signals(self) -> tuple[int, ...]:
        return (AFTER_NORM,)

    def start(self, row: Row) -> None:
        self._settle()
        self._states.append(None)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        self._settle()
        self._states[index] = hidden[AFTER_NORM][-1].clone()

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if self._plan is not None:
            self._plan.observe(draft, verdict, self._growths)
            self._growths = []
        self._last_pass = output.hidden[AFTER_NORM], [columns[-1] for columns in output.kept]

    def pack(self, index: int) -> tuple[Tensor | None]:
        self._settle()
        return (self._states[index],)

    def unpack(self, state: tuple[Tensor | None]) -> None:
        self._settle()
        self._states[-1] = state[0]

    def stop(self, index: int) -> None:
        self._settle()
        super().stop(index)

    def last_states(self, gamma: list[int]) -> tuple[Tensor, list[int]]:
        """States (B, H) of all rows, and how many of `gamma` nodes may be asked for: 0 where a row
        has no state yet."""
        hidden, known = self._last_pass or self._settled()
        budgets = [
            0 if column is None else budget for column, budget in zip(known, gamma, strict=True)
        ]
        if max(budgets) <= 0:
            return hidden, budgets
        columns = torch.tensor([column or 0 for column in known], device=hidden.device)
        return hidden[torch.arange(len(known), device=hidden.device), columns], budgets

    def drafted(self, rows: Rows, budgets: list[int], guesses: Guesses) -> Draft:
        """A chain or a tree of at most budgets[b] nodes for each row."""
        if self._plan is not None:
            draft, self._growths = draft_tree(rows, budgets, guesses, self._plan)
            return draft
        stop = None
        if self._settings.stop != "none":
            stop = DistributionStop(
                StopRule(
                    self._settings, len(rows), rows.device, ends=[row.stop_tokens for row in rows]
                )
            )
        return draft_chain(rows, budgets, guesses, stop)

    @torch.inference_mode()
    def _settle(self) -> None:
        """Rows come and go: take each one's own state out of the last pass."""
        if self._last_pass is not None:
            hidden, columns = self._last_pass
            self._states = PerRow(hidden[row, column].clone() for row, column in enumerate(columns))
            self._last_pass = None

    def _settled(self) -> tuple[Tensor, list[int | None]]:
        """States as if of a pass (B, 1, H); no column where a row has none yet."""
        known = [state for state in self._states if state is not None]
        if not known:
            return torch.empty(0), [None] * len(self._states)
        nothing = torch.zeros_like(known[0])
        hidden = torch.stack([nothing if state is None else state for state in self._states])[
            :, None
        ]
        return hidden, [None if state is None else 0 for state in self._states]
