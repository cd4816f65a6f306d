"""What steps take, kept from one start to the next: found again, and never believed where anything
is different."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.build import Needs, Options, assemble, choose, load_models
from outrider.cache import keep_json, kept_json
from outrider.decode import Decoder
from outrider.draft_length import AutoLength
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.ngram_cache import NgramCacheDrafter
from outrider.engine import step_costs, warmup
from outrider.engine.request import Speculation
from outrider.engine.step_costs import MAX_FILES, StepTimes, Sweep
from outrider.engine.warmup import calibrate_alone, facts_of
from outrider.llm import LLM
from outrider.rows import Rows
from outrider.runtime import building
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.unit.engine.conftest import MakeEngine, Models, ask, request

FACTS = {"cpu": "a", "threads": 2}
SECONDS = {1: {0: 0.5, 4: 0.75}, 8: {0: 1.5}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "folder", lambda: tmp_path / "step-costs")


def the_file() -> Path:
    (file,) = step_costs.folder().glob("*.json")
    return file


def test_what_was_kept_is_found_again() -> None:
    """Numbers of rows and sizes are numbers again."""
    StepTimes(FACTS, SECONDS).save()
    assert StepTimes.load(FACTS).seconds == SECONDS
    assert list(step_costs.folder().iterdir()) == [the_file()], "no scratch file is left"


def test_other_facts_have_another_file() -> None:
    StepTimes(FACTS, SECONDS).save()
    assert StepTimes.load(FACTS | {"threads": 1}).seconds == {}


@pytest.mark.parametrize(
    "change",
    [
        {"version": step_costs.VERSION - 1},
        {"version": step_costs.VERSION + 1},
        {"facts": {"cpu": "b"}},
        {"seconds": {"1": {"0": -1.0}}},
        {"seconds": {"1": {"0": float("nan")}}},
        {"seconds": {"one": {}}},
        {"seconds": [1.0]},
        {"seconds": None},
    ],
)
def test_a_strange_file_is_as_good_as_none(change: dict[str, Any]) -> None:
    """Of another version, of another machine (a digest may collide, a file may be copied), or
    nonsense."""
    StepTimes(FACTS, SECONDS).save()
    keep_json(the_file(), kept_json(the_file()) | change, max_files=MAX_FILES)
    assert StepTimes.load(FACTS).seconds == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_broken_file_is_as_good_as_none(text: str) -> None:
    StepTimes(FACTS, SECONDS).save()
    the_file().write_text(text, encoding="utf-8")
    assert StepTimes.load(FACTS).seconds == {}


def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the next start some time, and this one nothing."""
    (tmp_path / "occupied").write_text("a file", encoding="utf-8")
    monkeypatch.setattr(step_costs, "folder", lambda: tmp_path / "occupied" / "step-costs")
    with caplog.at_level(logging.INFO, logger="outrider.cache"):
        StepTimes(FACTS, SECONDS).save()
    assert "not kept" in caplog.text


def test_the_oldest_files_go_first() -> None:
    for number in range(MAX_FILES + 5):
        StepTimes({"number": number}, SECONDS).save()
    files = list(step_costs.folder().glob("*.json"))
    assert len(files) == MAX_FILES
    assert StepTimes.load({"number": MAX_FILES + 4}).seconds == SECONDS


# ------------------------------------------------ who uses it


def options_of(models: Models, drafter: str = "draft-model", **more: Any) -> Options:
    draft = str(models.draft) if drafter == "draft-model" else None
    return Options(
        str(models.target), draft=draft, drafter=drafter, **{"num_draft_tokens": "auto:4", **more}
    )


def facts_for(options: Options) -> dict[str, Any]:
    options, parts = choose(options)
    built = assemble(load_models(options, Needs.of(parts)), parts)
    return facts_of(built.options, built.target, built.draft, parts)


