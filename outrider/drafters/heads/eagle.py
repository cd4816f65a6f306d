"""EAGLE and EAGLE-3: a small head trained on the target's hidden states drafts chains or trees
(`models/heads/eagle.py`).

How such a head is fed the target's hidden states, and what its cache may hold: `feature_fed.py`.

Alongside a target on the native runtime the head's passes run there, too, and chains come whole from
one call (`runtime/fed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import DraftSetup
from outrider.drafters.heads.feature_fed import FeatureFed, FedChain, FedMaskedTree, FedTree
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.draft_tree import DraftModelSettings
from outrider.drafters.requirements import context_notes
from outrider.drafters.window import head_window, trained_length
from outrider.errors import CapabilityError, ConfigError
from outrider.models.derived.derive import is_linear, with_replaced
from outrider.models.derived.quantise import BITS, GROUP_SIZES
from outrider.models.derived.quantised_linear import QuantisedPanels
from outrider.models.heads.eagle import EagleHead, Kind
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.head_lm import HeadLM
from outrider.models.linear.pack import can_pack, pack_linears
from outrider.models.loaded import LoadedModel, ModelMemory
from outrider.models.loading.memory import head_memory
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.fed import FedChains, FedRun, FedTrees
from outrider.runtime.layers import release_linears
from outrider.runtime.run import NativeRun
from outrider.runtime.top_tokens import TopTokens
from outrider.settings import checked, setting
from outrider.trees.plan import TreePlan


@checked()
@dataclass(frozen=True)
class EagleSettings(DraftModelSettings):
    """Which head, and how its guesses branch."""

    head: str = setting("", "folder or GGUF file of the head; the same as --draft")
    bits: int = setting(
        16, "of the head's own layers: 16, as stored; 8 or 4, rounded on loading (native runtime)"
    )

    def __post_init__(self) -> None:
        DraftModelSettings.__post_init__(self)
        if self.bits not in (16, *BITS):
            raise ConfigError(f"an EAGLE head's bits must be 16, 8 or 4, got {self.bits}")


class EagleDrafter(FedTree):
    """The registered "eagle": chains unless the `tree` setting says otherwise."""

    needs = "an EAGLE head trained for the target (--draft FOLDER)"
    trained = True
    Settings = EagleSettings
    kind: Kind = "eagle"

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        outline = load_eagle(head, cls.kind, TargetSizes.of(target_config), outline=True)
        config = outline.config
        return head_memory(
            head,
            outline,
            config.num_layers * config.num_key_value_heads * config.head_dim * 2,
            dtype,
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        settings: EagleSettings = setup.settings
        notes: list[str] = []
        lm = _head_of(setup, cls.kind, notes)
        run = lm.run if isinstance(lm.run, FedRun) else None
        mask_token = _mask_token(lm, notes)
        drafter: FeatureFed
        if settings.tree == "chain":
            chains = FedChains(lm, run, mask_token) if run else None
            drafter = FedChain(lm, chains, settings, mask_token)
        elif mask_token is not None:
            drafter = FedMaskedTree(lm, TreePlan(settings), mask_token)
        else:
            drafter = cls(
                lm,
                TreePlan(settings),
                TopTokens(setup.target.lm.kernels),
                FedTrees(lm, run) if run else None,
            )
        drafter.loading_notes = notes
        return drafter


class Eagle3Drafter(EagleDrafter):
    """The registered "eagle3"."""

    needs = "an EAGLE-3 head trained for the target (--draft FOLDER or GGUF file)"
    kind: Kind = "eagle3"


def _head_of(setup: DraftSetup, kind: Kind, notes: list[str]) -> HeadLM:
    """The head, on the native runtime where the target runs there. Raises CheckpointError when it
    does not fit the target."""
    target = setup.target
    if setup.head is None:
        raise CapabilityError(
            f"drafter '{kind}' needs a head trained for this target: --draft FOLDER"
        )
    head = load_eagle(
        setup.head,
        kind,
        TargetSizes(target.card.hidden_size, target.lm.shape.vocab_size, target.card.num_layers),
    )
    head.to(device=target.lm.device, dtype=target.lm.dtype)
    bind_target(head, target)
    shape = target.lm.shape
    known = head.config.max_position_embeddings
    trained = trained_length(known, head.config.rope)
    window = head_window(setup, kind, trained, setup.head, notes)
    lm = HeadLM(head, shape.vocab_size, shape.context_length, window)
    if window is None:
        notes += context_notes(setup.head, known, shape.context_length)
    bits = setup.settings.bits
    if isinstance(target.lm.run, NativeRun):
        try:
            lm.head = used = head if bits == 16 else _rounded(head, bits)
            lm.run = FedRun(lm, target.lm.run.path)
            release_linears(used)
            return lm
        except NotLoweredError as error:
            lm.head = head
            notes.append(f"the {kind} head runs without the native runtime: {error}")
    elif bits != 16:
        raise CapabilityError(
            f"bits={bits} rounds the head for the native runtime, which does not run this target; "
            "leave it out"
        )
    if can_pack(target.lm.device, target.lm.dtype):
        pack_linears(head)
    return lm


def _mask_token(lm: HeadLM, notes: list[str]) -> int | None:
    """The mask token of a head that drafts in one pass (P-EAGLE), which is then given the feature
    of its masks; None: it drafts token by token."""
    head = lm.head
    assert isinstance(head, EagleHead)
    token = head.config.mask_token
    if head.mask_hidden is None or token is None:
        return None
    with torch.no_grad():
        (lm.mask_feature,) = lm.fused([head.mask_hidden.detach()[None]])
    notes.append(f"the head has mask token {token}: a draft is one pass (P-EAGLE)")
    return token


def _rounded(head: EagleHead, bits: int) -> EagleHead:
    """The head with linear layers of its own in 4 or 8 bits: fewer bytes to read, and drafts need
    not be exact."""
    if head.dtype != torch.bfloat16:
        raise NotLoweredError("weights in 4 and 8 bits multiply bfloat16 there")
    shared = head.output if head.lm_head is None else None
    rounded = with_replaced(
        head,
        lambda part: (
            QuantisedPanels(part, bits, GROUP_SIZES[0])
            if is_linear(part) and part is not shared
            else None
        ),
    )
    assert isinstance(rounded, EagleHead)
    return rounded


def bind_target(head: EagleHead, target: LoadedModel) -> None:
    """Give the head what it shares with the target. Raises CapabilityError where the target's were
    not kept."""
    if head.config.own_embedding and head.config.own_output:
        return
    if target.tables is None:
        raise CapabilityError(
            f"{target.label}: its tables were not kept, but the {head.config.kind} head needs them"
        )
    table = target.tables.embedding.weight
    assert isinstance(table, Tensor)
    head.bind(table, target.tables.output)
