"""Deployment files against the code: a panel, alert, flag or path that names something else than
what exists is found here."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.build import Options
from outrider.cli.app import build_app
from outrider.engine.observer import EngineSnapshot
from outrider.errors import ConfigError
from outrider.serve.app import make_app
from outrider.serve.config_file import read_config
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.selftest import Finding, SelfTest
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from outrider.stats import PartStats
from tests.unit.serve.observability.test_metrics import CONTROL, Engine, finish, request, step

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "outrider.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COLUMNS = 24
OF_THE_SCRAPE = {"instance", "job"}  # labels that Prometheus adds
METRIC = re.compile(r"outrider:[a-z0-9_]+|process_[a-z_]+")


def served_metrics() -> dict[str, set[str]]:
    """Every sample of a server that has done some of everything -> its labels."""
    metrics = ServerMetrics()
    totals = metrics.observer("m")
    totals.prefilled(request(), 0.1, 5)
    parts = [{"eagle3": PartStats(1, 4, 2)}, {}]
    totals.stepped(step([4, 3], [4, 3], [2, 3], [3, 4], parts=parts))
    totals.finished(request(), finish())
    metrics.watch(Engine(EngineSnapshot(control=CONTROL)))
    metrics.tested("m", SelfTest([Finding("no-acceptance", "nothing is accepted")]))
    metrics.answered("/v1/completions", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


METRICS = served_metrics()


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, legend)."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for rule in rules():
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(
    ("where", "expression", "legend"), list(queries()), ids=lambda value: str(value)[:40]
)
def test_every_query_asks_for_metrics_and_labels_that_exist(
    where: str, expression: str, legend: str
) -> None:
    """A renamed metric leaves a panel empty and an alert silent, which looks exactly like good
    news."""
    named = METRIC.findall(expression)
    assert named, "no metric"
    assert not set(named) - set(METRICS), "not on the page"
    known = set.union(*(METRICS[name] for name in named)) | OF_THE_SCRAPE
    used = set(re.findall(r"[{,]\s*([a-z_]+)\s*[=!]", expression))
    for group in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    used |= set(re.findall(r"\{\{\s*([a-z_]+)\s*\}\}", legend))
    assert used <= known


@pytest.mark.parametrize(
    ("where", "expression", "legend"), list(queries()), ids=lambda value: str(value)[:40]
)
def test_every_query_is_promql(where: str, expression: str, legend: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="pip install promql-parser")
    parser.parse(expression.replace("$__rate_interval", "5m"))


def test_dashboard_shows_what_an_operator_needs() -> None:
    """Named in issue 6; a panel that is lost with an edit in the browser is missed here."""
    asked = " ".join(expression for _, expression, _ in queries())
    for metric in (
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_rejected_tokens_per_pos_total",
        "request_steps_total",
        "step_time_seconds_total",
        "spec_decode_draft_length_bucket",
        "request_success_total",
        "http_responses_total",
    ):
        assert metric in asked


def test_panels_have_own_numbers_and_boxes() -> None:
    """Grafana drops panels with a number that was there before, and piles up those that overlap."""
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        assert box["x"] >= 0
        assert box["x"] + box["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def test_dashboard_and_scrape_are_where_the_containers_look() -> None:
    """compose mounts files that provisioning and Prometheus then name by path."""
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), source
    provider = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/outrider.yaml").read_text()
    )["providers"][0]
    mounts = " ".join(COMPOSE["services"]["grafana"]["volumes"])
    assert f":{provider['options']['path']}/outrider.json" in mounts
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert {"outrider", "prometheus", "grafana"} == set(COMPOSE["services"])
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["outrider:8000"]
    assert job["metrics_path"] in paths()
    mounts = " ".join(COMPOSE["services"]["prometheus"]["volumes"])
    assert all(f"/etc/prometheus/{file}:ro" in mounts for file in scrape["rule_files"])


def test_images_are_pinned() -> None:
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", COMPOSE["services"][name]["image"])


def paths() -> set[str]:
    """The paths of the HTTP application."""
    state = ServerState(settings())
    return set(make_app(state).openapi()["paths"])


def settings() -> ServerSettings:
    return ServerSettings(models=(ServedModel(name="m", options=Options(target="m")),))


def test_image_runs_as_nobody_special_and_says_how_it_is() -> None:
    last = DOCKERFILE.split("\nFROM ")[-1]
    (user,) = re.findall(r"^USER (\S+)$", last, re.MULTILINE)
    assert user not in ("root", "0")
    (path,) = re.findall(r"urlopen\('http://127\.0\.0\.1:8000(/[a-z]+)'", last)
    assert path in paths()
    assert "STOPSIGNAL SIGTERM" in last


def test_image_has_the_torch_of_the_makefile() -> None:
    """One pin, written twice because Docker cannot read the other."""
    (made,) = re.findall(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(\S+)$", DOCKERFILE, re.MULTILINE) == [made]


def test_extras_that_are_installed_exist() -> None:
    """pip only warns about an unknown extra, and the image would start without what it brings."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    unit = (DEPLOY / "outrider.service").read_text()
    for text in (DOCKERFILE, unit):
        assert "pip install" in text
        for names in re.findall(r"(?:outrider|['\"])\.?\[([a-z,]+)\]", text):
            assert set(names.split(",")) <= set(extras)


