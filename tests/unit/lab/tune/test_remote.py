"""A draft service in tuning's advice: a probe's numbers, in the formulas of `estimate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.app import run
from outrider.errors import ConfigError
from outrider.lab.result import read_result
from outrider.lab.tune.probe import Probe, StepNote
from outrider.lab.tune.remote import Line, RemoteAdvice, check_family, remote_advice
from outrider.lab.tune.space import Family
from outrider.lab.tune.tune_result import TuneResult
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

PASS_S, DRAFT_S = 0.030, 0.003
FAMILY = Family.of("draft-model", (1, 2, 4))


def probe(pass_s: float = PASS_S, draft_s: float = DRAFT_S, fixed_s: float = 0.0) -> Probe:
    """Four in five drafts are kept whole, the others not at all; every pass takes the same time, every draft token, too."""
    notes = []
    for number in range(40):
        size = (0, 1, 2, 4)[number % 4]
        drafting = fixed_s + size * draft_s if size else 0.0
        notes.append(
            StepNote(
                asked=size, drafted=size, kept=size if number % 5 else 0, seconds=pass_s + drafting, steady=number > 1,
                draft_s=drafting,
            )
        )
    return Probe(family=FAMILY.label, steps={"code": notes}, tokens=100, seconds=1.0)


def advice(rtt_ms: float, **costs: float) -> RemoteAdvice:
    found = remote_advice(FAMILY, probe(**costs), Line(rtt_ms / 1e3), 1, PASS_S)
    assert found is not None
    return found


def test_drafting_that_costs_something_for_any_draft_is_told_apart() -> None:
    found = advice(5, fixed_s=0.002)
    assert (found.draft_fixed_s, found.draft_s_per_token) == (pytest.approx(0.002), pytest.approx(DRAFT_S))


def test_a_draft_beside_the_target_is_better_by_the_line() -> None:
    found = advice(10, draft_s=0.001)
    assert found.estimate.co_located_speedup > found.remote_speedup > 1
    assert found.reason.startswith(f"with 10 ms there and back it reaches {found.remote_speedup:.2f}x plain decoding")


def test_a_line_longer_than_a_pass_brings_nothing() -> None:
    """The drafter `remote` waits no longer than a plain step takes, whatever the formula says about waiting."""
    found = advice(50)
    assert found.remote_speedup == 1.0
    assert "the shortest reply takes 53 ms and a plain step 30 ms" in found.reason


def test_a_draft_too_long_for_the_line_does_not_hide_a_shorter_one() -> None:
    """Of 4 tokens the reply takes 32.5 ms, more than a pass; of 3 it takes 29.5."""
    found = advice(20.5)
    assert found.estimate.in_time
    assert found.estimate.best_num_draft_tokens == 3


def test_without_a_step_that_drafts_nothing_is_reported() -> None:
    nothing = Probe(family=FAMILY.label, steps={"code": []}, tokens=0, seconds=1.0)
    assert remote_advice(FAMILY, nothing, Line(0.001), 1, PASS_S) is None


def test_look_ups_alone_cannot_be_asked_about() -> None:
    with pytest.raises(ConfigError, match="add --draft MODEL"):
        check_family([Family.of("ngram", (1, 2))])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("line")
    target = tiny_llama(257, sharpness=4.0, num_hidden_layers=2)
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", disturbed(target, 0.1), byte_tokenizer())
    lines = [json.dumps({"prompt": "abc " * (number + 2), "task": "code"}) for number in range(4)]
    (root / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


def test_a_whole_tuning_says_where_not_to_use_a_service(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the screen, in the result and in the report; passes of this target take less than a millisecond or two."""
    command = f"tune {root / 'target'} --draft {root / 'draft'} --prompts {root / 'prompts.jsonl'} --drafters draft-model"
    rest = "--batch-size 1 --max-tokens 24 --set ignore_eos=true --set chat_template=false --threads 1 --remote-rtt-ms 2000"
    assert run([*command.split(), *rest.split(), "--out", str(tmp_path / "t.json")]) == 0
    assert "Do not use a draft service here: with 2000 ms there and back" in " ".join(capsys.readouterr().out.split())
    result = read_result(tmp_path / "t.json")
    assert isinstance(result, TuneResult)
    assert result.remote is not None
    assert result.remote.remote_speedup == 1.0
    assert result.remote.draft_s_per_token > 0
    assert result.remote.estimate.rtt_s == 2.0
    assert run(["report", str(tmp_path / "t.json")]) == 0
    assert "Speedup with a round trip of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--remote-rtt-ms 5 --draft-endpoint grpc://127.0.0.1:1", "give one of them"),
        ("--remote-rtt-ms=-5", "at least 0, got -5"),
        ("--draft-endpoint local", "no line to measure"),
        ("--draft-endpoint http://127.0.0.1:1", "grpc://HOST:PORT"),
        ("--drafters ngram --remote-rtt-ms 5", "chains of a draft model, which are not tried here"),
    ],
)
def test_questions_that_cannot_be_answered(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, before anything is measured."""
    assert run(["tune", "demo", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_service_that_is_not_there_is_reported_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "demo", "--draft-endpoint", "grpc://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "the draft service grpc://127.0.0.1:9 does not answer: unreachable" in error
    assert len(error.splitlines()) == 1


def test_options_about_a_service_mean_nothing_to_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "http://127.0.0.1:9", "--remote-rtt-ms", "5"]) == 2
    assert "--remote-rtt-ms means nothing when a server is measured" in capsys.readouterr().err
