"""An assistant checkpoint (Gemma 4's) drafts chains or trees on the target's keys and values
(`models/heads/assistant.py`).

It is drafter `mtp` with `--draft FOLDER`. Each level of a draft is one pass of the assistant over
the tokens of the level before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.base import DraftSetup
from outrider.drafters.heads.last_state import LastState
from outrider.drafters.model.draft_tree import DraftModelSettings
from outrider.drafters.requirements import Requirements, context_notes
from outrider.errors import CapabilityError
from outrider.models.heads.assistant import Assistant, Attended, load_assistant
from outrider.models.lm import LM
from outrider.models.source import ModelSource
from outrider.rows import Rows
from outrider.trees.plan import TreePlan
from outrider.types import Draft


class _Passes:
    """`Guesses` of an assistant: a pass for every level, each token alongside the state that its
    parent's pass gave."""

    def __init__(
        self, assistant: Assistant, states: Tensor, seen: Attended, num_levels: int
    ) -> None:
        self.num_levels = num_levels
        self._assistant = assistant
        self._seen = seen
        self._states = states[:, None]  # (B, M, H) of the level's parents

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        logits, self._states = self._assistant.step(
            parents, self._states[rows, origins], self._seen
        )
        return logits


class AssistantDrafter(LastState):
    """Chains and trees of an assistant."""

    needs = "an assistant made for the target (--draft FOLDER)"
    requires = Requirements(head=True)
    trained = True
    shape = "chain or tree"
    Settings = DraftModelSettings

    def __init__(
        self, assistant: Assistant, target: LM, settings: DraftModelSettings, notes: list[str]
    ) -> None:
        super().__init__(settings, TreePlan(settings) if settings.tree != "chain" else None)
        self._assistant = assistant
        self._target = target
        self._notes = notes

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def runs_modules(self) -> bool:
        return True

    @classmethod
    def of(cls, source: ModelSource, setup: DraftSetup) -> AssistantDrafter:
        """The drafter of the assistant with these files."""
        target = setup.target
        settings = setup.settings
        if settings.stop == "acceptance":
            raise CapabilityError(
                "stop=acceptance is for drafter 'draft-model'; an assistant takes entropy and "
                "product"
            )
        if settings.window != 0:
            raise CapabilityError(
                f"the assistant in '{source.name}' takes no window: it reads the target's keys and "
                "values, and has no cache of its own. Leave window out."
            )
        if target.tables is None:
            raise CapabilityError(
                f"{target.label}: its tables were not kept, but the assistant needs them"
            )
        assistant = load_assistant(source, target.lm, target.config, target.tables.embedding)
        notes = [f"the assistant in '{source.name}' drafts on the target's keys and values"]
        notes += context_notes(source.name, assistant.max_positions, target.lm.shape.context_length)
        return cls(assistant, target.lm, settings, notes)

    @torch.inference_mode()
    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        known = self._assistant.max_positions
        within = [
            max(0, min(count, known - len(row.tokens)))
            for count, row in zip(gamma, rows, strict=True)
        ]
        states, budgets = self.last_states(within)
        if max(budgets) <= 0:
            return Draft.empty(len(rows), rows.device)
        seen = self._assistant.look(self._target.kv.lengths[: len(rows)])
        return self.drafted(
            rows,
            budgets,
            _Passes(self._assistant, states.to(self._target.dtype), seen, max(budgets)),
        )
