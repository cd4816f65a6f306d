"""From options to an engine that is ready to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.build import Needs, Options, choose, load_models
from outrider.engine.engine import Engine
from outrider.engine.lineup import Lineup
from outrider.engine.observer import Observer
from outrider.engine.settings import EngineSettings
from outrider.parts import choose_parts


def make_engine(
    options: Options, settings: EngineSettings | None = None, *, extra_drafters: Sequence[str] = (),
    allow_lossy: Sequence[str] = (), observer: Observer | None = None, name: str | None = None,
    status: Callable[[str], None] = lambda line: None,
) -> Engine:  # fmt: skip
    """Load models and parts, and time steps where the draft length is chosen by load.

    `extra_drafters`: more that requests may name; `allow_lossy`: lossy verifiers they may ask for.

    Raises what `outrider.build.build` raises.
    """
    settings = settings or EngineSettings()
    options = replace(options, max_num_seqs=settings.max_num_seqs)
    options, main = choose(options)
    parts = {main.drafter_name: main}
    for extra in extra_drafters:
        parts.setdefault(extra, choose_parts(extra, {}, "auto", {}, None, lossy=False))
    needs = Needs.of(main) if len(parts) == 1 else Needs.of_all(list(parts.values()))  # alone it may have a longer loop
    models = load_models(options, needs, status)
    lineup = Lineup(models, parts, allow_lossy)
    engine = Engine(name or options.target, lineup, settings, observer)
    engine.calibrate(status)
    return engine
