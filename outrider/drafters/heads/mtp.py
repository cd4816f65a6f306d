"""The multi-token-prediction head that ships inside a checkpoint drafts chains or trees
(`models/heads/mtp.py`).

It needs no --draft: its tensors are read from the target's own folder or GGUF file, or from another
one (`head`). How it is fed the target's hidden states, and what its cache may hold:
`feature_fed.py`. A head of one layer is applied again and again, taking its own state back; one of
several layers drafts a token with each (`MtpTurnsLM`). Gemma 4's is a checkpoint of its own
(`assistant.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.heads.assistant import AssistantDrafter
from outrider.drafters.heads.feature_fed import FeatureFed, FedChain, FedTree
from outrider.drafters.model.draft_tree import DraftModelSettings
from outrider.drafters.requirements import Requirements, context_notes
from outrider.drafters.window import head_window, trained_length
from outrider.errors import CapabilityError
from outrider.models.heads.assistant import is_assistant
from outrider.models.heads.head_lm import HeadLM
from outrider.models.heads.mtp import MtpHead, MtpTurnsLM
from outrider.models.heads.mtp_files import load_mtp, weigh_mtp
from outrider.models.linear.pack import can_pack, pack_linears
from outrider.models.lm import LM
from outrider.models.loaded import ModelMemory
from outrider.models.source import resolve
from outrider.runtime import block_packing
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.fed import FedChains, FedRun, FedTrees
from outrider.runtime.layers import layer_kernels, release_linears
from outrider.runtime.run import NativeRun
from outrider.runtime.top_tokens import TopTokens
from outrider.settings import checked, setting
from outrider.trees.plan import TreePlan


@checked()
@dataclass(frozen=True)
class MtpSettings(DraftModelSettings):
    """The path of the head, and how its guesses branch."""

    head: str = setting("", "folder or GGUF file of the head; else the target's own checkpoint")


class MtpDrafter(FedTree):
    """The registered "mtp": chains unless the `tree` setting says otherwise."""

    needs = "a target whose checkpoint has an MTP head, or --draft FOLDER or GGUF file of one"
    requires = Requirements(head=True, head_in_target=True)
    Settings = MtpSettings

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        return weigh_mtp(resolve(head), target_config, dtype)

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        target = setup.target
        settings = setup.settings
        lm = target.lm
        source = resolve(setup.head) if setup.head else target.source
        if source is None:
            raise CapabilityError(
                f"{target.label}: its files are not known, and drafter 'mtp' reads its head from "
                "them"
            )
        if is_assistant(source):
            return AssistantDrafter.of(source, setup)
        head = load_mtp(source, target.config, lm.dtype, lm.device, block_packing.pack)
        if target.tables is None:
            raise CapabilityError(
                f"{target.label}: its tables were not kept, but the MTP head needs them"
            )
        head.bind(target.tables.embedding, target.tables.output)
        turns = len(head.layers) > 1
        if settings.tree != "chain" and turns:
            raise CapabilityError(
                f"an MTP head of {len(head.layers)} layers drafts chains: leave "
                f"tree={settings.tree} out"
            )
        notes: list[str] = []
        known = head.config.max_position_embeddings
        window = _window(setup, head, source.name, notes)
        head_lm = (MtpTurnsLM if turns else HeadLM)(
            head, lm.shape.vocab_size, lm.shape.context_length, window
        )
        layers = f", {len(head.layers)} layers that draft a token each" if turns else ""
        notes.insert(
            0, f"the MTP head of '{source.name}' drafts ({head.config.layout} layout{layers})"
        )
        if window is None:
            notes += context_notes(source.name, known, lm.shape.context_length)
        run = _on_runtime(head_lm, head, lm, notes)
        if settings.tree != "chain":
            drafter: FeatureFed = cls(
                head_lm,
                TreePlan(settings),
                TopTokens(lm.kernels),
                FedTrees(head_lm, run) if run else None,
            )
        else:
            drafter = FedChain(head_lm, FedChains(head_lm, run) if run else None, settings)
        drafter.loading_notes = notes
        return drafter


def _window(setup: DraftSetup, head: MtpHead, name: str, notes: list[str]) -> int | None:
    """The positions that the head's layers see; None: all, or as they see themselves. Raises
    CapabilityError for a head that cannot have a window."""
    if setup.settings.window != 0 and any(shape.is_indexer for shape in head.layer_shapes):
        raise CapabilityError(
            f"the MTP head of '{name}' takes no window: its indexer chooses the positions that it "
            "sees. Leave window out."
        )
    target = setup.target.card
    known = head.config.max_position_embeddings or target.context_length or None
    return head_window(setup, "mtp", trained_length(known, target.values), name, notes)


def _on_runtime(head_lm: HeadLM, head: MtpHead, target: LM, notes: list[str]) -> FedRun | None:
    """The head's passes on the native runtime, where the target runs there."""
    if isinstance(target.run, NativeRun):
        try:
            head_lm.run = run = FedRun(head_lm, target.run.path)
            release_linears(head)
            return run
        except NotLoweredError as error:
            notes.append(f"the MTP head runs without the native runtime: {error}")
    if (kernels := layer_kernels(target.device, target.dtype)) is not None:
        kernels(head)
    if can_pack(target.device, target.dtype):
        pack_linears(head)
    return None