@pytest.mark.slow
def test_the_facts_tell_apart_what_differs_in_speed(models: Models) -> None:
    """And are the same in the next process: plain JSON, no addresses, no order of a set."""
    own = facts_for(options_of(models))
    assert own == json.loads(json.dumps(own)) == facts_for(options_of(models))
    for other in (
        options_of(models, num_draft_tokens="auto:5"),
        options_of(models, drafter="ngram"),
        options_of(models, verifier="token"),
        options_of(models, dtype="float64"),
        options_of(models, drafter_options={"tree": "2x2"}),
    ):
        assert facts_for(other) != own


@pytest.mark.slow
def test_other_kernels_are_timed_anew(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    own = facts_for(options_of(models, runtime="eager"))
    monkeypatch.setattr(building, "fingerprint", lambda: "another")
    assert facts_for(options_of(models, runtime="eager")) != own
    monkeypatch.undo()
    monkeypatch.setattr(building, "fingerprint", lambda: "another")
    assert facts_for(options_of(models, runtime="eager")) != own


def test_a_second_start_takes_no_time(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one times every length; the second one reads the file and makes no step."""
    # on a busy machine the usual one is over before all lengths were
    monkeypatch.setattr(warmup, "BUDGET_S", 600.0)
    lines: list[str] = []
    arguments = {"draft": str(models.draft), "num_draft_tokens": "auto:4"}
    first = LLM(str(models.target), status=lines.append, **arguments)  # type: ignore[arg-type]
    assert sum("timing steps" in line for line in lines) == 1
    assert set(StepTimes.load(facts_for(options_of(models))).seconds[1]) == {0, 1, 2, 3, 4}
    assert first.control == {"chosen": {}, "by_rows": {}, "timed_s": 0.0}, "nobody asked for these"

    def refuse(*_: Any) -> None:
        raise AssertionError("a step was timed again")

    monkeypatch.setattr(warmup, "_times", refuse)
    second = LLM(str(models.target), **arguments)  # type: ignore[arg-type]
    control = second._decoder.control
    assert isinstance(control, AutoLength)
    rates = control.drafters["draft-model"].goodput(1)
    assert rates is not None
    assert len(rates) == 5


def test_timing_leaves_no_trace(models: Models) -> None:
    """Same greedy text as without; caches are empty, and a drafter that learns has learned nothing."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = [5, 6, 7, 8, 5, 6]
    texts = set()
    for length in (3, "auto:4"):
        llm = LLM(str(models.target), drafter="ngram-cache", num_draft_tokens=length)
        assert llm._built.target.lm.kv.lengths == []
        drafter = llm._decoder.drafter
        assert isinstance(drafter, NgramCacheDrafter)
        assert len(drafter._cache) == 0
        texts.add(tuple(llm.generate([prompt], params)[0].token_ids))
    assert len(texts) == 1


def test_fixed_lengths_are_not_timed(models: Models) -> None:
    lines: list[str] = []
    LLM(str(models.target), drafter="ngram", num_draft_tokens=3, status=lines.append)
    assert not any("timing" in line for line in lines)
    assert not step_costs.folder().exists()


def test_a_decoder_by_hand_may_be_given_costs_too(models: Models) -> None:
    """Benchmarks build decoders of their own."""
    options, parts = choose(options_of(models))
    built = assemble(load_models(options, Needs.of(parts)), parts)
    decoder = Decoder(
        built.target.lm, built.decoder.drafter, parts.make_verifier(), parts.make_control()
    )
    calibrate_alone(built, decoder, parts)
    control = decoder.control
    assert isinstance(control, AutoLength)
    assert control.drafters["draft-model"].goodput(1) is not None


# ------------------------------------------------ one server, several drafters


def test_a_request_teaches_the_control_of_its_own_drafter(engine_of: MakeEngine) -> None:
    """Verdicts and lengths; what steps cost was timed for both at the start."""
    engine = engine_of(extra=("ngram",), num_draft_tokens="auto:4")
    for drafter, other in (("ngram", "draft-model"), ("draft-model", "ngram")):
        before = {
            name: one.summary()["chosen"] for name, one in engine._batch.control.drafters.items()
        }
        (answer,) = ask(
            engine,
            request([5, 6, 7, 8, 5, 6, 7], speculation=Speculation(drafter=drafter), max_tokens=12),
        )
        assert len(answer.token_ids) == 12
        after = {
            name: one.summary()["chosen"] for name, one in engine._batch.control.drafters.items()
        }
        assert after[drafter] != before[drafter]
        assert after[other] == before[other]


def test_every_drafter_of_a_server_knows_its_costs(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "BUDGET_S", 600.0)  # however busy this machine is
    engine = engine_of(extra=("ngram",), num_draft_tokens="auto:4", max_num_seqs=4, start=False)
    controls = engine._batch.control.drafters
    for name in ("draft-model", "ngram"):
        for rows in (1, 2, 4):
            assert controls[name].goodput(rows) is not None, (name, rows)
    engine.start()


def test_a_server_times_steps_at_its_first_start_only(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches starts that each time another number of rows for two seconds; what did not fit into
    the first start is left to real steps."""
    monkeypatch.setattr(warmup, "BUDGET_S", 600.0)
    monkeypatch.setattr(warmup, "_least_s", lambda alone, count: 0.0 if count <= 2 else 601.0)
    timed: list[int] = []
    times = warmup._times

    def counted(*arguments: Any) -> dict[int, float]:
        timed.append(arguments[3])
        return times(*arguments)

    monkeypatch.setattr(warmup, "_times", counted)
    for _ in range(2):
        engine = engine_of(num_draft_tokens="auto:9", max_num_seqs=4, start=False)
        goodput = engine._batch.control.drafters["draft-model"]
        assert [rows for rows in (1, 2, 4) if rows in goodput._crowds] == [1, 2]
        engine.start()
    assert timed == [1, 2]


def test_crowds_have_half_of_the_first_start(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sweep of one row that takes all the time, so that costs of a crowd are a guess."""
    budgets: dict[int, float] = {}

    def instant(*arguments: Any) -> dict[int, float]:
        budgets[arguments[3]] = arguments[5]
        return {0: 1e-4, 4: 2e-4}

    monkeypatch.setattr(warmup, "_times", instant)
    engine_of(num_draft_tokens="auto:4", max_num_seqs=2, start=False).start()
    assert budgets[1] <= warmup.BUDGET_S / 2
    assert budgets[2] > warmup.BUDGET_S / 2


def test_the_fewest_steps_of_many_rows_take_as_long_as_those_of_each() -> None:
    assert warmup._least_s({0: 0.01, 7: 0.02}, 4) == pytest.approx(4 * 0.02 * (2 + 6 + 96 / 8))
    assert warmup._least_s({}, 4) == 0.0


def test_what_was_timed_once_is_not_known() -> None:
    """Catches a single step of half a second, beside another program that started, kept as the
    price of a length for good."""
    sweep = Sweep([8, 0, 2], skip=1)
    row = SimpleNamespace(clamp_draft=lambda size: size)
    for seconds in (9.0, 0.006, 0.5, 0.010, 0.011, 0.008):  # 8 (not timed), 0, 2, 8, 0, 2
        (asked,) = sweep.choose(cast(Any, [row]))
        sweep.observe(cast(Any, SimpleNamespace(drafted=[asked], seconds=seconds, experts=None)))
    assert sweep.known() == {0: 0.006, 2: 0.008}
    sweep.lengths = [8]
    assert sweep.choose(cast(Any, [row])) == [8]


def test_a_drafter_that_offers_nothing_is_not_asked_for_ever(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slow model's user waiting for a hundred steps, because three lengths were to be
    timed and there is but one."""
    options, parts = choose(options_of(models, "ngram"))
    built = assemble(load_models(options, Needs.of(parts)), parts)
    steps: list[int] = []

    def nothing(drafter: NgramDrafter, rows: Rows, gamma: list[int]) -> Draft:
        steps.append(max(gamma))
        return Draft.empty(len(rows), rows.device)

    monkeypatch.setattr(NgramDrafter, "propose", nothing)
    seconds, _ = warmup._times(built.decoder, built, None, 1, [4, 0, 2, 1, 3], budget_s=0.0)
    assert set(seconds) == {0}
    assert len(steps) <= 2 * (warmup.WARM_UP + 3 * step_costs.MIN_TIMES)
