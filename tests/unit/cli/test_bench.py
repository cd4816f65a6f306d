"""`outrider bench` without models: options become a plan, and none is accepted and ignored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.build import Options
from outrider.cli.bench import BenchOptions
from outrider.cli.options import MachineOptions
from outrider.cli.prompting import AnswerOptions, ConversationOptions
from outrider.lab.bench import run
from outrider.lab.bench.bench_result import BenchResult, WorkloadInfo
from outrider.lab.bench.plan import Plan
from outrider.lab.journal import Journal
from outrider.lab.result import read_result
from outrider.lab.server import measure
from tests.unit.report.results import bench as result
from tests.unit.report.results import cell, interval, measured


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the library was asked for; it answers with an empty result, or as `answer` says."""
    calls: list[dict[str, Any]] = []

    def run_bench(
        options: Any, plan: Any, workload: Any, path: Path, *, resume: bool, **more: Any
    ) -> Any:
        calls.append(
            {
                "options": options,
                "plan": plan,
                "workload": workload,
                "path": path,
                "resume": resume,
                **more,
            }
        )
        Journal.open(path, {"plan": 1}, resume=resume)
        if calls[0].get("interrupt"):
            raise KeyboardInterrupt
        return BenchResult(workload=WorkloadInfo(name=workload.name), seconds=1.0)

    monkeypatch.setattr(run, "run_bench", run_bench)
    return calls


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_option_reaches_the_plan(
    cli: Callable[..., Any], asked: list[dict[str, Any]]
) -> None:
    found = cli(
        "bench",
        "demo",
        "--drafters",
        "ngram k=3, suffix",
        "--drafters",
        "draft-model verifier=token",
        "--temperature",
        "0,0.7",
        "--batch-size",
        "1,4,4",
        "--context-lengths",
        "128,256",
        "--limit",
        "5",
        "--max-tokens",
        "40",
        "--sampling",
        "top_k=9",
        "--seed",
        "3",
        "--sampling",
        "ignore_eos=true",
        "--enough",
        "max_rounds=4",
        "--budget",
        "0.5",
        "--enough",
        "max_other_cpu=0.3",
        "--draft",
        "demo",
        "--threads",
        "1",
        "--model-options",
        "runtime=eager",
        "--prompts",
        "embedded:code",
        "--reading",
        "chat_template=false",
        "--reading",
        "on_bad=skip",
        "--json",
    )
    assert found.code == 0, found.err
    plan: Plan = asked[0]["plan"]
    assert [one.label for one in plan.configurations] == [
        "ngram k=3",
        "suffix",
        "draft-model verifier=token",
    ]
    assert (plan.temperatures, plan.batch_sizes, plan.context_lengths) == (
        (0.0, 0.7),
        (1, 4),
        (128, 256),
    )
    assert (plan.prompts, plan.seed, plan.rounds, plan.budget_s) == (5, 3, 4, 30)
    assert plan.max_other_cpu == 0.3
    assert (plan.sampling.max_tokens, plan.sampling.top_k, plan.sampling.ignore_eos) == (
        40,
        9,
        True,
    )
    assert asked[0]["options"] == Options(target="demo", draft="demo", threads=1, runtime="eager")
    assert (asked[0]["chat_template"], asked[0]["on_bad"], asked[0]["workload"].name) == (
        False,
        "skip",
        "embedded:code",
    )
    assert json.loads(found.out)["command"].startswith("outrider")


def test_defaults_follow_the_target(cli: Callable[..., Any], asked: list[dict[str, Any]]) -> None:
    assert cli("bench", "demo").code == 0
    assert cli("bench", "some/model").code == 0
    assert [call["workload"].name for call in asked] == ["demo", "embedded:reasoning"]
    drafters = [[one.drafter for one in call["plan"].configurations] for call in asked]
    assert "draft-model" in drafters[0]
    assert "draft-model" not in drafters[1]
    assert {"ngram", "suffix"} <= set(drafters[1])


