"""Training as a user runs it: a process that is killed and gone on with, and the demo target end to
end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.demo import demo_paths
from tests.unit.train.material import save_responses, save_target, texts

pytestmark = pytest.mark.slow


def outrider(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def training(folder: Path, out: str, *more: str) -> list[str]:
    return outrider(
        "train",
        "draft-model init_layers=1",
        "--target",
        str(folder / "target"),
        "--responses",
        f"{folder / 'r.jsonl'}",
        "--out",
        str(folder / out),
        "--epochs",
        "15",
        "--batch-size",
        "4",
        "--measuring",
        "measure_limit=0",
        "--device",
        "cpu",
        "--training",
        "save_every_s=0",
        "--training",
        "held_out=0.2",
        *more,
    )


@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """SIGKILL, which no handler sees; then --resume: the same bits as the run that was left alone."""
    save_target(tmp_path / "target")
    save_responses(tmp_path / "r.jsonl", texts(40))
    subprocess.run(
        training(tmp_path, "whole"), check=True, env=environment(), capture_output=True, timeout=500
    )
    run = subprocess.Popen(
        training(tmp_path, "cut"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    checkpoint = tmp_path / "cut" / "checkpoint.pt"
    deadline = time.monotonic() + 300
    while run.poll() is None and time.monotonic() < deadline:
        if checkpoint.exists() and _step(checkpoint) % 8 == 3:  # 8 steps an epoch
            break
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    subprocess.run(
        training(tmp_path, "cut", "--resume"),
        check=True,
        env=environment(),
        capture_output=True,
        timeout=500,
    )
    whole, cut = (
        load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("whole", "cut")
    )
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    curves = [
        json.loads((tmp_path / name / "result.json").read_text())["curve"]
        for name in ("whole", "cut")
    ]
    assert curves[0] == curves[1]


def _step(checkpoint: Path) -> int:
    try:
        return int(torch.load(checkpoint, weights_only=True)["state"]["step"])
    except (OSError, RuntimeError):  # replaced while it was read
        return -1


@pytest.mark.nightly
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """Data parallel, with a last micro-batch that nobody shares: the same mean gradient, so the
    same drafter to rounding."""
    save_target(tmp_path / "target")
    save_responses(tmp_path / "r.jsonl", texts(40))
    small = ("--epochs", "3", "--batch-size", "3", "--training", "micro_batch=1")
    subprocess.run(
        training(tmp_path, "one", *small),
        check=True,
        env=environment(),
        capture_output=True,
        timeout=500,
    )
    launch = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    )
    command = [*launch, *training(tmp_path, "two", *small)[1:]]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    curves = [
        json.loads((tmp_path / name / "result.json").read_text())["curve"]
        for name in ("one", "two")
    ]
    assert [point["step"] for point in curves[0]] == [point["step"] for point in curves[1]]
    assert [point["loss"] for point in curves[1]] == pytest.approx(
        [point["loss"] for point in curves[0]], rel=1e-3
    )
    # something was learnt that could differ
    assert curves[0][-1]["loss"] < curves[0][0]["loss"] - 0.01
    one, two = (
        load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("one", "two")
    )
    assert all(torch.allclose(value, two[name], atol=1e-3) for name, value in one.items())


@pytest.mark.nightly
def test_the_demo_target_from_prompts_to_a_draft(tmp_path: Path) -> None:
    """The recipe of docs/train.md, small: half of the demo target's layers learn enough of it for
    the expected tau to rise."""
    command = outrider(
        "train",
        "draft-model init_layers=4",
        "--target",
        "demo",
        "--prompts",
        "demo:60",
        "--out",
        str(tmp_path / "run"),
        "--model-options",
        "runtime=eager",
        "--max-tokens",
        "48",
        "--epochs",
        "4",
        "--batch-size",
        "4",
        "--measuring",
        "measure_limit=2",
        "--measuring",
        "measure_tokens=16",
    )
    subprocess.run(command, check=True, env=environment(), capture_output=True, timeout=500)
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["target"] == "demo"
    assert result["curve"][-1]["tau"] > result["curve"][0]["tau"] + 0.1
    assert {(one["label"], one["temperature"]) for one in result["measured"]} == {
        (label, temperature) for label in ("before", "after") for temperature in (0.0, 1.0)
    }
    answer = outrider(
        "generate",
        "demo",
        "Sam has 3 lemons.",
        "--draft",
        str(tmp_path / "run" / "drafter"),
        "--drafter",
        "draft-model",
        "--model-options",
        "runtime=eager",
        "--max-tokens",
        "8",
        "--json",
    )
    assert demo_paths().target.is_dir()
    subprocess.run(answer, check=True, env=environment(), capture_output=True, timeout=200)