def test_stopping_waits_for_running_answers() -> None:
    """A supervisor that kills earlier than the server drains cuts answers off."""
    drain_s = settings().drain_timeout_s
    unit = service()
    assert int(unit["Service"]["TimeoutStopSec"]) > drain_s
    assert unit["Service"]["KillSignal"] == "SIGTERM"
    assert int(COMPOSE["services"]["outrider"]["stop_grace_period"].removesuffix("s")) > drain_s


def service() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "outrider.service").read_text())
    return unit


def test_unit_does_not_restart_what_was_started_wrongly() -> None:
    assert int(service()["Service"]["RestartPreventExitStatus"]) == ConfigError.exit_code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """A misspelt directive is ignored by systemd, and with it the protection it should give."""
    unit = tmp_path / "outrider.service"
    text = (DEPLOY / "outrider.service").read_text()
    unit.write_text(
        text.replace("/opt/outrider/bin/outrider", "/bin/true").replace(
            "User=outrider\nGroup=outrider\n", ""
        )
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_one_server_gets_its_key_and_the_draft_service_s_token() -> None:
    """Catches a server that no draft service lets in, and a secret that stands in a file."""
    secrets = {"OUTRIDER_API_KEY", "OUTRIDER_SERVICE_TOKEN"}
    assert secrets <= set(COMPOSE["services"]["outrider"]["environment"])
    assert secrets <= set(
        re.findall(r"^#(\w+)=$", (DEPLOY / "outrider.env").read_text(), re.MULTILINE)
    )


def test_files_name_no_machine_and_no_foreign_host() -> None:
    """Only services of the same compose file, this machine, and images by their public names."""
    for file in DEPLOY.rglob("*"):
        if not file.is_file():
            continue
        text = file.read_text()
        hosts = set(re.findall(r"https?://([^/:\s'\"]+)", text))
        targets = {f"target-{number}" for number in (1, 2)}  # of services/compose.yaml
        # of k8s/target.yaml
        targets |= {f"outrider-target-{number}.outrider-target" for number in range(4)}
        assert hosts <= {"prometheus", "127.0.0.1", "localhost", *targets}, file
        assert "/work/" not in text
        assert "/home/" not in text.replace("--create-home", "")


def test_options_of_the_deployment_files_exist() -> None:
    """Flags in the image's entry point, the unit and compose against `outrider serve --help`."""
    known = options_of("serve")
    used = set()
    for file in ("entrypoint.sh", "outrider.env", "outrider.service", "compose.yaml"):
        text = (DEPLOY / file).read_text()
        for line in re.findall(r"(?:OUTRIDER_ARGS=|outrider serve ).*", text):
            used |= set(re.findall(r"(?<![\w-])(--(?:set \w+|[a-z-]+))", line))
        used |= set(re.findall(r"(?:than |finish \()(--(?:set \w+|[a-z-]+))", text))
    assert used
    assert used <= known


# ---------------------------------------------------------------- docs/serve.md

PAGE = (ROOT / "docs" / "serve.md").read_text()


def options_of(verb: str) -> set[str]:
    """What `outrider VERB --help` lists."""
    command = typer.main.get_command(build_app()).commands[verb]  # type: ignore[attr-defined]
    names = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return {name for name in names if name.startswith("--")} | {"--help"}


def test_page_names_metrics_that_exist() -> None:
    """Histograms count, too; the page shows them with the suffix `_bucket`."""
    known = {name.removesuffix(end) for name in METRICS for end in ("", "_bucket")}
    for name in re.findall(r"outrider:[a-z0-9_]+", PAGE):
        assert name in known, name
    for end in re.findall(r"`(_[a-z_]+)`", PAGE):
        assert f"outrider:control{end}" in known, end
    for name in re.findall(r"`((?:request|num|inter|prefix|generation|control)_[a-z_]+)`", PAGE):
        assert f"outrider:{name}" in known or name == "prefix_share", name


def test_page_names_options_that_exist() -> None:
    known = set.union(
        *(options_of(verb) for verb in ("serve", "tune", "bench", "estimate", "train"))
    )
    foreign = {"--build", "--build-arg", "--rm", "--restart"}  # docker's
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", PAGE)) - foreign <= known


def test_page_explains_every_finding_of_the_self_test() -> None:
    source = (ROOT / "outrider" / "serve" / "observability" / "selftest.py").read_text()
    codes = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    assert len(codes) == 6
    assert codes == set(re.findall(r"^\| `([a-z]+-[a-z-]+)` \|", PAGE, re.MULTILINE))


def test_page_lists_every_path() -> None:
    named = {
        re.sub("[A-Z]+", "", path)
        for path in re.findall(r"`(?:GET |POST |DELETE )?(/[A-Za-z0-9_/]*)", PAGE)
    }
    public = {re.sub(r"{\w+}", "", path) for path in paths()}
    assert {path for path in public if not path.startswith("/playground")} <= named | {
        "/v1/completions"
    }


def test_configuration_of_the_page_is_accepted(tmp_path: Path) -> None:
    """Indented blocks of a page are copied before they are read."""
    block = PAGE[PAGE.index("    [server]") : PAGE.index("Every model is an engine")]
    text = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    (tmp_path / "fast.json").write_text(
        json.dumps({"outrider_settings": 1, "options": {"num_draft_tokens": 4}})
    )
    (tmp_path / "server.toml").write_text(text.replace('"fast.json"', f'"{tmp_path}/fast.json"'))
    read = read_config(tmp_path / "server.toml", {})
    assert [model.name for model in read.models] == ["small", "copying"]
    assert read.models[0].engine.max_num_seqs == 16
    assert read.models[1].extra_drafters == ("suffix",)
    assert len(read.rules) == 3
