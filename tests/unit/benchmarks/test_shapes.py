"""The benchmark of shapes: files of random weights that both engines can read, and its table from
numbers by hand."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import typer
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from tests.gguf_files import VOCABULARY_SIZE, write_model
from tests.helpers import tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SIZES = {"layers": 2, "hidden": 256, "mlp": 512, "heads": 4, "kv_heads": 2}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A GGUF file with a tokenizer."""
    model = tiny_llama(VOCABULARY_SIZE, hidden_size=64, intermediate_size=96)
    return write_model(tmp_path / "words.gguf", model, "llama")


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_a_file_of_random_weights_answers(
    part: Any, tmp_path: Path, words: Path, form: str
) -> None:
    """Its weights are around zero and of the spread that was asked for, its vocabulary is filled
    up, and it runs."""
    files = part("shape_files")
    shape = files.Shape(**SIZES, vocabulary=VOCABULARY_SIZE + 60)
    path = files.file_of(shape, "tiny", form, words, tmp_path / "made")
    assert path.name == f"tiny.{form}.gguf"
    reader = gguf.GGUFReader(path)
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    assert len(matrices) == 1 + 2 * 7
    assert sum(tensor.n_bytes for tensor in matrices) == files.num_bytes(shape, form)
    for tensor in matrices:
        assert tensor.tensor_type.name == form
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert abs(values.mean()) < 0.004, tensor.name
        assert 0.01 < values.std() < 0.04, tensor.name
    llm = LLM(str(path), drafter="none", runtime="eager")
    done = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(done.token_ids) == 4
    changed = path.stat().st_mtime_ns
    assert files.file_of(shape, "tiny", form, words, tmp_path / "made") == path
    assert path.stat().st_mtime_ns == changed, "made once"


def test_short_rows_take_the_type_that_holds_them(part: Any) -> None:
    """As llama.cpp's own tool: 576 inputs are no multiple of 256."""
    files = part("shape_files")
    assert [files.type_of(form, 576) for form in ("Q4_K", "Q6_K", "Q4_1")] == [
        "Q5_0",
        "Q8_0",
        "Q4_1",
    ]
    assert files.type_of("Q4_K", 1536) == "Q4_K"


def test_shapes_are_those_of_their_models(part: Any) -> None:
    """Numbers of weights as their model cards say, head included where it is not the embeddings."""
    files = part("shape_files")
    millions = {
        name: round(sum(outputs * inputs for _, outputs, inputs in shape.matrices()) / 1e6)
        for name, shape in files.SHAPES.items()
    }
    assert millions == {"135M": 134, "1B": 1236, "3B": 3213, "8B": 8030}


