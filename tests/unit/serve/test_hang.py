"""/health of a real engine whose thread is stuck in a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.build import Options
from outrider.engine.batch import Batch
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings, Request, Update
from outrider.sampling.params import SamplingParams
from outrider.serve.app import make_app
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.served_app import error_of

LIMIT_S = 1.0
WAIT_S = 60.0


def until(reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.slow
def test_a_step_that_hangs_fails_health_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a server that reports health while nothing is answered, and one that is restarted for
    being idle."""
    target = save_checkpoint(tmp_path / "target", tiny_llama(257), byte_tokenizer())
    options = Options(target=str(target), drafter="ngram")
    engine = make_engine(options, EngineSettings(kv_memory=64 << 20), name="tiny")
    engine.start()
    state = ServerState(
        ServerSettings(models=(ServedModel(name="tiny", options=options),), hang_timeout_s=LIMIT_S)
    )
    state.metrics.watch(engine)
    state.serve([engine], created=1)
    stuck = threading.Event()
    free = threading.Event()
    over = threading.Event()
    step = Batch.step

    def blocked(batch: Batch, drafts: Any) -> Any:
        stuck.set()
        assert free.wait(WAIT_S)
        return step(batch, drafts)

    def listen(update: Update) -> None:
        if update.finish is not None:
            over.set()

    monkeypatch.setattr(Batch, "step", blocked)
    with TestClient(make_app(state)) as client:

        def statuses() -> list[int]:
            return [client.get(path).status_code for path in ("/health", "/ready")]

        assert statuses() == [200, 200]
        try:
            engine.submit(
                Request(
                    id="r", prompt=[5, 6, 7], params=SamplingParams(max_tokens=4, ignore_eos=True)
                ),
                listen,
            )
            assert stuck.wait(WAIT_S)
            assert client.get("/health").status_code == 200
            until(lambda: statuses() == [503, 503])
            error = error_of(client.get("/health"), 503)
            assert error["code"] == "engine_hung"
            assert "'tiny' has work" in error["message"]
            lines = client.get("/metrics").text.splitlines()
            (age,) = (
                line
                for line in lines
                if line.startswith('outrider:engine_turn_age_seconds{model_name="tiny"}')
            )
            assert float(age.split()[-1]) > LIMIT_S
            assert client.get("/v1/models").status_code == 200
        finally:
            free.set()
        until(lambda: statuses() == [200, 200])
        assert over.wait(WAIT_S)
        time.sleep(1.5 * LIMIT_S)  # idle
        assert statuses() == [200, 200]
    engine.stop()
    engine.check_integrity()
