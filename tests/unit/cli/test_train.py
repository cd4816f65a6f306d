"""`outrider train` on the command line: options reach the run, nonsense is one line and exit code
2, Ctrl-C leaves a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import train as verb
from outrider.cli.app import run
from outrider.demo import demo_paths
from outrider.train import quick
from outrider.train import run as training
from outrider.train.run import TrainSpec
from tests.unit.train.material import save_responses, save_target, texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_target(tmp_path / "target")
    save_responses(tmp_path / "r.jsonl", texts())
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    return [
        "train",
        "early-exit rank=4",
        "--target",
        str(folder / "target"),
        "--responses",
        f"{folder / 'r.jsonl'}",
        "--out",
        str(folder / "out"),
        "--measuring",
        "measure_limit=0",
        "--epochs",
        "1",
        *more,
    ]


def test_demo_is_the_embedded_pair_s_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for --draft of other commands: to begin with, and to be stopped."""
    seen: list[TrainSpec] = []
    monkeypatch.setattr(training, "run_training", lambda spec, *rest: seen.append(spec))
    more = ["--target", "demo", "--prompts", "demo", "--out", str(tmp_path / "out")]
    assert run(["train", "draft-model", "--init", "demo", *more]) == 0
    assert run(["train", "acceptance draft=demo", *more]) == 0
    assert seen[0].init == demo_paths().draft
    assert seen[1].settings == {"draft": str(demo_paths().draft)}


