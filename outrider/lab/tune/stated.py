"""Advice from a settings file: how to draft, what to take where an engine lacks that, and nothing measured beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.build import DEMO, Options, head_in, named_drafter
from outrider.errors import ConfigError
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.tune.drafts import read_drafts
from outrider.lab.tune.engine_advice import TRAINED, EngineAdvice, EngineChoice, head_folder
from outrider.lab.tune.space import TrainedHead
from outrider.settings_file import SettingsFile


def stated(settings: SettingsFile, temperature: float = 0.0) -> EngineAdvice:
    """The `options` of a settings file; `temperature` is what requests sample at, which such files do not say. Raises ConfigError
    for options that name nothing we have."""
    everything = [_named(settings.target, options) for options in (settings.options, *settings.next_best)]
    draft = next((options.draft for options in everything if options.draft), DEMO if settings.target == DEMO else None)
    first, *others = map(_choice, everything)
    return EngineAdvice(
        settings.target, draft, temperature > 0, first.configuration, settings.why or f"the settings say drafter '{PLAIN}'",
        [first, *(replace(other, about="the next best that tune found") for other in others)],
        lambda one: _head(settings.target, one), is_stated=True,
    )  # fmt: skip


def _named(target: str, given: dict[str, Any]) -> Options:
    """Options of a settings file, with the drafter that 'auto' stands for."""
    options = Options(target, **given)
    return named_drafter(options, head_in(options.draft))


def _choice(options: Options) -> EngineChoice:
    configuration = Configuration(
        options.drafter, options.num_draft_tokens, options.drafter_options, options.verifier, options.verifier_options
    )
    length = configuration.parts().length
    schedule = [pair for pair in length.by_rows if pair[0] == 1 or pair[1] < length.max_nodes] or [(1, length.max_nodes)]
    about = f"The settings leave the draft length open; it wants a number: {length.max_nodes}, their maximum."
    return EngineChoice(configuration, length.max_nodes, schedule, about if length.is_auto else "")


def _head(target: str, configuration: Configuration) -> TrainedHead | None:
    """What is known of the trained head that drafts; of a block head more than its kind is needed. Raises ConfigError for one
    that cannot be read here."""
    kind, folder = configuration.drafter, head_folder(configuration)
    if kind not in TRAINED:
        return None
    if kind != "block":
        return TrainedHead(kind=kind, folder=folder)
    found = read_drafts(Options(target), [folder] if folder else []).heads
    named = next((one for one in found if one.kind == kind and one.folder == folder), None)
    if named is None:
        raise ConfigError(f"the block head '{folder}' cannot be read here, so nobody knows how long its blocks are")
    return named
