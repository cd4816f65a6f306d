"""Responses: made by our engine, gone on with, read again; drift, damage and empty files named by
line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.build import Options
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.progress import Progress
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from outrider.train import responses
from outrider.train.material import TrainingData, gather
from outrider.train.responses import ResponsePlan, read_responses
from outrider.train.texts import TrainingText
from tests.helpers import byte_tokenizer, word_tokenizer
from tests.unit.train.material import Interrupting, save_responses, save_target, texts

PLAN = ResponsePlan(temperatures=(0.0, 1.0), samples=2, max_tokens=6, seed=3)


def prompts_file(path: Path, count: int = 5) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(count)))
    return path


def options(target: Path) -> Options:
    return Options(str(target), drafter="ngram", max_num_seqs=2)


def gathered(
    tmp_path: Path, out: str, plan: ResponsePlan = PLAN, *, progress: object = None
) -> list[TrainingText]:
    target = tmp_path / "target"
    if not target.exists():
        save_target(target)
    material = TrainingData(prompts=str(prompts_file(tmp_path / "prompts.jsonl")))
    found, _ = gather(
        material,
        options(target),
        "tiny",
        byte_tokenizer(),
        plan,
        tmp_path / out,
        progress or Progress(),  # type: ignore[arg-type]
    )
    return found


def test_greedy_responses_are_the_targets_own(tmp_path: Path) -> None:
    """Two samples of five prompts with alternating temperatures: the greedy ones are the texts of
    plain decoding."""
    found = gathered(tmp_path, "out")
    assert len(found) == 10
    llm = LLM(tmp_path / "target", drafter="none")
    for index in range(0, 10, 2):  # temperature 0 comes first
        done = llm.generate(found[index].prompt, SamplingParams(max_tokens=6))[0]
        assert found[index].response == done.token_ids
    assert found[1].response != found[6].response or found[3].response != found[8].response


@pytest.mark.slow
def test_an_interrupted_stage_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled texts and all: the same file as without the interruption, nothing asked twice; half a
    line is dropped."""
    monkeypatch.setattr(responses, "ROUNDS", 1)
    whole = gathered(tmp_path, "whole")
    with pytest.raises(KeyboardInterrupt):
        gathered(tmp_path, "cut", progress=Interrupting(4, "regenerating responses"))
    path = tmp_path / "cut" / "responses.jsonl"
    there = path.read_text().count("\n") - 1
    assert 4 <= there < 10
    path.write_text(path.read_text() + '{"id": "half')
    assert gathered(tmp_path, "cut") == whole
    assert len(path.read_text().splitlines()) == 11
    with pytest.raises(ConfigError, match=r"another plan \(plan\)"):
        gathered(tmp_path, "cut", replace(PLAN, seed=4))


def test_files_are_read_again(tmp_path: Path) -> None:
    """What was written is what is read."""
    assert read_responses(
        save_responses(tmp_path / "r.jsonl", texts(3)), byte_tokenizer(), 257
    ) == texts(3)


def test_logs_with_answers(tmp_path: Path) -> None:
    """A ShareGPT log: every answered question, ended by the end token."""
    log = tmp_path / "chat.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    log.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    (found,) = read_responses(log, byte_tokenizer(), 257, chat_template=False)
    assert bytes(token - 1 for token in found.response[:-1]) != b""
    assert found.response[-1] == 0
    assert byte_tokenizer().decode(found.response[:-1]) == "yo"


def test_bad_files(tmp_path: Path) -> None:
    """Each names the file, the line where there is one, and what to do."""
    missing = tmp_path / "missing"
    empty = tmp_path / "empty"
    damaged = tmp_path / "damaged"
    with pytest.raises(ConfigError, match="missing cannot be read"):
        read_responses(missing, byte_tokenizer(), 257)
    empty.write_text("")
    with pytest.raises(ConfigError, match="empty is empty"):
        read_responses(empty, byte_tokenizer(), 257)
    save_responses(damaged, [])
    with pytest.raises(ConfigError, match="holds no responses"):
        read_responses(damaged, byte_tokenizer(), 257)
    damaged.write_text(
        save_responses(damaged, texts(2)).read_text().replace('{"id": "t1"', '{"id" "t1"')
    )
    with pytest.raises(ConfigError, match="damaged, line 3 is damaged"):
        read_responses(damaged, byte_tokenizer(), 257)
    unanswered = prompts_file(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match=r"none of the 5 requests .* has an answer"):
        read_responses(unanswered, byte_tokenizer(), 257)


def test_tokenizer_drift(tmp_path: Path) -> None:
    """Equal ids under another tokenizer are other texts; an id outside the vocabulary is caught as
    well."""
    path = save_responses(tmp_path / "r.jsonl", texts(2), word_tokenizer(50))
    with pytest.raises(CapabilityError, match="vocabulary is not this target's"):
        read_responses(path, byte_tokenizer(), 257)
    outside = save_responses(tmp_path / "o.jsonl", [TrainingText("far", [1], [2, 999])])
    with pytest.raises(CapabilityError, match="text 'far' has token 999"):
        read_responses(outside, byte_tokenizer(), 257)


def test_prompt_files_with_faults(tmp_path: Path) -> None:
    """Empty, unreadable, bad lines: named with their numbers, before anything is generated."""
    save_target(tmp_path / "target")
    bad = tmp_path / "bad.jsonl"
    for content, message in (("", "is empty"), ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2")):
        bad.write_text(content)
        data = TrainingData(prompts=str(bad))
        with pytest.raises(ConfigError, match=message):
            gather(
                data,
                options(tmp_path / "target"),
                "t",
                byte_tokenizer(),
                PLAN,
                tmp_path / "o",
                Progress(),
            )


def test_one_source_of_texts(tmp_path: Path) -> None:
    """Combinations that mean nothing are refused by name."""
    for material, message in (
        (TrainingData(), "got none of them"),
        (TrainingData(prompts="a", traffic="b"), "prompts and traffic"),
        (TrainingData(traffic="b"), "--init"),
        (TrainingData(prompts="a", recorded_answers=True), "--from-traffic"),
    ):
        with pytest.raises(ConfigError, match=message):
            material.check(None)
    with pytest.raises(ConfigError, match="no folder"):
        TrainingData(prompts="a").check(tmp_path / "none")
