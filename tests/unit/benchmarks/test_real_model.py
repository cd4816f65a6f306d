"""The real model's benchmark without its peers: floors and ratios from numbers by hand, formats,
prompts, what is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.gguf_files import write_model
from tests.helpers import tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def run(rate: float, prompt: int = 0, text: str = "a", tau: float = 1.0) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "tokens_per_s": rate,
        "ttft_s": 0.5,
        "other_cpu": 0.0,
        "text": text,
        "tau": tau,
    }


def content(**changes: Any) -> dict[str, Any]:
    """Ours twice as fast as llama.cpp; drafting helps in one category and hurts in the other."""
    cell = {
        "outrider: none": [run(100), run(120, 1, "b")],
        "outrider: suffix": [run(300, 0, "a", 3.0), run(90, 1, "c", 1.0), run(310, 2, "z", 3.0)],
        "outrider: ngram": [run(50)],
        "llamacpp: plain": [run(60)],
        "openvino: lookup": [run(150)],
    }
    slow = {
        "outrider: none": [run(100)],
        "outrider: suffix": [run(80)],
        "llamacpp: plain": [run(160)],
    }
    return {
        "model": "tiny.gguf",
        "plan": {"threads": 2},
        "start": {"outrider generate demo": [9.0, 2.0, 2.5], "outrider serve the file": [9.0]},
        "plain": {
            "Q4_1": {"short": {"outrider": [run(100), run(220), run(210)], "llamacpp": [run(105)]}}
        },
        "drafting": {"Q4_1": {"qa": cell, "gsm8k": slow}},
        "failures": {"openvino Q8_0": "no such thing"},
        **changes,
    }


def test_floors_by_hand(part: Any) -> None:
    """Catches a mean over categories that are not the floor's, a maximum for a median, a floor that
    is met when missing."""
    floors = {floor.promise: floor for floor in part("real_report").floors(content())}
    found = {name: (floor.found, floor.verdict) for name, floor in floors.items()}
    assert found["first letter of `generate demo`, s"] == (2.5, "met")
    assert found["first letter of `generate FILE.gguf`, s"] == (None, "not measured")
    assert found["`serve FILE.gguf` ready, s"] == (9.0, "not met")
    assert found["plain / llama.cpp, Q4_1, short prompt"] == (2.0, "met")
    assert found["plain / llama.cpp, Q4_1, context 2000"] == (None, "not measured")
    assert found["best drafter / best peer setting, Q4_1, mean of 1 categories"] == (2.0, "met")
    assert found["best drafter / own plain, Q4_1, worst category"] == (
        pytest.approx(0.8),
        "not met",
    )


def test_the_fastest_and_the_texts(part: Any) -> None:
    """The best is by its median, plain decoding aside; a prompt that plain decoding has not
    answered is not identical."""
    report = part("real_report")
    cell = content()["drafting"]["Q4_1"]["qa"]
    assert report.fastest(cell, lambda name: name.startswith("outrider")) == "outrider: suffix"
    assert report.identical(cell["outrider: suffix"], cell["outrider: none"]) == (1, 3)
    assert report.over_own_plain({"outrider: none": [run(1)]}) is None


def test_everything_is_shown(part: Any) -> None:
    out = Console(width=200, record=True)
    part("real_report").show(out, content())
    shown = out.export_text()
    for wanted in (
        "not met",
        "210 (100 - 220)",
        "300 (2.3; 1/3)",
        "openvino Q8_0: FAILED: no such thing",
    ):
        assert wanted in shown


def test_a_run_is_counted_from_the_first_step_on(part: Any) -> None:
    """An engine that gives four tokens with its first step must not have them counted as decoded."""
    model = part("real_model")
    answer = {"token_ids": list(range(10)), "ttft_s": 1.0, "seconds": 4.0, "other_cpu": 0.0}
    assert model.stored(answer, 5)["tokens_per_s"] == 3.0
    stats = {"first_tokens": 4, "decode_s": 2.0, "tau": 2.5}
    assert model.stored({**answer, "stats": stats}, 5) | {"text": ""} == {
        "tokens_per_s": 3.0,
        "ttft_s": 1.0,
        "num_prompt": 5,
        "other_cpu": 0.0,
        "text": "",
        "tau": 2.5,
    }


def test_a_file_in_another_format(part: Any, tmp_path: Path) -> None:
    """Same names and metadata, matrices within the rounding of their format, norms untouched; its
    own format is the file."""
    formats = part("real_formats")
    model = tiny_llama(260, hidden_size=64, intermediate_size=96)
    source = write_model(tmp_path / "tiny.F32.gguf", model, "llama")
    assert formats.converted(source, "F32", tmp_path / "made") == source
    made = formats.converted(source, "Q8_0", tmp_path / "made")
    assert formats.own_format(made) == "Q8_0"
    assert formats.converted(source, "Q8_0", tmp_path / "made") == made
    before = gguf.GGUFReader(source)
    after = gguf.GGUFReader(made)
    names = {name for name in before.fields if not name.startswith("GGUF.")}
    assert names <= set(after.fields)
    for name in names - set(formats.MADE_ANEW):
        assert after.fields[name].contents() == before.fields[name].contents(), name
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert one.name == other.name
        wanted = gguf.dequantize(one.data, one.tensor_type)
        found = gguf.dequantize(other.data, other.tensor_type)
        bound = np.abs(wanted).max() / 127 if len(one.shape) > 1 else 0.0
        assert np.abs(found - wanted).max() <= bound


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_without_a_model_it_says_so_and_ends_well(part: Any, tmp_path: Path, name: str) -> None:
    """`../shared` is not everywhere; a missing or empty folder is no failure."""
    model = part("real_model")
    app = typer.Typer()
    app.command()(model.main)
    shown = CliRunner().invoke(app, ["--model", str(tmp_path / name)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("skipped: no GGUF file at")


def test_a_draft_of_the_targets_own_bits_is_left_out(part: Any) -> None:
    plan = part("real_model").Plan(
        (), (), (), (), ("suffix k=8", "quantised bits=4 k=5"), 1, 1, 1, 8, 1, "auto"
    )
    assert plan.ours("Q4_1") == ("suffix k=8",)
    assert plan.ours("BF16") == ("suffix k=8", "quantised bits=4 k=5")


def test_prompts_of_a_length(part: Any) -> None:
    """Through the demo target's tokenizer with a template: never longer than asked for, and nearly
    as long."""
    prompts = part("real_prompts")
    workload = part("workload")
    if not (workload.SHARED / "data" / "spec_bench").is_dir():
        pytest.skip("needs ../shared/data")
    made = prompts.Prompts(workload.PAIRS["demo"] / "target")
    made._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    for length in (50, 200):
        assert length - 3 <= len(made.of_length(length)) <= length
    assert made.of_length(50) != made.of_length(50, 1)
    few = made.of_category("translation", 3)
    assert len(few) == 3
    assert made.chat("x")[-1] == made._tokenizer(":", add_special_tokens=False)["input_ids"][-1]


def test_named_numbers_of_a_peers_words(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting must not become the default."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    protocol = part("protocol")
    assert protocol.named_numbers("lookup k=3", "lookup", k=5, ngram=2) == {"k": 3, "ngram": 2}
    for wrong in ("lookup n=3", "look-up k=3"):
        with pytest.raises(ValueError, match="is neither 'plain' nor 'lookup'"):
            protocol.named_numbers(wrong, "lookup", k=5)
