"""Tuning the embedded pair, as a user does: from prompts to a settings file that `generate` loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.app import run
from outrider.lab.result import read_result
from outrider.lab.tune.tune_result import TuneResult
from outrider.settings_file import read_settings

pytestmark = pytest.mark.slow
COMMAND = (
    "tune demo --drafters draft-model,ngram --limit 5 --max-tokens 24 --batch-size 1,2 --threads 1"
)


def tune(folder: Path, *more: str) -> TuneResult:
    out = folder / "tune.json"
    assert run([*COMMAND.split(), "--out", str(out), *more]) == 0
    result = read_result(out)
    assert isinstance(result, TuneResult)
    return result


@pytest.mark.slow
def test_from_prompts_to_a_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.json"
    result = tune(tmp_path, "--settings-out", str(settings), "--out", str(tmp_path / "tune.html"))
    assert {one.family for one in result.families} >= {
        "draft-model",
        "ngram",
        "draft-model tree=best-first",
    }
    assert not [one.failure for one in result.families if one.failure]
    assert all(one.identical == one.texts for one in result.confirmed), (
        "greedy texts are plain decoding's"
    )
    assert len(result.overall_speedup) > 3 * len(result.families), "every length was forecast"
    assert [one.batch_size for one in result.schedule] == [2]
    assert {one.engine for one in result.advice} >= {"vLLM", "llama.cpp"}
    assert "Tuning demo" in capsys.readouterr().out
    assert not (tmp_path / "tune.unfinished.jsonl").exists(), "finished"
    command = f"outrider serve demo --threads 1 --settings {settings}"
    assert result.next_command == command
    assert command in (tmp_path / "tune.html").read_text()
    options = read_settings(settings).options
    llm = LLM("demo", **options)
    assert llm.config["drafter"] == options["drafter"]
    assert llm.generate("Question: 1 + 1?\nAnswer:", SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.slow
def test_the_demo_s_heads_compete_without_being_named(tmp_path: Path) -> None:
    """And are found again by the name of their drafter alone."""
    settings = tmp_path / "settings.json"
    command = "tune demo --drafters eagle3,medusa,block,ngram --limit 5 --max-tokens 32 --batch-size 1,2 --threads 1"
    out = tmp_path / "tune.json"
    assert (
        run(
            [
                *command.split(),
                "--settings-out",
                str(settings),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    result = read_result(out)
    assert isinstance(result, TuneResult)
    families = {one.family: one.failure for one in result.families}
    assert {
        "eagle3",
        "medusa",
        "block",
        "block stop=confidence",
        "eagle3 tree=best-first",
        "medusa tree=medusa",
    } <= set(families)
    assert not any(families.values())
    tau = {one.configuration: one.tau for one in result.forecasts}
    assert tau["eagle3 k=7"] > 3, "they were trained on such prompts"
    assert tau["eagle3 k=7"] > tau["medusa k=4"] > tau["ngram k=4"]
    for one in result.confirmed:
        assert one.identical == one.texts, "greedy texts are plain decoding's"
    llm = LLM("demo", **read_settings(settings).options)
    assert llm.generate("Question: 1 + 1?\nAnswer:", SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.slow
def test_an_interrupted_tuning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C costs one run; the same command with --resume runs what is missing only."""
    from outrider.lab.tune import tune as stages

    real = stages.run_probe
    runs = []

    def interrupted(*arguments: object) -> object:
        runs.append(1)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(stages, "run_probe", interrupted)
    out = tmp_path / "tune.json"
    assert run([*COMMAND.split(), "--out", str(out)]) == 130
    kept = (tmp_path / "tune.unfinished.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"].split(" / ")[0] for line in kept[1:]] == [
        "probe none",
        "probe draft-model",
    ]
    result = tune(tmp_path, "--resume")
    drafting = "--drafter none" if not result.recommendations[0].speculate else " k="
    assert result.next_command.startswith("outrider serve demo --threads 1 --drafter ")
    assert drafting in result.next_command, (
        "without a settings file the command says everything itself"
    )
    num_probes = len(result.families) + 1  # plain decoding
    assert len(runs) == num_probes + 1, "the interrupted one ran twice, the two before it once"


def test_another_command_cannot_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tune.unfinished.jsonl").write_text(json.dumps({"plan": {"verb": "bench"}}) + "\n")
    assert run([*COMMAND.split(), "--out", str(tmp_path / "tune.json"), "--resume"]) == 2
    assert "another plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--drafters", "eagle"], "cannot tune eagle here"),
        (["--draft", "no/such-model", "--draft", "nor/this"], "one draft model at a time"),
        (["--limit", "2"], "needs 4 prompts"),
        (["--batch-size", "two"], "--batch-size takes whole numbers"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_input_is_one_line(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", "demo", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
