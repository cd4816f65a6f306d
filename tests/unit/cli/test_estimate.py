"""`outrider estimate`, as typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from outrider.cli.estimate import Dtype
from outrider.lab.estimate.estimate import estimate
from outrider.lab.estimate.estimate_result import EstimateResult
from outrider.lab.estimate.roofline import DTYPE_BYTES, DtypeName
from outrider.lab.result import read_result
from outrider.report.estimate import verdict

DOCS = Path(__file__).parents[3] / "docs" / "algorithms" / "estimate.md"
Cli = Callable[..., Any]


def answered(cli: Cli, *arguments: str) -> dict[str, Any]:
    found = cli("estimate", *arguments, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_times(cli: Cli) -> None:
    found = answered(cli, "--alpha", ".8", "--draft-ms", "2", "--target-ms", "20", "--batch-size", "4")
    assert found["c"] == pytest.approx(0.1)
    assert found["lengths"][0]["curve"]["tokens_per_s"] == pytest.approx(200)
    assert found["kind"] == "estimate"


def test_every_option_reaches_the_formulas(cli: Cli) -> None:
    found = answered(
        cli, "--acceptance", "0.9,0.8", "--target", "demo", "--draft", "demo", "--dtype", "float32", "--set", "draft_dtype=int8",
        "--bandwidth", "10GB/s", "--set", "flops=1TFLOPS", "--batch-size", "3", "--set", "context=100", "--num-draft-tokens", "4",
        "--max-draft-tokens", "6",
    )  # fmt: skip
    asked = found["input"]
    assert (asked["acceptance"], asked["hardware"]) == ([0.9, 0.8], {"bandwidth": 1e10, "flops": 1e12})
    assert (asked["target"]["name"], asked["target"]["dtype"], asked["target"]["num_params"]) == (
        "demo target",
        "float32",
        14162304,
    )
    assert (asked["draft"]["name"], asked["draft"]["dtype"]) == ("demo draft", "int8")
    assert (found["num_rows"], found["context"], found["num_draft_tokens"], len(found["lengths"])) == (3, 100, 4, 7)
    kv = 3 * 100 * 8192
    assert found["lengths"][0]["curve"]["step_s"] == pytest.approx((14162304 * 4 + kv) / 1e10)


def test_costs_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"target": {"points": [{"num_tokens": 1, "seconds": 0.02}, {"num_tokens": 9, "seconds": 0.03}]}}')
    found = answered(cli, "--alpha", ".8", "--costs", str(file))
    assert found["cost_source"] == "measured"
    assert found["lengths"][4]["curve"]["step_s"] == pytest.approx(0.025)


def test_params(cli: Cli) -> None:
    found = answered(cli, "--alpha", ".8", "--target-params", "8B", "--draft-params", "1B", "--set", "draft_dtype=int4")
    assert found["c"] == pytest.approx(1 / 32)


def test_results_and_reports_are_written(cli: Cli, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("e.json", "e.html", "e.md")]
    found = cli(
        "estimate",
        "--alpha",
        ".8",
        "--c",
        ".1",
        "--out",
        str(files[0]),
        "--out",
        str(files[1]),
        "--out",
        str(files[2]),
    )
    assert found.code == 0
    assert "2.47x" in found.out
    assert all("2.47x" in file.read_text() for file in files[1:])
    result = read_result(files[0])
    assert isinstance(result, EstimateResult)
    assert result.command.startswith("outrider")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--alpha 0.8"),
        (["--alpha", ".8"], "enough is one of: --c 0.1;"),
        (["--alpha", ".8", "--c", ".1", "--set", "flops=1TFLOPS"], "--set flops needs --bandwidth"),
        (["--alpha", ".8", "--c", ".1", "--dtype", "int8"], "--dtype changes nothing"),
        (["--alpha", ".8", "--c", ".1", "--set", "draft_dtype=int8"], "--set draft_dtype changes nothing"),
        (["--alpha", ".8", "--target", "demo", "--target-params", "8B"], "give one of them"),
        (["--alpha", ".8", "--target", "nowhere", "--draft", "demo"], "no model folder at 'nowhere'"),
        (["--alpha", ".8", "--target", "runs/no/drafter", "--draft", "demo"], "no model folder at 'runs/no/drafter'"),
        (["--alpha", ".8", "--c", ".1", "--out", "/nowhere/e.json"], "the folder of"),
        (["--alhpa", ".8"], "Did you mean '--alpha'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_teaching_line(cli: Cli, arguments: list[str], message: str) -> None:
    found = cli("estimate", *arguments)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1


def test_a_draft_service_by_the_formulas_of_its_page(cli: Cli) -> None:
    """The speedup beside that of the target's process, and the verdict; the page's example is this command."""
    given = "--alpha 0.8 --target-ms 30 --draft-ms 3 --remote-rtt-ms"
    page = (Path(__file__).resolve().parents[3] / "docs/algorithms/remote-drafts.md").read_text(encoding="utf-8")
    assert f"outrider estimate {given} 5\n" in page
    found = json.loads(cli("estimate", *given.split(), "5", "--json").out)["remote"]
    lines = re.findall(r"^\| (\d) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(lines) == 5
    for line, one in zip(lines, found["lengths"][:5], strict=True):
        gamma, reply, service, co_located = map(float, line)
        assert one["num_draft_tokens"] == gamma
        assert one["reply_s"] == pytest.approx(reply / 1e3)
        assert (round(one["speedup"], 2), round(one["co_located_speedup"], 2)) == (service, co_located)
    tau = sum(0.8**power for power in range(6))
    assert found["lengths"][4]["speedup"] == pytest.approx(tau * 30 / 50)
    assert found["pays"]
    assert found["in_time"]
    far = json.loads(cli("estimate", *given.split(), "100", "--num-draft-tokens", "5", "--max-draft-tokens", "5", "--json").out)
    assert not far["remote"]["pays"]
    assert far["remote"]["lengths"][4]["speedup"] == pytest.approx(tau * 30 / 145)
    text = cli("estimate", *given.split(), "100").out
    assert "do not have a service draft" in text
    assert "it decodes plainly" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--alpha 0.8 --c 0.1 --remote-rtt-ms 5", "--target-ms"),
        ("--alpha 0.8 --target-ms 9 --draft-ms 1 --remote-rtt-ms=-5", "at least 0"),
    ],
)
def test_bad_questions_about_a_draft_service(cli: Cli, arguments: str, message: str) -> None:
    """Each is one teaching line."""
    found = cli("estimate", *arguments.split())
    assert found.code == 2
    assert message in found.err


def test_dtypes_are_the_librarys() -> None:
    """The command line has its own list, because it must answer before the library is loaded."""
    assert get_args(Dtype) == get_args(DtypeName) == tuple(DTYPE_BYTES)


def test_help_loads_no_torch() -> None:
    code = "import sys; from outrider.cli.app import run; run(['estimate', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_documents_example_says_what_the_command_says(cli: Cli) -> None:
    """Every row of its table, its verdict and its three models."""
    text = DOCS.read_text(encoding="utf-8")
    (command,) = re.findall(r"^    outrider (estimate (?:.*\\\n)*.*)$", text, re.MULTILINE)
    found = cli(*shlex.split(command.replace("\\\n", " ")), "--json")
    result = EstimateResult.model_validate_json(found.out)
    assert estimate(result.input).lengths == result.lengths
    assert verdict(result)[0] in text
    for one in result.lengths:
        cells = [one.leviathan_speedup, one.effective_gamma, one.envelope_speedup, one.curve.tau, one.curve.speedup]
        assert f"| {one.num_draft_tokens} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in text
    for model in result.models:
        assert model.break_even_alpha is not None
        assert f"| {model.best_num_draft_tokens} | {model.best_speedup:.2f} | {model.break_even_alpha:.3f} |" in text