def test_recorded_answers_are_not_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--from-traffic",
        "x.jsonl",
        "--reading",
        "recorded_answers=true",
        "--sampling",
        "top_k=3",
    ]
    assert (
        run(["train", "draft-model", "--target", "demo", "--out", str(tmp_path / "a"), *given]) == 2
    )
    assert (
        "--sampling top_k means nothing with --reading recorded_answers=true"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_whole_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result beside the drafter, the report from it; the same folder is refused."""
    assert run(command(folder, "--training", "held_out=0.2")) == 0
    assert "expected tau" in capsys.readouterr().out.lower()
    result = json.loads((folder / "out" / "result.json").read_text())
    assert (result["kind"], result["recipe"], result["settings"]["rank"]) == (
        "train",
        "early-exit",
        4,
    )
    assert result["config"]["held_out"] == 0.2
    assert (
        run(["report", str(folder / "out" / "result.json"), "--out", str(folder / "r.html")]) == 0
    )
    assert "Expected tau" in (folder / "r.html").read_text()
    capsys.readouterr()
    assert run(command(folder)) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--warmpu", "0.1"], "Did you mean '--training warmup=VALUE'"),
        (["--lr"], "'--lr' is written --training lr=VALUE"),
        (["--out", "page.html"], "'outrider report FOLDER/result.json --out page.html'"),
        (["--training", "feature_cache=2apples"], "--training feature_cache takes bytes"),
        (["--prompts", "demo"], "responses"),
        (
            ["--temperature", "0.5", "--sampling", "responses_per_prompt=2"],
            "--temperature, --sampling responses_per_prompt mean nothing",
        ),
        (
            ["--drafter", "suffix", "--draft", "x"],
            "--drafter, --draft mean nothing without --prompts or --from-traffic",
        ),
        (["--from-traffic", "x.jsonl"], "texts come from one of"),
        (["--reading", "recorded_answers=true"], "--from-traffic"),
        (["--resume"], "no run to resume"),
        (["--training", "held_out=2"], "held_out must be above 0 and below 1"),
        (["--training", "betas=1"], "betas must be two numbers"),
        (["--training", "precision=fp16"], "needs a CUDA device"),
        (["--init", "nowhere"], "no folder 'nowhere'"),
    ],
)
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    """One line, exit code 2, no traceback, and no folder that would be in the way of the corrected
    command."""
    assert run(command(folder, *more)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (folder / "out" / "config.json").exists()


def test_unknown_kind_and_missing_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest kind and setting; a target that is not there."""
    arguments = command(folder)
    for kind, message in (
        ("eagle33", "Did you mean 'eagle3'"),
        ("early-exit rnak=3", "Did you mean 'rank'"),
        ("early-exit init_layers=2", "no option 'init_layers'"),
        ("early-exit rank", "'rank' in 'early-exit rank' is not NAME=VALUE"),
        ("rank=4", "KIND begins with the name of a kind"),
        ("early-exit 'rank=4", "quotes that do not close"),
    ):
        assert run(["train", kind, *arguments[2:]]) == 2
        assert message in capsys.readouterr().err
    arguments[3] = str(folder / "none")
    assert run(arguments) == 2
    assert "no model folder" in capsys.readouterr().err


def test_interrupted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """130, and how to go on."""

    def cut(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", cut)
    assert run(command(folder)) == verb.INTERRUPTED
    assert "--resume continues" in capsys.readouterr().err


def test_options_reach_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed is what is done: every group."""
    seen: list[TrainSpec] = []
    monkeypatch.setattr(training, "run_training", lambda spec, progress, command: seen.append(spec))
    arguments = [
        "train",
        "draft-model init_layers=2 loss=tv",
        "--target",
        "demo",
        "--prompts",
        "demo:5",
        "--limit",
        "3",
        "--out",
        str(folder / "demo"),
        "--training",
        "lr=0.01",
        "--seed",
        "7",
        "--temperature",
        "0.5,1",
        "--sampling",
        "responses_per_prompt=2",
        "--sampling",
        "top_p=0.9",
        "--training",
        "feature_cache=1.5MB",
        "--measuring",
        "measure_limit=3",
        "--measuring",
        "measure_temperature=1",
        "--only-responses",
    ]
    assert run(arguments) == 0
    (spec,) = seen
    assert spec.settings == {"loss": "tv", "init_layers": "2"}
    assert (spec.config.lr, spec.config.seed, spec.responses.seed, spec.measure.seed) == (
        0.01,
        7,
        7,
        7,
    )
    assert (spec.responses.temperatures, spec.responses.samples, spec.responses.top_p) == (
        (0.5, 1.0),
        2,
        0.9,
    )
    assert (spec.feature_cache, spec.measure.prompts, spec.measure.temperatures) == (
        1_500_000,
        3,
        (1.0,),
    )
    assert spec.only_responses
    assert spec.name == "demo"
    assert Path(spec.options.target).is_dir()
    # the embedded draft model, which goes by that name, too
    assert (spec.asked.target, spec.asked.draft) == ("demo", None)
    assert spec.material.prompts is not None
    assert len(Path(spec.material.prompts).read_text().splitlines()) == 5


def test_quick_is_one_measured_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what to expect before it starts."""
    seen: list[TrainSpec] = []
    monkeypatch.setattr(training, "run_training", lambda spec, *rest: seen.append(spec))
    out = tmp_path / "out"
    assert run(["train", "eagle3", "--quick", "--target", "demo", "--out", f"{out}"]) == 0
    assert quick.announcement() in capsys.readouterr().err
    (spec,) = seen
    assert (spec.kind, spec.settings, spec.config.epochs) == (
        "eagle3",
        quick.SETTINGS,
        quick.EPOCHS,
    )
    assert len((out / "prompts.jsonl").read_text().splitlines()) == quick.QUICK.answers
    assert spec.measure == quick.MEASURED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["block", "--target", "demo"], "--quick trains eagle3 for demo, got block for demo"),
        (["eagle3", "--target", "./x"], "--quick trains eagle3 for demo, got eagle3 for ./x"),
        (["eagle3 unrolls=6", "--target", "demo"], "got eagle3 unrolls=6 for demo"),
        (["eagle3", "--target", "demo", "--epochs", "9"], "--epochs means nothing with --quick"),
        (["eagle3", "--target", "demo", "--limit", "9"], "--limit means nothing with --quick"),
        (
            ["eagle3", "--target", "demo", "--measuring", "measure_limit=0"],
            "--measuring measure_limit means nothing with --quick",
        ),
    ],
)
def test_quick_decides_everything_but_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["train", "--quick", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_what_quick_promises_was_measured() -> None:
    """Catches a figure that was left behind by the results it is taken from."""
    results = Path(__file__).parents[3] / "benchmarks" / "results"

    def newest(study: str) -> dict[str, Any]:
        data = sorted(results.glob(f"studies-{study}-2*.json*"))[-1].read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)

    def tau(study: str, **wanted: object) -> float:
        rows = newest(study)["measured"]
        fitting = [row for row in rows if wanted.items() <= row.items() and "demo" in row["task"]]
        return sum(row["emitted"] for row in fitting) / sum(row["steps"] for row in fitting)

    after = tau("before-after", label="eagle3, after", temperature=0.0)
    assert f"{after:.2f}" == f"{quick.LONG.tau:.2f}"
    content = newest("quick")
    (row,) = [row for row in content["measured"] if row["label"] == "after"]
    assert f"{row['emitted'] / row['steps']:.2f}" == f"{quick.QUICK.tau:.2f}"
    run = content["curves"]["eagle3"]
    assert run["num_train"] + run["num_held_out"] == quick.QUICK.answers
    assert "--quick" in run["command"]
