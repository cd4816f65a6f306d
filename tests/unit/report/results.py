"""A result of every kind, made by hand: what the golden reports are rendered from."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outrider.lab.bench.bench_result import (
    AcceptanceLengths,
    Accuracy,
    BenchResult,
    Cell,
    ConfigurationInfo,
    DepthAcceptance,
    Divergence,
    Identity,
    Measured,
    MeasuredAnswer,
    OtherProcesses,
    Percentiles,
    ServerComparison,
    ServerMeasurement,
    SpeculationCounts,
    WorkloadInfo,
)
from outrider.lab.certify.certify_result import (
    CertifyResult,
    DistributionTest,
    SameTexts,
    SampledDistribution,
    TextDifference,
    TextRun,
)
from outrider.lab.certify.server_result import (
    AskedServer,
    DrawnWith,
    ServerCertifyResult,
    ServerTextDifference,
    ServerTexts,
    ShortTexts,
    TwoSampleTest,
)
from outrider.lab.estimate.estimate import costs_of, estimate
from outrider.lab.estimate.estimate_result import EstimateResult, ModelSize
from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.explain_result import (
    Advice,
    CauseRow,
    ExplainedText,
    ExplainResult,
    GroupRow,
    LevelRow,
    Place,
    Times,
)
from outrider.lab.predict import StepCosts
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration, ReplayResult
from outrider.lab.result import Interval, Result
from outrider.lab.tune.confirm import Confirmed
from outrider.lab.tune.forecast import Forecast, LoadStep
from outrider.lab.tune.tune_result import (
    FamilySummary,
    Recommendation,
    Tried,
    TuneResult,
    Words,
)
from outrider.stats import PartStats
from outrider.train.train_result import CurvePoint, HeldOutResult, TrainingLoss, TrainResult
from tests.unit.lab.bench.test_machine import target


def pinned(result: Result) -> Result:
    """The same result as if it had been made at one time, by one version, on one machine."""
    same = {
        "created": datetime(2026, 7, 1, 12, tzinfo=UTC),
        "versions": {"outrider": "0"},
        "machine": {"cpu": "a CPU"},
    }
    return result.model_copy(update=same)


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


# ---------------------------------------------------------------- bench


TIMES = {"prompt": 0.2, "draft": 0.3, "target": 0.4, "verify": 0.06, "other": 0.04}
MS = Percentiles(n=9, p50=0.010, p90=0.02, p99=0.03)


def measured(number: int, found: Interval | None = None, **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "configuration": number,
        "num_runs": 9,
        "num_tokens": 90,
        "num_steps": 30,
        "drafted": 150,
        "tested": 80,
        "accepted": 60,
        "num_disturbed": 0,
        "speedup": found,
        "end_to_end": found,
        "tokens_per_s": interval(50, 45, 55),
        "throughput_tokens_per_s": 40.0,
        "ttft_s": MS,
        "tpot_s": MS,
        "chunk_s": MS,
        "time_s": TIMES,
        "roof": 0.5,
    }
    if found is not None:
        values["acceptance"] = DepthAcceptance(num_steps=30, reached=[30, 25, 2], kept=[25, 20, 1])
        values["step_s"] = {0: 0.013, 1: 0.015, 5: 0.02}
        values["identity"] = Identity(num_compared=9, num_identical=9)
        values["acceptance_lengths"] = AcceptanceLengths.of([(10, 4), (10, 3), (70, 23)])
        values["tokens_per_step"] = {1: 5, 2: 5, 3: 10, 5: 10}
    return Measured(**{**values, **changes})


def cell(*configurations: Measured, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "task": "reasoning",
        "temperature": 0.0,
        "batch_size": 1,
        "context": None,
        "prompt_ids": ["a", "b"],
        "mean_prompt_tokens": 20.0,
        "max_new_tokens": 64,
        "rounds": 2,
        "ended_by": "rounds",
        "seconds": 9.0,
        "configurations": list(configurations),
    }
    return Cell(**{**values, **changes})


def bench(*cells: Cell, **changes: Any) -> BenchResult:
    names = ("none", "draft-model k=5", "suffix")
    infos = [
        ConfigurationInfo(
            label=name, arguments={}, baseline=0, added_weights_bytes=900, learns=name == "suffix"
        )
        for name in names
    ]
    values: dict[str, Any] = {
        "workload": WorkloadInfo(name="w"),
        "target": target(),
        "configurations": infos,
        "cells": list(cells),
        "seconds": 90.0,
        "notes": ["a note"],
    }
    return BenchResult(**{**values, **changes})


def at_shape(size: int, context: int | None) -> Cell:
    """Speedups tell where they were measured: 2 at one row, 0.5 at four, and a thousandth of the
    context more."""
    value = 2 / size + (context or 0) / 1000
    found = interval(value, value - 0.1, value + 0.1)
    return cell(measured(0), measured(1, found), batch_size=size, context=context)


GAIN = cell(measured(0), measured(1, interval(1.9, 1.8, 2.0)), measured(2, interval(0.8, 0.7, 0.9)))


def doubtful_bench() -> BenchResult:
    """Busy neighbours, texts that differ, sampled answers that were graded, failures, a run that
    was stopped."""
    others = OtherProcesses(
        mean=0.48, highest=0.6, allowed=0.1, num_runs=27, num_disturbed=26, num_repeated=9
    )
    first = Divergence(prompt="b", position=7, plain=[1], own=[2], plain_text="yes", own_text="no")
    parted = Identity(num_compared=9, num_identical=8, first=first)
    graded = Accuracy(
        num_graded=20, num_incomplete=3, num_right=10, num_plain_right=12, p_value=0.625
    )
    busy = cell(
        measured(0, other_cpu=0.44, num_disturbed=8),
        measured(1, interval(1.9, 1.8, 2.0), other_cpu=0.55, num_disturbed=9, identity=parted),
        task="busy",
        others=others,
        failures={"suffix": "too large"},
        ended_by="interrupted",
    )
    sampled = cell(
        measured(0),
        measured(1, interval(1.1, 0.95, 1.3), accuracy=graded, identity=None),
        temperature=1.0,
    )
    found = bench(busy, sampled, interrupted=True, command="outrider bench t")
    found.configurations[2].failure = "no such layer"
    return found


# ---------------------------------------------------------------- servers


COUNTS = SpeculationCounts(
    num_steps=10,
    num_tokens=22,
    num_draft_tokens=30,
    num_accepted_tokens=12,
    accepted_per_position=[8, 3, 1],
)


def server(label: str, **facts: Any) -> ServerMeasurement:
    answer = MeasuredAnswer(id="1", seconds=0.3, ttft_s=0.1, num_chunks=2, text="a b", num_tokens=3)
    times = {
        name: Percentiles(n=1, p50=0.1, p90=0.2, p99=0.3)
        for name in ("request_s", "ttft_s", "tpot_s")
    }
    return ServerMeasurement(
        label=label,
        url="http://h",
        model="m",
        answers=[answer],
        tokens_per_s=10.0,
        **{"engine": "vllm", "concurrency": 4, "num_requests": 1, **times, **facts},
    )


def compared_servers() -> list[ServerMeasurement]:
    """A plain server and a speculating one, with everything that a report of servers can have."""
    comparison = ServerComparison(
        baseline="plain", num_pairs=9, speedup=interval(1.5, 1.4, 1.62), differing=["7"]
    )
    failure = "request r9: http://h: the connection was dropped (ReadError)"
    return [
        server(
            "plain", engine="sglang", speculation=SpeculationCounts(num_steps=10, num_tokens=25)
        ),
        server(
            "spec",
            speculation=COUNTS,
            comparison=comparison,
            num_requests=5,
            failures=[failure],
            notes=["given up: gone"],
        ),
    ]


# ---------------------------------------------------------------- certify


DIFFERENCE = TextDifference(
    prompt=1,
    run="speculative, alone",
    position=6,
    expected=108,
    found=None,
    expected_text=" <b>",
    found_text="(end)",
    gap=0.1,
    gap_in_spacings=10.0,
    moved_in_spacings=None,
    cause="verifier",
)


def distribution_test(
    sampler: str,
    part: str = "texts",
    view: str = "by id",
    last: int = 1,
    *,
    rejected: bool = False,
) -> DistributionTest:
    return DistributionTest(
        part=part,
        sampler=sampler,
        view=view,
        first=1,
        last=last,
        num_draws=900,
        num_uncertain=870,
        num_cells=40,
        g=31.5,
        df=32,
        p_value=0.49,
        rejected=rejected,
        impossible=0,
        detectable_total_variation=0.0734,
    )


def certificate(**changes: Any) -> CertifyResult:
    facts: dict[str, Any] = {
        "verdict": "lossless",
        "reasons": ["Greedy text: all identical"],
        "workload": "words",
        "num_prompts": 4,
        "settings": {
            "target": "demo",
            "verifier": "block",
            "exact": True,
            "drafter_options": {"tree": "chain"},
        },
        "sampling": {"temperature": 1.0},
        "max_new_tokens": 48,
        "seed": 7,
        "elapsed_s": 61.0,
        "notes": ["a note"],
        "greedy": SameTexts(
            status="passed",
            why="all identical",
            differences=[],
            runs=[
                TextRun(name="speculative, alone", num_identical=4, num_prompts=4, num_tokens=192)
            ],
        ),
        "sampled_distribution": SampledDistribution(
            status="passed",
            why="4000 tokens in 4 texts",
            temperature=1.0,
            false_alarms=1e-3,
            power=0.9,
            num_texts=4,
            num_tokens=4000,
            origins={"accepted": 5, "bonus": 2},
            tests=[
                distribution_test("speculative"),
                distribution_test("plain"),
                distribution_test("speculative", "texts", "preference", last=900),
                distribution_test("speculative", "drafts", last=5),
            ],
        ),
        "invariance": SameTexts(
            status="not claimed", why="the distribution, not the text", runs=[], differences=[]
        ),
    }
    return CertifyResult(**(facts | changes))


def failed_certificate() -> CertifyResult:
    sections = certificate()
    greedy = sections.greedy.model_copy(update={"status": "failed", "differences": [DIFFERENCE]})
    tests = [distribution_test("speculative"), distribution_test("plain", rejected=True)]
    sampled = sections.sampled_distribution.model_copy(update={"tests": tests})
    return certificate(
        verdict="not lossless",
        reasons=["Greedy text: not"],
        greedy=greedy,
        sampled_distribution=sampled,
    )


def beginnings_test(drawn: DrawnWith, **changes: Any) -> TwoSampleTest:
    facts: dict[str, Any] = {
        "drawn": drawn,
        "view": "beginning",
        "num_draws": 400,
        "num_uncertain": 400,
        "num_cells": 9,
        "g": 6.5,
        "df": 8,
        "p_value": 0.59,
        "impossible": 0,
        "detectable_total_variation": 0.2,
    }
    return TwoSampleTest(**(facts | changes))


def server_certificate(**changes: Any) -> ServerCertifyResult:
    runs = [
        TextRun(name=name, num_identical=4, num_prompts=4, num_tokens=192)
        for name in ("plain, alone, again at the end", "speculative, alone")
    ]
    url = "http://localhost:8000"
    facts: dict[str, Any] = {
        "verdict": "lossless",
        "reasons": ["Greedy text: the same"],
        "plain": AskedServer(
            url=url,
            model="m",
            engine="outrider",
            fields={"speculation": {"mode": "off"}},
            num_requests=412,
            drafted={"greedy": 0, "sampled": 0},
        ),
        "speculative": AskedServer(
            url=url,
            model="m",
            engine="outrider",
            fields={},
            num_requests=408,
            drafted={"greedy": 90, "sampled": 700},
        ),
        "sampling": {"temperature": 1.0},
        "workload": "words",
        "num_prompts": 4,
        "max_new_tokens": 48,
        "concurrency": 8,
        "seed": 7,
        "determinism": ServerTexts(status="passed", why="all repeated", runs=runs[:1]),
        "greedy": ServerTexts(status="passed", why="the same", runs=runs[1:]),
        "sampled": ShortTexts(
            status="passed",
            why="they are alike",
            temperature=1.0,
            num_tokens=8,
            num_prompts=4,
            tests=[beginnings_test("all"), beginnings_test("with seeds", view="end")],
        ),
        "notes": ["a note"],
        "elapsed_s": 61.0,
    }
    return ServerCertifyResult(**(facts | changes))


def failed_server_certificate() -> ServerCertifyResult:
    """Two servers: a request that failed, a text that differs, a test that was rejected."""
    whole = server_certificate()
    parted = ServerTextDifference(
        prompt=2,
        run="speculative, alone",
        position=17,
        expected_text=" was a |",
        found_text="<b>|` \x1b[1m",
        gap=3.25,
        is_least=True,
        cause="error",
    )
    tests = [beginnings_test("all", rejected=True, p_value=1e-9), beginnings_test("with seeds")]
    return server_certificate(
        verdict="not lossless",
        reasons=["Greedy text: not"],
        speculative=whole.speculative.model_copy(
            update={
                "url": "http://localhost:8001",
                "failures": ["request r1: HTTP 500"],
                "drafted": {"greedy": None},
            }
        ),
        determinism=whole.determinism.model_copy(
            update={"status": "not claimed", "why": "batches move its text"}
        ),
        greedy=whole.greedy.model_copy(update={"status": "failed", "differences": [parted]}),
        sampled=whole.sampled.model_copy(update={"status": "failed", "tests": tests}),
    )


# ---------------------------------------------------------------- explain


SHARE = Interval(value=0.8, low=0.7, high=0.9)


def explained_text(**changes: Any) -> ExplainedText:
    """A step of four draft tokens: two kept, one rejected; then a bonus token after a draft kept
    whole; then a plain one. `changes`: of every place."""
    numbers: dict[str, Any] = {
        "p_token": 0.5,
        "q_token": 0.125,
        "p_entropy": 0.7,
        "q_entropy": 0.3,
        "disagreement": 0.1,
    }
    kept = {"tested": [1], "is_kept": True, "p_draft": 0.5, "q_draft": 0.5, "rank_draft": 1}
    untested: dict[str, Any] = {"tested": [], "is_kept": False}
    rejection = {
        "tested": [1, 2],
        "is_kept": False,
        "p_draft": 0.0625,
        "q_draft": 0.75,
        "rank_draft": 3,
        "rejected": " 13",
        "lost": {"draft": 1.5},
    }
    thinking = [
        (" There", "accepted", "word", 0, 1, kept),
        (" are", "accepted", "word", 1, 1, kept),
        (" 12", "correction", "number", 2, 2, rejection),
        (" in", "accepted", "word", 0, 1, kept),
        (" all", "bonus", "word", 1, 4, {**untested, "lost": {"length": 0.9}}),
        (".", "plain", "punctuation", 0, 1, untested),
    ]
    places = [
        Place(
            piece=piece,
            fate=fate,
            kind=kind,
            section="answer" if piece == "." else "thinking",
            level=level,
            rank_token=rank,
            **{**numbers, **facts, **changes},
        )
        for piece, fate, kind, level, rank, facts in thinking
    ]
    return ExplainedText(id="q1", task="reasoning", prompt="How many?", places=places)


def explanation(**changes: Any) -> ExplainResult:
    causes = [
        CauseRow(cause=name, tokens=10.0 * (8 - n), tokens_per_step=0.1 * (8 - n), tokens_per_s=2.0)
        for n, name in enumerate(CAUSES)
    ]
    lost = sum(row.tokens for row in causes)
    group = GroupRow(
        name="number",
        tokens=40,
        tested=30,
        kept=24,
        share=SHARE,
        lost=9.5,
        disagreement=0.2,
        entropy=0.5,
    )
    fields: dict[str, Any] = {
        "target": "demo",
        "draft": None,
        "configuration": "draft-model k=3",
        "verifier": "block",
        "is_greedy": False,
        "has_draft_probs": True,
        "is_chain": True,
        "sampling": {"temperature": 0.7},
        "num_draft_tokens": "3",
        "workload": "demo",
        "texts_read": 1,
        "steps": 100,
        "emitted": 320,
        "drafted": 300,
        "tested": 250,
        "accepted": 220,
        "ideal": 320 + lost,
        "tau": Interval(value=3.2, low=3.0, high=3.4),
        "alpha": Interval(value=0.88, low=0.8, high=0.9),
        "tokens_per_s": 64.0,
        "other_cpu": 0.0,
        "times": Times(step_s=0.05, draft_s=0.02, draft_level_s=0.007, steps=99),
        "causes": causes,
        "by_level": [LevelRow(level=n, tested=100, kept=80, share=SHARE) for n in (1, 2, 3)],
        "by_kind": [group],
        "by_section": [group.model_copy(update={"name": "answer"})],
        "advice": [Advice(title="Longer drafts", evidence="because 4 beats 3.", tone="good")],
        "texts": [explained_text()],
    }
    return ExplainResult(**{**fields, **changes})


def greedy_lookup_explanation() -> ExplainResult:
    """A drafter that copies: no distribution of its own, no times, nothing lost but one part of the
    answer."""
    nothing = dict.fromkeys(("q_token", "q_draft", "q_entropy", "disagreement"))
    return explanation(
        is_greedy=True,
        has_draft_probs=False,
        sampling={"temperature": 0},
        times=None,
        alpha=None,
        tokens_per_s=None,
        by_section=[],
        by_part={"suffix": PartStats(2, 5, 2), "forced": PartStats(1, 2, 2)},
        command="outrider explain demo",
        texts=[explained_text(**nothing)],
        notes=["a note"],
    )


# ---------------------------------------------------------------- replay


def replayed_counts(tau: float, speedup: float | None, drafted: int = 10) -> AcceptanceCounts:
    return AcceptanceCounts(
        num_texts=9,
        steps=100,
        emitted=round(100 * tau),
        drafted=drafted,
        tested=10,
        accepted=5,
        accepted_per_position=[4, 1],
        tau=interval(tau, tau - 0.1, tau + 0.1),
        alpha=0.5,
        draft_utilisation=0.5,
        speedup=None if speedup is None else Interval.unknown(speedup),
    )


def replayed(
    label: str, tau: float, speedup: float | None, drafted: int = 10
) -> ReplayedConfiguration:
    return ReplayedConfiguration(
        configuration=label,
        drafter=label.split()[0],
        overall=replayed_counts(tau, speedup, drafted),
        by_task={},
        draft_s_per_step=1e-4,
        learns=False,
        outside_costs=0,
    )


def replay_result() -> ReplayResult:
    """Two lengths with costs, and two tasks."""
    tasks = {"even": replayed_counts(1.5, 1.3), "odd": replayed_counts(1.2, 1.0)}
    configurations = [
        replayed("none", 1.0, 1.0),
        replayed("ngram k=1", 1.1, 1.05),
        replayed("ngram k=2", 1.2, 1.1),
    ]
    return ReplayResult(
        workload="log.jsonl",
        tokenizer="demo",
        num_texts=12,
        num_tokens=144,
        skipped=[],
        costs=StepCosts.of_steps({0: 0.01, 8: 0.01}),
        notes=["a note"],
        configurations=[one.model_copy(update={"by_task": tasks}) for one in configurations],
    )


# ---------------------------------------------------------------- estimate


def estimated() -> EstimateResult:
    """Acceptance by position, passes that cost more beyond four tokens, and two models."""
    sizes = [
        ModelSize(role="target", name="8B", weights_bytes=16 << 30, kv_bytes_per_token=131072),
        ModelSize(role="draft", name="1B", weights_bytes=2 << 30, kv_bytes_per_token=32768),
    ]
    return estimate(
        [0.9, 0.8], costs_of(0.1, {4: 1.0, 9: 1.5}), "c 0.1 and passes 4:1,9:1.5", sizes
    )


# ---------------------------------------------------------------- tune and train


def tune_result() -> TuneResult:
    sizes = {1: 1.2, 3: 1.6, 5: 1.8}
    forecasts = [
        Forecast(
            family="draft-model",
            configuration=f"draft-model k={k}",
            size=k,
            task="code",
            tau=1 + k / 3,
            step_s=0.01,
            tokens_per_s=100.0,
            speedup=speedup,
            break_even_alpha=0.31,
        )
        for k, speedup in sizes.items()
    ]
    step = LoadStep(
        batch_size=4,
        configuration="draft-model k=3",
        size=3,
        tokens_per_s=300,
        plain_tokens_per_s=200,
        speedup=1.5,
    )
    return TuneResult(
        tried=Tried(
            temperature=0.0,
            max_new_tokens=8,
            batch_size=1,
            probe_prompts=1,
            confirm_prompts=2,
            tasks={"code": 3},
            workload="w",
            target="org/target",
            draft="org/draft",
            model_options={},
        ),
        families=[
            FamilySummary(
                family="draft-model",
                survival={"code": [0.8, 0.6]},
                step_s={0: 0.01, 1: 0.012, 5: 0.02},
                seconds=3.0,
            ),
            FamilySummary(family="suffix", survival={}, step_s={}, seconds=0.0, failure="not run"),
        ],
        plain_step_s=0.01,
        forecasts=forecasts,
        overall_speedup={f"draft-model k={k}": value for k, value in sizes.items()},
        others=OtherProcesses(
            mean=0.15, highest=0.3, allowed=0.15, num_runs=4, num_disturbed=2, num_repeated=1
        ),
        confirmed=[
            Confirmed(
                configuration="draft-model k=5",
                speedup=interval(2.0, 1.9, 2.1),
                by_task={},
                tokens_per_s=200.0,
                tau=2.7,
                identical=2,
                texts=2,
            )
        ],
        recommendations=[
            Recommendation(
                task="all",
                speculate=True,
                configuration="draft-model k=5",
                family="draft-model",
                options={"drafter": "draft-model", "num_draft_tokens": 5},
                speedup=interval(2.0, 1.9, 2.1),
                reason="draft-model k=5 reaches 2.00x plain decoding",
            ),
            Recommendation(
                task="chat",
                speculate=False,
                configuration="none",
                options={"drafter": "none"},
                speedup=None,
                reason="nothing pays",
            ),
        ],
        schedule=[step],
        by_load={"draft-model": [step]},
        seconds=12.0,
        advice=[
            Words(engine="vLLM", text="vllm serve x", notes=["a hint"]),
            Words(engine="none", text=""),
        ],
        notes=["a note"],
        next_command="outrider serve org/target --settings fast.json",
    )


def train_result() -> TrainResult:
    def point(step: int, tau: float) -> CurvePoint:
        return CurvePoint(
            epoch=step / 10, step=step, loss=2 / tau, tau=tau, survival=[0.5, 0.25], parts={}
        )

    counts = {
        "temperature": 0.0,
        "task": "code",
        "num_prompts": 4,
        "steps": 10,
        "drafted": 30,
        "tested": 20,
    }
    return TrainResult(
        target="org/target",
        recipe="eagle3",
        config={"epochs": 2},
        settings={"layers": 1},
        responses={"temperature": 0},
        num_train=90,
        num_held_out=10,
        num_train_tokens=9000,
        num_trained_parameters=1000,
        drafter_bytes=4096,
        steps=20,
        seconds=120.0,
        best_step=10,
        curve=[point(0, 1.0), point(10, 2.0), point(20, 1.8)],
        losses=[TrainingLoss(step=n, loss=3 - n / 10) for n in (5, 10)],
        calibration={"bias": 0.25},
        notes=["a note"],
        measured=[
            HeldOutResult(
                label="before",
                configuration="eagle3",
                emitted=11,
                accepted=1,
                accepted_per_position=[1],
                **counts,
            ),
            HeldOutResult(
                label="after",
                configuration="eagle3",
                emitted=25,
                accepted=15,
                accepted_per_position=[9, 6],
                **counts,
            ),
        ],
    )