def test_a_full_disk_is_refused(
    part: Any, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = part("shape_files")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    with pytest.raises(OSError, match=r"8B\.Q4_K\.gguf needs 4\.7 GB.*has 1\.0 GB"):
        files.file_of(files.SHAPES["8B"], "8B", "Q4_K", words, tmp_path / "made")


def test_the_table_from_numbers_by_hand(part: Any) -> None:
    """Catches a mean for a median, a slowest pass for the fastest, a ratio to another context, and
    an engine that failed."""
    shapes = part("shapes")
    run = {"token_s": 0.02, "prompt_s": 4.0, "other_cpu": 0.0}
    slow = [[0.02, 0.03, 0.04, 0.05], [0.03, 0.05, 0.06, 0.09]]
    fast = [[0.01, 0.02, 0.03, 0.04], [0.02, 0.03, 0.05, 0.08]]
    ours = {
        "runs": [
            {**run, "passes_s": slow},
            {**run, "token_s": 0.5, "prompt_s": 5.0, "passes_s": fast},
            {**run, "token_s": 0.03, "prompt_s": 4.5, "passes_s": slow},
        ],
        "loads_s": [3.0, 1.0],
        "commands_s": [6.0, 2.0],
        "peak_bytes": 2e9,
    }
    cell = {"shape": "1B", "type": "Q4_K", "file_bytes": 7e8, "reading_s": 0.5}
    content = {
        "cells": [{**cell, "engines": {"outrider": ours, "llamacpp": {"runs": [], "failed": "x"}}}],
        "hardware": {"cpu": "a processor", "threads_used": 2, "memory_read_gb_per_s": 20.0},
        "date": "2026-01-01",
        "command": "python benchmarks/shapes.py",
    }
    table = shapes.markdown(content)
    assert (
        "| 1B Q4_K, 0.70 GB | outrider | 30.0 | 4.50 | 2.00, 3.00, 4.00 (10.0) | "
        "1.50, 2.50, 4.00 (20.0) | 3.00 (6.0) | 1.00 | 6.0, 2.0 | 2.00 |" in table
    )
    assert "| llamacpp | failed: x |" in table
    assert "a processor, 2 threads, 20 GB/s, 2026-01-01" in table


def test_unknown_names_are_refused_and_no_tokenizer_is_no_failure(
    part: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Path
) -> None:
    shapes = part("shapes")
    app = typer.Typer()
    app.command()(shapes.main)
    monkeypatch.setattr(shapes, "REAL", tmp_path / "nowhere.gguf")
    shown = CliRunner().invoke(app, [])
    assert (shown.exit_code, shown.output[:7]) == (0, "skipped")
    monkeypatch.setattr(shapes, "REAL", words)
    for option, name in (("--shapes", "70B"), ("--types", "Q9"), ("--peers", "vllm")):
        shown = CliRunner().invoke(app, [option, name])
        assert shown.exit_code == 2
        assert f"'{name}' is none of" in shown.output


@pytest.mark.slow
def test_one_file_from_end_to_end(
    part: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Path
) -> None:
    """A worker of ours loads it twice, is timed, and its file is deleted."""
    shapes = part("shapes")
    files = part("shape_files")
    tiny = files.Shape(**SIZES, vocabulary=VOCABULARY_SIZE)
    stored: dict[str, Any] = {}

    def store(name: str, content: dict[str, Any], *rest: Any) -> Path:
        stored.update(content, hardware={"cpu": "", "threads_used": 1, "memory_read_gb_per_s": 1})
        stored.update(date="", command="")
        return tmp_path / f"{name}-2026-01-01.json"

    for name, value in {
        "REAL": words,
        "FOLDER": tmp_path / "made",
        "PEERS": tmp_path / "peers",
        "SHAPES": {"tiny": tiny},
        "RESULTS": tmp_path,
        "CONTEXTS": (16, 32),
        "PROMPT_TOKENS": 32,
        "MAX_MODEL_LEN": 64,
        "ANSWER": 4,
        "write_result": store,
        "read_result": lambda path: stored,
        "interpreter": lambda peer: tmp_path / "nowhere",
    }.items():
        monkeypatch.setattr(shapes, name, value)
    app = typer.Typer()
    app.command()(shapes.main)
    options = ("--shapes", "tiny", "--types", "Q4_0", "--rounds", "1", "--repeats", "1")
    shown = CliRunner().invoke(app, [*options, "--threads", "1", "--no-starts", "--remove"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    measured = stored["cells"][0]["engines"]["outrider"]
    assert len(measured["loads_s"]) == 2
    assert measured["peak_bytes"] > 0
    assert [len(row) for row in measured["runs"][0]["passes_s"]] == [4, 4]
    assert "llamacpp: not installed" in shown.output
    assert not [*(tmp_path / "made").glob("*.gguf")], "--remove"
    cell = {"shape": "tiny", "engines": {}, "file_bytes": 1, "reading_s": 1.0}
    stored["cells"] = [{**cell, "type": "Q8_0"}, {**cell, "type": "Q4_0"}]
    (tmp_path / "earlier.json").write_text("{}", encoding="utf-8")
    options = (*options, "--threads", "1", "--no-starts", "--onto", str(tmp_path / "earlier.json"))
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert [cell["type"] for cell in stored["cells"]] == ["Q4_0", "Q8_0"]
    assert stored["cells"][0]["engines"], "measured anew"
    assert not stored["cells"][1]["engines"], "as it was"
    before = stored["cells"][0]["engines"]["outrider"]
    shown = CliRunner().invoke(app, [*options, "--loads"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    after = stored["cells"][0]["engines"]["outrider"]
    assert (after["runs"], after["peak_bytes"]) == (before["runs"], before["peak_bytes"])
    assert after["loads_s"] != before["loads_s"], "timed again"
    shown = CliRunner().invoke(app, [*options[:-2], "--loads"])
    assert shown.exit_code == 2
    assert "needs" in shown.output
