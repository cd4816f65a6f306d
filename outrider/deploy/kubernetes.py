"""Kubernetes: settings as a ConfigMap, Deployment, Service, and an autoscaler that follows the queue."""

from __future__ import annotations

import hashlib
from typing import Any

from outrider.deploy import serving
from outrider.deploy.container_paths import CACHE, MODELS, ContainerPaths
from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, as_yaml

METRIC = "outrider_num_requests_waiting"  # outrider:num_requests_waiting without the colon, which the metrics API does not take
ADAPTER_RULE = {
    "seriesQuery": 'outrider:num_requests_waiting{namespace!="",pod!=""}',
    "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
    "name": {"as": METRIC},
    "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
}


def files(deployment: Deployment) -> DeployFiles:
    """`outrider.yaml`; where replicas may grow also `prometheus-adapter.yaml`, values for that program's chart."""
    paths = ContainerPaths()
    settings = paths.in_container(deployment.source.settings)
    command = serving.command(deployment, settings)
    lines = [deployment.headline, "Start: kubectl apply -f outrider.yaml"]
    if paths.known:
        lines.append(f"The volume claim '{deployment.models_claim}' must hold these, and is not made here:")
        lines += [f"{here} as {there.removeprefix(MODELS)}" for here, there in paths.known.items()]
    lines.append(f"A secret '{deployment.name}' with the key 'api-key' is what clients must send; without it anybody may ask.")
    secrets = serving.secrets(settings)
    if serving.TOKEN_KEY in secrets.values():
        lines.append(f"Its key '{serving.TOKEN_KEY}' is the draft service's token, where that asks for one.")
    documents = [
        _config_map(deployment, settings.text()),
        _deployment(deployment, command, settings.text(), bool(paths.known), secrets), _service(deployment),
    ]  # fmt: skip
    if deployment.max_replicas == deployment.replicas:
        return DeployFiles({"outrider.yaml": as_yaml(lines, *documents)})
    lines.append(f"The autoscaler needs the pods' metric {METRIC}: prometheus-adapter.yaml says how (docs/deploy.md).")
    about = ["Values for the chart prometheus-adapter: the queue's length as a metric of pods."]
    adapter = as_yaml(about, {"rules": {"custom": [ADAPTER_RULE]}})
    return DeployFiles({"outrider.yaml": as_yaml(lines, *documents, _autoscaler(deployment)), "prometheus-adapter.yaml": adapter})


def _head(kind: str, version: str, deployment: Deployment, suffix: str = "") -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": deployment.name + suffix, "labels": _labels(deployment)}
    if deployment.namespace is not None:
        metadata["namespace"] = deployment.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _labels(deployment: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "outrider", "app.kubernetes.io/instance": deployment.name}


def _config_map(deployment: Deployment, settings: str) -> dict[str, Any]:
    return {**_head("ConfigMap", "v1", deployment, "-settings"), "data": {serving.FILE: settings}}


def _service(deployment: Deployment) -> dict[str, Any]:
    ports = [{"name": "http", "port": deployment.port, "targetPort": "http"}]
    return {**_head("Service", "v1", deployment), "spec": {"selector": _labels(deployment), "ports": ports}}


def _deployment(
    deployment: Deployment, command: list[str], settings: str, has_models: bool, secrets: dict[str, str]
) -> dict[str, Any]:
    annotations = {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(deployment.port), "prometheus.io/path": "/metrics",
        "outrider/settings": hashlib.sha256(settings.encode()).hexdigest()[:16],  # other settings make other pods
    }  # fmt: skip
    volumes: list[dict[str, Any]] = [
        {"name": "settings", "configMap": {"name": f"{deployment.name}-settings"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if has_models:
        claim = {"claimName": deployment.models_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    pod = {
        "terminationGracePeriodSeconds": serving.GRACE_S + 10,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": serving.USER, "fsGroup": serving.USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(deployment, command, has_models, secrets)],
        "volumes": volumes,
    }  # fmt: skip
    spec: dict[str, Any] = {
        "selector": {"matchLabels": _labels(deployment)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": _labels(deployment), "annotations": annotations}, "spec": pod},
    }
    if deployment.max_replicas == deployment.replicas:  # else the autoscaler's business, and `apply` must not reset it
        spec = {"replicas": deployment.replicas, **spec}
    return {**_head("Deployment", "apps/v1", deployment), "spec": spec}


def _container(
    deployment: Deployment, command: list[str], has_models: bool, secrets: dict[str, str]
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "settings", "mountPath": serving.FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": CACHE},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    if has_models:
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
    memory = f"{deployment.memory_mib}Mi"
    limits: dict[str, Any] = {"cpu": str(deployment.cpus), "memory": memory}
    if deployment.gpus:
        limits["nvidia.com/gpu"] = deployment.gpus
    return {
        "name": "outrider",
        "image": deployment.image,
        "command": command[:2],
        "args": command[2:],
        "env": [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": deployment.name, "key": key, "optional": True}}}
            for name, key in secrets.items()
        ],
        "ports": [{"name": "http", "containerPort": deployment.port}],
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 15, "timeoutSeconds": 5, "failureThreshold": 4,
        },
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},  # until the Service sends nobody here any more
        "resources": {"requests": {"cpu": str(deployment.cpus), "memory": memory}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }  # fmt: skip


def _autoscaler(deployment: Deployment) -> dict[str, Any]:
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment.name},
        "minReplicas": deployment.replicas,
        "maxReplicas": deployment.max_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": METRIC},
                    "target": {"type": "AverageValue", "averageValue": str(deployment.queue)},
                },
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return {**_head("HorizontalPodAutoscaler", "autoscaling/v2", deployment), "spec": spec}
