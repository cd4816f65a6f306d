"""Docker Compose: one file with the server and, inside it, the settings."""

from __future__ import annotations

from typing import Any

from outrider.deploy import serving
from outrider.deploy.container_paths import CACHE, ContainerPaths
from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, as_yaml

READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/ready', timeout=4).read()"


def files(deployment: Deployment) -> DeployFiles:
    """`compose.yaml`."""
    paths = ContainerPaths()
    settings = paths.in_container(deployment.source.settings)
    lines = [
        deployment.headline,
        "Start: docker compose -f compose.yaml up -d. The image: docker build -f deploy/Dockerfile -t outrider:cpu .",
        f"Everyone who reaches the port may send requests, unless {serving.KEY_VARIABLE} is set where this is started.",
    ]
    secrets = serving.secrets(settings)
    lines += [
        f"The draft service's token is read from {name} where this is started."
        for name, key in secrets.items() if key == serving.TOKEN_KEY
    ]  # fmt: skip
    project = _project(deployment, serving.command(deployment, settings), paths, settings.text(), list(secrets))
    return DeployFiles({"compose.yaml": as_yaml(lines, project)})


def _project(
    deployment: Deployment, command: list[str], paths: ContainerPaths, settings: str, environment: list[str]
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {
            "type": "bind", "source": _literal(here), "target": _literal(there), "read_only": True,
            "bind": {"create_host_path": False},
        }
        for here, there in paths.known.items()
    ]  # fmt: skip
    address = f"[{deployment.host.strip('[]')}]" if ":" in deployment.host else deployment.host
    service: dict[str, Any] = {
        "image": deployment.image,
        "entrypoint": command[:2],
        "command": [_literal(word) for word in command[2:]],
        "environment": environment,
        "configs": [{"source": "settings", "target": f"{serving.FOLDER}/{serving.FILE}"}],
        "ports": [f"{address}:{deployment.port}:{deployment.port}"],
        "volumes": [*mounts, {"type": "volume", "source": "cache", "target": CACHE}],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "healthcheck": {
            "test": ["CMD", "python", "-c", READY.format(port=deployment.port)],
            "interval": "15s", "timeout": "5s", "retries": 4, "start_period": "10m",
        },
        "stop_grace_period": f"{serving.GRACE_S}s",
        "restart": "unless-stopped",
        "deploy": {"resources": _resources(deployment)},
    }  # fmt: skip
    return {
        "name": deployment.name,
        "services": {deployment.name: service},
        "configs": {"settings": {"content": _literal(settings)}},
        "volumes": {"cache": {}},
    }


def _resources(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = {"limits": {"cpus": str(deployment.cpus), "memory": f"{deployment.memory_mib}M"}}
    if deployment.gpus:
        device = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
        found["reservations"] = {"devices": [device]}
    return found


def _literal(text: str) -> str:
    """Text in which compose must replace no variable."""
    return text.replace("$", "$$")
