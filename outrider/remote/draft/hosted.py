"""Turns names and options into a drafter that works without a target: refused, loaded and checked
in that order.

A drafter is built for a target. Here a stand-in takes its place, with what look-ups and draft
models need: a tokenizer, the width of the vocabulary, a device. A drafter that needs more must run
in the target's process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.demo import demo_paths
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.composite_settings import CompositeSettings
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.draft_tree import TreeModelDrafter
from outrider.errors import CapabilityError, ConfigError
from outrider.loader import ModelLoader, ToLoad
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import load_config, load_tokenizer, resolve_device, resolve_dtype
from outrider.models.loading.memory import estimate_memory
from outrider.models.loading.read_card import card_of
from outrider.models.source import resolve
from outrider.options import DEMO, Needs, Options, Runtime
from outrider.parts import Parts, choose_parts
from outrider.remote.draft.host import GeneralHost
from outrider.remote.draft.model_host import ModelHost
from outrider.remote.identity import model_identity
from outrider.remote.protocol import messages
from outrider.settings import checked, parse_settings

WORKS = "draft-model, universal, ngram, suffix, ngram-cache, retrieval, or a composite of these"
ELSEWHERE = {
    "none": "drafts nothing",
    "recycling": "learns from the target's logits of every pass",
    "lookahead": "makes its guesses in the target's own passes",
    "prediction": "drafts from what a request expects, which only the target's process knows",
}


@checked()
@dataclass(frozen=True, kw_only=True)
class HostedDrafterOptions:
    """Which drafter a service hosts."""

    model: str | None = None  # whose tokens are drafted: the target; its weights are not read
    draft: str | None = None  # the draft model
    drafter: str = "draft-model"
    drafter_options: dict[str, Any] = field(default_factory=dict)
    max_draft_tokens: int = 8
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    runtime: Runtime = "auto"
    max_model_len: int | None = None  # longest text; None: as the models have it
    revision: str | None = None  # of the target
    trust_remote_code: bool = False


@dataclass(frozen=True)
class HostedDrafter:
    """A drafter ready to work for askers."""

    name: str
    host: ModelHost | GeneralHost
    identity: messages.ModelIdentity
    vocab_size: int
    max_context: int  # tokens of a text
    has_distributions: bool
    notes: list[str]


class StandIn:
    """A target that is somewhere else. Raises CapabilityError when it is asked for what only a real
    one has."""

    def __init__(self, what: str, **known: Any) -> None:
        self.__dict__.update(known)
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CapabilityError(
            f"this drafter needs the {self._what}'s '{name}', which a draft service does not "
            f"have. Use {WORKS}"
        )


def chosen_parts(options: HostedDrafterOptions) -> Parts:
    """The drafter by name, before anything is loaded. Raises ConfigError or CapabilityError with
    what would work."""
    name = options.drafter
    _refuse_by_name(name)
    parts = choose_parts(
        name, options.drafter_options, "auto", {}, options.max_draft_tokens, lossy=False
    )
    settings = parts.drafter_settings
    required = parts.requirements
    if isinstance(settings, CompositeSettings):
        for part in settings.names():
            _refuse_by_name(part)
        if settings.mode == "best" and required.draft:
            raise CapabilityError(
                "a composite with mode=best weighs a model's time against the target's pass, "
                "which is elsewhere. Use mode=merge"
            )
    if required.head or required.heads:
        raise CapabilityError(
            f"drafter '{name}' drafts from the target's hidden states, which stay in its process. "
            f"Use {WORKS}"
        )
    if required.module:
        raise CapabilityError(f"drafter '{name}' runs on the target's own weights. Use {WORKS}")
    if name == "draft-model" and required.trees:
        raise ConfigError(
            "a draft service drafts chains with a model: leave out the drafter's 'tree'"
        )
    if required.draft and options.draft is None:
        raise ConfigError(
            f"drafter '{name}' needs a draft model: outrider service draft MODEL, a folder, a hub "
            "id or demo"
        )
    if options.draft is not None and not required.draft:
        raise ConfigError(
            f"drafter '{name}' uses no draft model, but '{options.draft}' was given as one"
        )
    if options.model is None and name != "draft-model":
        raise ConfigError(
            f"drafter '{name}' needs to know whose tokens it drafts: --model TARGET (only its "
            "tokenizer is read)"
        )
    if options.revision is not None and options.model is None:
        raise ConfigError("a revision is the target's: name it with --model TARGET")
    return parts


def wants_draft(drafter: str, drafter_options: dict[str, Any]) -> bool:
    """Whether this drafter has a draft model. Raises ConfigError for unknown names and options."""
    kind: type[Drafter] = DRAFTERS.load(drafter)
    return kind.requirements(
        parse_settings(kind.Settings, drafter_options, f"drafter '{drafter}'")
    ).draft


def _refuse_by_name(name: str) -> None:
    if name in ELSEWHERE:
        raise CapabilityError(
            f"drafter '{name}' {ELSEWHERE[name]}, so no service can host it. Use {WORKS}"
        )


def load_drafter(
    options: HostedDrafterOptions, status: Callable[[str], None] = lambda line: None
) -> HostedDrafter:
    """Load and build. Raises what loading a model raises, and CapabilityError for a drafter that
    needs its target."""
    parts = chosen_parts(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    loaded, notes = (
        _load_draft(options, parts, device, status) if options.draft is not None else (None, [])
    )
    if loaded is not None and not loaded.lm.kv.by_position:
        raise CapabilityError(
            f"'{loaded.name}' keeps running states, not only keys and values of each token, and a "
            "draft service shares out rows "
            "of those. Draft with it alongside the target (--draft), or give the service another model"
        )
    target, vocab_size, context = _target(options, loaded, device)
    setup = DraftSetup(target, loaded, options.max_draft_tokens, parts.drafter_settings)
    drafter: Drafter = parts.drafter.build(setup)
    drafter.name = parts.drafter_name
    if drafter.signals:
        raise CapabilityError(
            f"drafter '{parts.drafter_name}' wants the target's hidden states. Use {WORKS}"
        )
    lm = None if loaded is None else loaded.lm
    host: ModelHost | GeneralHost
    if isinstance(drafter, ModelDrafter) and not isinstance(drafter, TreeModelDrafter):
        host = ModelHost(drafter, vocab_size)
    else:
        host = GeneralHost(drafter, vocab_size, device, lm)
    name = options.model or options.draft or ""
    identity = model_identity(name, target.tokenizer, vocab_size)
    notes = [*notes, *drafter.notes]
    return HostedDrafter(
        parts.drafter_name, host, identity, vocab_size, context, loaded is not None, notes
    )


def _load_draft(
    options: HostedDrafterOptions, parts: Parts, device: torch.device, status: Callable[[str], None]
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
    lengths = parts.requirements.loop_lengths(options.max_draft_tokens, any_length=True)
    draft = ToLoad(source, options.draft, is_target=False)
    loader = ModelLoader(
        elsewhere, Needs(draft=True, loop_lengths=lengths), device, status, [draft]
    )
    loaded = loader.load(draft, config.get_text_config().vocab_size if lengths else None)
    return loaded, loader.notes


def _target(
    options: HostedDrafterOptions, draft: LoadedModel | None, device: torch.device
) -> tuple[Any, int, int]:
    """The target's stand-in, the width of the drafts' distributions, and the longest text."""
    if options.model is None:
        assert draft is not None
        name = draft.name
        tokenizer = draft.tokenizer
        card = draft.card
        vocab_size = draft.lm.shape.vocab_size
    else:
        name = str(demo_paths().target) if options.model == DEMO else options.model
        source = resolve(name, options.revision)
        card = card_of(load_config(source, options.trust_remote_code))
        tokenizer = load_tokenizer(source, options.trust_remote_code)
        vocab_size = card.vocab_size
    if draft is not None and draft.draft_loop is not None:
        vocab_size = draft.card.vocab_size  # as its drafting loop picks tokens
    if tokenizer is None:
        raise ConfigError(
            f"'{name}' has no tokenizer, so nobody can compare its tokens with an asker's"
        )
    context = card.usable_context
    if draft is not None and options.drafter != "universal":
        context = min(context, draft.lm.shape.context_length)
    if options.max_model_len is not None:
        context = min(context, options.max_model_len)
    shape = StandIn("target model", vocab_size=vocab_size, context_length=context)
    lm = StandIn("target model", shape=shape, device=device)
    return (
        StandIn("target", name=name, label=name, tokenizer=tokenizer, card=card, lm=lm),
        vocab_size,
        context,
    )
