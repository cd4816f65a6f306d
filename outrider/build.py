"""From options to a decoder that has passed every check: names resolved, memory weighed, models
loaded, probed.

Everything that can be refused is refused here, before the first token, in the order that costs the
user least time: names and combinations first, then configs and tokenizers, then memory, then
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from outrider import collector
from outrider.cpus import usable_cpus
from outrider.decode import Decoder
from outrider.demo import demo_head, demo_heads, demo_paths, demo_template
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.drafters.companions import AUTO, KINDS, MODEL, Choice, Target, choose_companion
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.grammar import Grammars
from outrider.loader import ModelLoader, ToLoad
from outrider.models.heads.kinds import head_kind, how_to_draft
from outrider.models.heads.mtp_files import ships_mtp
from outrider.models.heads.on_hub import fetched_head
from outrider.models.loaded import LoadedModel
from outrider.models.loading import hub
from outrider.models.loading.context import shorter_draft
from outrider.models.loading.load import load_config, resolve_device
from outrider.models.loading.memory import MemoryReport
from outrider.models.loading.unsupported import OWN_CACHE_ROUNDS, why_rows_differ
from outrider.models.source import ModelSource, resolve
from outrider.models.tokens.bad_words import BadWordFinder
from outrider.options import DEMO, Needs, Options
from outrider.parts import Parts, choose_parts
from outrider.prefill import PrefillSettings, SparsePrefill
from outrider.rows import RowVerifier
from outrider.settings import parse_settings

REMOTE = "remote"  # the drafter that asks a draft service
# in place of its address: one of this machine, started and ended with the drafter


@dataclass
class Models:
    """Loaded and checked: any number of decoders may take turns on them, as long as their rows have
    left."""

    target: LoadedModel
    draft: LoadedModel | None
    options: Options  # of models and machine, resolved
    memory: MemoryReport
    context: int  # tokens a row may hold, prompt and answer
    notes: list[str]
    prefill: SparsePrefill | None = None  # None: prompts are read whole


@dataclass
class Built:
    """A decoder and what there is to say about it."""

    decoder: Decoder
    target: LoadedModel
    draft: LoadedModel | None
    options: Options  # resolved: no "auto" left
    memory: MemoryReport
    context: int  # tokens a row may hold, prompt and answer
    draws_trees: bool
    notes: list[str] = field(default_factory=list)  # one line each, for a person to read
    takes_prediction: bool = False  # the drafter looks at what rows predict
    prefill: SparsePrefill | None = None  # None: prompts are read whole

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the target's vocabulary."""
        return Grammars(
            self.target.tokenizer, self.target.lm.shape.vocab_size, self.target.eos_token_ids
        )

    @cached_property
    def bad_words(self) -> BadWordFinder:
        """Words that answers may not hold, as tokens of the target."""
        return BadWordFinder(
            self.target.tokenizer, self.target.lm.shape.vocab_size, self.target.label
        )

    @property
    def is_demo(self) -> bool:
        """Whether the target is the embedded one, by whatever name or from whatever folder."""
        return getattr(self.target.tokenizer, "chat_template", None) == demo_template()

    def config(self) -> dict[str, Any]:
        """The resolved options as plain JSON."""
        merged = {}
        for role, model in (("target", self.target), ("draft", self.draft)):
            if model is not None and model.source is not None and model.source.adapter is not None:
                merged[role] = model.source.adapter.facts
        return {
            **asdict(self.options),
            **({"adapters": merged} if merged else {}),
            "exact": self.target.lm.limits.exact_rows
            and (self.target.lm.limits.exact_trees or not self.draws_trees),
            "lossless": self.promises(self.decoder.verifier),
        }

    def promises(self, verifier: RowVerifier) -> bool:
        """Whether a text that this rule verifies follows the target's distribution."""
        return verifier.lossless and self.prefill is None


def build(options: Options, status: Callable[[str], None] = lambda line: None) -> Built:
    """Load and check everything. `status` is called with what takes long, while it happens."""
    options, parts = choose(options)
    return assemble(load_models(options, Needs.of(parts), status), parts)


