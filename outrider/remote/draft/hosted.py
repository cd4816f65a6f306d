"""The draft model that a service hosts: refused, loaded and checked in that order.

A target is somewhere else. Only its tokenizer and its config are read, where it is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.demo import demo_paths
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.draft_tree import DraftModelSettings, TreeModelDrafter
from outrider.drafters.programs import loop_of
from outrider.drafters.window import windowed_draft
from outrider.errors import CapabilityError, ConfigError
from outrider.loader import ModelLoader, ToLoad
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import load_config, load_tokenizer, resolve_device, resolve_dtype
from outrider.models.loading.memory import estimate_memory
from outrider.models.loading.read_card import card_of
from outrider.models.source import resolve
from outrider.models.tokens.vocabulary import check_same_vocabulary
from outrider.options import DEMO, Needs, Options, Runtime
from outrider.remote.draft.host import ModelHost
from outrider.remote.identity import model_identity
from outrider.remote.protocol import messages
from outrider.settings import checked, parse_settings


@checked()
@dataclass(frozen=True, kw_only=True)
class HostedDrafterOptions:
    """The draft model that a service hosts, and how it drafts. Raises ConfigError for what cannot
    be."""

    draft: str | None = None  # the draft model
    model: str | None = None  # whose tokens are drafted: the target; its weights are not read
    drafter_options: dict[str, Any] = field(default_factory=dict)  # of drafter 'draft-model'
    max_draft_tokens: int = 8
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    runtime: Runtime = "auto"
    max_model_len: int | None = None  # longest text; None: as the models have it
    revision: str | None = None  # of the target
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.draft is None:
            raise ConfigError(
                "a draft service needs a draft model: outrider service draft MODEL, a folder, a "
                "hub id or demo"
            )
        if self.drafter_settings.tree != "chain":
            raise ConfigError("a draft service drafts chains: leave out the drafter's 'tree'")
        if self.revision is not None and self.model is None:
            raise ConfigError("a revision is the target's: name it with --model TARGET")

    @property
    def drafter_settings(self) -> DraftModelSettings:
        """The options of its drafter. Raises ConfigError for unknown ones."""
        settings: DraftModelSettings = parse_settings(
            DraftModelSettings, self.drafter_options, "drafter 'draft-model'"
        )
        return settings


@dataclass(frozen=True)
class HostedDrafter:
    """A draft model ready to work for askers."""

    host: ModelHost
    identity: messages.ModelIdentity
    vocab_size: int
    max_context: int  # tokens of a text
    notes: list[str]


def load_drafter(
    options: HostedDrafterOptions, status: Callable[[str], None] = lambda line: None
) -> HostedDrafter:
    """Load and build. Raises what loading a model raises, and CapabilityError for a model that
    cannot be shared out."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    draft, notes = _load_draft(options, resolve_device(options.device), status)
    if not draft.lm.kv.by_position:
        raise CapabilityError(
            f"'{draft.name}' keeps running states, not only keys and values of each token, and a "
            "draft service shares out rows "
            "of those. Draft with it alongside the target (--draft), or give the service another model"
        )
    name = draft.name
    tokenizer = draft.tokenizer
    card = draft.card
    vocab_size = draft.lm.shape.vocab_size
    if options.model is not None:
        name = str(demo_paths().target) if options.model == DEMO else options.model
        source = resolve(name, options.revision)
        card = card_of(load_config(source, options.trust_remote_code))
        tokenizer = load_tokenizer(source, options.trust_remote_code)
        vocab_size = card.vocab_size
    if draft.draft_loop is not None:
        vocab_size = draft.card.vocab_size  # as its drafting loop picks tokens
    if tokenizer is None:
        raise ConfigError(
            f"'{name}' has no tokenizer, so nobody can compare its tokens with an asker's"
        )
    if options.model is not None and draft.tokenizer is not None:
        check_same_vocabulary(tokenizer, draft.tokenizer, name, draft.label, may_lack=True)
    context = card.usable_context
    if options.max_model_len is not None:
        context = min(context, options.max_model_len)
    settings = options.drafter_settings
    draft, window_notes = windowed_draft(draft, settings.window, context, options.max_draft_tokens)
    context = min(context, draft.lm.shape.context_length)
    drafter = ModelDrafter(draft.lm, loop_of(draft, vocab_size), settings, draft.mask_token)
    drafter.loading_notes = window_notes
    return HostedDrafter(
        host=ModelHost(drafter, vocab_size),
        identity=model_identity(options.model or options.draft or "", tokenizer, vocab_size),
        vocab_size=vocab_size,
        max_context=context,
        notes=[*notes, *drafter.notes],
    )


def _load_draft(
    options: HostedDrafterOptions, device: torch.device, status: Callable[[str], None]
) -> tuple[LoadedModel, list[str]]:
    """The draft model as it is loaded alongside a target: weighed, probed, on the runtime that was
    asked for."""
    assert options.draft is not None
    name = str(demo_paths().draft) if options.draft == DEMO else options.draft
    elsewhere = Options(
        target="the target, elsewhere",
        draft=name,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        runtime=options.runtime,
        trust_remote_code=options.trust_remote_code,
    )
    source = resolve(name)
    config = load_config(source, options.trust_remote_code)
    dtype = resolve_dtype(options.dtype, config, device)
    memory = estimate_memory(
        [source], [config], dtype=dtype, device=device, num_rows=1, packed=device.type == "cpu"
    )
    status(memory.one_line())
    required = TreeModelDrafter.requirements(options.drafter_settings)
    lengths = required.loop_lengths(options.max_draft_tokens, any_length=True)
    draft = ToLoad(source, options.draft, is_target=False)
    loader = ModelLoader(
        elsewhere, Needs(draft=True, loop_lengths=lengths), device, status, [draft]
    )
    loaded = loader.load(draft, config.get_text_config().vocab_size if lengths else None)
    return loaded, loader.notes
