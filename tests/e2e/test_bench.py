"""`outrider bench demo` as a user types it: measured, interrupted, resumed, rendered again."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.result import read_result

SMALL = (
    "--drafters", "draft-model k=4, suffix k=auto", "--limit", "2", "--max-tokens", "12",
    "--enough", "max_rounds=1", "--enough", "max_other_cpu=2", "--threads", "1",
)  # fmt: skip
TIMEOUT_S = 240


@pytest.mark.slow
def test_a_conversation_and_the_files_of_specdec_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later turn has the model's own answer before it, and every text is in the files."""
    monkeypatch.chdir(tmp_path)
    questions = ["Sam has 3 apples and buys 4 more. How many?", "Ann has 5 and buys 2. How many?"]
    Path("talk.jsonl").write_text(json.dumps({"question_id": "a", "turns": questions}))
    out = ("--prompts", "talk.jsonl", "--out", "r.json", "--out", "files")
    assert app.run(["bench", "demo", *SMALL, *out]) == 0
    assert "By turn of a conversation" in capsys.readouterr().out
    result = read_result(Path("r.json"))
    assert isinstance(result, BenchResult)
    (cell,) = result.cells
    assert cell.prompt_ids == ["a", "a/2"]
    first, second = cell.configurations[0].by_turn
    assert (first.turn, second.turn) == (1, 2)
    # both questions, and the answer between them
    answer = cell.configurations[0].runs[0].tokens
    assert second.mean_prompt_tokens >= 2 * first.mean_prompt_tokens - 4 + sum(answer) - 4
    (line,) = Path("files/none-t0/responses.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"] == questions
    assert all(json.loads(line)["choices"][0]["turns"])
    assert len(list(Path("files").iterdir())) == 3, "a folder for each setting"


@pytest.mark.nightly
def test_bench_on_the_demo_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batch sizes and a context length: all compared, texts identical, numbers consistent."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--batch-size",
        "1,2",
        "--context-lengths",
        "80",
        "--out",
        "r.json",
        "--out",
        "r.html",
    )
    assert app.run(["bench", "demo", *SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "texts are plain decoding's, token by token" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json"]
    result = read_result(Path("r.json"))
    assert isinstance(result, BenchResult)
    assert f"Speedup by batch size: {result.cells[0].task} (greedy)" in printed
    assert [(cell.batch_size, cell.context) for cell in result.cells] == [
        (1, None),
        (2, None),
        (1, 80),
    ]
    for cell in result.cells:
        plain, model, suffix = cell.configurations
        assert (plain.tau, plain.speedup) == (1, None)
        assert model.tau > 2, "the demo's draft is a good one"
        assert all(one.speedup is not None and one.step_s for one in (model, suffix))
        assert all(
            one.identity is not None and one.identity.num_identical == 2 for one in (model, suffix)
        )
        for one in cell.configurations:
            assert one.num_runs == 2
        assert all(sum(one.time_s.values()) > 0 for one in cell.configurations)
    assert {cell.mean_prompt_tokens for cell in result.cells if cell.context} == {80}
    assert [info.added_weights_bytes for info in result.configurations][1:] == [
        result.configurations[1].added_weights_bytes,
        0,
    ]


@pytest.mark.slow
def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    """The real signal, in a process of its own: what is known is reported, the journal is named,
    and the same command goes on."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "bench",
        "demo",
        *SMALL,
        "--temperature",
        "1",
        "--limit",
        "3",
        "--out",
        "r.json",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    journal = tmp_path / "r.unfinished.jsonl"
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # jobs in the background inherit that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and not (
        journal.exists() and "/ group 0" in journal.read_text()
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "you stopped it: more was to come" in out
    assert json.loads((tmp_path / "r.json").read_text())["cells"][0]["ended_by"] == "interrupted"
    assert "the same command with --resume continues" in errors
    assert "Traceback" not in errors
    done = journal.read_text().count("\n")
    again = subprocess.run(
        [*command, "--resume", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert again.returncode == 0, again.stderr
    assert done > 1
    assert not journal.exists()
    cells = json.loads(again.stdout)["cells"]
    assert [[one["num_runs"] for one in cell["configurations"]] for cell in cells] == [[3, 3, 3]]
    assert cells[0]["configurations"][1]["identity"] is None, "sampled texts differ by design"


def test_nothing_to_resume_is_reported_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "outrider.lab.runner.load_models", lambda *arguments: pytest.fail("a model was read")
    )
    assert app.run(["bench", "demo", "--resume"]) == 2
    assert "there is no interrupted run to resume" in capsys.readouterr().err