def choose(options: Options) -> tuple[Options, Parts]:
    """The parts that options ask for, before any model is read; the options with the head's folder
    where its drafter wants it."""
    options, notes = with_found_draft(with_endpoint(options))
    head = head_in(options.draft)
    options = named_drafter(options, head)
    drafter = options.drafter
    parts = choose_parts(
        drafter,
        options.drafter_options,
        options.verifier,
        options.verifier_options,
        options.num_draft_tokens,
        lossy=options.lossy,
    )
    parts = replace(parts, length=parts.length.up_to(options.max_num_seqs), notes=notes)
    required = parts.requirements
    if required.head and required.head_folder is None:
        headed = required.head_part or drafter
        raise ConfigError(
            f"drafter '{headed}' needs a head trained for this target: --draft FOLDER ('outrider "
            "train' makes it)"
        )
    if options.draft is not None and not parts.requirements.draft:
        raise ConfigError(
            f"drafter '{drafter}' uses no draft model, but draft='{options.draft}' was given"
        )
    if parts.requirements.draft and options.draft is not None and head is not None:
        raise ConfigError(
            f"'{options.draft}' is a trained head, not a draft model: "
            f"{how_to_draft(head, options.draft)}"
        )
    if parts.requirements.draft and options.draft is None and options.target != DEMO:
        raise ConfigError(
            f"drafter '{drafter}' needs a draft model: --draft FOLDER_OR_HUB_ID, or --drafter ngram"
        )
    return options, parts


def with_found_draft(options: Options) -> tuple[Options, tuple[str, ...]]:
    """--draft auto, or a head that is named by its hub id, as the folder that it stands for, and
    what to say of it. Raises ConfigError where the drafter that was asked for needs what was not
    found."""
    if options.draft is None or options.draft == DEMO:
        return options, ()
    if options.draft != AUTO:
        return replace(options, draft=fetched_head(options.draft)), ()
    kinds: Collection[str] = KINDS
    if options.drafter != "auto":
        kind: type[Drafter] = DRAFTERS.load(options.drafter)
        settings = parse_settings(
            kind.Settings, options.drafter_options, f"drafter '{options.drafter}'"
        )
        required = kind.requirements(settings)
        if not (required.draft or required.head):
            return options, ()  # refused as any other draft is
        kinds = [required.head_part or options.drafter] if required.head else [MODEL]
    choice = found_companion(options, kinds)
    if choice.kind is None and options.drafter != "auto":
        raise ConfigError(
            f"drafter '{options.drafter}' has nothing to draft with: {'; '.join(choice.notes)}"
        )
    return replace(options, draft=choice.draft), choice.notes


