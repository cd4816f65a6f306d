"""`outrider certify`, as typed: what reaches the lab, exit codes, and a run that is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.certify import certify as lab
from outrider.lab.certify import sampled
from outrider.lab.certify.certify_result import CertifyResult
from outrider.lab.result import read_result
from tests.helpers import disturbed, save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.report.results import certificate

Cli = Callable[..., Any]
SMALL = ("--limit", "1", "--max-tokens", "6", "--samples", "80", "--threads", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small pair, and prompts for it."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_llama(40, sharpness=2.0, hidden_size=16, intermediate_size=32)
    for name, model in (("target", target), ("draft", disturbed(target, 0.3))):
        save_checkpoint(root / name, model, word_tokenizer(40))
    (root / "prompts.jsonl").write_text('{"prompt": "w5 w9 w5 w9"}\n{"prompt": "w7 w7 w8"}\n')
    return root / "target", root / "draft"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(models: tuple[Path, Path], *more: str) -> list[str]:
    target, draft = models
    return [
        "certify",
        str(target),
        "--draft",
        str(draft),
        "--prompts",
        str(target.parent / "prompts.jsonl"),
        *SMALL,
        *more,
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the lab was asked for; it answers with `asked["verdict"]`."""
    seen: dict[str, Any] = {"verdict": "lossless"}

    def answer(subject: Any, workload: Any, prompts: Any, plan: Any, units: Any) -> CertifyResult:
        seen.update(subject=subject, prompts=prompts, plan=plan)
        return certificate(verdict=seen["verdict"])

    monkeypatch.setattr(lab, "certify", answer)
    return seen


@pytest.mark.parametrize(
    ("verdict", "code"), [("lossless", 0), ("not lossless", 1), ("lossy", 1), ("inconclusive", 1)]
)
def test_the_exit_code_is_zero_for_lossless_only(
    cli: Cli, here: Path, models: tuple[Path, Path], asked: dict[str, Any], verdict: str, code: int
) -> None:
    asked["verdict"] = verdict
    found = cli(*arguments(models))
    assert found.code == code
    assert verdict.split()[0] in found.out.lower()
    assert list(here.iterdir()) == []


def test_options_reach_the_lab(
    cli: Cli, here: Path, models: tuple[Path, Path], asked: dict[str, Any]
) -> None:
    """Catches an option that is ignored."""
    sampling = (
        "--temperature",
        "0.7",
        "--sampling",
        "top_k=5",
        "--seed",
        "11",
        "--sampling",
        "stop=w3",
    )
    assert (
        cli(*arguments(models, *sampling, "--verifier", "token", "--num-draft-tokens", "3")).code
        == 0
    )
    plan = asked["plan"]
    subject = asked["subject"]
    assert (plan.samples, plan.seed) == (80, 11)
    assert (
        plan.sampling.temperature,
        plan.sampling.top_k,
        plan.sampling.max_tokens,
        plan.sampling.stop,
    ) == (0.7, 5, 6, ["w3"])
    assert plan.drawing == plan.sampling
    assert (subject.speculative.verifier.name, subject.max_drafted) == ("token", 3)
    assert asked["prompts"] == [[5, 9, 5, 9]]


@pytest.mark.slow
def test_how_much_is_drawn(
    cli: Cli, here: Path, models: tuple[Path, Path], asked: dict[str, Any]
) -> None:
    """Defaults, and what is asked for."""
    base = [*arguments(models)[:6], "--model-options", "runtime=eager"]
    plans = []
    for more in ([], ["--samples", "123", "--max-tokens", "9"]):
        assert cli(*base, *more).code == 0
        plans.append((asked["plan"].samples, asked["plan"].sampling.max_tokens))
    assert plans == [(5000, 128), (123, 9)]
    assert asked["plan"].drawing.temperature == 1.0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--samples", "0"], "--samples"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--drafter", "none"], "nothing to certify"),
        (["--temperature", "-1"], "temperature"),
        (["--verifier", "blok"], "Did you mean 'block'"),
        (["--resume"], "no interrupted run"),
        (["--out", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, here: Path, models: tuple[Path, Path], more: list[str], words: str
) -> None:
    base = [
        part
        for part in arguments(models)
        if more[0] != "--drafter" or part not in ("--draft", str(models[1]))
    ]
    found = cli(*base, *more)
    assert found.code == 2
    assert words in found.err.splitlines()[-1]
    assert found.out == ""


def test_a_real_run_writes_what_it_says(cli: Cli, here: Path, models: tuple[Path, Path]) -> None:
    """Everything for real, and few samples."""
    found = cli(
        *arguments(
            models,
            "--samples",
            "20",
            "--json",
            "--out",
            "c.json",
            "--out",
            "c.html",
            "--out",
            "c.md",
        )
    )
    assert found.code == 0
    result = CertifyResult.model_validate_json(found.out)
    assert result.verdict == "lossless"
    assert result.greedy.status == "passed"
    assert read_result(Path("c.json")) == result
    assert json.loads(found.out)["command"].startswith("outrider")
    assert sorted(path.name for path in here.iterdir()) == ["c.html", "c.json", "c.md"]
    assert "Lossless" in Path("c.md").read_text()


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    cli: Cli, here: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while sampling: exit code 130, no half result; --resume draws the rest and another
    plan is refused."""
    real = sampled.Draws._batch
    calls = []

    def draw(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(sampled.Draws, "_batch", draw)
    monkeypatch.setattr(sampled, "LATEST", 4)  # texts so short that there are several batches
    stopped = cli(*arguments(models, "--out", "c.json"))
    assert stopped.code == 130
    assert "--resume" in stopped.err
    assert [path.name for path in here.iterdir()] == ["c.unfinished.jsonl"]
    assert (
        "another plan (plan)"
        in cli(*arguments(models, "--out", "c.json", "--seed", "5", "--resume")).err
    )
    resumed = cli(*arguments(models, "--out", "c.json", "--resume"))
    assert resumed.code in (0, 1)
    assert [path.name for path in here.iterdir()] == ["c.json"]
    total = len(calls)
    whole = cli(*arguments(models, "--out", "whole.json"))
    assert len(calls) - total == total - 1  # the third was asked for twice, the first two not again
    assert whole.code == resumed.code
    names = ("c.json", "whole.json")
    one, other = (
        read_result(Path(name)).model_dump(exclude={"created", "elapsed_s", "command"})
        for name in names
    )
    assert one == other


# ------------------------------------------------ grammars


def test_a_form_of_answers_reaches_the_lab(
    cli: Cli, here: Path, models: tuple[Path, Path], asked: dict[str, Any]
) -> None:
    (here / "schema.json").write_text('{"type": "string"}')
    assert cli(*arguments(models)).code == 0
    assert asked["plan"].sampling.structured_outputs is None
    assert cli(*arguments(models, "--sampling", "json_schema=schema.json")).code == 0
    assert asked["plan"].sampling.structured_outputs.json == {"type": "string"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--sampling", "regex=a", "--sampling", "json_schema=schema.json"),
            "an answer has one form",
        ),
        (
            ("--sampling", "json_schema=nowhere.json"),
            "--sampling json_schema nowhere.json cannot be read: No such file",
        ),
        (
            ("--sampling", "json_schema=schema.json"),
            "--sampling json_schema schema.json is not JSON",
        ),
    ],
)
def test_a_wrong_form_is_refused_by_name(
    cli: Cli, here: Path, models: tuple[Path, Path], more: tuple[str, ...], message: str
) -> None:
    (here / "schema.json").write_text("{")
    result = cli(*arguments(models, *more))
    assert result.code == 2
    assert message in result.err
