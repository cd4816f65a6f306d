"""The command line as such: help at once, clear about mistakes, a line and an exit code for every
error."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from outrider.cli import session
from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.errors import CapabilityError, CheckpointError, NumericalError, OutriderError
from tests.unit.report import results

PROMISED = "drafter draft num-draft-tokens verifier max-tokens temperature seed dtype device threads json show-drafts"
SETTINGS = (
    "top_k top_p min_p repetition_penalty presence_penalty frequency_penalty stop logprobs runtime "
    "stream chat_template lossy"
)
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "psutil",
    "prompt_toolkit",
    "huggingface_hub",
)


@pytest.mark.parametrize(
    "verb",
    [
        [],
        ["generate"],
        ["chat"],
        ["run"],
        ["demo"],
        ["pull"],
        ["ls"],
        ["list"],
        ["doctor"],
        ["serve"],
        ["train"],
    ],
)
def test_help_imports_nothing_heavy(verb: list[str]) -> None:
    """Help that loads torch takes seconds. The import set is checked, since time depends on the
    machine."""
    code = (
        f"import sys; from outrider.cli.app import run; code = run({[*verb, '--help']!r}); "
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0"


@pytest.mark.slow
def test_choosing_parts_imports_no_model_code() -> None:
    """Code of models takes seconds; a start without trained heads needs none of transformers', and
    no estimate does."""
    code = "import sys, outrider.build, outrider.lab.estimate.estimate; print('HEAVY', 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY False"


def test_a_saved_result_is_shown_without_what_measured_it(tmp_path: Path) -> None:
    """Torch, statistics and plots take seconds, and a page of text on a terminal needs none of
    them."""
    results.bench(results.GAIN).write(tmp_path / "r.json")
    heavy = ("torch", "transformers", "scipy.stats")
    code = (
        f"import sys; from outrider.cli.app import run; code = run(['report', {str(tmp_path / 'r.json')!r}]); "
        f"print('HEAVY', [m for m in {heavy!r} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0"


def test_help_names_every_verb_and_option(cli: Callable[..., Any]) -> None:
    """The options a user is promised."""
    top = cli("--help")
    assert top.code == 0
    assert all(verb in top.out for verb in ("generate", "chat", "demo", "ls", "doctor"))
    out = cli("generate", "--help").out
    assert [name for name in PROMISED.split() if f"--{name}" not in out] == []
    assert [name for name in SETTINGS.split() if f"--{name.replace('_', '-')} " in out] == []
    assert "further options: --help=all, or of one group --help=" in " ".join(out.split())
    everything = cli("generate", "--help=all").out
    assert [
        name for name in SETTINGS.split() if f"--{name.replace('_', '-')}" not in everything
    ] == []
    assert [name for name in PROMISED.split() if f"--{name}" not in everything] == []


def test_no_verb_prints_help(cli: Callable[..., Any]) -> None:
    result = cli()
    assert result.code == 0
    assert "Usage" in result.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["genrate"], "Did you mean 'generate'?"),
        (["generate", "demo", "x", "--draftr", "ngram"], "Did you mean '--drafter'?"),
        (["generate", "demo", "x", "--temprature=1"], "Did you mean '--temperature'?"),
        (["generate"], "'target'"),
        (
            ["generate", "demo", "x", "--temperature", "warm"],
            "--temperature must be a number, got 'warm'",
        ),
        (
            ["generate", "demo", "x", "--runtime", "maybe"],
            "--runtime must be one of auto, native, graphs, eager, got 'maybe'",
        ),
        (["generate", "demo", "x", "--seed"], "--seed"),
        (["generate", "demo", "x", "y"], "y"),
        (
            ["generate", "demo", "x", "--top-p", "3"],
            "1 is off, 0 greedy), got 3.0",
        ),
        (
            ["generate", "demo", "x", "--max-tokens", "0"],
            "max_tokens must be at least 1 (longest answer; None: to the end of the context), got 0",
        ),
        (["generate", "demo", "x", "--stop", ""], "stop[0] must not be empty"),
        (["generate", "demo", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (
            ["generate", "demo", "x", "--show-drafts", "--no-stream"],
            "--show-drafts marks the stream",
        ),
        (["generate", "demo"], "no prompt"),
        (["generate", "demo", ""], "the prompt is empty"),
        (["ls", "drafter"], "Did you mean 'drafters'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    cli: Callable[..., Any], fake: Any, arguments: list[str], expected: str
) -> None:
    """A wrong command line must not load a model, nor print a page or a traceback."""
    result = cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert expected in result.err
    assert fake.asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("no model folder\nat all"), 2),
        (CapabilityError("needs 9 GiB"), 2),
        (NumericalError("NaN"), 1),
    ],
)
def test_errors_while_loading(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: OutriderError, code: int
) -> None:
    """The library's errors keep their exit code and become one line."""

    def fail(target: str, options: ModelOptions, generation_config: str) -> None:
        raise error

    monkeypatch.setattr(session, "load_llm", fail)
    result = cli("generate", "demo", "x")
    assert (result.code, result.out) == (code, "")
    assert result.err == f"error: {' '.join(str(error).split())}\n"


def test_a_bug_keeps_its_traceback(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no OutriderError is ours to find: it must not be dressed up as the user's mistake."""

    def fail(target: str, options: ModelOptions, generation_config: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(session, "load_llm", fail)
    with pytest.raises(ZeroDivisionError):
        cli("generate", "demo", "x")


def test_ctrl_c_while_loading(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: str, options: ModelOptions, generation_config: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "load_llm", fail)
    result = cli("generate", "demo", "x")
    assert (result.code, result.err) == (130, "error: interrupted\n")


def test_defaults_are_the_library_s() -> None:
    """The help prints the command line's defaults; they must be what `LLM` and `SamplingParams` do."""
    from outrider.llm import LLM
    from outrider.sampling.params import SamplingParams

    library = inspect.signature(LLM.__init__).parameters
    for name, value in vars(ModelOptions()).items():
        if not name.endswith("_option") and name != "settings":
            assert library[name].default == value, name
    assert SamplingOptions().params() == SamplingParams()


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """A library that prints while loading must not spoil `--json`."""
    with session.progress("loading") as status:
        print("chatter")
        status("compiling [1/2]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "chatter\ncompiling [1/2]\n"


def test_ctrl_c_while_arguments_are_read_says_so(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an exit code without a word, which typer makes of it."""

    def interrupted(*values: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TyperGroup, "parse_args", interrupted)
    result = cli("ls")
    assert (result.code, result.err) == (130, "error: interrupted\n")
