"""From settings to engines that run and were tried."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outrider.engine.engine import Engine, make_engine
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.served import Serves
from outrider.serve.settings import ServedModel, ServerSettings

log = logging.getLogger("outrider.serve")


def load_engines(settings: ServerSettings, monitoring: Monitoring, status: Callable[[str], None]) -> list[Serves]:
    """Load and start engines, one after another. `status` is called with what takes long.

    Raises what `make_engine` raises; then none is left running.
    """
    started: list[Engine] = []
    try:
        return [_load(model, settings, monitoring, status, started) for model in settings.models]
    except BaseException:
        for engine in started:
            engine.stop()
        raise


def _load(
    model: ServedModel, settings: ServerSettings, monitoring: Monitoring, status: Callable[[str], None], started: list[Engine]
) -> Serves:
    engine = make_engine(
        model.options, model.engine, extra_drafters=model.extra_drafters, allow_lossy=model.allow_lossy,
        observer=monitoring.observer(model.name), name=model.name, generation_config=model.generation_config, status=status,
    )  # fmt: skip
    engine.start()
    started.append(engine)
    for note in engine.notes:
        log.info("%s: %s", model.name, note)
    return monitoring.ready(engine, test=settings.self_test, facts=engine.facts, status=status)
