"""From options to an engine that is ready to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.build import DEMO, Needs, Options, choose, load_models, named_drafter
from outrider.engine.drafter_pool import DrafterPool, lossy_verifier
from outrider.engine.engine import Engine
from outrider.engine.observer import Observer
from outrider.engine.request import EngineSettings
from outrider.errors import CapabilityError, ConfigError
from outrider.models.generation_config import checked_choice, sampling_defaults
from outrider.parts import Parts, choose_parts


def make_engine(
    options: Options, settings: EngineSettings | None = None, *, extra_drafters: Sequence[str] = (),
    allow_lossy: Sequence[str] = (), observer: Observer | None = None, name: str | None = None, generation_config: str = "auto",
    status: Callable[[str], None] = lambda line: None,
) -> Engine:  # fmt: skip
    """Load models and parts, and time steps where the draft length is chosen by load.

    `extra_drafters`: more that requests may name; `allow_lossy`: lossy verifiers they may ask for; `generation_config`: where
    sampling defaults come from.

    Raises what `outrider.build.build` raises.
    """
    settings = settings or EngineSettings()
    checked_choice(generation_config)
    options = replace(options, max_num_seqs=settings.max_num_seqs)
    options, main = choose(options)
    parts = {main.drafter_name: main}
    for extra in extra_drafters:
        own = named_drafter(replace(options, drafter=extra, drafter_options={}, draft=None), None).drafter_options
        parts.setdefault(extra, choose_parts(extra, own, "auto", {}, None, lossy=False))
    _check(options, parts, allow_lossy)
    needs = Needs.of(main) if len(parts) == 1 else Needs.of_all(list(parts.values()))  # alone it may have a longer loop
    models = load_models(options, needs, status)
    drafter_pool = DrafterPool(models, parts, allow_lossy)
    defaults = sampling_defaults(generation_config, models.target, models.context)
    engine = Engine(name or options.target, drafter_pool, settings, observer, defaults)
    engine.calibrate(status)
    return engine


def _check(options: Options, parts: Mapping[str, Parts], allow_lossy: Sequence[str]) -> None:
    """What can be refused before any model is read. `parts`: the server's own drafter first. Raises ConfigError for a drafter
    that lacks what only the first one can be given, CapabilityError where the verifier that was asked for does not take all."""
    for name in allow_lossy:
        lossy_verifier(name)
    (first, main), *others = parts.items()
    for name, one in others:
        lacks_draft = one.wants_draft and options.draft is None and options.target != DEMO
        lacks_head = one.drafter.needs_head and not (one.drafter.head_in_target or one.head)
        if lacks_head or lacks_draft:
            what = "a draft model" if lacks_draft else "a trained head"
            raise ConfigError(
                f"extra drafter '{name}' needs {what}, which only a server's first drafter can be given: "
                f"--drafter {name} --draft FOLDER, with '{first}' as the extra one"
            )
        if one.draws_trees and main.verifier.shape != "tree" and options.verifier != "auto":
            raise CapabilityError(
                f"verifier '{options.verifier}' takes chains, but extra drafter '{name}' drafts trees: leave one of them out"
            )
