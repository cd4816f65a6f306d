"""What vLLM's plug-in loader calls: cheap, harmless where nobody asks for us; and our counters on
vLLM's page."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from outrider.integrations.vllm import metrics, runner_v2
from outrider.integrations.vllm.versions import warn_if_untested

OURS = SimpleNamespace(method="custom_class", model="outrider.integrations.vllm.Proposer")
OTHERS = [
    SimpleNamespace(method="custom_class", model="some.other.Proposer"), SimpleNamespace(method="ngram", model="ngram"), None,
]  # fmt: skip


def run(script: str, **environment: str) -> str:
    """What a fresh Python prints."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (metrics.FOLDER, metrics.SHARED)
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def page(folder: Path) -> str:
    """The counters of a folder, as vLLM's page would show them."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return generate_latest(registry).decode()


def test_registering_is_cheap() -> None:
    """It runs in every process of every vLLM on the machine: no torch, no drafter, no server, no
    vLLM."""
    script = (
        "import sys\nfrom outrider.integrations.vllm import plugin\nplugin.register()\nplugin.register()\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'vllm', 'numpy', 'outrider.drafters'} & set(sys.modules)))"
    )
    assert run(script).strip() == "[]"


def test_the_entry_point_is_declared() -> None:
    """vLLM finds us through the installed package's metadata."""
    project = (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]' in project
    assert 'outrider = "outrider.integrations.vllm.plugin:register"' in project


def test_the_server_shows_what_another_process_counts() -> None:
    """Registered before the engine's process starts, which inherits the environment; the folder is
    gone with the server."""
    engine = (
        "from outrider.integrations.vllm.metrics import Meter\nmeter = Meter.find('suffix')\nmeter.started(2)\n"
        "meter.proposed('suffix', 3)\nmeter.proposed('suffix', 0)\nmeter.kept('suffix', 2)\nmeter.took(0.0003)\nmeter.took(9.0)"
    )
    server = (
        "import os, subprocess, sys\nfrom outrider.integrations.vllm import plugin\nplugin.register()\n"
        f"subprocess.run([sys.executable, '-c', {engine!r}], check=True)\n"
        "from prometheus_client import REGISTRY, generate_latest\nprint(os.environ['OUTRIDER_VLLM_METRICS'])\n"
        "print(generate_latest(REGISTRY).decode())"
    )
    folder, _, shown = run(server).partition("\n")
    for line in (
        'outrider:texts_total{drafter="suffix"} 2.0',
        'outrider:rows_total{drafter="suffix",outcome="drafted"} 1.0',
        'outrider:rows_total{drafter="suffix",outcome="nothing"} 1.0',
        'outrider:draft_tokens_total{drafter="suffix",part="suffix"} 3.0',
        'outrider:accepted_tokens_total{drafter="suffix",part="suffix"} 2.0',
        'outrider:propose_seconds_bucket{drafter="suffix",le="0.0002"} 0.0',
        'outrider:propose_seconds_bucket{drafter="suffix",le="0.0005"} 1.0',
        'outrider:propose_seconds_bucket{drafter="suffix",le="+Inf"} 2.0',
        'outrider:propose_seconds_count{drafter="suffix"} 2.0',
    ):
        assert line in shown
    assert not Path(folder).exists()


