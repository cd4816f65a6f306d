"""`outrider estimate`, as typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from outrider.cli.app import build_app
from outrider.lab.estimate.estimate_result import EstimateResult
from outrider.lab.result import read_result
from outrider.report.estimate import verdict
from tests.unit.report import results

DOCS = Path(__file__).parents[3] / "docs" / "algorithms" / "estimate.md"
Cli = Callable[..., Any]


def answered(cli: Cli, *arguments: str) -> EstimateResult:
    output = cli("estimate", *arguments, "--json")
    assert output.code == 0, output.err
    return EstimateResult.model_validate_json(output.out)


def test_numbers(cli: Cli) -> None:
    result = answered(cli, "--alpha", "0.9,0.8", "--c", "0.1", "--pass-cost", "4:1.0,9:1.5")
    assert result.acceptance == [0.9, 0.8]
    assert result.lengths[8].step_cost == pytest.approx(2.3)
    assert result.kind == "estimate"


def test_models(cli: Cli) -> None:
    result = answered(cli, "--alpha", ".8", "--c", ".1", "--target", "demo", "--draft", "demo")
    assert [(model.role, model.name) for model in result.memory] == [
        ("target", "demo"),
        ("draft", "demo"),
    ]


def test_a_result_of_bench_has_costs_and_acceptance(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    results.bench(results.GAIN).write(file)
    result = answered(cli, "--result", str(file))
    assert result.acceptance == pytest.approx([25 / 30, 20 / 25, 1 / 2])
    assert result.lengths[5].step_cost == pytest.approx(0.02 / 0.013)
    assert "draft-model k=5" in result.source
    assert answered(cli, "--result", str(file), "--alpha", "0.5").acceptance == [0.5]


def test_results_and_reports_are_written(cli: Cli, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("e.json", "e.html", "e.md")]
    output = cli(
        "estimate",
        "--alpha",
        ".8",
        "--c",
        ".1",
        *(word for file in files for word in ("--out", str(file))),
    )
    assert output.code == 0
    assert "2.47x" in output.out
    assert all("2.47x" in file.read_text() for file in files[1:])
    result = read_result(files[0])
    assert isinstance(result, EstimateResult)
    assert result.command.startswith("outrider")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "enough is --alpha 0.8 --c 0.1"),
        (["--alpha", ".8"], "nothing says what a draft token costs"),
        (["--alpha", "much", "--c", ".1"], "--alpha takes probabilities"),
        (["--alpha", "1.1", "--c", ".1"], "between 0 and 1"),
        (["--alpha", ".8", "--c", "-1"], "from 0 on"),
        (["--alpha", ".8", "--c", ".1", "--pass-cost", "5"], "--pass-cost takes N:NUMBER pairs"),
        (["--alpha", ".8", "--c", ".1", "--pass-cost", "5:0.5"], "cannot cost 0.5 passes"),
        (["--alpha", ".8", "--c", ".1", "--result", "x.json"], "--c means nothing with --result"),
        (["--alpha", ".8", "--result", "nowhere.json"], "cannot be read"),
        (["--alpha", ".8", "--c", ".1", "--target", "runs/no/drafter"], "runs/no/drafter"),
        (["--alpha", ".8", "--c", ".1", "--out", "/nowhere/e.json"], "the folder of"),
        (["--alhpa", ".8"], "Did you mean '--alpha'"),
    ],
)
def test_bad_input_is_one_teaching_line(cli: Cli, arguments: list[str], message: str) -> None:
    output = cli("estimate", *arguments)
    assert output.code == 2
    assert message in output.err
    assert output.err.count("\n") == 1


def test_eight_options_are_enough() -> None:
    command: Any = typer.main.get_command(build_app())
    options = {
        name
        for one in command.commands["estimate"].params
        for name in one.opts
        if name not in ("--help", "--help-of")
    }
    assert len(options) <= 8


def test_help_loads_no_torch() -> None:
    code = "import sys; from outrider.cli.app import run; run(['estimate', '--help']); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_the_documents_example_says_what_the_command_says(cli: Cli) -> None:
    """Every row of its table, and its verdict."""
    text = DOCS.read_text(encoding="utf-8")
    (command,) = re.findall(r"^    outrider (estimate --alpha 0\.9.*)$", text, re.MULTILINE)
    result = EstimateResult.model_validate(json.loads(cli(*shlex.split(command), "--json").out))
    assert verdict(result)[0] in text
    for length in result.lengths:
        edge = "-" if length.break_even_alpha is None else f"{length.break_even_alpha:.3f}"
        cells = [f"{number:.2f}" for number in (length.tau, length.step_cost, length.speedup)]
        assert f"| {length.num_draft_tokens} | {' | '.join(cells)} | {edge} |" in text


def test_a_draft_service_by_the_formulas_of_its_page(cli: Cli) -> None:
    """The round trip is a part of each pass that checks a draft; the page's table has both ways."""
    page = (DOCS.parent / "remote-drafts.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    outrider estimate (.*)$", page, re.MULTILINE)
    service = answered(cli, *command.split())
    co_located = answered(cli, *command.split(" --pass-cost")[0].split())
    lines = re.findall(r"^\| (\d) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(lines) == 5
    for k, reply_ms, with_service, without in lines:
        assert float(reply_ms) == 5 + 3 * int(k)
        assert f"{service.lengths[int(k)].speedup:.2f}" == with_service
        assert f"{co_located.lengths[int(k)].speedup:.2f}" == without
