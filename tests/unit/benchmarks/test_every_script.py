"""Every benchmark starts, the small ones run, and every stored result is shown by today's code."""

from __future__ import annotations

import io
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

REPOSITORY = Path(__file__).resolve().parents[3]
BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = BENCHMARKS / "results"
FILES = sorted(BENCHMARKS.rglob("*.py"))
WORKERS = {"services_worker.py"}  # answers lines of standard input and takes no options
SCRIPTS = [
    path
    for path in FILES
    if "__main__" in path.read_text(encoding="utf-8") and path.parent == BENCHMARKS
]
NOT_OURS = ("llama_cpp", "openvino", "openvino_genai", "vllm")  # of the peers' own environments


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts find each other, and leave signals as they were: one that ends the process at SIGTERM
    would end other tests."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_it_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import of a name that the package no longer has."""
    if path.parent.name == "peers":
        monkeypatch.syspath_prepend(str(path.parent))
    try:
        runpy.run_path(str(path), run_name="imported")
    except ModuleNotFoundError as error:
        if error.name not in NOT_OURS:
            raise


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.name not in WORKERS], ids=lambda path: path.stem
)
def test_it_shows_its_help(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()


# --- the small ones run


def ask(count: int) -> list[str]:
    """In place of GSM8K's questions."""
    return ["Question: 1, 2, 3, 1, 2?"] * count


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and its draft."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_llama(257, hidden_size=64, intermediate_size=64)
    target.config.bos_token_id = 1
    for name, model in (("target", target), ("draft", disturbed(target, 0.05))):
        save_checkpoint(folder / name, model.bfloat16(), byte_tokenizer())
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a script with options and returns what it would have stored, by name, and what it
    printed."""
    stored: dict[str, Any] = {}
    threads = torch.get_num_threads()

    def write(name: str, content: dict[str, Any], *rest: Any) -> Path:
        stored[name] = content
        return RESULTS / f"{name}.json"

    def ran(script: str, *options: Any, **replaced: Any) -> tuple[dict[str, Any], str]:
        module = import_module(script)
        for name, value in {"write_result": write, **replaced}.items():
            monkeypatch.setattr(module, name, value, raising=name != "write_result")
        app = typer.Typer()
        app.command()(module.main)
        done = CliRunner().invoke(app, [str(option) for option in options])
        assert done.exit_code == 0, (done.output, done.exception)
        return stored, done.output

    yield ran
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_blocks(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process for each model runs here."""
    blocks = import_module("blocks")

    def here(command: list[str], **settings: Any) -> SimpleNamespace:
        with redirect_stdout(io.StringIO()) as out, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[1:])
            blocks.main()
        return SimpleNamespace(stdout=out.getvalue())

    # compilers run as ever
    monkeypatch.setattr(blocks, "subprocess", SimpleNamespace(run=here, PIPE=subprocess.PIPE))
    monkeypatch.setattr(
        sys, "argv", ["blocks.py", str(pair / "target"), "--max-tokens", "4", "--repeats", "1"]
    )
    blocks.main()
    assert "tokens_per_s" in capsys.readouterr().out


def test_control(run: Any) -> None:
    assert "look-up" in run("control", "--cells", 2, "--prompts", 1, "--tokens", 8)[1]


def test_head_prompts(run: Any, tmp_path: Path, shared: Path) -> None:
    run("head_prompts", tmp_path / "prompts.jsonl", "--count", 5)
    assert len((tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()) == 5


def test_inflate(run: Any, tmp_path: Path, pair: Path) -> None:
    # it checks what it made if a file is there
    asked = {"GSM8K_TEST": Path(__file__), "GREEDY_TOKENS": 4, "prompt_texts": ask}
    run("inflate", pair / "target", tmp_path / "wide", "--mlp", 128, **asked)
    assert '"intermediate_size": 128' in (tmp_path / "wide" / "config.json").read_text(
        encoding="utf-8"
    )


def test_recording(run: Any, pair: Path) -> None:
    options = (
        "--pair",
        pair,
        "--configurations",
        "none,ngram",
        "--prompts",
        1,
        "--repeats",
        1,
        "--max-tokens",
        8,
    )
    stored, _ = run("recording", *options, "--threads", 1, prompt_texts=ask)
    assert [*stored["recording"]["configurations"]] == ["none", "ngram"]


@pytest.mark.slow
def test_rollback(run: Any) -> None:
    shape = import_module("rollback").SHAPE
    small = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": shape["layer_types"][:4],
    }
    stored, _ = run(
        "rollback", "--context", 8, "--repeats", 2, "--threads", 1, SHAPE={**shape, **small}
    )
    assert [*stored["rollback"]["found"]] == ["bfloat16", "float32"]


@pytest.mark.slow
def test_runtime(run: Any, pair: Path) -> None:
    options = ("--contexts", "16,32", "--prompts", 16, "--repeats", 1, "--threads", 1)
    stored, _ = run(
        "runtime", pair / "target", *options, BUSY=(0,), memory_bandwidth=lambda threads: 1e10
    )
    assert [*stored["runtime"]["passes_s"]] == [16, 32]
    runtime = import_module("runtime")
    assert runtime.cached_token_s({16: {1: 2.0}, 32: {1: 10.0}}) == 0.5
    assert runtime.cached_token_s({16: {1: 2.0}}) is None, "one context says nothing of it"


@pytest.mark.slow
def test_step(run: Any, pair: Path) -> None:
    options = (
        "--pair",
        pair,
        "--mlp",
        0,
        "--k",
        2,
        "--rounds",
        1,
        "--prompts",
        1,
        "--max-tokens",
        16,
        "--threads",
        1,
    )
    arithmetic = type("Arithmetic", (), {"is_possible": staticmethod(lambda: False)})
    stored, _ = run(
        "step", *options, "--max-other-cpu", 99, Arithmetic=arithmetic, prompt_texts=ask
    )
    assert [*stored["step"]["summary"]] == ["0", "2"]


# --- stored results


def names(*patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in RESULTS.glob(pattern))


BY_OPTION = {  # the options, or a command, that show a result again
    **dict.fromkeys(names("auto-*", "drafters-*"), ("drafters", "--render")),
    **dict.fromkeys(names("real-heads-*"), ("real_heads", "render")),
    **dict.fromkeys(names("real-model-*", "defaults-*"), ("real_model", "--render")),
    **dict.fromkeys(names("serve-2*"), ("serve", "--render")),
    **dict.fromkeys(names("services-*"), ("services", "--render")),
    **dict.fromkeys(names("shapes-*"), ("shapes", "--render")),
    **dict.fromkeys(names("tune-*"), ("tune", "--render")),
}


@pytest.mark.parametrize("name", BY_OPTION)
def test_a_stored_result_is_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches code that no longer reads what an earlier version stored."""
    script, option = BY_OPTION[name]
    monkeypatch.setattr(sys, "argv", [script, option, str(RESULTS / name)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert not ended.value.code
    assert len(capsys.readouterr().out.splitlines()) > 2


@pytest.mark.parametrize("name", names("peers-*"))
def test_a_comparison_with_peers_is_shown(name: str) -> None:
    out = Console(record=True, width=160)
    import_module("peer_report").show(out, import_module("workload").read_result(RESULTS / name))
    assert "outrider" in out.export_text()


def test_the_page_of_studies_says_what_their_results_say(tmp_path: Path) -> None:
    """Catches a page that was changed by hand, and a report that the committed page does not show."""
    import_module("study.report").render(tmp_path / "page.md")
    committed = REPOSITORY / "docs" / "results" / "heads.md"
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == committed.read_text(
        encoding="utf-8"
    )