def test_several_servers_read_the_folder_that_vllm_made(tmp_path: Path) -> None:
    script = (
        "import os\nfrom outrider.integrations.vllm import plugin, metrics\nplugin.register()\n"
        "assert metrics.FOLDER not in os.environ\nmetrics.Meter.find('ngram').started(4)"
    )
    for _ in range(2):
        run(script, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'outrider:texts_total{drafter="ngram"} 8.0' in page(tmp_path)


def test_an_engine_made_anew_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may build several engines, one after another; a counter never goes back."""
    monkeypatch.delenv(metrics.SHARED, raising=False)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    for _ in range(2):
        meter = metrics.Meter.find("suffix")
        assert meter is not None
        meter.proposed("suffix", 3)
        meter.took(0.1)
    assert 'outrider:draft_tokens_total{drafter="suffix",part="suffix"} 6.0' in page(tmp_path)
    assert 'outrider:propose_seconds_count{drafter="suffix"} 2.0' in page(tmp_path)


def test_without_a_reader_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metrics.SHARED, raising=False)
    monkeypatch.setenv(metrics.FOLDER, "/nowhere/at/all")
    assert metrics.Meter.find("suffix") is None


# -------------------------------------------------------------------- the new runner


class VllmConfig:
    """vLLM's, as far as it is wrapped."""

    def __init__(self, speculative_config: Any) -> None:
        self.speculative_config = speculative_config

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        return ["speculative method 'custom_class'", "something else"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of vLLM that are wrapped, the runner's with its own name for the function."""
    made = {
        name: ModuleType(name)
        for name in (runner_v2.SPECULATORS, runner_v2.RUNNER, runner_v2.CONFIG)
    }
    package, runner, config = made.values()
    kind = type("VllmConfig", (VllmConfig,), dict(vars(VllmConfig)))
    original = lambda vllm_config, device, req_states: ("vLLM's", device, req_states)  # noqa: E731
    package.init_speculator = runner.init_speculator = original  # type: ignore[attr-defined]
    config.VllmConfig = kind  # type: ignore[attr-defined]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(package=package, runner=runner, config=kind)


def test_other_configurations_get_what_they_got(vllm: SimpleNamespace) -> None:
    runner_v2.enable()
    for other in OTHERS:
        made = vllm.config(other)
        assert vllm.runner.init_speculator(made, "cpu", "states") == ("vLLM's", "cpu", "states")
        assert made._get_v2_model_runner_unsupported_features() == [
            "speculative method 'custom_class'",
            "something else",
        ]


def test_ours_is_built_where_it_is_asked_for(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator = ModuleType("outrider.integrations.vllm.speculator")
    speculator.Speculator = lambda *given: ("ours", *given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, speculator.__name__, speculator)
    runner_v2.enable()
    runner_v2.enable()  # vLLM may load plug-ins again
    made = vllm.config(OURS)
    for module in (vllm.package, vllm.runner):
        assert module.init_speculator(made, "cpu", "states") == ("ours", made, "cpu", "states")
    assert made._get_v2_model_runner_unsupported_features() == ["something else"]


def test_another_new_runner_is_left_alone(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the functions are gone, vLLM must go on as it would without us."""
    del vllm.package.init_speculator
    with caplog.at_level(logging.WARNING, "vllm.outrider"):
        runner_v2.enable()
    assert "drafts in the old model runner only" in caplog.text
    assert vllm.config(OURS)._get_v2_model_runner_unsupported_features()[0] == runner_v2.UNSUPPORTED


def test_a_function_with_other_arguments_is_left_alone(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody's speculators are made by it: an earlier vLLM has it without the requests' states."""
    vllm.package.init_speculator = vllm.runner.init_speculator = lambda vllm_config, device: (
        "vLLM's",
        device,
    )
    with caplog.at_level(logging.WARNING, "vllm.outrider"):
        runner_v2.enable()
    assert vllm.runner.init_speculator(vllm.config(OTHERS[0]), "cpu") == ("vLLM's", "cpu")
    assert "drafts in the old model runner only" in caplog.text
    assert vllm.config(OURS)._get_v2_model_runner_unsupported_features()[0] == runner_v2.UNSUPPORTED


@pytest.mark.parametrize(
    ("version", "warned"),
    [("0.32.0", 0), ("0.32.1+cpu", 0), ("0.33.0", 1), ("0.31.2", 1), ("dev", 1)],
)
def test_other_versions_are_named_once(
    version: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.outrider"):
        warn_if_untested(version)
    assert len(caplog.records) == warned
    assert all(
        version in record.getMessage() and "0.32" in record.getMessage()
        for record in caplog.records
    )