def test_defaults_of_options_are_those_of_the_library() -> None:
    plan = BenchOptions().plan([], ConversationOptions(), AnswerOptions())
    for field in dataclasses.fields(Plan):
        if field.name not in ("configurations", "sampling"):
            assert getattr(plan, field.name) == field.default, field.name
    assert plan.sampling == Plan(()).sampling
    assert MachineOptions().options("t") == Options(target="t")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--concurrency", "2"), "--concurrency means nothing without a server's URL"),
        (
            ("demo", "--baseline-url", "http://x", "--server", "api=chat"),
            "--baseline-url, --server api mean nothing",
        ),
        (
            ("http://x:1", "--drafters", "ngram", "--budget", "3"),
            "--drafters, --budget mean nothing when a server is measured",
        ),
        (
            ("http://x:1", "--reading", "chat_template=false"),
            "--reading chat_template means nothing",
        ),
        (("http://x:1", "--temperature", "0,1"), "one --temperature"),
        (
            ("localhost:8000",),
            "'localhost:8000' looks like a server's address: write http://localhost:8000",
        ),
        (("10.0.0.1:80/v1",), "write http://10.0.0.1:80/v1"),
        (
            ("demo", "--temperature", "warm"),
            "--temperature takes numbers with commas between, got 'warm'",
        ),
        (("demo", "--batch-size", "1,2.5"), "--batch-size takes whole numbers"),
        (("demo", "--batch-size", ""), "at least one batch size"),
        (
            ("http://x:1", "--enough", "max_rounds=3"),
            "--enough max_rounds means nothing when a server is measured",
        ),
        (("demo", "--drafters", "k=5"), "begins with a drafter's name"),
        (("demo", "--prompts", "gsm9k"), "Did you mean 'gsm8k'"),
        (("demo", "--prompts", "16"), "is --limit 16"),
        (("demo", "--out", "no/such/folder/r.json"), "does not exist"),
        (("demo", "--sampling", "top_p=2"), "top_p"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    cli: Callable[..., Any], arguments: tuple[str, ...], words: str
) -> None:
    found = cli("bench", *arguments)
    assert found.code == 2
    assert words in found.err
    assert "Traceback" not in found.err


