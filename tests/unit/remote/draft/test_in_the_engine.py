"""The engine with a draft service: started without one, its control, its counters in /metrics."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.build import Options
from outrider.draft_length import AutoLength
from outrider.engine import step_costs
from outrider.engine.engine import Engine, make_engine
from outrider.engine.observer import EngineSnapshot
from outrider.engine.request import EngineSettings, Request
from outrider.remote.protocol import messages
from outrider.sampling.params import SamplingParams
from outrider.serve.observability.metrics_families import of_snapshots
from outrider.step import StepFacts
from tests.draft_service import FakeDraftService, Known
from tests.unit.remote.conftest import PROMPTS, Demo, drafter_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_pauses")]

SETTINGS = EngineSettings(max_num_seqs=2)


def opened(address: str, k: int | str = 4) -> Engine:
    engine = make_engine(
        Options("demo", draft_endpoint=address, num_draft_tokens=k, threads=1),
        settings=SETTINGS,
    )
    engine.start()
    return engine


def answer(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """One greedy answer."""
    updates: queue.Queue[object] = queue.Queue()
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    engine.submit(Request(id="r", prompt=prompt, params=params), updates.put)
    emitted: list[int] = []
    while True:
        update = updates.get(timeout=120)
        emitted += update.token_ids  # type: ignore[attr-defined]
        if update.finish is not None:  # type: ignore[attr-defined]
            return emitted


def test_it_starts_without_a_service(
    demo: Demo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing steps beforehand included, of which nothing is kept: tomorrow the line is another one."""
    monkeypatch.setattr(step_costs.StepTimes, "save", lambda self: pytest.fail("kept"))
    monkeypatch.setattr(step_costs.StepTimes, "load", lambda facts: pytest.fail("loaded"))
    engine = opened(f"unix:{folder}/nobody.sock", "auto:4")
    try:
        assert any("does not answer" in note for note in engine.notes)
        text = demo.plain["greedy"][0]
        prompt = text[:-28]
        assert answer(engine, prompt, 28) == text[-28:]
        assert engine.snapshot().drafter["remote_draft_troubles/unreachable"] >= 1
        assert isinstance(engine._batch.control, AutoLength)
    finally:
        engine.stop()


def test_counters_reach_the_metrics(demo: Demo, folder: Path, patient: None) -> None:
    """Under their public names, troubles by reason."""
    with FakeDraftService(folder, Known(demo.plain["greedy"])) as service:
        engine = opened(service.address)
        try:
            text = demo.plain["greedy"][0]
            assert answer(engine, text[:-28], 28) == text[-28:]
            snapshot = engine.snapshot()
        finally:
            engine.stop()
    assert snapshot.drafter["remote_draft_hits"] + snapshot.drafter["remote_draft_waits"] > 3
    shown = {**snapshot.drafter, "remote_draft_troubles/lost": 2}
    samples = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in of_snapshots({"m": EngineSnapshot(drafter=shown)})
        for sample in family.samples
    }
    assert (
        samples["outrider:remote_draft_troubles_total", (("model_name", "m"), ("reason", "lost"))]
        == 2
    )
    assert (
        samples["outrider:remote_draft_hits_total", (("model_name", "m"),)]
        == shown["remote_draft_hits"]
    )
    others = {family.name for family in of_snapshots({"m": EngineSnapshot()})}
    assert not any("remote" in name for name in others)


@pytest.mark.parametrize("k", [4, "auto:4"])
def test_a_far_service_is_asked_seldom(
    demo: Demo, folder: Path, k: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every reply is many steps late, requests become rare; when replies are fast again, drafts
    come."""
    observe = AutoLength.observe

    def even(control: AutoLength, facts: StepFacts) -> None:
        """All steps cost the same, so what a busy machine's clock says decides nothing."""
        observe(control, replace(facts, seconds=0.01))

    monkeypatch.setattr(AutoLength, "observe", even)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    plain = demo.llm().generate(PROMPTS[0], params)[0]
    known = Known([plain.prompt_token_ids + plain.token_ids])
    is_near = False

    def far(
        service: FakeDraftService, request: messages.RowRequest
    ) -> list[messages.RowReply] | None:
        """Replies that are late by more than any draft is long, by the number of requests and not
        by the clock."""
        return None if is_near else []

    with (
        FakeDraftService(folder, known, misbehave=far) as service,
        demo.remote(service.address, k=k) as llm,
    ):
        for _ in range(4):
            before = drafter_of(llm).counters["remote_draft_requests"]
            assert llm.generate(PROMPTS[0], params)[0].token_ids == plain.token_ids
        assert drafter_of(llm).counters["remote_draft_requests"] - before < 15
        is_near = True
        for _ in range(20):
            done = llm.generate(PROMPTS[0], params)[0]
            assert done.token_ids == plain.token_ids
            if done.stats.accepted > 50:
                break
        assert done.stats.accepted > 50