def found_companion(options: Options, kinds: Collection[str] = KINDS) -> Choice:
    """The companion of a target that --draft auto takes, of one of these kinds."""
    if options.target == DEMO:
        return Choice(kind=MODEL, notes=("--draft auto: what comes with the demo drafts",))
    target = Target(
        options.target, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    return choose_companion(target, kinds, device=options.device)


def with_endpoint(options: Options) -> Options:
    """--draft-endpoint as what it stands for: drafter 'remote' and its option `endpoint`. Raises
    ConfigError for two drafters or two addresses."""
    asked = options.draft_endpoint
    given = options.drafter_options.get("endpoint")
    if asked is not None and options.drafter not in ("auto", REMOTE):
        raise ConfigError(
            f"--draft-endpoint has a draft service draft (drafter '{REMOTE}'), but drafter "
            f"'{options.drafter}' was asked for, "
            "too: leave one of them out"
        )
    if asked is not None and given not in (None, asked):
        raise ConfigError(
            f"two draft services were named: --draft-endpoint {asked} and endpoint={given}; give "
            "one"
        )
    if asked is None:
        return options
    drafter_options = {**options.drafter_options, "endpoint": asked}
    return replace(options, drafter=REMOTE, drafter_options=drafter_options)


def named_drafter(options: Options, head: str | None) -> Options:
    """Drafter 'auto' by its name, and the folder of a head that is given as the draft where its
    drafter looks for it. `head`: see `head_in`."""
    drafter = options.drafter if options.drafter != "auto" else _best_drafter(options, head)
    return _with_head(replace(options, drafter=drafter), drafter)


def target_config(options: Options) -> Any:
    """The target's config, read before anything else of it."""
    return load_config(_target_source(options), options.trust_remote_code)


def embedded_heads(target: str, device: str) -> dict[str, str]:
    """Folders of the trained heads that come with a target, by the drafter that drafts with them."""
    if target == DEMO:
        return {name: str(folder) for name, folder in demo_heads().items()}
    return {"mtp": target} if ships_mtp(target, device) else {}


def _set_threads(asked: int | None) -> None:
    """Use as many threads as were asked for; else torch's choice, at most what affinity and a
    container's quota let run."""
    wanted = min(torch.get_num_threads(), usable_cpus()) if asked is None else asked
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


def load_models(
    options: Options, needs: Needs, status: Callable[[str], None] = lambda line: None
) -> Models:
    """Target and, where needed, draft: weighed, loaded, probed, on their runtime. `options` of
    drafting play no part here."""
    with collector.paused():
        return _load_models(options, needs, status)


def _load_models(asked: Options, needs: Needs, status: Callable[[str], None]) -> Models:
    models = _models_to_load(asked, needs)
    sources = [model.source for model in models]
    options = replace(
        asked,
        target=sources[0].name,
        revision=sources[0].revision,
        draft=sources[1].name if len(sources) > 1 else None,
    )
    prefill = options.prefill_settings
    if prefill is not None and prefill.is_early:
        needs = replace(needs, module=True)
    _set_threads(options.threads)
    device = resolve_device(options.device)
    loader = ModelLoader(options, needs, device, status, models)
    memory = loader.weigh()
    status(memory.one_line())
    target = loader.load(models[0])
    loop_vocab = target.lm.shape.vocab_size if needs.loop_lengths else None
    draft = None if len(models) < 2 else loader.load(models[1], loop_vocab)
    context = loader.context(target)
    resolved = loader.resolved(target, context)
    loaded = Models(target, draft, resolved, memory, context, loader.notes)
    if prefill is not None:
        loaded.prefill = _make_prefill(options, prefill, loaded, status)
        loaded.notes.append(loaded.prefill.note)
    return loaded


def _make_prefill(
    options: Options, prefill: PrefillSettings, models: Models, status: Callable[[str], None]
) -> SparsePrefill:
    """The sparse prefill of loaded models, for which another draft may have to be loaded."""
    scorer = models.target
    if not prefill.is_early:
        label = "demo draft" if prefill.draft == DEMO else prefill.draft
        source = model_source(prefill.draft, "draft")
        draft_options = replace(options, target=prefill.draft, revision=None, quantise=None)
        loader = ModelLoader(
            draft_options,
            Needs(module=True),
            models.target.lm.device,
            status,
            [ToLoad(source, label)],
        )
        status(loader.weigh().one_line())
        scorer = loader.load(loader.models[0])
        models.notes.extend(loader.notes)
    return SparsePrefill.of(prefill, models.target, scorer)


def notes_of_drafter(drafter: Drafter, draft: LoadedModel | None, context: int) -> list[str]:
    """Notes on how it works, and how far a draft model drafts where rows may be longer."""
    if draft is None or drafter.longest_text is None:
        return drafter.notes
    return [*drafter.notes, *shorter_draft(drafter.longest_text, context, draft.label)]


def assemble(models: Models, parts: Parts) -> Built:
    """A decoder of these parts on loaded models. Raises what the drafter's own checks raise."""
    target = models.target
    draft = models.draft
    drafter = parts.make_drafter(target, draft if parts.requirements.draft else None)
    if models.prefill is not None:
        models.prefill.check_drafter(parts.requirements, drafter)
    decoder = Decoder(
        target.lm, drafter, parts.make_verifier(), parts.make_control(), parts.length.max_nodes
    )
    decoder.prefill = models.prefill
    notes = [*models.notes, *parts.notes, *notes_of_drafter(drafter, draft, models.context)]
    if not decoder.verifier.lossless:
        notes.append(
            f"verifier '{decoder.verifier.name}' is lossy: the text is not the one that the model "
            "alone would emit"
        )
    if not target.lm.limits.exact_rows:
        why = (
            OWN_CACHE_ROUNDS
            if target.lm.why_own_cache
            else why_rows_differ(target.card, target.lm.device)
        )
        notes.append(f"exact up to rounding here, not to the bit: {why}")
    if parts.requirements.trees and not target.lm.limits.exact_trees:
        notes.append(
            "trees are exact up to rounding here, not to the bit (--runtime native makes them so)"
        )
    options = replace(
        models.options,
        drafter=parts.drafter_name,
        num_draft_tokens=parts.length.asked,
        drafter_options=asdict(parts.drafter_settings),
        verifier=parts.verifier.name,
        verifier_options=asdict(parts.verifier_settings),
    )
    return Built(
        decoder,
        target,
        draft,
        options,
        models.memory,
        models.context,
        parts.requirements.trees,
        notes,
        parts.requirements.prediction,
        models.prefill,
    )


def _with_head(options: Options, drafter: str) -> Options:
    """--draft names the folder of the head for a drafter that needs one; from here on it is that
    drafter's option `head`."""
    kind: type[Drafter] = DRAFTERS.load(drafter)
    required = kind.requirements(
        parse_settings(kind.Settings, options.drafter_options, f"drafter '{drafter}'")
    )
    if not required.head:
        return options
    part = required.head_part or drafter
    named = required.head_folder
    if options.draft is None:
        embedded = _head_that_comes(options.target, part) if named is None else None
        if embedded is None:
            return options
        return replace(
            options, drafter_options=kind.with_head(options.drafter_options, part, str(embedded))
        )
    if named not in (None, options.draft):
        raise ConfigError(
            f"two heads were named: --draft {options.draft} and head={named}; give one"
        )
    return replace(
        options,
        draft=None,
        drafter_options=kind.with_head(options.drafter_options, part, options.draft),
    )


def _head_that_comes(target: str, part: str) -> Path | str | None:
    """The path of the head for drafter `part` that comes with a target; None: none does."""
    if DRAFTERS.load(part).requires.head_in_target:
        return demo_paths().target if target == DEMO else target
    return demo_head(part) if target == DEMO else None


def _best_drafter(options: Options, head: str | None) -> str:
    """The drafter that 'auto' chooses: one for the head that --draft names, a draft model where
    there is one, the MTP head in the target's checkpoint, else suffix decoding.
    """
    if head is not None and head in DRAFTERS.names() and DRAFTERS.load(head).requires.head:
        return head
    if options.draft is not None or options.target == DEMO:
        return "draft-model"
    return "mtp" if ships_mtp(options.target, options.device) else "suffix"


def head_in(draft: str | None) -> str | None:
    """The kind of trained head in the folder or GGUF file that --draft names. None: no head,
    nothing there, or a damaged one, which loading reports in full.
    """
    if draft is None or draft == DEMO or not Path(draft).exists():
        return None
    try:
        return head_kind(resolve(draft))
    except (CheckpointError, CapabilityError):
        return None


def _models_to_load(options: Options, needs: Needs) -> list[ToLoad]:
    """The target and its draft by their files; of the demo the draft joins whenever a drafter wants
    one."""
    models = [ToLoad(_target_source(options), options.target, quantise=options.quantise)]
    if options.draft == DEMO or (options.target == DEMO and options.draft is None and needs.draft):
        models.append(
            ToLoad(model_source(DEMO, "draft"), options.draft or "demo draft", is_target=False)
        )
    elif options.draft is not None:
        label = hub.called(options.draft)
        models.append(ToLoad(resolve(options.draft), label, is_target=False))
    return models


def _target_source(options: Options) -> ModelSource:
    """The target's files. Raises ConfigError for the revision of a model that is not on the hub."""
    if options.revision is not None and (options.target == DEMO or Path(options.target).exists()):
        kind = "file" if Path(options.target).is_file() else "folder"
        raise ConfigError(
            f"revision '{options.revision}' names a version on the hub, but '{options.target}' is "
            f"a local {kind}. Leave it out."
        )
    return model_source(options.target, "target", options.revision)


def model_source(
    name: str, role: Literal["target", "draft"], revision: str | None = None
) -> ModelSource:
    """A model's files; 'demo' is the model of this role of the embedded pair. Raises what `resolve`
    raises."""
    return resolve(str(getattr(demo_paths(), role)) if name == DEMO else name, revision)