def test_ctrl_c_says_how_to_go_on(
    cli: Callable[..., Any],
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def interrupted(*arguments: Any, resume: bool, **more: Any) -> Any:
        Journal.open(arguments[3], {}, resume=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_bench", interrupted)
    found = cli("bench", "demo", "--out", "r.json")
    assert found.code == 130
    assert "r.unfinished.jsonl: the same command with --resume continues" in found.err
    assert (tmp_path / "r.unfinished.jsonl").exists()


def test_a_finished_run_leaves_the_result_and_no_journal(
    cli: Callable[..., Any], asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert cli("bench", "demo", "--out", "r.json").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]
    assert cli("bench", "demo").code == 0
    assert asked[1]["path"] == Path("outrider-bench.unfinished.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]


JOURNALS = {  # --out and --resume -> the journal, where a run left these
    "r.html": ("r.unfinished.jsonl", ()),
    "r.html q.json": ("q.unfinished.jsonl", ("r.unfinished.jsonl",)),
    "r.html q.json --resume": (
        "r.unfinished.jsonl",
        ("r.unfinished.jsonl", "outrider-bench.unfinished.jsonl"),
    ),
    "r.md --resume": ("outrider-bench.unfinished.jsonl", ("outrider-bench.unfinished.jsonl",)),
    "r.md q.html --resume": ("r.unfinished.jsonl", ()),
}


@pytest.mark.parametrize("given", JOURNALS)
def test_the_journal_has_the_name_of_what_is_written(
    cli: Callable[..., Any], asked: list[dict[str, Any]], tmp_path: Path, given: str
) -> None:
    """Catches pages of one folder that share a journal, and a run that a further --out loses."""
    expected, left = JOURNALS[given]
    for name in left:
        Journal.open(tmp_path / name, {"plan": 1}, resume=False)
    words = [word if word == "--resume" else f"--out={word}" for word in given.split()]
    cli("bench", "demo", *words)
    assert asked[-1]["path"] == Path(expected)


def test_an_interrupted_run_is_not_thrown_away_in_silence(
    cli: Callable[..., Any], asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    Journal.open(tmp_path / "outrider-bench.unfinished.jsonl", {"plan": 1}, resume=False)
    assert "--resume would have continued it" in cli("bench", "demo").err
    Journal.open(tmp_path / "outrider-bench.unfinished.jsonl", {"plan": 1}, resume=False)
    found = cli("bench", "demo", "--resume")
    assert "would have continued" not in found.err
    assert asked[-1]["resume"] is True


def test_a_server_is_asked_for_its_own_options(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def bench_servers(endpoints: Any, workload: Any, options: Any, **more: Any) -> Any:
        calls.append((endpoints, workload, options, more))
        return BenchResult(workload=WorkloadInfo(name="w"), seconds=1.0)

    monkeypatch.setattr(measure, "bench_servers", bench_servers)
    arguments = (
        "bench",
        "http://localhost:1/v1",
        "--baseline-url",
        "http://localhost:2",
        "--concurrency",
        "2",
        "--server",
        "server_model=m",
        "--server",
        "stall_timeout=9",
        "--temperature",
        "0.5",
        "--max-tokens",
        "7",
        "--limit",
        "3",
        "--server",
        "api=chat",
    )
    assert cli(*arguments).code == 0
    endpoints, _, options, more = calls[0]
    assert [(label, one.root, one.model) for label, one in endpoints.items()] == [
        ("plain", "http://localhost:2", "m"),
        ("speculative", "http://localhost:1", "m"),
    ]
    assert (options.concurrency, options.timeout_s, options.api) == (2, 9, "chat")
    assert (options.sampling.temperature, options.sampling.max_tokens, more["prompts"]) == (
        0.5,
        7,
        3,
    )
    refused = cli(*arguments, "--resume")
    assert refused.code == 2
    assert "--resume means nothing when a server is measured" in refused.err


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ((), {"plain": "one", "speculative": "one"}),
        (("--server", "baseline_api_key_env=KEY_B"), {"plain": "two", "speculative": "one"}),
        (("--server", "baseline_api_key_env="), {"plain": None, "speculative": "one"}),
    ],
)
def test_each_server_gets_its_own_key(
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    more: tuple[str, ...],
    keys: dict[str, Any],
) -> None:
    """Guards against handing one server's key to another; and no key is in the result."""
    calls: list[Any] = []

    def bench_servers(endpoints: Any, workload: Any, options: Any, **_: Any) -> Any:
        calls.append(endpoints)
        return BenchResult(workload=WorkloadInfo(name="w"), seconds=1.0)

    monkeypatch.setattr(measure, "bench_servers", bench_servers)
    monkeypatch.setenv("KEY_A", "one")
    monkeypatch.setenv("KEY_B", "two")
    out = tmp_path / "result.json"
    found = cli(
        "bench",
        "http://localhost:1",
        "--baseline-url",
        "http://localhost:2",
        "--server",
        "api_key_env=KEY_A",
        "--out",
        str(out),
        *more,
    )
    assert found.code == 0
    assert {label: one.api_key for label, one in calls[0].items()} == keys
    assert "two" not in out.read_text()


def test_a_baselines_key_wants_a_baseline(cli: Callable[..., Any]) -> None:
    found = cli("bench", "http://localhost:1", "--server", "baseline_api_key_env=KEY_B")
    assert found.code == 2
    assert "means nothing without --baseline-url" in found.err


def test_ctrl_c_gives_what_is_known_and_keeps_the_journal(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report, the result file and the code of an interrupted command; the same command can go
    on."""

    def run_bench(options: Any, plan: Any, workload: Any, path: Path, **more: Any) -> Any:
        known = cell(measured(0), measured(1, interval(1.9, 1.8, 2.0)), ended_by="interrupted")
        Journal.open(path, {"plan": 1}, resume=False)
        return result(known, interrupted=True)

    monkeypatch.setattr(run, "run_bench", run_bench)
    found = cli("bench", "demo", "--out", "r.json")
    assert found.code == 130
    assert "1.90x [1.80, 2.00]" in found.out
    assert "you stopped it" in found.out
    assert (
        "interrupted; what is finished is in r.unfinished.jsonl: the same command with --resume continues"
        in found.err
    )
    assert Path("r.unfinished.jsonl").exists()
    written = read_result(Path("r.json"))
    assert isinstance(written, BenchResult)
    assert written.interrupted
