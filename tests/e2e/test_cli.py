"""The real command on real weights: what a user types and sees.

In this process where that shows the same thing, since every process of its own loads torch again;
as its own process where signals, pipes or a clean stdout are the point. What can be seen without a
model is in `tests/unit/cli`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from outrider.cli import app

TIMEOUT_S = 240
# quick to start, and no quarrel over cores with other tests
PLAIN = ("--runtime", "eager", "--threads", "1")
PROMPT = "Once upon a time"
QUESTION = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    errors: str


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Run one command line in this process, piped."""
    threads = torch.get_num_threads()

    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = app.run(arguments)
        return Outcome(code, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command as its own process."""
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def copy_of(model: Path, to: Path) -> Path:
    shutil.copytree(model, to, copy_function=shutil.copyfile)
    to.chmod(0o755)
    return to


@pytest.mark.slow
def test_json_of_a_process_is_one_object(pair: tuple[Path, Path]) -> None:
    """stdout holds nothing but the object, although libraries that like to print loaded two models."""
    target, draft = map(str, pair)
    with start(
        "generate",
        target,
        QUESTION,
        "--no-chat-template",
        "--draft",
        draft,
        "--max-tokens",
        "24",
        "--json",
        *PLAIN,
    ) as process:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    found = json.loads(out)
    assert found["stats"]["emitted"] == len(found["token_ids"]) == 24
    assert found["stats"]["accepted"] > 0
    assert found["config"]["drafter"] == "draft-model"


@pytest.mark.slow
def test_same_tokens_whoever_drafts(stories: Path, cli: Callable[..., Outcome]) -> None:
    """The streamed text is the JSON's text, and both are plain decoding's."""
    common = ("generate", str(stories), "--max-tokens", "60", *PLAIN)
    plain = cli(*common, "--json", "--drafter", "none", stdin=PROMPT)
    drafted = cli(*common, "--json", "--drafter", "ngram", stdin=PROMPT + "\n")
    streamed = cli(*common, stdin=PROMPT)
    assert (plain.code, drafted.code, streamed.code) == (0, 0, 0), plain.errors + drafted.errors
    assert json.loads(plain.out)["token_ids"] == json.loads(drafted.out)["token_ids"]
    assert (
        json.loads(drafted.out)["stats"]["drafted"] > json.loads(plain.out)["stats"]["drafted"] == 0
    )
    assert streamed.out.rstrip("\n") == json.loads(plain.out)["text"].rstrip("\n")
    assert "tokens/s" in streamed.errors


@pytest.mark.slow
def test_marks(stories: Path, cli: Callable[..., Outcome]) -> None:
    """Runs of accepted tokens are visible; without the marks it is the same text."""
    common = ("generate", str(stories), PROMPT, "--max-tokens", "120", *PLAIN)
    marked = cli(*common, "--show-drafts")
    plain = cli(*common)
    assert marked.out.count("‹") == marked.out.count("›") > 0
    assert marked.out.replace("‹", "").replace("›", "") == plain.out


def test_logprobs(stories: Path, cli: Callable[..., Outcome]) -> None:
    """One entry a token, the token itself among them; greedy means the likeliest."""
    run = cli(
        "generate", str(stories), PROMPT, "--max-tokens", "5", "--json", "--logprobs", "2", *PLAIN
    )
    found = json.loads(run.out)
    assert len(found["logprobs"]) == 5
    for token, logprobs in zip(found["token_ids"], found["logprobs"], strict=True):
        assert logprobs[str(token)] == max(logprobs.values()) <= 0


@pytest.mark.slow
def test_chat(stories: Path, tmp_path: Path, cli: Callable[..., Outcome]) -> None:
    """Two answers through a template; counters add up."""
    model = copy_of(stories, tmp_path / "chatty")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    run = cli("chat", str(model), "--max-tokens", "8", *PLAIN, stdin="Once upon\nThe cat\n/stats\n")
    assert run.code == 0, run.errors
    assert len(run.out.splitlines()) >= 2
    assert "16 tokens in" in run.errors


def test_chat_without_a_template(stories: Path, cli: Callable[..., Outcome]) -> None:
    """This model has none: reported before the first message."""
    run = cli("chat", str(stories), *PLAIN, stdin="hello\n")
    assert (run.code, run.out) == (2, "")
    assert "no chat template" in run.errors


def test_bad_models(stories: Path, tmp_path: Path, cli: Callable[..., Outcome]) -> None:
    """Missing, cut off, without a tokenizer: one line each, exit code 2."""
    cut = copy_of(stories, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    mute = copy_of(stories, tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (mute / name).unlink(missing_ok=True)
    for folder, word in (
        (tmp_path / "nowhere", "no model folder"),
        (cut, "damaged"),
        (mute, "tokenizer"),
    ):
        run = cli("generate", str(folder), PROMPT)
        found = [line for line in run.errors.splitlines() if line.startswith("error: ")]
        assert (run.code, run.out, len(found)) == (2, "", 1), run.errors
        assert word in found[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--drafter", "ngrm"), "Did you mean 'ngram'?"),
        (("--verifier", "blok"), "Did you mean 'block'?"),
        (("--dtype", "bfloat61"), "Did you mean 'bfloat16'?"),
        (("--device", "gpu"), "device"),
        (("--num-draft-tokens", "0"), "num_draft_tokens must be between"),
        (("--threads", "0"), "threads must be at least 1"),
        (("--max-model-len", "4"), "the context holds 4"),
        (("--drafter", "draft-model"), "needs a draft model"),
        (("--drafter", "ngram", "--draft", "x"), "uses no draft model"),
    ],
)
def test_bad_options(
    stories: Path, cli: Callable[..., Outcome], arguments: tuple[str, ...], word: str
) -> None:
    """What only the library can know is refused as clearly as a mistyped option."""
    run = cli("generate", str(stories), "Once upon a time there was", *arguments)
    found = [line for line in run.errors.splitlines() if line.startswith("error: ")]
    assert (run.code, run.out, len(found)) == (2, "", 1), run.errors
    assert word in found[0]


@pytest.mark.slow
def test_draft_of_another_vocabulary(
    stories: Path, pair: tuple[Path, Path], cli: Callable[..., Outcome]
) -> None:
    """Sizes, the first difference, and what to use instead."""
    run = cli("generate", str(stories), PROMPT, "--draft", str(pair[1]), *PLAIN)
    assert run.code == 2
    assert all(
        word in run.errors for word in ("4096", "512", "first difference", "--drafter ngram")
    )


@pytest.mark.slow
def test_ctrl_c(stories: Path) -> None:
    """A real SIGINT in the middle of a stream: what was written, its stats, exit code 130."""
    options = (
        "--max-tokens",
        "450",
        "--temperature",
        "1",
        "--seed",
        "1",
        "--drafter",
        "none",
        *PLAIN,
    )
    with start("generate", str(stories), PROMPT, *options) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert (first + out).endswith("\n")
    assert "stopped by you" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_reader_that_leaves(stories: Path) -> None:
    """`outrider generate ... | head -c 1`: quiet, and not with exit code 0."""
    with start("generate", str(stories), PROMPT, "--max-tokens", "200", *PLAIN) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Exception" not in errors


@pytest.mark.slow
def test_demo(cli: Callable[..., Outcome]) -> None:
    """The first command of the README, short: every drafter says what plain decoding
    says."""
    from outrider.cli.demo import CONFIGURATIONS
    from outrider.demo import demo_paths

    if not (demo_paths().target / "config.json").exists():
        pytest.skip("the embedded pair is not in this checkout")
    run = cli("demo", "--limit", "2", "--rounds", "1", "--json", "--threads", "1")
    assert run.code == 0, run.errors
    found = json.loads(run.out)
    bench = found["bench"]
    assert [one["label"] for one in bench["configurations"]] == [
        "none",
        *CONFIGURATIONS.split(", "),
    ]
    measured = bench["cells"][0]["configurations"]
    assert len(measured) == len(bench["configurations"])
    assert all(
        one["identity"]["num_identical"] == one["identity"]["num_compared"] == 2
        for one in measured[1:]
    )
