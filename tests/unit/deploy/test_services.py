"""Compose file and Kubernetes manifests of a deployment in parts, against the code and against one
another.

A misspelt option, a port that two files write differently or a label that selects nothing is found
here, not in a cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from outrider.cli.app import build_app
from outrider.options import Options
from outrider.remote.coordinator.settings import parsed_targets
from outrider.remote.endpoint import Endpoint
from outrider.serve.observability.metrics_families import GAUGES
from outrider.serve.settings import ServedModel, ServerSettings

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "services" / "compose.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "services" / "prometheus.yaml").read_text())
HTTP_PORT = 8000
PORTS = {"draft": 50051, "target": HTTP_PORT, "coordinator": HTTP_PORT}
# what entrypoint.sh puts before other words
SERVE = ["serve", "--host", "0.0.0.0", "--port", "8000"]
PARTS = ("draft", "target", "coordinator")
COMPONENT = "app.kubernetes.io/component"


@cache
def manifests(*, with_tls: bool = False) -> tuple[dict[str, Any], ...]:
    """What is written, or, with TLS, what kustomize makes of it."""
    if not with_tls:
        files = [
            file
            for file in sorted((DEPLOY / "k8s").glob("*.yaml"))
            if file.name != "kustomization.yaml"
        ]
        return tuple(
            document for file in files for document in yaml.safe_load_all(file.read_text())
        )
    return tuple(yaml.safe_load_all(built(with_tls=True)))


@cache
def built(*, with_tls: bool) -> str:
    """`kubectl kustomize`; needs no cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(DEPLOY / "k8s", Path(folder) / "k8s"))
        if with_tls:
            file = copy / "kustomization.yaml"
            file.write_text(
                file.read_text().replace("# components:\n#   - tls", "components:\n  - tls")
            )
        done = subprocess.run(
            ["kubectl", "kustomize", str(copy)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_kind(*kinds: str, with_tls: bool = False) -> list[dict[str, Any]]:
    return [document for document in manifests(with_tls=with_tls) if document["kind"] in kinds]


def workloads(*, with_tls: bool = False) -> dict[str, dict[str, Any]]:
    """By part."""
    found = of_kind("Deployment", "StatefulSet", with_tls=with_tls)
    return {workload["metadata"]["labels"][COMPONENT]: workload for workload in found}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def commands() -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(part, arguments of `outrider`, environment) of everything that the files start."""
    for name, service in COMPOSE["services"].items():
        if name != "prometheus":
            yield name.split("-")[0], _run(service["command"].split()), service["environment"]
    for with_tls in (False, True) if shutil.which("kubectl") else (False,):
        for part, workload in workloads(with_tls=with_tls).items():
            environment = {
                entry["name"]: entry.get("value") for entry in container(workload)["env"]
            }
            yield part, _run(container(workload)["args"]), environment


def _run(words: list[str]) -> list[str]:
    """The words of `outrider` that entrypoint.sh makes of a command."""
    return (
        words[1:]
        if words[0] == "outrider"
        else words
        if words[0] == "service"
        else [*SERVE, *words]
    )


def probes() -> Iterator[list[str]]:
    """Commands that ask whether a part is well."""
    for service in COMPOSE["services"].values():
        if "healthcheck" in service:
            yield service["healthcheck"]["test"][1:]
    for workload in workloads(with_tls=True).values() if shutil.which("kubectl") else ():
        for name, value in container(workload).items():
            if name.endswith("Probe") and "exec" in value:
                yield value["exec"]["command"]


@cache
def options_of(part: str) -> frozenset[str]:
    """What `outrider service PART --help` lists; of a target `outrider serve --help`."""
    group: Any = typer.main.get_command(build_app())
    command = (
        group.commands["serve"] if part == "target" else group.commands["service"].commands[part]
    )
    return frozenset(
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    )


# ---------------------------------------------------------------- what is started


def test_every_part_is_started_by_both() -> None:
    assert {part for part, _, _ in commands()} == set(PARTS)
    assert set(workloads()) == set(PARTS)
    assert {name.split("-")[0] for name in COMPOSE["services"]} == {*PARTS, "prometheus"}


def test_options_exist() -> None:
    for part, arguments, _ in commands():
        assert arguments[: 1 if part == "target" else 2] == (
            ["serve"] if part == "target" else ["service", part]
        )
        given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert given <= options_of(part), part
    for probe in probes():
        assert probe[:3] == ["outrider", "service", "health"]
        assert {word for word in probe if word.startswith("--")} <= options_of("health")


def test_variables_are_read() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "outrider").rglob("*.py"))
    for part, _, environment in commands():
        assert ("MODEL" in environment) == (part != "coordinator")
        assert "OUTRIDER_API_KEY" in environment or part == "draft"
        assert "OUTRIDER_SERVICE_TOKEN" in environment, f"{part} would let anybody in"
        for name in environment:
            assert f'"{name}"' in code, name


def test_parts_listen_where_others_look_for_them() -> None:
    for part, arguments, _ in commands():
        words = arguments[1 if part == "target" else 2 :]
        given = dict(zip(words[::2], words[1::2], strict=True))
        assert int(given["--port"]) == PORTS[part]
        assert given["--host"] == "0.0.0.0"
        assert given.get("--metrics-port", "9464") == "9464"


def test_addresses_lead_to_parts_of_the_same_file() -> None:
    names = {service["metadata"]["name"] for service in of_kind("Service")}
    for part, _, environment in commands():
        for variable, there in (("DRAFT_ENDPOINT", "draft"), ("TARGET_ENDPOINT", "target")):
            expected = {"DRAFT_ENDPOINT": "target", "TARGET_ENDPOINT": "coordinator"}[variable]
            assert (variable in environment) == (part == expected)
            for address in addresses_of(environment.get(variable), there):
                host, _, port = address.rpartition(":")
                assert int(port) == PORTS[there]
                assert host in COMPOSE["services"] or host.split(".")[-1] in names
                assert there in host


def addresses_of(value: str | None, there: str) -> list[str]:
    """HOST:PORT of every address that a variable names."""
    if value is None:
        return []
    if there == "draft":
        return [Endpoint.parse(value).target]
    return [address.partition("://")[2] for address in parsed_targets([value])]


def test_stopping_waits_for_running_answers() -> None:
    models = (ServedModel(name="m", options=Options(target="m")),)
    drain_s = ServerSettings(models=models).drain_timeout_s
    for workload in workloads().values():
        assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s
    for name, service in COMPOSE["services"].items():
        assert name == "prometheus" or int(service["stop_grace_period"].removesuffix("s")) > drain_s


# ---------------------------------------------------------------- compose


def test_compose_file_is_understood_by_docker() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0
    ):
        pytest.skip("needs docker with compose")
    command = [docker, "compose", "-f", str(DEPLOY / "services" / "compose.yaml"), "config", "-q"]
    environment = {**os.environ, "OUTRIDER_SERVICE_TOKEN": "secret"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_only_the_coordinator_and_prometheus_have_a_door() -> None:
    """Ports are open towards this machine only, until BIND opens them further."""
    doors = {
        name: service["ports"]
        for name, service in COMPOSE["services"].items()
        if "ports" in service
    }
    assert doors == {
        "coordinator": ["${BIND:-127.0.0.1}:8000:8000"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_prometheus_scrapes_every_part() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    assert f'job="{job["job_name"]}"' in (DEPLOY / "alerts.yaml").read_text()
    scraped = set(job["static_configs"][0]["targets"])
    parts = [name for name in COMPOSE["services"] if name != "prometheus"]
    assert scraped == {f"{name}:9464" if name == "draft" else f"{name}:8000" for name in parts}
    mounts = COMPOSE["services"]["prometheus"]["volumes"]
    for mount in mounts[:2]:
        source, inside, _ = mount.split(":")
        assert (DEPLOY / "services" / source).exists()
        assert inside.rpartition("/")[2] in ("prometheus.yaml", *PROMETHEUS["rule_files"])


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_manifests_fit_the_schemas_of_kubernetes(with_tls: bool) -> None:
    """Strictly: a field that Kubernetes does not know is refused."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    found = manifests(with_tls=with_tls)
    assert len(found) == 12
    for document in found:
        validate.validate(document, desired_version="1.30", strict=True)


def test_kustomize_puts_the_image_in() -> None:
    images = re.findall(r"image: (\S+)", built(with_tls=False))
    assert images == ["outrider:cpu"] * len(PARTS)


def test_selectors_find_what_they_should() -> None:
    labels = {
        part: workload["spec"]["template"]["metadata"]["labels"]
        for part, workload in workloads().items()
    }
    for part, workload in workloads().items():
        assert workload["spec"]["selector"]["matchLabels"] == labels[part]
    for service in of_kind("Service"):
        part = service["metadata"]["labels"][COMPONENT]
        assert service["spec"]["selector"] == labels[part]
        ports = {
            port["name"]: port["containerPort"] for port in container(workloads()[part])["ports"]
        }
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for budget in of_kind("PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"] in labels.values()
    target = workloads()["target"]
    assert target["spec"]["serviceName"] in {
        service["metadata"]["name"] for service in of_kind("Service")
    }


def test_parts_are_probed_at_their_port() -> None:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(workloads()["draft"])[name]["grpc"]["port"] == PORTS["draft"]
        for part in ("target", "coordinator"):
            assert container(workloads()[part])[name]["httpGet"]["port"] == "http"


def test_with_tls_no_probe_and_no_address_stays_plain() -> None:
    for part, workload in workloads(with_tls=True).items():
        inside = container(workload)
        text = yaml.safe_dump(inside)
        assert "grpc://" not in text.replace("grpcs://", "")
        assert "http://" not in text
        if part != "coordinator":
            assert all(
                set(inside[name]) & {"grpc", "httpGet"} == set()
                for name in inside
                if name.endswith("Probe")
            )
            asks_callers = inside["args"].index(
                {"draft": "--tls-client-ca", "target": "--ssl-ca-certs"}[part]
            )
            assert inside["args"][asks_callers + 1] == "/etc/outrider/tls/ca.crt"
        mounted = {mount["name"]: mount["mountPath"] for mount in inside["volumeMounts"]}
        files = [word for word in inside["args"] if "/etc/outrider/tls/" in word]
        assert files
        assert mounted["tls"] == "/etc/outrider/tls"
        secrets = [
            volume["secret"]
            for volume in workload["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        ]
        assert [secret["secretName"] for secret in secrets] == ["outrider-service-tls"]


def test_network_lets_in_only_who_has_business_there() -> None:
    policies = {
        policy["spec"]["podSelector"]["matchLabels"][COMPONENT]: policy["spec"]
        for policy in of_kind("NetworkPolicy")
    }
    assert set(policies) == set(PARTS)
    for part, caller in (("draft", "target"), ("target", "coordinator")):
        first, metrics = policies[part]["ingress"]
        assert [peer["podSelector"]["matchLabels"][COMPONENT] for peer in first["from"]] == [caller]
        assert first["ports"] == [{"port": PORTS[part]}]
        assert metrics["ports"] == [{"port": 9464 if part == "draft" else HTTP_PORT}]
        assert policies[caller]["egress"][0]["ports"] == [{"port": PORTS[part]}]
        peers = policies[caller]["egress"][0]["to"]
        assert [peer["podSelector"]["matchLabels"][COMPONENT] for peer in peers] == [part]
    assert policies["draft"]["egress"] == []


def test_as_many_targets_are_named_as_there_may_be() -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    (environment,) = [environment for part, _, environment in commands() if part == "coordinator"][
        1:2
    ]
    named = [
        address.split(".")[0] for address in addresses_of(environment["TARGET_ENDPOINT"], "target")
    ]
    name = scaler["spec"]["scaleTargetRef"]["name"]
    assert name == workloads()["target"]["metadata"]["name"]
    assert named == [f"{name}-{number}" for number in range(scaler["spec"]["maxReplicas"])]
    assert scaler["spec"]["minReplicas"] == workloads()["target"]["spec"]["replicas"]


def test_the_autoscaler_asks_for_a_metric_that_exists() -> None:
    text = (DEPLOY / "k8s" / "scaling.yaml").read_text()
    (asked,) = set(re.findall(r"outrider:([a-z_]+)", text))
    assert asked in GAUGES
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    name = scaler["spec"]["metrics"][0]["external"]["metric"]["name"]
    assert f"name: {{as: {name}}}" in text


def test_nothing_runs_with_rights_or_writes_where_it_should_not() -> None:
    for workload in workloads().values():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        inside = container(workload)["securityContext"]
        assert inside["readOnlyRootFilesystem"]
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} == set(container(workload)["resources"])


# ---------------------------------------------------------------- Ray


def test_the_file_for_ray_is_what_ray_reads() -> None:
    """By hand, and by Ray's own schemas where it is installed."""
    content = yaml.safe_load((DEPLOY / "ray.yaml").read_text())
    (application,) = content["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (config,) = application["args"]["llm_configs"]
    assert set(config) == {"model_loading_config", "engine_kwargs", "deployment_config"}
    assert config["engine_kwargs"]["speculative_config"]["method"] == "eagle3"
    schema = pytest.importorskip("ray.serve.schema", reason="pip install 'ray[serve]'")
    schema.ServeDeploySchema.model_validate(content)


# ---------------------------------------------------------------- the image


@pytest.mark.parametrize(
    ("given", "run"),
    [
        (["demo"], ["serve", "--host", "0.0.0.0", "--port", "8000", "demo"]),
        (["service", "draft", "--port", "1"], ["service", "draft", "--port", "1"]),
        (["outrider", "ls", "a b"], ["ls", "a b"]),
        ([], ["serve", "--host", "0.0.0.0", "--port", "8000"]),
    ],
)
def test_the_image_runs_what_it_is_given(tmp_path: Path, given: list[str], run: list[str]) -> None:
    fake = tmp_path / "outrider"
    fake.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(DEPLOY / "entrypoint.sh"), *given],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.splitlines() == run


def test_what_the_image_copies_is_sent_to_the_builder() -> None:
    """Everything else is left out by Dockerfile.dockerignore."""
    copied = re.findall(
        r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    sent = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name in " ".join(copied).split():
        assert name in sent
        assert (ROOT / name).exists()
