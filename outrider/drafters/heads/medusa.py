"""Medusa: heads on the target's last hidden state guess the next tokens, each on its own (Cai et
al. 2401.10774).

    positions    ...  n-2      n-1        n      n+1
    tokens       ...  x_{n-2}  x_{n-1}    ?      ?        x_{n-1} is the pending token: committed, not yet in the target's cache
    feature           f_{n-2}                             the last there is; its own distribution was that of x_{n-1}
    head 0, 1                             x_n    x_{n+1}  so head 0 guesses what follows the pending token

The guesses depend on the text alone, not on each other, so every token drawn from a head's
distribution is drawn from the distribution that travels with it. A drafter keeps one feature a row
(`last_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.drafters.base import DraftSetup
from outrider.drafters.heads.last_state import LastState
from outrider.drafters.parallel import LevelGuesses
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS, Requirements
from outrider.errors import ConfigError
from outrider.models.heads.medusa import MedusaHeads, load_medusa
from outrider.models.linear.pack import can_pack, pack_linears
from outrider.models.loaded import ModelMemory
from outrider.models.loading.memory import head_memory
from outrider.rows import Rows
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.layers import release_linears
from outrider.runtime.medusa import MedusaRun
from outrider.runtime.run import NativeRun
from outrider.sampling.confidence import ConfidenceSettings
from outrider.settings import checked, setting
from outrider.trees.cartesian import cartesian_shape
from outrider.trees.growth import Growth, ShapeGrowth
from outrider.trees.plan import DYNAMIC_NUM_NODES, KINDS, TreePlan, TreeSettings
from outrider.types import Draft

MEDUSA = "medusa"  # the tree kind
FADING = 0.8  # of the assumed accuracy from head to head, where a checkpoint has no measured one


@checked()
@dataclass(frozen=True)
class MedusaSettings(TreeSettings, ConfidenceSettings):
    """How guesses branch, and when a chain of them stops early."""

    head: str = setting("", "folder of the heads; --draft names it, too")
    tree: str = setting(
        "chain", f"{KINDS}, or medusa: planned by the accuracies measured in training"
    )

    def __post_init__(self) -> None:
        ConfidenceSettings.__post_init__(self)
        if self.stop == "acceptance":
            raise ConfigError(
                "stop=acceptance is for drafter 'draft-model', whose distributions its head was "
                "trained on"
            )
        if self.tree == MEDUSA:
            if self.adapt:
                raise ConfigError(
                    "adapt plans shapes anew; tree 'medusa' is planned once. Use sequoia or "
                    "best-first"
                )
            replace(self, tree="sequoia", stop="none")  # checks the other settings
        else:
            TreeSettings.__post_init__(self)
        if self.tree != "chain" and self.stop != "none":
            raise ConfigError(
                f"stop={self.stop} is for chains; tree '{self.tree}' is cut by its node budget "
                "and min_gain"
            )

    def default_num_nodes(self) -> int:
        return DYNAMIC_NUM_NODES if self.tree == MEDUSA else super().default_num_nodes()


class MedusaPlan(TreePlan):
    """Trees no deeper than there are heads, and Medusa's own shape."""

    def __init__(self, settings: MedusaSettings, heads: MedusaHeads) -> None:
        depth = min(settings.max_depth, heads.num_heads)
        super().__init__(replace(settings, max_depth=depth))
        self._accuracies = heads.config.accuracies or assumed_accuracies(
            settings.acceptance(), heads.num_heads
        )

    def growth(self, num_nodes: int, *, sampled: bool, prices: Sequence[float] = ()) -> Growth:
        if self.kind == MEDUSA:
            return ShapeGrowth(cartesian_shape(self._accuracies, num_nodes))
        return super().growth(num_nodes, sampled=sampled, prices=prices)


def assumed_accuracies(
    siblings: tuple[float, ...], num_heads: int
) -> tuple[tuple[float, ...], ...]:
    """`sibling_acceptance` for the first head, a little less for every further one."""
    return tuple(tuple(FADING**head * chance for chance in siblings) for head in range(num_heads))


class MedusaDrafter(LastState):
    """Chains and trees from Medusa heads."""

    needs = "Medusa heads trained for the target (--draft FOLDER)"
    requires = Requirements(head=True)
    trained = True
    shape = "chain or tree"
    Settings = MedusaSettings

    def __init__(
        self, heads: MedusaHeads, settings: MedusaSettings, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(
            settings, MedusaPlan(settings, heads) if settings.tree != "chain" else None
        )
        self.heads = heads
        self._notes = list(notes)

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def runs_modules(self) -> bool:
        return self.heads.run is None

    @classmethod
    def requirements(cls, settings: MedusaSettings) -> Requirements:
        is_tree = settings.tree != "chain"
        nodes = settings.default_num_nodes() if is_tree else DEFAULT_NUM_DRAFT_TOKENS
        return replace(super().requirements(settings), trees=is_tree, num_draft_tokens=nodes)

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        config = target_config.get_text_config()
        return head_memory(
            head, load_medusa(head, config.hidden_size, config.vocab_size, outline=True), 0, dtype
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> MedusaDrafter:
        if setup.head is None:
            raise ConfigError(
                "drafter 'medusa' needs heads: --draft FOLDER (make one with outrider train medusa)"
            )
        target = setup.target
        settings = setup.settings
        heads = load_medusa(setup.head, target.card.hidden_size, target.lm.shape.vocab_size)
        assert target.tables is not None, "a target loaded for heads keeps its tables"
        heads.bind(target.tables.output)
        planned = settings.tree == MEDUSA and not heads.config.accuracies
        notes = [
            f"{heads.num_heads} Medusa heads: at most {heads.num_heads} tokens deep"
            + (
                "; their accuracies were never measured, so the tree is planned by sibling_acceptance"
                if planned
                else ""
            )
        ]
        lm = target.lm
        heads.to(device=lm.device, dtype=lm.dtype)
        if isinstance(lm.run, NativeRun):
            try:
                heads.run = MedusaRun(heads, lm.run.path)
                release_linears(heads)
            except NotLoweredError as error:
                notes.append(f"the Medusa heads run without the native runtime: {error}")
        if heads.run is None and can_pack(lm.device, lm.dtype):
            pack_linears(heads)
        return cls(heads, settings, notes)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        states, budgets = self.last_states(gamma)
        if max(budgets) <= 0:
            return Draft.empty(len(rows), rows.device)
        return self.drafted(rows, budgets, LevelGuesses(self.heads(states)))
